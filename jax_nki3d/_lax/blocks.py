# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose windows share no element: one matrix product between two changes of layout.

Where no kernel exceeds its stride, the volume falls into blocks of stride_d x stride_h x stride_w elements, and each window
lies in the block of its own: U-Net up-sampling, patch embeddings, strided 1x1x1. A tap is then an index inside a block, so that
no tap needs a slice and no phase a product of its own, however large the stride.
"""

import numpy as np
from jax import Array, lax

from .._geometry import Geometry
from .products import AXES, window

_BLOCKS, _INSIDE = (2, 4, 6), (3, 5, 7)  # axes of [C, B, blocks_d, inside_d, blocks_h, inside_h, blocks_w, inside_w]


def applies(geometry: Geometry) -> bool:
    """Whether every window lies in a block of its own."""
    return all(
        geometry.kernel[a] <= geometry.stride[a] and (geometry.dilation[a] == 1 or geometry.kernel[a] == 1) for a in AXES
    )


def correlate(x: Array, filters: Array, geometry: Geometry) -> Array:
    """y[o] = sum over k of x[o * stride + k - front] . filters[k]; shapes as in `products.py`."""
    y = lax.dot_general(filters, _cut(x, geometry), (((0, 1, 2, 3), (*_INSIDE, 0)), ((), ())))
    return y.transpose(1, 0, 2, 3, 4)


def spread(dy: Array, filters: Array, geometry: Geometry) -> Array:
    """The adjoint of `correlate`: every element of dy fills its block."""
    inside = lax.dot_general(filters, dy, (((4,), (1,)), ((), ())))  # [K_d, K_h, K_w, C_in, B, D, H, W]
    rest = [(0, geometry.stride[a] - geometry.kernel[a], 0) for a in AXES]
    if any(config != (0, 0, 0) for config in rest):
        inside = lax.pad(inside, np.zeros((), dy.dtype), [*rest, *[(0, 0, 0)] * 5])
    whole = inside.transpose(4, 3, 5, 0, 6, 1, 7, 2)
    whole = whole.reshape(*whole.shape[:2], *(geometry.out[a] * geometry.stride[a] for a in AXES))
    for axis in AXES:
        whole = window(whole, axis, geometry.front[axis], geometry.size[axis])
    return whole


def filter_gradient(x: Array, dy: Array, geometry: Geometry) -> Array:
    """dw[k] = sum over batch and o of x[o * stride + k - front] (outer) dy[o]."""
    dw = lax.dot_general(_cut(x, geometry), dy, (((1, *_BLOCKS), (0, 2, 3, 4)), ((), ())))  # [C_in, K_d, K_h, K_w, C_out]
    return dw.transpose(1, 2, 3, 0, 4)


def _cut(x: Array, geometry: Geometry) -> Array:
    """[B, C, D, H, W] -> [C, B, D_out, K_d, H_out, K_h, W_out, K_w]."""
    for axis in AXES:
        x = window(x, axis, -geometry.front[axis], geometry.out[axis] * geometry.stride[axis])
    split = [n for a in AXES for n in (geometry.out[a], geometry.stride[a])]
    cut = x.transpose(1, 0, 2, 3, 4).reshape(x.shape[1], x.shape[0], *split)
    for axis in AXES:
        cut = lax.slice_in_dim(cut, 0, geometry.kernel[axis], axis=_INSIDE[axis])
    return cut
