# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which of the formulations of `products.py` a shape gets on CPU, and in how many slabs.

Which axes are stacked and which are summed changes nothing but the memory that passes by, so the choice is the least traffic:

    2 * (elements copied into patches) + (elements of the products before they are summed) + 4096 * (products) + 256 * (slices)

over the candidates: sum no axis, D, D and H, or all three. Copies weigh double, since they run along W in short rows. Few input
channels favour patches, few output channels sums; a kernel as large as its stride needs neither; small volumes want few
products. The program must also be compiled: where the choice has more than `MAX_SLICES` slices (kernels of 12 and more at
strides of 8 and more), plain lax runs. The constants and the candidates come from measurements on x86
(docs/performance.md); `python -m benchmarks.formulations` repeats them.

Windows that share no element need no choice: `blocks.py` takes them.

What does not fit in the caches costs more than it computes, and memory without bound besides: above `SLAB_BYTES` of
intermediate values, the operation runs slab by slab along its longest axis.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from jax import Array, lax

from .._geometry import Geometry, Triple, effective_kernel, triple
from .._precision import widen
from . import blocks, native, products

AXES = products.AXES
CANDIDATES: tuple[tuple[int, ...], ...] = ((0, 1), (0,), (0, 1, 2), ())
COPY_WEIGHT = 2
PRODUCT_COST = 4096
SLICE_COST = 256
MAX_SLICES = 2048
SLAB_BYTES = 24 * 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one map runs.

    Attributes:
        summed: the axes whose taps are summed after the product; the others are stacked before it.
        native: whether plain lax runs, because the program would grow too long.
        slab_axis: the axis that is cut.
        slabs: the number of slabs; 1 for all at once.
        workspace: intermediate elements of the whole operation.
    """

    summed: tuple[int, ...]
    native: bool
    slab_axis: int
    slabs: int
    workspace: int

    def __str__(self) -> str:
        if self.native:
            return "lax convolution"
        names = ["DHW"[a] for a in AXES]
        stacked = "".join(names[a] for a in AXES if a not in self.summed) or "none"
        slabs = f", {self.slabs} slabs along {names[self.slab_axis]}" if self.slabs > 1 else ""
        return f"stack {stacked}, sum {''.join(names[a] for a in self.summed) or 'none'}{slabs}"


def correlate(x: Array, filters: Array, geometry: Geometry) -> Array:
    """`products.correlate` as planned."""
    x, filters = widen(x), widen(filters)
    if is_empty(x):
        return _empty(x, (0, filters.shape[4], *geometry.out))
    if blocks.applies(geometry):
        return blocks.correlate(x, filters, geometry)
    plan = plan_correlate(geometry, known_batch(x), x.shape[1], filters.shape[4], x.dtype.itemsize)
    if plan.native:
        return native.correlate(x, filters, geometry)
    if plan.slabs == 1:
        return products.correlate(x, filters, geometry, plan.summed)
    axis, length = plan.slab_axis, _slab_length(geometry.out[plan.slab_axis], plan.slabs)
    part, x, step = _cut_windows(x, geometry, axis, length, plan.slabs)

    def slab(i, whole):
        some = lax.dynamic_slice_in_dim(x, i * step, part.size[axis], axis=2 + axis)
        y = products.correlate(some, filters, part, plan.summed)
        return lax.dynamic_update_slice_in_dim(whole, y, i * length, axis=2 + axis)

    shape = (x.shape[0], filters.shape[4], *_replace(geometry.out, axis, plan.slabs * length))
    whole = lax.fori_loop(0, plan.slabs, slab, _empty(x, shape))
    return lax.slice_in_dim(whole, 0, geometry.out[axis], axis=2 + axis)


def spread(dy: Array, filters: Array, geometry: Geometry) -> Array:
    """`products.spread` as planned."""
    dy, filters = widen(dy), widen(filters)
    if is_empty(dy):
        return _empty(dy, (0, filters.shape[3], *geometry.size))
    if blocks.applies(geometry):
        return blocks.spread(dy, filters, geometry)
    plan = plan_spread(geometry, known_batch(dy), filters.shape[3], dy.shape[1], dy.dtype.itemsize)
    if plan.native:
        return native.spread(dy, filters, geometry)
    if plan.slabs == 1:
        return products.spread(dy, filters, geometry, plan.summed)
    # A slab is a run of whole strides of the output: elements of dy from its first position minus the largest shift
    # of a tap, to its last position minus the smallest.
    axis, stride = plan.slab_axis, geometry.stride[plan.slab_axis]
    length = _slab_length(-(-geometry.size[axis] // stride), plan.slabs)
    shifts = [tap.shift for tap in geometry.taps(axis)]
    reach = length + max(shifts) - min(shifts)
    dy = products.window(dy, axis, -max(shifts), (plan.slabs - 1) * length + reach)
    part = dataclasses.replace(
        geometry,
        size=_replace(geometry.size, axis, length * stride),
        out=_replace(geometry.out, axis, reach),
        front=_replace(geometry.front, axis, geometry.front[axis] + max(shifts) * stride),
    )

    def slab(i, whole):
        some = lax.dynamic_slice_in_dim(dy, i * length, reach, axis=2 + axis)
        x = products.spread(some, filters, part, plan.summed)
        return lax.dynamic_update_slice_in_dim(whole, x, i * length * stride, axis=2 + axis)

    shape = (dy.shape[0], filters.shape[3], *_replace(geometry.size, axis, plan.slabs * length * stride))
    whole = lax.fori_loop(0, plan.slabs, slab, _empty(dy, shape))
    return lax.slice_in_dim(whole, 0, geometry.size[axis], axis=2 + axis)


def filter_gradient(x: Array, dy: Array, geometry: Geometry) -> Array:
    """`products.filter_gradient` as planned; slabs add up."""
    x, dy = widen(x), widen(dy)
    shape = (*geometry.kernel, x.shape[1], dy.shape[1])
    if is_empty(x):
        return _empty(x, shape)
    if blocks.applies(geometry):
        return blocks.filter_gradient(x, dy, geometry)
    plan = plan_filter_gradient(geometry, known_batch(x), x.shape[1], dy.shape[1], x.dtype.itemsize)
    if plan.native:
        return native.filter_gradient(x, dy, geometry)
    if plan.slabs == 1:
        return products.filter_gradient(x, dy, geometry, plan.summed)
    axis, length = plan.slab_axis, _slab_length(geometry.out[plan.slab_axis], plan.slabs)
    part, x, step = _cut_windows(x, geometry, axis, length, plan.slabs)
    dy = products.window(dy, axis, 0, plan.slabs * length)

    def slab(i, total):
        some_x = lax.dynamic_slice_in_dim(x, i * step, part.size[axis], axis=2 + axis)
        some_dy = lax.dynamic_slice_in_dim(dy, i * length, length, axis=2 + axis)
        return total + products.filter_gradient(some_x, some_dy, part, plan.summed)

    return lax.fori_loop(0, plan.slabs, slab, _empty(x, shape))


def known_batch(x: Array) -> int:
    """The batch to plan for: 1 if it is a symbol, which `jax.export` can leave open."""
    return x.shape[0] if isinstance(x.shape[0], int) else 1


def is_empty(x: Array) -> bool:
    """Whether the batch is known to be empty."""
    return isinstance(x.shape[0], int) and x.shape[0] == 0


# ---- the choice ------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """What a candidate moves: elements copied, elements of the products, and how many products and slices there are."""

    copied: int
    produced: int
    products: int
    slices: int

    @property
    def cost(self) -> int:
        """In elements."""
        calls = PRODUCT_COST * self.products + SLICE_COST * self.slices
        return COPY_WEIGHT * self.copied + self.produced + calls


@lru_cache(maxsize=4096)
def plan_correlate(geometry: Geometry, batch: int, c_in: int, c_out: int, itemsize: int) -> Plan:
    """The plan of y = correlate(x, filters)."""
    traffic = {}
    for summed in CANDIDATES:
        patches = _patches(geometry, summed, batch * c_in)
        if len(summed) == 3 and max(geometry.stride) > 1:
            patches += batch * c_in * prod(geometry.size)  # each phase is a copy that nothing else absorbs
        sizes = [-(-geometry.size[a] // geometry.stride[a]) if a in summed else geometry.out[a] for a in AXES]
        produced = batch * c_out * prod(sizes) * prod(_kernels(geometry, summed))
        phases = _phases(geometry, summed)
        slices = phases * sum(_kernels(geometry, stacked_axes(summed))) + prod(_kernels(geometry, summed))
        traffic[summed] = Traffic(patches, produced, phases, slices)
    return _least(traffic, geometry.out, itemsize)


@lru_cache(maxsize=4096)
def plan_spread(geometry: Geometry, batch: int, c_in: int, c_out: int, itemsize: int) -> Plan:
    """The plan of x = spread(dy, filters)."""
    per_phase = [-(-geometry.size[a] // geometry.stride[a]) for a in AXES]
    traffic = {}
    for summed in CANDIDATES:
        sizes, taps, patches = list(geometry.out), 1, 0
        for axis in reversed(AXES):
            if axis not in summed:
                sizes[axis] = per_phase[axis]
                taps *= geometry.kernel[axis]
                patches += batch * c_out * taps * prod(sizes) if geometry.kernel[axis] > 1 else 0
        phases = _phases(geometry, stacked_axes(summed))
        columns = prod(_kernels(geometry, summed)) * phases
        slices = columns + phases * sum(_kernels(geometry, stacked_axes(summed))) + prod(geometry.stride)
        traffic[summed] = Traffic(patches, batch * c_in * columns * prod(sizes), phases, slices)
    return _least(traffic, triple(per_phase), itemsize)


@lru_cache(maxsize=4096)
def plan_filter_gradient(geometry: Geometry, batch: int, c_in: int, c_out: int, itemsize: int) -> Plan:
    """The plan of dw = filter_gradient(x, dy): both sides are copies."""
    traffic = {}
    for summed in CANDIDATES:
        sizes, taps, copies = list(geometry.out), 1, 0
        for axis in reversed(AXES):
            if axis in summed:
                sizes[axis] = -(-geometry.size[axis] // geometry.stride[axis])
                taps *= geometry.kernel[axis]
                copies += batch * c_out * taps * prod(sizes) if geometry.kernel[axis] > 1 else 0
        phases = _phases(geometry, summed)
        slices = phases * sum(geometry.kernel) + prod(_kernels(geometry, summed))
        traffic[summed] = Traffic(_patches(geometry, summed, batch * c_in) + copies, 0, phases, slices)
    # Where traffic ties, copies of few axes of dy make the squarer product.
    order = sorted(CANDIDATES, key=lambda summed: (len(summed) != 1, len(summed)))
    return _least({summed: traffic[summed] for summed in order}, geometry.out, itemsize)


def _patches(geometry: Geometry, summed: tuple[int, ...], rows: int) -> int:
    """Elements that `products.correlate` copies, stage by stage."""
    sizes, taps, total = list(geometry.size), 1, 0
    for axis in reversed(AXES):
        if axis not in summed:
            sizes[axis] = geometry.out[axis]
            taps *= geometry.kernel[axis]
            total += rows * taps * prod(sizes) if geometry.kernel[axis] > 1 or geometry.stride[axis] > 1 else 0
    return total


def stacked_axes(summed: Sequence[int]) -> list[int]:
    """The axes that are not summed."""
    return [a for a in AXES if a not in summed]


def _kernels(geometry: Geometry, axes: Sequence[int]) -> list[int]:
    return [geometry.kernel[a] for a in axes]


def _phases(geometry: Geometry, axes: Sequence[int]) -> int:
    """Combinations of phases on the given axes: each is a product of its own."""
    return prod(len(geometry.taps_by_phase(a)) for a in axes)


def _least(traffic: dict[tuple[int, ...], Traffic], lengths: Triple, itemsize: int) -> Plan:
    summed = min(traffic, key=lambda s: traffic[s].cost)
    workspace = traffic[summed].copied + traffic[summed].produced
    axis = max(AXES, key=lambda a: (lengths[a], -a))
    # Below two rows a slab would mostly recompute the border that it shares with its neighbours.
    slabs = max(1, min(-(-workspace * itemsize // SLAB_BYTES), lengths[axis] // 2))
    # Rounding up the rows of a slab may leave the last ones empty.
    slabs = -(-lengths[axis] // _slab_length(lengths[axis], slabs))
    return Plan(summed, traffic[summed].slices > MAX_SLICES, axis, slabs, workspace)


# ---- slabs -----------------------------------------------------------------------------------------------------------


def _slab_length(length: int, slabs: int) -> int:
    return -(-length // slabs)


def _cut_windows(x: Array, geometry: Geometry, axis: int, length: int, slabs: int) -> tuple[Geometry, Array, int]:
    """The geometry of one slab of `length` outputs, x with its padding along `axis`, and the step from slab to slab."""
    stride = geometry.stride[axis]
    window = effective_kernel(geometry.kernel[axis], geometry.dilation[axis])
    x = products.window(x, axis, -geometry.front[axis], (slabs * length - 1) * stride + window)
    part = dataclasses.replace(
        geometry,
        size=_replace(geometry.size, axis, (length - 1) * stride + window),
        out=_replace(geometry.out, axis, length),
        front=_replace(geometry.front, axis, 0),
    )
    return part, x, length * stride


def _replace(values: Triple, axis: int, value: int) -> Triple:
    return triple([value if a == axis else v for a, v in enumerate(values)])


def _empty(like: Array, shape: tuple[int, ...]) -> Array:
    """Zeros that vary over the same axes of shard_map as `like`, as a loop's carry must."""
    return lax.full_like(like, 0, shape=shape)
