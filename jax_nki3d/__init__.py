# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D convolution, transposed convolution and average pooling for JAX, with their gradients."""

from ._activation import ActFnType as ActFnType
from ._options import options as options
from ._report import explain as explain
from ._version import __version__ as __version__
from .avg_pooling_3d import avg_pooling_3d as avg_pooling_3d
from .avg_pooling_3d_backward import avg_pooling_3d_backward as avg_pooling_3d_backward
from .conv3d import conv3d as conv3d
from .conv3d_bwd import conv3d_bwd as conv3d_bwd
from .conv3d_transpose import conv3d_transpose as conv3d_transpose

__all__ = [
    "ActFnType",
    "avg_pooling_3d",
    "avg_pooling_3d_backward",
    "conv3d",
    "conv3d_bwd",
    "conv3d_transpose",
    "explain",
    "options",
]
