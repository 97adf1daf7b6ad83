# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of a convolution, of a transposed one, and of a convolution's dx: three gathers of the same form.

A matmul multiplies a stationary matrix of filter taps with a strided view of the input where it lies in SBUF. Two packings fill the array:

- **columns** are (block elements in depth and height) x (output channels): a block of neighbouring outputs shares what it reads;
- **rows** are (neighbouring inputs) x (input channels): the window is laid on several groups of partitions, each shifted by one neighbour (`stack`).

The matrix holds a tap where an input of the rows reaches an output of the columns, and zero elsewhere. Width is never blocked: its phases
(of a transposed convolution) are accumulated one after another and written with a stride, so that a store moves whole rows.

Without stacking the window holds no padding: each matmul is clipped to the blocks whose input exists.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from .axis import Axis, lattice

__all__ = ["Box", "Column", "Copy", "GatherPlan", "Group", "Unsupported", "flat_tail", "plan_gather"]

ROWS = COLUMNS = 128
BANK = 512  # float32 elements of a PSUM bank
ELEMENTS = 65536  # per partition, of what an engine writes in one instruction
STRIDE = 32767  # elements between two planes, which an instruction steps over
MOST_TAPS = 32768
MOST_PACKED_TAPS = 2048
CANDIDATES = 6  # plans that are worked out and compared
BLOCK_SIZES = 8  # block sizes of which one plan is worked out at least

Axes = tuple[Axis, Axis, Axis]
Sizes = tuple[int, int, int]
Elements = tuple[tuple[tuple[int, int], ...], ...]


class Unsupported(ValueError):
    """What a kernel cannot do; the message says why."""


@dataclass(frozen=True)
class Group:
    """One matmul per tile of positions (and tile of input channels).

    Attributes:
        offset: of the first neighbour, in input positions (d, h, w).
        tap: the flat tap, if the group has one tap in one column element (then no matrix is built).
    """

    offset: tuple[int, int, int]
    tap: int = -1


@dataclass(frozen=True)
class Copy:
    """A run of taps in the stationary matrix: row block `row`, columns of element `element`.

    Attributes:
        row: the first neighbour of the rows; `rows` neighbours follow, each with the next tap.
        rows: how many neighbours.
        group: the first group; `count` groups follow in steps of `group_step`.
        element: the column element.
        tap: the first tap; following groups take taps in steps of `tap_step`.
    """

    row: int
    rows: int
    group: int
    group_step: int
    element: int
    tap: int
    tap_step: int
    count: int


@dataclass(frozen=True)
class Column:
    """One tile of columns: the elements of a block that are computed together, for one phase of the width.

    Attributes:
        elements: (e_d, e_h) of each.
        phase: e_w.
        groups: the matmuls that sum up to them.
        copies: how the stationary matrix is filled; empty if every group is a tap by itself.
    """

    elements: tuple[tuple[int, int], ...]
    phase: int
    groups: tuple[Group, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Box:
    """Blocks [first, end) of each axis."""

    d: tuple[int, int]
    h: tuple[int, int]
    w: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Blocks per axis."""
        return self.d[1] - self.d[0], self.h[1] - self.h[0], self.w[1] - self.w[0]


@dataclass(frozen=True)
class GatherPlan:
    """What the kernel does, in which order.

    Attributes:
        axes: depth, height, width.
        taps: per axis.
        rows_in: input channels.
        columns_out: output channels.
        row_tile: input channels of one tile.
        column_tile: output channels of one tile.
        stack: neighbours on the partitions, per axis.
        unit: distance of these neighbours, per axis.
        columns: the column tiles of one block, all phases.
        chunk: blocks of one window, per axis.
        tile: blocks of one matmul, per axis.
        itemsize: bytes per element of the input.
        part: taps whose weights are in SBUF at one time.
        weights_stay: whether the weights of all output channels stay in SBUF.
        vector_share: one eviction in this many is Vector's, the others are Scalar's; 0: all are Scalar's, which keeps up with the tensor engine.
    """

    axes: Axes
    taps: tuple[int, int, int]
    rows_in: int
    columns_out: int
    row_tile: int
    column_tile: int
    stack: tuple[int, int, int]
    unit: tuple[int, int, int]
    columns: tuple[Column, ...]
    chunk: tuple[int, int, int]
    tile: tuple[int, int, int]
    itemsize: int
    part: int
    weights_stay: bool
    vector_share: int = 0

    @property
    def stacked(self) -> int:
        """Neighbours on the partitions."""
        return prod(self.stack)

    @property
    def row_tiles(self) -> int:
        """Tiles of input channels."""
        return -(-self.rows_in // self.row_tile)

    @property
    def column_tiles(self) -> int:
        """Tiles of output channels."""
        return -(-self.columns_out // self.column_tile)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Blocks per axis."""
        d, h, w = self.axes
        return d.blocks, h.blocks, w.blocks

    def chunks(self) -> Iterator[Box]:
        """The windows, in order."""
        for d in spans(self.blocks[0], self.chunk[0]):
            for h in spans(self.blocks[1], self.chunk[1]):
                for w in spans(self.blocks[2], self.chunk[2]):
                    yield Box(d, h, w)

    @property
    def merged(self) -> bool:
        """Whether the column tiles, of one element each, are staged together."""
        return len(self.columns) > self.axes[2].block and all(len(column.elements) == 1 for column in self.columns)

    def rows_of(self, chunk: Box) -> tuple[tuple[int, int], tuple[int, int]]:
        """The planes and rows [first, end) of the result that a chunk computes."""
        depth, height = self.axes[0], self.axes[1]
        return (
            (depth.block * chunk.d[0], min(depth.out, depth.block * chunk.d[1])),
            (height.block * chunk.h[0], min(height.out, height.block * chunk.h[1])),
        )

    def phase_blocks(self, phase: int) -> int:
        """The blocks of the width that have an output of this phase."""
        axis = self.axes[2]
        return max(0, -(-(axis.out - phase) // axis.block))

    def tiles(self, chunk: Box, phase: int) -> Iterator[Box]:
        """The position tiles of a chunk for a phase of the width."""
        end = min(chunk.w[1], self.phase_blocks(phase))
        for d in spans(chunk.d[1] - chunk.d[0], self.tile[0], chunk.d[0]):
            for h in spans(chunk.h[1] - chunk.h[0], self.tile[1], chunk.h[0]):
                for w in spans(max(0, end - chunk.w[0]), self.tile[2], chunk.w[0]):
                    yield Box(d, h, w)

    def reach(self, group: Group, tile: Box) -> Box | None:
        """The blocks of a tile for which some neighbour of the group lies in the input; None if there are none."""
        spans_ = []
        for axis, offset, count, unit, (first, end) in zip(
            self.axes, group.offset, self.stack, self.unit, (tile.d, tile.h, tile.w), strict=True
        ):
            reached = [axis.valid_blocks(offset + unit * q) for q in range(count)]
            low = max(first, min(a for a, b in reached if b > a) if any(b > a for a, b in reached) else end)
            high = min(end, max(b for _, b in reached))
            if low >= high:
                return None
            spans_.append((low, high))
        return Box(*spans_)

    def window(self, chunk: Box) -> tuple[tuple[int, int], ...]:
        """Input positions [first, end) per axis that a chunk reads; beyond the input if neighbours are stacked (zeros are put there)."""
        result = []
        for axis, (first, end), index in zip(self.axes, (chunk.d, chunk.h, chunk.w), range(3), strict=True):
            offsets = self._offsets(index)
            low, high = axis.step * first + offsets[0], axis.step * (end - 1) + offsets[1] + 1
            if self.stacked == 1:
                low, high = max(0, low), min(axis.size, high)
                low = min(low, high)
            result.append((low, high))
        return tuple(result)

    def reach_of(self, index: int) -> int:
        """Input positions of an axis that one block reads, from the first to the last."""
        first, last = self._offsets(index)
        return last - first + 1

    def _offsets(self, index: int) -> tuple[int, int]:
        every = [group.offset[index] for column in self.columns for group in column.groups]
        if not every:
            return 0, 0
        return min(every), max(every) + self.unit[index] * (self.stack[index] - 1)


def spans(total: int, size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """[first, end) of consecutive pieces of `size`, the last maybe shorter.

    Example:
        >>> list(spans(5, 2, start=10))
        [(10, 12), (12, 14), (14, 15)]
    """
    for first in range(0, total, size):
        yield start + first, start + min(first + size, total)


def plan_gather(
    axes_of: Callable[[int, int], Axes],
    taps: tuple[int, int, int],
    rows_in: int,
    columns_out: int,
    itemsize: int,
    budget: int,
    cores: int = 1,
    batch: int = 1,
    packed: bool = True,
) -> GatherPlan:
    """The cheapest plan among all block sizes and stacks that fit.

    Args:
        axes_of: the axes for blocks of (r_d, r_h).
        taps: per axis.
        rows_in: input channels.
        columns_out: output channels.
        itemsize: bytes per element.
        budget: SBUF bytes per partition.
        cores: physical cores that share the chunks.
        batch: examples.
        packed: whether outputs and inputs may be packed; without it an Inf or NaN reaches only the outputs that read it.

    Raises:
        Unsupported: not even the smallest window fits.
    """
    row_tile, column_tile = min(rows_in, ROWS), min(columns_out, COLUMNS)
    if prod(taps) > MOST_TAPS:
        raise Unsupported(f"{prod(taps)} taps are {prod(taps)} matmuls per tile of outputs; {MOST_TAPS} are planned at most")
    packed = packed and prod(taps) <= MOST_PACKED_TAPS
    tiles = -(-columns_out // column_tile)
    rough: list[tuple[float, int, tuple[Axes, Elements, Sizes, Sizes]]] = []
    for r_d, r_h in _block_sizes(column_tile) if packed else [(1, 1)]:
        axes = axes_of(r_d, r_h)
        if any(r > 1 and axis.blocks * axis.block >= axis.out + axis.block for r, axis in ((r_d, axes[0]), (r_h, axes[1]))):
            continue  # blocks larger than the output
        for elements in _element_tiles(axes, column_tile, packed):
            neighbours = _neighbours(axes, elements)
            for stack, unit in (
                _stacks(axes, elements, row_tile) if packed and rows_in <= ROWS // 2 else [((1, 1, 1), (1, 1, 1))]
            ):
                rough.append(
                    (
                        _roughly(axes, elements, neighbours, stack, rows_in, tiles, itemsize),
                        len(rough),
                        (axes, elements, stack, unit),
                    )
                )
    # the unpacked form is always tried: it needs the least memory
    plain, ones = axes_of(1, 1), (1, 1, 1)
    single = tuple((pair,) for pair in itertools.product(range(plain[0].block), range(plain[1].block)))
    best: tuple[float, GatherPlan] | None = None
    reason = ""
    for axes, elements, stack, unit in [*_candidates(rough), (plain, single, ones, ones)]:
        columns = tuple(_columns(axes, elements, stack, unit, taps))
        try:
            plan = _fit(
                axes, taps, rows_in, columns_out, row_tile, column_tile, stack, unit, columns, itemsize, budget, 1, batch
            )
        except Unsupported as unsupported:
            reason = str(unsupported)
            continue
        cost = _cost(plan, batch)
        if best is None or cost < best[0]:
            best = cost, plan
    if best is None:
        raise Unsupported(reason)
    plan = best[1]
    if cores > 1:
        # the same sums in the same order, cut into shares
        plan = _fit(
            plan.axes,
            taps,
            rows_in,
            columns_out,
            row_tile,
            column_tile,
            plan.stack,
            plan.unit,
            plan.columns,
            itemsize,
            budget,
            cores,
            batch,
        )
    times = _times(plan, batch)
    # Scalar alone takes 1.8 times as long to evict as both together
    return dataclasses.replace(plan, vector_share=2 if 1.8 * times.evict > max(times.tensor, times.dma) else 0)


def _candidates(rough: list[Any]) -> list[Any]:
    """The best on the whole, and the best of each block size, since stores like blocks of depth."""
    ordered = sorted(rough, key=lambda entry: entry[:2])
    chosen = {entry[1]: entry for entry in ordered[:CANDIDATES]}
    blocks: set[tuple[int, int]] = set()
    for entry in ordered:
        axes = entry[2][0]
        key = (axes[0].block, axes[1].block)
        if key not in blocks and len(blocks) < BLOCK_SIZES:
            blocks.add(key)
            chosen[entry[1]] = entry
    return [entry[2] for entry in chosen.values()]


def _neighbours(axes: Axes, elements: Elements) -> tuple[list[tuple[int, int]], list[int]]:
    """How many neighbours each tile of elements reads on depth and height, and each phase on width."""

    def count(axis: int, used: set[int]) -> int:
        return _count(axes[axis].offsets(tuple(used)))

    tiles = [(count(0, {d for d, _ in tile}), count(1, {h for _, h in tile})) for tile in elements]
    return tiles, [count(2, {phase}) for phase in range(axes[2].block)]


def _roughly(
    axes: Axes,
    elements: Elements,
    neighbours: tuple[list[tuple[int, int]], list[int]],
    stack: Sizes,
    rows_in: int,
    column_tiles: int,
    itemsize: int,
) -> float:
    """Microseconds of one example, from counts alone: to choose the candidates that are worth a plan."""
    tiles, phases = neighbours
    of_tiles = sum(-(-depth // stack[0]) * -(-height // stack[1]) for depth, height in tiles)
    matmuls = of_tiles * sum(-(-width // stack[2]) for width in phases)
    cycles = matmuls * prod(axis.blocks for axis in axes) * -(-rows_in // ROWS) * column_tiles * (4 if itemsize == 4 else 1)
    stacked = prod(stack)
    copied = stacked * prod(axis.size + 2 for axis in axes) * rows_in * itemsize if stacked > 1 else 0
    placed = len(elements) * sum(len(tile) for tile in elements) * stacked if stacked > 1 else 0
    tensor, dma = cycles / 2400, copied / 368e3 + 0.08 * (stacked + placed / 8)
    return max(tensor, dma) + 0.1 * (tensor + dma)


def _count(offsets: tuple[int, ...]) -> int:
    return lattice(offsets)[2] if offsets else 0


def _block_sizes(column_tile: int) -> list[tuple[int, int]]:
    most = max(1, COLUMNS // column_tile)
    sizes = [r for r in (1, 2, 3, 4, 5, 6, 8, 12, 16, 32) if r <= most]
    return [(r_d, r_h) for r_d in sizes for r_h in sizes if r_d * r_h <= most and (r_d <= 8 and r_h <= 8)]


def _element_tiles(axes: Axes, column_tile: int, packed: bool) -> list[Elements]:
    """Ways to cut the elements of a block into tiles of columns."""
    most = max(1, COLUMNS // column_tile) if packed else 1
    by_depth = [(d, h) for d in range(axes[0].block) for h in range(axes[1].block)]
    by_height = [(d, h) for h in range(axes[1].block) for d in range(axes[0].block)]
    ways = {tuple(tuple(order[first:end]) for first, end in spans(len(order), most)) for order in (by_depth, by_height)}
    return sorted(ways)


def _stacks(axes: Axes, elements: Elements, row_tile: int) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Boxes of neighbours that fit the rows."""
    most = ROWS // row_tile
    counts, units = [], []
    all_elements = [tuple(range(axis.block)) for axis in axes]
    for index, axis in enumerate(axes):
        if index == 2:
            found = [lattice(axis.offsets((e,))) for e in all_elements[2] if axis.reads[e]]
        else:
            used = tuple(sorted({pair[index] for tile in elements for pair in tile}))
            found = [lattice(axis.offsets(used))] if axis.offsets(used) else []
        counts.append(max((count for _, _, count in found), default=1))
        units.append(min((unit for _, unit, count in found if count > 1), default=1))
    boxes = []
    for a_w in _splits(counts[2], most):
        for a_h in _splits(counts[1], most // a_w):
            for a_d in _splits(counts[0], most // (a_w * a_h)):
                boxes.append(((a_d, a_h, a_w), (units[0], units[1], units[2])))
    return boxes


def _splits(count: int, most: int) -> list[int]:
    """Sizes up to `most` that cut `count` into different numbers of pieces."""
    sizes = {-(-count // pieces) for pieces in range(1, count + 1)}
    return sorted(size for size in sizes | {1} if size <= most)


def _columns(
    axes: Axes, elements: Elements, stack: tuple[int, int, int], unit: tuple[int, int, int], taps: tuple[int, int, int]
) -> Iterator[Column]:
    for tile in elements:
        for phase in range(axes[2].block):
            yield _column(axes, tile, phase, stack, unit, taps)


def _column(
    axes: Axes,
    tile: tuple[tuple[int, int], ...],
    phase: int,
    stack: tuple[int, int, int],
    unit: tuple[int, int, int],
    taps: tuple[int, int, int],
) -> Column:
    """The groups of a column tile, and where each tap goes in its matrix."""
    wide = axes[2].reads[phase]
    reads = [(e, axes[0].reads[d], axes[1].reads[h]) for e, (d, h) in enumerate(tile) if wide]
    reads = [(e, deep, high) for e, deep, high in reads if deep and high]
    if not reads:
        return Column(tile, phase, (), ())
    lows = (
        min(offset for _, deep, _ in reads for _, offset in deep),
        min(offset for _, _, high in reads for _, offset in high),
        min(offset for _, offset in wide),
    )

    def placed(axis: int, pairs: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
        """(tap, offset of its group, place in the stack) on one axis."""
        # neighbours off the lattice of a unit cannot share a stack
        assert all((offset - lows[axis]) % unit[axis] == 0 for _, offset in pairs)
        places = [(tap, divmod((offset - lows[axis]) // unit[axis], stack[axis])) for tap, offset in pairs]
        return [(tap, lows[axis] + unit[axis] * stack[axis] * group, q) for tap, (group, q) in places]

    entries = []  # (group key, row, element, tap)
    on_width = placed(2, wide)
    for element, deep, high in reads:
        on_height = placed(1, high)
        for k_d, n_d, q_d in placed(0, deep):
            for k_h, n_h, q_h in on_height:
                row, tap = (q_d * stack[1] + q_h) * stack[2], (k_d * taps[1] + k_h) * taps[2]
                entries += [((n_d, n_h, n_w), row + q_w, element, tap + k_w) for k_w, n_w, q_w in on_width]
    keys = sorted({key for key, _, _, _ in entries})
    number = {key: i for i, key in enumerate(keys)}
    if len(tile) == 1 and prod(stack) == 1:
        tap_of = {key: tap for key, _, _, tap in entries}
        return Column(tile, phase, tuple(Group(key, tap_of[key]) for key in keys), ())
    copies = _merged([(row, number[key], element, tap) for key, row, element, tap in entries])
    return Column(tile, phase, tuple(Group(key) for key in keys), copies)


def _merged(entries: list[tuple[int, int, int, int]]) -> tuple[Copy, ...]:
    """Placements (row, group, element, tap) as few copies: runs of rows with following taps, then equal runs over evenly spaced groups."""
    runs: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # (row, rows, element) -> [(group, tap)]
    entries = sorted(entries, key=lambda entry: (entry[2], entry[1], entry[0]))
    i = 0
    while i < len(entries):
        row, group, element, tap = entries[i]
        rows = 1
        while i + rows < len(entries) and entries[i + rows] == (row + rows, group, element, tap + rows):
            rows += 1
        runs.setdefault((row, rows, element), []).append((group, tap))
        i += rows
    copies = []
    for (row, rows, element), places in runs.items():
        i = 0
        while i < len(places):
            group, tap = places[i]
            count, group_step, tap_step = 1, 1, 1
            if i + 1 < len(places) and places[i + 1][1] > tap:
                group_step, tap_step = places[i + 1][0] - group, places[i + 1][1] - tap
                while i + count < len(places) and places[i + count] == (group + count * group_step, tap + count * tap_step):
                    count += 1
            copies.append(Copy(row, rows, group, group_step, element, tap, tap_step, count))
            i += count
    return tuple(copies)


def _fit(
    axes: Axes,
    taps: tuple[int, int, int],
    rows_in: int,
    columns_out: int,
    row_tile: int,
    column_tile: int,
    stack: tuple[int, int, int],
    unit: tuple[int, int, int],
    columns: tuple[Column, ...],
    itemsize: int,
    budget: int,
    cores: int,
    batch: int,
) -> GatherPlan:
    """Choose the chunk and the tile of positions so that everything fits in SBUF."""
    row_tiles, column_tiles = -(-rows_in // row_tile), -(-columns_out // column_tile)
    every_tap = prod(taps)
    direct = all(not column.copies for column in columns)
    raw = every_tap * column_tile * itemsize * row_tiles
    matrices = (
        sum(len(column.groups) * len(column.elements) for column in columns if column.copies)
        * column_tile
        * itemsize
        * row_tiles
    )
    one = raw + matrices
    if any(len(column.groups) * len(column.elements) * column_tile > ELEMENTS for column in columns if column.copies):
        raise Unsupported(f"a packed matrix has more than {ELEMENTS} elements per partition")
    weights_stay = one * column_tiles <= budget // 2
    part = every_tap
    if one > budget // 2 or every_tap * column_tile > ELEMENTS:
        if not direct:
            raise Unsupported(f"the packed weights need {one} B per partition of {budget}")
        part = max(1, min((budget // 4) // (column_tile * itemsize * row_tiles), ELEMENTS // column_tile))
        weights_stay = False
        one = 2 * part * column_tile * itemsize * row_tiles
    left = budget - (one * column_tiles if weights_stay else one) - 4096

    def needed(chunk: tuple[int, int, int]) -> int:
        plan = make(chunk)
        # a chunk inside the volume, which padding does not shorten
        d, h, w = (axis.step * (n - 1) + plan.reach_of(i) for i, (axis, n) in enumerate(zip(axes, chunk, strict=True)))
        d, h, w = (max(1, min(n, a.size) if plan.stacked == 1 else n) for n, a in zip((d, h, w), axes, strict=True))
        if h * w > STRIDE or chunk[1] * axes[1].block * chunk[2] * axes[2].block > STRIDE:
            return budget + 1
        window = d * h * w * itemsize * row_tiles
        if plan.stacked > 1:
            window = 2 * window + flat_tail(plan, (d, h, w)) * itemsize
        staged = chunk[0] * chunk[1] * chunk[2] * axes[2].block * itemsize
        if plan.merged:
            staged *= axes[0].block * axes[1].block
        return window + 2 * staged

    def make(chunk: tuple[int, int, int]) -> GatherPlan:
        tile_w = min(chunk[2], BANK)
        tile_h = min(chunk[1], max(1, BANK // tile_w))
        tile_d = min(chunk[0], max(1, BANK // (tile_w * tile_h))) if tile_h == chunk[1] else 1
        # even pieces: 12 rows in tiles of 5 are tiles of 4
        tile_h = -(-chunk[1] // -(-chunk[1] // tile_h))
        tile_d = -(-chunk[0] // -(-chunk[0] // tile_d))
        return GatherPlan(
            axes,
            taps,
            rows_in,
            columns_out,
            row_tile,
            column_tile,
            stack,
            unit,
            columns,
            chunk,
            (tile_d, tile_h, tile_w),
            itemsize,
            part,
            weights_stay,
        )

    blocks = tuple(axis.blocks for axis in axes)
    chunk = (blocks[0], blocks[1], blocks[2])
    if cores > 1 and batch % cores:
        # an even share for each core: by depth, else by height
        axis = 0 if blocks[0] >= cores else 1
        shares = [-(-chunk[i] // cores) if i == axis else chunk[i] for i in range(3)]
        chunk = (shares[0], shares[1], shares[2])
    while needed(chunk) > left:
        # depth first: its windows overlap least in bytes that are stored together
        index = 0 if chunk[0] > 1 else 1 if chunk[1] > 1 else 2
        if chunk[index] == 1:
            raise Unsupported(f"the smallest window does not fit in the {left} B per partition that the weights leave")
        size = chunk[index]
        pieces = -(-blocks[index] // size) + 1
        smaller = min(size - 1, -(-blocks[index] // pieces))
        chunk = (*chunk[:index], smaller, *chunk[index + 1 :])  # type: ignore[assignment]
    return make(chunk)


def flat_tail(plan: GatherPlan, window: tuple[int, int, int]) -> int:
    """Elements beyond a flat window that the largest shift of a stack reaches."""
    return ((plan.stack[0] - 1) * plan.unit[0] * window[1] + (plan.stack[1] - 1) * plan.unit[1]) * window[2] + (
        plan.stack[2] - 1
    ) * plan.unit[2]


class _Times(NamedTuple):
    tensor: float
    evict: float
    dma: float
    prepare: float
    positions: int


def _cost(plan: GatherPlan, batch: int) -> float:
    """Microseconds of the busiest engine on trn2, and a little of everything, so that a tie goes to the plan that does less."""
    times = _times(plan, batch)
    busy = times[:4]
    return max(busy) + 0.05 * sum(busy) + 1e-6 * times.positions


def _times(plan: GatherPlan, batch: int) -> _Times:
    """Microseconds of each engine on trn2, roughly: for the comparison of plans."""
    positions = sum(
        plan.blocks[0] * plan.blocks[1] * plan.phase_blocks(column.phase) * max(1, len(column.groups))
        for column in plan.columns
    )
    clipped = 0.0
    whole = Box(*((0, size) for size in plan.blocks))
    for column in plan.columns:
        for group in column.groups:
            region = plan.reach(group, Box(whole.d, whole.h, (0, plan.phase_blocks(column.phase))))
            clipped += prod(region.sizes) if region is not None else 0
    per_element = 4.0 if plan.itemsize == 4 else 1.0
    tensor = batch * clipped * plan.row_tiles * plan.column_tiles * per_element / 2400
    evicted = (
        batch
        * sum(plan.blocks[0] * plan.blocks[1] * plan.phase_blocks(column.phase) for column in plan.columns)
        * plan.column_tiles
        / 2160
    )
    # one chunk inside the volume stands for all
    kinds = [list(spans(n, size)) for n, size in zip(plan.blocks, plan.chunk, strict=True)]
    chunk = Box(*(kind[len(kind) // 2] for kind in kinds))
    chunks = batch * prod(len(kind) for kind in kinds)
    window = plan.window(chunk)
    sizes = [high - low for low, high in window]
    volume = prod(max(1, min(high, axis.size) - max(0, low)) for (low, high), axis in zip(window, plan.axes, strict=True))
    loads = 1 if plan.weights_stay else plan.column_tiles
    elements = plan.axes[0].block * plan.axes[1].block
    rows = chunk.sizes[0] * (chunk.sizes[1] if plan.axes[1].block > 1 else 1)
    bytes_ = float(loads * volume * plan.rows_in * plan.itemsize)
    pieces = loads * plan.rows_in * (max(1, volume // max(1, sizes[2])) if plan.stacked > 1 else 1)
    if plan.merged:
        # one store of all elements, whole planes where the chunk holds all rows
        rows, elements = (chunk.sizes[0] * plan.axes[0].block if chunk.sizes[1] < plan.blocks[1] else 1), 1
    pieces += elements * plan.columns_out * rows
    dmas = loads * plan.row_tiles + elements * plan.column_tiles
    if plan.stacked > 1:
        bytes_ += plan.stacked * prod(sizes) * plan.rows_in * plan.itemsize
        pieces += plan.stacked * plan.rows_in
        dmas += plan.stacked
    copies = sum(len(column.copies) for column in plan.columns) * plan.row_tiles * plan.column_tiles
    placed = copies if plan.stacked > 1 else 0
    dma = max(chunks * (bytes_ / 23.0 + 16 * pieces) / 16, 1300 * (chunks * dmas + placed) / 16) / 1000
    prepared = copies * 100 / 1200 if plan.stacked == 1 else 0.0
    return _Times(tensor, evicted, dma, prepared, positions)
