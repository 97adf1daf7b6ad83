# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Convolutions as one matrix product per phase: no zero is ever inserted, none is ever multiplied.

A tap acts on an axis in one of two ways:

* **stacked**: the shifted copies of the data, one per tap, become further rows of the matrix ("patches");
* **summed**: the filter's taps become further columns of the matrix, and the shifted products are added up afterwards.

The multiply-adds are the same. What differs is the memory that passes by: `C_in * taps` values per position for stacked
axes, `C_out * taps` for summed ones. With both mixed (say, stacked over W, summed over D and H) a 3x3x3 convolution moves
3 + 9 values per channel and position, and not 27. `plan.py` chooses the axes.

With a stride, taps that read the same phase of the input (index modulo stride) share a product. All three functions work
on channels-first data with the channels leading, [C, B, D, H, W], so that rows of W stay contiguous, and know padding only
as reads outside the volume.
"""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._geometry import Geometry, Tap

AXES = (0, 1, 2)
_SPATIAL = -3  # position of D in [..., D, H, W]


def correlate(x: Array, filters: Array, geometry: Geometry, summed: Sequence[int]) -> Array:
    """y[o] = sum over taps of x[o * stride + k * dilation - front] . filters[k].

    Args:
        x: [B, C_in, D, H, W].
        filters: [K_d, K_h, K_w, C_in, C_out].
        geometry: the index relation; `geometry.size` is the extent of `x`.
        summed: the axes whose taps are summed after the product, the others are stacked before it.

    Returns:
        [B, C_out, D_out, H_out, W_out].
    """
    stacked = _others(summed)
    source = jnp.moveaxis(x, 1, 0)
    total = None
    for groups in _phase_groups(geometry, summed):
        if any(g[0].phase >= geometry.size[a] for a, g in zip(summed, groups, strict=True)):
            continue  # a volume thinner than the stride: every tap of this phase reads padding
        phase_of_x, some_filters = source, filters
        for axis, group in zip(summed, groups, strict=True):
            phase_of_x = _every(phase_of_x, axis, group[0].phase, geometry.stride[axis])
            some_filters = _take_taps(some_filters, axis, group)
        patches = _stack_patches(phase_of_x, geometry, stacked)
        products = _multiply(some_filters, patches, stacked)  # [taps of summed axes..., C_out, B, D, H, W]
        total = _add_shifted(total, products, summed, groups, lambda a: geometry.out[a], sign=1)
    if total is None:  # every tap of every phase reads padding
        total = jnp.zeros((filters.shape[4], x.shape[0], *geometry.out), x.dtype)
    return jnp.moveaxis(total, 0, 1)


def spread(dy: Array, filters: Array, geometry: Geometry, summed: Sequence[int]) -> Array:
    """The adjoint of `correlate`: x[i] = sum over (o, k) with o * stride + k * dilation - front = i of dy[o] . filters[k].

    The output splits into stride_d * stride_h * stride_w phases; each is an ordinary stride-1 product over the taps that reach it.

    Args:
        dy: [B, C_out, D_out, H_out, W_out].
        filters: [K_d, K_h, K_w, C_in, C_out], as given to `correlate`.
        geometry: the index relation of `correlate`; `geometry.out` is the extent of `dy`.
        summed: the axes whose taps are summed after the product.

    Returns:
        [B, C_in, D, H, W].
    """
    stacked = _others(summed)
    source = jnp.moveaxis(dy, 1, 0)
    filters = filters.swapaxes(3, 4)  # rows of the product are now C_out
    per_phase = tuple(-(-geometry.size[a] // geometry.stride[a]) for a in AXES)
    phases: dict[tuple[int, ...], Array] = {}
    for groups in _phase_groups(geometry, stacked):
        patches, some_filters = source, filters
        for axis, group in reversed(list(zip(stacked, groups, strict=True))):
            patches = jnp.stack([window(patches, axis, -tap.shift, per_phase[axis]) for tap in group])
            some_filters = _take_taps(some_filters, axis, group)
        products = _multiply(some_filters, patches, stacked)
        for sums in _phase_groups(geometry, summed):
            chosen = products
            for position, group in enumerate(sums):
                chosen = _take_taps(chosen, position, group)
            total = _add_shifted(None, chosen, summed, sums, lambda a: per_phase[a], sign=-1)
            phase = {a: g[0].phase for a, g in zip((*stacked, *summed), (*groups, *sums), strict=True)}
            phases[tuple(phase[a] for a in AXES)] = total
    return jnp.moveaxis(_interleave(phases, geometry, per_phase), 0, 1)


def filter_gradient(x: Array, dy: Array, geometry: Geometry, summed: Sequence[int]) -> Array:
    """dw[k] = sum over batch and o of x[o * stride + k * dilation - front] (outer) dy[o].

    Stacked axes copy x once per tap, as in `correlate`; "summed" axes copy dy once per tap, shifted the other way.

    Returns:
        [K_d, K_h, K_w, C_in, C_out].
    """
    stacked = _others(summed)
    source, gradient = jnp.moveaxis(x, 1, 0), jnp.moveaxis(dy, 1, 0)
    kernel = tuple(geometry.kernel[a] for a in summed)
    blocks: dict[tuple[int, ...], Array] = {}
    for groups in _phase_groups(geometry, summed):
        if any(g[0].phase >= geometry.size[a] for a, g in zip(summed, groups, strict=True)):
            continue
        phase_of_x, copies = source, gradient
        for axis, group in zip(summed, groups, strict=True):
            phase_of_x = _every(phase_of_x, axis, group[0].phase, geometry.stride[axis])
        for axis, group in reversed(list(zip(summed, groups, strict=True))):
            length = phase_of_x.shape[_SPATIAL + axis]
            copies = jnp.stack([window(copies, axis, -tap.shift, length) for tap in group])
        patches = _stack_patches(phase_of_x, geometry, stacked)  # [stacked taps..., C_in, B, D, H, W]
        n, m = len(stacked) + 1, len(summed) + 1
        block = lax.dot_general(patches, copies, ((tuple(range(n, n + 4)), tuple(range(m, m + 4))), ((), ())))
        block = jnp.moveaxis(block, tuple(range(n, n + m - 1)), tuple(range(m - 1)))  # summed taps lead
        for index in np.ndindex(*(len(g) for g in groups)):
            blocks[tuple(g[i].k for g, i in zip(groups, index, strict=True))] = block[index]
    block_shape = (*(geometry.kernel[a] for a in stacked), x.shape[1], dy.shape[1])
    for k in np.ndindex(*kernel):
        if k not in blocks:  # a tap that reads padding alone
            blocks[k] = jnp.zeros(block_shape, x.dtype)
    dw = jnp.stack([blocks[k] for k in np.ndindex(*kernel)]).reshape(*kernel, *block_shape)
    order = (*summed, *stacked)
    return dw.transpose(*(order.index(a) for a in AXES), 3, 4)


def _others(summed: Sequence[int]) -> tuple[int, ...]:
    return tuple(a for a in AXES if a not in summed)


def _phase_groups(geometry: Geometry, axes: Sequence[int]) -> itertools.product:
    """One group of taps with a common phase for each of the axes, in all combinations."""
    return itertools.product(*(geometry.taps_by_phase(a).values() for a in axes))


def _take_taps(filters: Array, axis: int, group: Sequence[Tap]) -> Array:
    """The filter planes of one group: an arithmetic progression wherever more than one tap shares a phase."""
    indices = [tap.k for tap in group]
    if len(indices) == filters.shape[axis]:
        return filters
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    return lax.slice_in_dim(filters, indices[0], indices[-1] + 1, step, axis)


def _every(x: Array, axis: int, start: int, step: int) -> Array:
    """One phase of x along a spatial axis."""
    return x if step == 1 else lax.slice_in_dim(x, start, x.shape[_SPATIAL + axis], step, x.ndim + _SPATIAL + axis)


def window(x: Array, axis: int, start: int, length: int, step: int = 1) -> Array:
    """`length` elements of a spatial axis from `start` (which may be negative), `step` apart; zeros outside x."""
    dim = x.ndim + _SPATIAL + axis
    span = (length - 1) * step + 1
    first, last = max(0, start), min(x.shape[dim], start + span)
    if first >= last:
        return jnp.zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]), x.dtype)
    before, after = first - start, start + span - last
    if before or after:
        config = [(0, 0, 0)] * x.ndim
        config[dim] = (before, after, 0)
        x = lax.pad(lax.slice_in_dim(x, first, last, axis=dim), np.zeros((), x.dtype), config)
        first, last = 0, span
    return lax.slice_in_dim(x, first, last, step, dim)


def _stack_patches(x: Array, geometry: Geometry, stacked: Sequence[int]) -> Array:
    """[C, B, D, H, W] -> [taps of stacked axes..., C, B, D', H', W'], one axis at a time, so that copies of copies are shared."""
    for axis in reversed(stacked):
        stride, out = geometry.stride[axis], geometry.out[axis]
        x = window(x, axis, -geometry.front[axis], geometry.extent[axis])
        starts = [k * geometry.dilation[axis] for k in range(geometry.kernel[axis])]
        x = jnp.stack([window(x, axis, start, out, stride) for start in starts])
    return x


def _multiply(filters: Array, patches: Array, stacked: Sequence[int]) -> Array:
    """Contracts the stacked taps and the rows' channels: [summed taps..., columns, B, D, H, W]."""
    filter_dims, patch_dims = (*stacked, 3), tuple(range(len(stacked) + 1))
    return lax.dot_general(filters, patches, ((filter_dims, patch_dims), ((), ())))


def _add_shifted(total, products: Array, summed, groups, length, sign: int):
    """Adds the products of the summed taps, each moved to where it belongs."""
    for index in np.ndindex(*(len(g) for g in groups)):
        term = products[index]
        for axis, group, i in zip(summed, groups, index, strict=True):
            term = window(term, axis, sign * group[i].shift, length(axis))
        total = term if total is None else total + term
    return total


def _interleave(phases: dict[tuple[int, ...], Array], geometry: Geometry, per_phase: tuple[int, ...]) -> Array:
    """{phase: [C, B, d, h, w]} -> [C, B, D, H, W]; a phase that no tap reaches is zero."""
    some = next(iter(phases.values()))
    for phase in np.ndindex(*geometry.stride):
        if phase not in phases:
            phases[phase] = jnp.zeros_like(some)
    whole = jnp.stack([phases[phase] for phase in np.ndindex(*geometry.stride)])
    whole = whole.reshape(*geometry.stride, *some.shape).transpose(3, 4, 5, 0, 6, 1, 7, 2)
    whole = whole.reshape(*some.shape[:2], *(n * s for n, s in zip(per_phase, geometry.stride, strict=True)))
    return lax.slice(whole, (0,) * 5, (*some.shape[:2], *geometry.size))
