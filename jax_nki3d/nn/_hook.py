# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`conv_general_dilated`: a 3-D convolution of this library behind lax's signature, for the hooks of Flax's own layers."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._arguments import as_int
from ..conv3d import conv3d
from ._arguments import as_padding, as_steps
from ._convolution import convolve_transposed

_OPERATION = "conv_general_dilated"


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """`lax.conv_general_dilated` for 3-D convolutions without groups, by `jax_nki3d.conv3d` and `jax_nki3d.conv3d_transpose`.

    It is what the argument `conv_general_dilated` of `flax.nnx.Conv` and of `flax.linen.Conv` takes, so that a model changes one
    argument of a layer and keeps its parameters and their names.

    Args:
        lhs: the volume, five axes in the order of `dimension_numbers`.
        rhs: the kernel, five axes in the order of `dimension_numbers`, in the dtype of `lhs`.
        window_strides: three ints.
        padding: "SAME", "VALID" or three pairs (low, high), none negative; with an `lhs_dilation` above 1, three pairs of any ints.
        lhs_dilation: None or three ints: a transposed convolution, where `window_strides` must be 1.
        rhs_dilation: None or three ints: distance between neighbouring taps.
        dimension_numbers: as in lax; None for NCDHW and OIDHW.
        feature_group_count: must be 1.
        batch_group_count: must be 1.
        precision: anything; products are summed in float32 or wider whatever it says.
        preferred_element_type: None or the dtype of `lhs`.
        out_sharding: None.

    Returns:
        The result of `lax.conv_general_dilated`, in the dtype of `lhs`, rounded once.

    Raises:
        ValueError: not 3-D, or a number or string out of its domain.
        TypeError: operands of different dtypes, or an argument of a wrong type.
        NotImplementedError: groups; a stride together with `lhs_dilation`; another result type; an `out_sharding`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_nki3d.nn.flax_nnx import conv_general_dilated
        >>> layer = nnx.Conv(3, 4, (3, 3, 3), strides=2, conv_general_dilated=conv_general_dilated, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 8, 6, 3))).shape
        (2, 4, 4, 3, 4)
    """
    if lhs.ndim != 5 or rhs.ndim != 5:
        raise ValueError(
            f"{_OPERATION}: `lhs` and `rhs` must have five axes, for a 3-D convolution, got shapes {lhs.shape} and {rhs.shape}. "
            "Keep lax's function in layers of other dimensions."
        )
    for name, groups in (("feature_group_count", feature_group_count), ("batch_group_count", batch_group_count)):
        if as_int(_OPERATION, name, groups, groups, 1) != 1:
            raise NotImplementedError(
                f"{_OPERATION}: `{name}` must be 1, got {groups}. Keep lax's function in layers with groups."
            )
    if preferred_element_type is not None and np.dtype(preferred_element_type) != lhs.dtype:
        raise NotImplementedError(
            f"{_OPERATION}: `preferred_element_type` must be None or the dtype of `lhs`, {lhs.dtype}, got {preferred_element_type}. "
            "Sums run in float32 or wider in any case; cast the operands for a wider result."
        )
    if out_sharding is not None:
        raise NotImplementedError(
            f"{_OPERATION}: `out_sharding` must be None, got {out_sharding}. Use jax.shard_map, or jax.sharding.auto_axes, around the model."
        )
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    data_format = "NDHWC" if numbers.lhs_spec[1] == 4 else "NCDHW"
    x = jnp.transpose(lhs, _axes(numbers.lhs_spec, data_format))
    kernel = jnp.transpose(rhs, (*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0]))
    strides = as_steps(_OPERATION, "window_strides", window_strides)
    spread = as_steps(_OPERATION, "lhs_dilation", lhs_dilation, optional=True)
    dilation = as_steps(_OPERATION, "rhs_dilation", rhs_dilation, optional=True)
    if spread == (1, 1, 1):
        pads = as_padding(_OPERATION, padding, ("SAME", "VALID"))
        y = conv3d(x, kernel, stride=strides, padding=pads, dilation=dilation, data_format=data_format)
    elif strides == (1, 1, 1):
        pads = as_padding(_OPERATION, padding, (), minimum=None)
        y = convolve_transposed(
            _OPERATION,
            x,
            kernel,
            None,
            strides=spread,
            padding=pads,
            dilation=dilation,
            activation_fn=None,
            data_format=data_format,
        )
    else:
        raise NotImplementedError(
            f"{_OPERATION}: `window_strides` {strides} and `lhs_dilation` {spread} are both above 1. Keep lax's function in this layer."
        )
    back = np.argsort(_axes(numbers.out_spec, data_format))
    return jnp.transpose(y, tuple(map(int, back)))


def _axes(spec: Sequence[int], data_format: str) -> tuple[int, ...]:
    """The axes of an array with lax's (batch, feature, D, H, W) in the order of the layout."""
    batch, feature, *space = spec
    return (batch, *space, feature) if data_format == "NDHWC" else (batch, feature, *space)
