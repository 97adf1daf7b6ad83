# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Window sums of average pooling, one axis after the other: K_d + K_h + K_w additions per output, not their product."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._geometry import Geometry
from .products import AXES, window

# Windows of more elements along an axis are one reduce_window: as many slices as elements take seconds to compile.
MAX_SLICES = 64


def pool_sums(x: Array, geometry: Geometry) -> Array:
    """Sums of the windows of each plane, [B, C, D, H, W] -> [B, C, D_out, H_out, W_out]."""
    for axis in AXES:
        kernel, stride, out = geometry.kernel[axis], geometry.stride[axis], geometry.out[axis]
        if kernel <= min(stride, MAX_SLICES) and not geometry.front[axis]:
            # Windows that share no element: strided slices fuse into one pass over x.
            x = _total([window(x, axis, k, out, stride) for k in range(kernel)])
        else:
            x = _running_sums(window(x, axis, -geometry.front[axis], geometry.extent[axis]), axis, kernel, stride)
    return x


def spread_sums(dy: Array, geometry: Geometry) -> Array:
    """The adjoint of `pool_sums`: each phase of the output sums the few elements of dy that reach it."""
    for axis in reversed(AXES):
        kernel, stride, size = geometry.kernel[axis], geometry.stride[axis], geometry.size[axis]
        if stride == 1:
            dy = _running_sums(window(dy, axis, geometry.front[axis] - kernel + 1, size + kernel - 1), axis, kernel, 1)
        elif MAX_SLICES < kernel <= stride and not geometry.front[axis]:
            dy = _repeated(dy, axis, geometry)
        else:
            dy = _spread_axis(dy, axis, geometry)
    return dy


def divisor(geometry: Geometry, count_include_pad: bool) -> np.ndarray:
    """Elements per window, [1, 1, D_out, H_out, W_out] or a single number in that shape: a constant of the program."""
    if count_include_pad:
        return np.full((1,) * 5, np.prod(geometry.kernel, dtype=np.int64))
    counts = []
    for axis in AXES:
        reads = np.add.outer(np.arange(geometry.out[axis]) * geometry.stride[axis], np.arange(geometry.kernel[axis]))
        reads -= geometry.front[axis]
        counts.append(((reads >= 0) & (reads < geometry.size[axis])).sum(axis=1))
    return np.einsum("d,h,w->dhw", *counts)[None, None]


def _running_sums(x: Array, axis: int, kernel: int, stride: int) -> Array:
    """Overlapping windows along one axis of a volume that already bears its padding."""
    sizes, strides = [1] * 5, [1] * 5
    sizes[2 + axis], strides[2 + axis] = kernel, stride
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, sizes, strides, "VALID")


def _spread_axis(dy: Array, axis: int, geometry: Geometry) -> Array:
    stride, size = geometry.stride[axis], geometry.size[axis]
    per_phase = -(-size // stride)
    groups = geometry.taps_by_phase(axis)
    phases = []
    for phase in range(stride):
        shifts = [tap.shift for tap in groups.get(phase, ())]
        terms = [window(dy, axis, -shift, per_phase) for shift in shifts]
        phases.append(_total(terms) if terms else jnp.zeros_like(window(dy, axis, 0, per_phase)))
    dim = 2 + axis
    whole = jnp.stack(phases, axis=dim + 1)
    whole = whole.reshape(*dy.shape[:dim], per_phase * stride, *dy.shape[dim + 1 :])
    return lax.slice_in_dim(whole, 0, size, axis=dim)


def _repeated(dy: Array, axis: int, geometry: Geometry) -> Array:
    """Each element `kernel` times, then zeros up to the next window: for windows that share no element."""
    dim, kernel, stride, size = 2 + axis, geometry.kernel[axis], geometry.stride[axis], geometry.size[axis]
    windows = jnp.broadcast_to(jnp.expand_dims(dy, dim + 1), (*dy.shape[: dim + 1], kernel, *dy.shape[dim + 1 :]))
    config = [(0, 0, 0)] * windows.ndim
    config[dim + 1] = (0, stride - kernel, 0)
    whole = lax.pad(windows, np.zeros((), dy.dtype), config)
    whole = whole.reshape(*dy.shape[:dim], dy.shape[dim] * stride, *dy.shape[dim + 1 :])
    return window(whole, axis, 0, size)


def _total(terms: Sequence[Array]) -> Array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
