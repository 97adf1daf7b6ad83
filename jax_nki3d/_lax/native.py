# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The three maps as one `lax.conv_general_dilated` each: what cuDNN and other accelerators' compilers recognise.

Also the shape rules of the primitives: one operation is quick to trace and knows about shardings.
"""

import numpy as np
from jax import Array, lax

from .._geometry import Geometry, effective_kernel
from .._precision import sum_dtype

_AXES = (0, 1, 2)


def correlate(x: Array, filters: Array, geometry: Geometry) -> Array:
    """y[o] = sum over k of x[o * stride + k * dilation - front] . filters[k]."""
    x, padding = _reached(x, geometry)
    return lax.conv_general_dilated(
        x,
        filters,
        geometry.stride,
        padding,
        rhs_dilation=geometry.dilation,
        dimension_numbers=("NCDHW", "DHWIO", "NCDHW"),
        preferred_element_type=sum_dtype(x.dtype),
    )


def spread(dy: Array, filters: Array, geometry: Geometry) -> Array:
    """The adjoint of `correlate`: a convolution over dy with stride - 1 zeros between its elements."""
    window = [effective_kernel(geometry.kernel[a], geometry.dilation[a]) for a in _AXES]
    before = [window[a] - 1 - geometry.front[a] for a in _AXES]
    # Padding beyond the kernel would be a negative number, which XLA has got wrong: compute those rows, then drop them.
    start = [max(0, -b) for b in before]
    after = [geometry.size[a] + geometry.front[a] - geometry.extent[a] + window[a] - 1 for a in _AXES]
    stop = [start[a] + geometry.size[a] for a in _AXES]
    y = lax.conv_general_dilated(
        dy,
        filters[::-1, ::-1, ::-1],
        (1, 1, 1),
        [(max(0, b), max(0, c)) for b, c in zip(before, after, strict=True)],
        lhs_dilation=geometry.stride,
        rhs_dilation=geometry.dilation,
        dimension_numbers=("NCDHW", "DHWOI", "NCDHW"),
        preferred_element_type=sum_dtype(dy.dtype),
    )
    return lax.slice(y, (0, 0, *start), (*y.shape[:2], *stop))


def filter_gradient(x: Array, dy: Array, geometry: Geometry) -> Array:
    """dw[k] = sum over batch and o of x[o * stride + k * dilation - front] (outer) dy[o]: dy is the window."""
    x, padding = _reached(x, geometry)
    return lax.conv_general_dilated(
        x,
        dy,
        geometry.dilation,
        padding,
        rhs_dilation=geometry.stride,
        dimension_numbers=("CNDHW", "IODHW", "DHWNC"),
        preferred_element_type=sum_dtype(x.dtype),
    )


def _reached(x: Array, geometry: Geometry) -> tuple[Array, list[tuple[int, int]]]:
    """The part of the volume that windows reach, and the zeros around it: none of the paddings is negative then."""
    ends = [min(geometry.size[a], max(0, geometry.extent[a] - geometry.front[a])) for a in _AXES]
    front = [min(geometry.front[a], geometry.extent[a]) for a in _AXES]
    padding = [(front[a], geometry.extent[a] - front[a] - ends[a]) for a in _AXES]
    return lax.slice(x, (0,) * 5, (*x.shape[:2], *ends)), padding


def pool_sums(x: Array, geometry: Geometry) -> Array:
    """Sums of the windows of each plane, [B, C, D, H, W] -> [B, C, D_out, H_out, W_out]."""
    pads = [(f, max(0, e - f - s)) for f, e, s in zip(geometry.front, geometry.extent, geometry.size, strict=True)]
    zero = np.zeros((), x.dtype)
    window, strides = (1, 1, *geometry.kernel), (1, 1, *geometry.stride)
    return lax.reduce_window(x, zero, lax.add, window, strides, [(0, 0), (0, 0), *pads])


def spread_sums(dy: Array, geometry: Geometry) -> Array:
    """The adjoint of `pool_sums`: windows of dy with stride - 1 zeros between its elements."""
    config, start = [(0, 0, 0)] * 2, [0, 0]
    for size, front, extent, kernel, stride in zip(
        geometry.size, geometry.front, geometry.extent, geometry.kernel, geometry.stride, strict=True
    ):
        # Element i of the result sums the kernel's elements before i + front, which lie at multiples of the stride.
        config.append((kernel - 1, max(0, size + front - extent) + kernel - 1, stride - 1))
        start.append(front)
    zero = np.zeros((), dy.dtype)
    apart = lax.pad(dy, zero, config)
    sums = lax.reduce_window(apart, zero, lax.add, (1, 1, *geometry.kernel), (1,) * 5, "VALID")
    return lax.slice(sums, start, (*dy.shape[:2], *(s + n for s, n in zip(start[2:], geometry.size, strict=True))))
