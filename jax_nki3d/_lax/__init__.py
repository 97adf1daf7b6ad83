# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The path on CPU and GPU: each operation in lax, in a precision of float32 or wider, rounded once.

An operation is one of three bilinear maps (correlate, spread, filter_gradient), whose sums are wide, and a rounding of its
result. `NATIVE` maps each to one `lax.conv_general_dilated`, which accelerators recognise; `CPU` maps it to
matrix products, chosen per shape in `plan.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array

from .._activation import apply_activation
from .._geometry import Geometry
from .._precision import widen
from .._spec import AvgPooling3dSpec, Conv3dSpec, ConvTranspose3dSpec, from_canonical, to_canonical
from . import native, plan, pooling


class Formulations(NamedTuple):
    """The three maps of `_geometry.py` and the pooling pair: (x, filters, geometry), (dy, filters, geometry), (x, dy, geometry)."""

    correlate: Callable[[Array, Array, Geometry], Array]
    spread: Callable[[Array, Array, Geometry], Array]
    filter_gradient: Callable[[Array, Array, Geometry], Array]
    pool_sums: Callable[[Array, Geometry], Array]
    spread_sums: Callable[[Array, Geometry], Array]


CPU = Formulations(plan.correlate, plan.spread, plan.filter_gradient, pooling.pool_sums, pooling.spread_sums)
NATIVE = Formulations(native.correlate, native.spread, native.filter_gradient, native.pool_sums, native.spread_sums)


def conv3d(maps: Formulations, x: Array, filters: Array, bias: Array | None, spec: Conv3dSpec) -> Array:
    """[B, C_in, D, H, W], [K_d, K_h, K_w, C_in, C_out] -> [B, C_out, D_out, H_out, W_out]."""
    y = maps.correlate(x, filters, spec.geometry)
    return _finish(y, bias, spec, x.dtype)


def conv3d_transpose(maps: Formulations, x: Array, filters: Array, bias: Array | None, spec: ConvTranspose3dSpec) -> Array:
    """[B, C_in, D, H, W], flipped filters -> [B, C_out, D_out, H_out, W_out]."""
    y = maps.spread(x, adjoint_filters(filters, spec.filter_shape), spec.geometry)
    return _finish(y, bias, spec, x.dtype)


def input_gradient(maps: Formulations, dy: Array, filters: Array, spec: Conv3dSpec) -> Array:
    """dx [B, C_in, D, H, W]."""
    return maps.spread(dy, filters, spec.geometry).astype(dy.dtype)


def filter_gradient(maps: Formulations, x: Array, dy: Array, spec: Conv3dSpec) -> Array:
    """dw [K_d, K_h, K_w, C_in, C_out]."""
    return maps.filter_gradient(x, dy, spec.geometry).astype(dy.dtype)


def bias_gradient(dy: Array, dtype) -> Array:
    """db [C_out]: the sum over all positions."""
    return widen(dy).sum(axis=(0, 2, 3, 4)).astype(dtype)


def avg_pooling_3d(maps: Formulations, x: Array, spec: AvgPooling3dSpec) -> Array:
    """Window sums times one over the number of elements of the window."""
    sums = maps.pool_sums(widen(to_canonical(x, spec.data_format)), spec.geometry)
    return from_canonical(_divide(sums, spec).astype(x.dtype), spec.output_format)


def avg_pooling_3d_backward(maps: Formulations, dy: Array, spec: AvgPooling3dSpec) -> Array:
    """Each gradient, divided like its average, added to every element of its window."""
    shares = _divide(widen(to_canonical(dy, spec.output_format)), spec)
    return from_canonical(maps.spread_sums(shares, spec.geometry).astype(dy.dtype), spec.data_format)


def adjoint_filters(filters: Array, filter_shape: str) -> Array:
    """Filters of a transposed convolution <-> filters of the convolution that it transposes; its own inverse."""
    flipped = filters[::-1, ::-1, ::-1]
    return flipped.swapaxes(3, 4) if filter_shape == "KDHW_CI_CO" else flipped


def _finish(y: Array, bias: Array | None, spec: Conv3dSpec | ConvTranspose3dSpec, dtype) -> Array:
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :, None, None, None]
    return apply_activation(spec.activation, y).astype(dtype)


def _divide(sums: Array, spec: AvgPooling3dSpec) -> Array:
    return sums / pooling.divisor(spec.geometry, spec.count_include_pad).astype(sums.dtype)
