# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""NKI kernels of the 3-D operations, and an interpreter that runs them on any CPU (`nki3d.simulator`).

The kernels run on a Trainium where the vendor's `nki` is installed, else in the interpreter, with NumPy arrays.
"""

from .activation import ActFnType
from .avg_pooling_3d import avg_pooling_3d
from .avg_pooling_3d_backward import avg_pooling_3d_backward
from .conv3d import conv3d
from .conv3d_bwd import conv3d_bwd
from .conv3d_transpose import conv3d_transpose

__all__ = ["ActFnType", "avg_pooling_3d", "avg_pooling_3d_backward", "conv3d", "conv3d_bwd", "conv3d_transpose"]
