# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of dw: a matmul whose contraction runs over output positions.

dw[k, ci, co] = sum over b, o of x[b, ci, stride * o + dilation * k - padding] * dy[b, co, o].

Positions are on the partitions: a row of the width, times `groups` far-apart pieces of the depth (or height), so that the 128 rows of the array
are filled. Depth and height are on the free axis, where a tap is an offset; only the taps of the width need a shifted copy of x each. The stationary
operand holds neighbours of x times input channels (a `box` of neighbours fits 128 columns), the moving one `rows` output rows times output
channels, so that a matmul is never shorter than the engine's issue interval. Sums stay in PSUM, in float32, over all positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .axis import Axis, convolution_axis, lattice
from .gather import Unsupported, spans

__all__ = ["FilterGradientPlan", "Piece", "filter_gradient_plan"]

Triple = tuple[int, int, int]
Sextuple = tuple[int, int, int, int, int, int]

LANES = 128
BANK = 512  # float32 elements of a PSUM bank
BANKS = 8
ELEMENTS = 65536  # per partition, of what an engine writes in one instruction
STRIDE = 32767  # elements between two taps or planes, which an instruction steps over


@dataclass(frozen=True)
class Piece:
    """One stationary tile: a box of neighbours.

    Attributes:
        first: the first neighbour per axis: lattice positions of depth and height, the tap of the width.
        count: neighbours per axis.
    """

    first: Triple
    count: Triple


@dataclass(frozen=True)
class FilterGradientPlan:
    """What the kernel does.

    Attributes:
        axes: depth, height, width of the convolution; height in blocks of `rows` outputs.
        taps: per axis.
        channels: (C_in, C_out).
        row_tile: input channels of one tile.
        column_tile: output channels of one tile.
        rows: output rows that share a matmul as columns.
        group_axis: 0 if the groups of partitions are pieces of the depth, 1 if of the height.
        groups: how many.
        pitch: partitions from one group to the next.
        width: output columns of one tile of the width.
        first: the first lattice position of depth and height; unit: their distance; count: their number.
        pieces: the stationary tiles.
        passes: pieces that fit in PSUM together, as [first, end).
        chunk: output planes (of each group, if they are of the depth) and blocks of rows (likewise) of one load.
        itemsize: bytes per element.
    """

    axes: tuple[Axis, Axis, Axis]
    taps: Triple
    channels: tuple[int, int]
    row_tile: int
    column_tile: int
    rows: int
    group_axis: int
    groups: int
    pitch: int
    width: int
    first: tuple[int, int]
    unit: tuple[int, int]
    count: tuple[int, int]
    pieces: tuple[Piece, ...]
    passes: tuple[tuple[int, int], ...]
    chunk: tuple[int, int]
    itemsize: int

    @property
    def per_bank(self) -> int:
        """Pieces whose sums share a PSUM bank."""
        return max(1, BANK // (self.rows * self.column_tile))

    @property
    def extent(self) -> tuple[int, int]:
        """Planes and blocks of rows of one group."""
        planes, blocks = self.axes[0].out, self.axes[1].blocks
        if self.group_axis == 0:
            return -(-planes // self.groups), blocks
        return planes, -(-blocks // self.groups)

    def loads(self) -> Iterator[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]:
        """(planes, blocks of rows, columns) of each load, as [first, end) within a group."""
        planes, blocks = self.extent
        for d in spans(planes, self.chunk[0]):
            for h in spans(blocks, self.chunk[1]):
                for w in spans(self.axes[2].out, self.width):
                    yield d, h, w

    def origin(self, group: int) -> tuple[int, int]:
        """The first plane and block of rows of a group."""
        planes, blocks = self.extent
        return (group * planes, 0) if self.group_axis == 0 else (0, group * blocks)

    def window(self, d: tuple[int, int], h: tuple[int, int]) -> tuple[int, int]:
        """Input planes and rows that the planes and blocks of rows of a load read, per group."""
        depth, height = self.axes[0], self.axes[1]
        planes = depth.step * (d[1] - d[0] - 1) + self.unit[0] * (self.count[0] - 1) + 1
        rows = height.step * (h[1] - h[0] - 1) + self.unit[1] * (self.count[1] - 1) + 1
        return planes, rows

    def reaches(self, piece: Piece, plane: int, block: int) -> bool:
        """Whether some neighbour of a piece lies in the input, for an output plane and block of rows (of some group)."""
        for axis, position in ((0, plane), (1, block)):
            if self.groups > 1 and axis == self.group_axis:
                continue  # another position for each group
            low = self.axes[axis].step * position + self.first[axis] + self.unit[axis] * piece.first[axis]
            high = low + self.unit[axis] * (piece.count[axis] - 1)
            if high < 0 or low >= self.axes[axis].size:
                return False
        return True

    def lattice_of(self, axis: int, tap: int, element: int) -> int:
        """The lattice position of depth (0) or height (1) that a tap of an element of the block reads."""
        for k, offset in self.axes[axis].reads[element]:
            if k == tap:
                return (offset - self.first[axis]) // self.unit[axis]
        raise AssertionError("every tap of a convolution reads one offset")


@functools.lru_cache(maxsize=256)
def filter_gradient_plan(
    size: Triple,
    out: Triple,
    taps: Triple,
    stride: Triple,
    padding: Sextuple,
    dilation: Triple,
    channels: tuple[int, int],
    itemsize: int,
    budget: int,
) -> FilterGradientPlan:
    """The plan with the fewest matmul cycles among all numbers of rows and boxes that fit.

    Raises:
        Unsupported: not even one row fits.
    """
    row_tile, column_tile = min(channels[0], LANES), min(channels[1], LANES)
    width = min(out[2], LANES)
    # engines reach groups of 32, 64 or 128 partitions only; 2-byte types are transposed by DMA, which reaches all
    pitch = width if itemsize == 2 else next(p for p in (32, 64, 128) if p >= width)
    most = LANES // pitch
    best: tuple[float, FilterGradientPlan] | None = None
    reason = ""
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        if rows > 1 and (rows > out[1] or rows * column_tile > BANK):
            continue
        axes = (
            convolution_axis(size[0], taps[0], stride[0], dilation[0], (padding[0], padding[1])),
            convolution_axis(size[1], taps[1], stride[1], dilation[1], (padding[2], padding[3]), rows),
            convolution_axis(size[2], taps[2], stride[2], dilation[2], (padding[4], padding[5])),
        )
        lattices = [lattice(axes[i].offsets(tuple(range(axes[i].block)))) for i in (0, 1)]
        counts = (lattices[0][2], lattices[1][2])
        for box in _boxes((counts[0], counts[1], taps[2]), max(1, LANES // row_tile)):
            pieces = tuple(
                Piece((d[0], h[0], w[0]), (d[1] - d[0], h[1] - h[0], w[1] - w[0]))
                for h in spans(counts[1], box[1])
                for d in spans(counts[0], box[0])
                for w in spans(taps[2], box[2])
            )
            group_axis = 0 if out[0] >= min(most, axes[1].blocks) else 1
            groups = min(most, out[0] if group_axis == 0 else axes[1].blocks)
            cycles = max(min(64, prod(box) * row_tile), rows * column_tile) * len(pieces)
            per_pass = BANKS * max(1, BANK // (rows * column_tile))
            passes = tuple(spans(len(pieces), per_pass))
            plan = FilterGradientPlan(
                axes=axes,
                taps=taps,
                channels=channels,
                row_tile=row_tile,
                column_tile=column_tile,
                rows=rows,
                group_axis=group_axis,
                groups=groups,
                pitch=pitch,
                width=width,
                first=(lattices[0][0], lattices[1][0]),
                unit=(lattices[0][1], lattices[1][1]),
                count=counts,
                pieces=pieces,
                passes=passes,
                chunk=(1, 1),
                itemsize=itemsize,
            )
            planes, blocks = plan.extent
            cost = float(cycles * planes * blocks * len(passes)) * (1 + 0.02 * len(passes)) + 4 * rows * prod(taps)
            if best is not None and cost >= best[0]:
                continue
            try:
                best = cost, _chunked(plan, budget)
            except Unsupported as unsupported:
                reason = str(unsupported)
    if best is None:
        raise Unsupported(reason)
    return best[1]


def _boxes(counts: Triple, most: int) -> Iterator[Triple]:
    """Boxes of up to `most` neighbours that cut the counts into different numbers of pieces."""

    def sizes(count: int, limit: int) -> list[int]:
        return sorted(size for size in {-(-count // n) for n in range(1, count + 1)} | {1} if size <= limit)

    for a_d in sizes(counts[0], most):
        for a_h in sizes(counts[1], most // a_d):
            for a_w in sizes(counts[2], most // (a_d * a_h)):
                yield a_d, a_h, a_w


def _chunked(plan: FilterGradientPlan, budget: int) -> FilterGradientPlan:
    """The plan with the largest loads that fit."""
    from dataclasses import replace

    # sums of one pass in float32 and as results, and slack
    taps = prod(plan.taps)
    final = (len(plan.pieces) * plan.rows + 3 * -(-taps * plan.row_tile // LANES) * plan.rows) * plan.column_tile * 4 + 8192
    planes, blocks = plan.extent
    chunk = (planes, blocks)

    def needed(chunk: tuple[int, int]) -> int:
        window = plan.window((0, chunk[0]), (0, chunk[1]))
        wide = (
            min(plan.axes[2].size, plan.axes[2].step * (plan.width - 1) + (plan.taps[2] - 1) * 8 + 1)
            if plan.axes[2].out > LANES
            else plan.axes[2].size
        )
        loaded = window[0] * window[1] * wide + chunk[0] * chunk[1] * plan.rows * plan.axes[2].out
        per_tap = window[0] * window[1] * plan.row_tile
        positions = chunk[0] * chunk[1] * plan.rows
        if per_tap > STRIDE or plan.taps[2] * per_tap > ELEMENTS or positions * plan.column_tile > ELEMENTS:
            return budget + 1
        if window[0] * window[1] * wide > ELEMENTS or positions * plan.axes[2].out > ELEMENTS or window[1] * wide > STRIDE:
            return budget + 1
        turned = plan.taps[2] * per_tap + chunk[0] * chunk[1] * plan.rows * plan.column_tile
        # x and dy come in one group at a time
        # with a stride, x is there once more, its phases apart
        return (loaded * (2 if plan.axes[2].step > 1 else 1) + turned) * plan.itemsize

    while needed(chunk) > budget - final:
        if chunk[0] > 1:
            chunk = (min(chunk[0] - 1, -(-planes // (-(-planes // chunk[0]) + 1))), chunk[1])
        elif chunk[1] > 1:
            chunk = (1, min(chunk[1] - 1, -(-blocks // (-(-blocks // chunk[1]) + 1))))
        else:
            raise Unsupported(f"one row of outputs and its neighbours do not fit in {budget} B per partition")
    return replace(plan, chunk=chunk)
