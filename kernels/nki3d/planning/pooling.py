# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of an average pooling and of its backward pass: two maps of one form.

On each axis, element i of the result is the sum of the source's elements [lo(i), hi(i)):

- forward, lo(i) = i * stride - padding and hi(i) = lo(i) + kernel;
- backward, the windows o that cover element i: o * stride <= i + padding < o * stride + kernel.

The result of an axis is cut into cells of `up` elements (1 forward, `stride` backward), whose ranges advance by `down` elements of the
source (`stride` forward, 1 backward). So a handful of strided sums, the `Piece`s, makes a whole axis.

A **lane** is what one partition computes at a time: a tile of the result for one plane (or, where a layout has channels last, for some
channels of one example), with the window of the source that it reads. Lanes are counted over planes and over the blocks of the three axes,
so that few planes fill 128 partitions, too. An axis with one block is clipped to what exists; on an axis with several, all lanes have the
same window, and what lies outside the volume is set to zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

from .gather import Unsupported

__all__ = ["Piece", "PoolAxis", "PoolPlan", "Pooling", "Transfer", "Unsupported", "plan_pooling", "pooling"]

LANES = 128
ELEMENTS = 65_536  # of an instruction's operand, per partition
STRIDE = 32_767
COUNT = 65_535
FORMATS = ("NCDHW", "NDHWC")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
TOO_MANY = 1e5  # cost of a plan whose bytes are far from the least
RESERVE = 8192  # bytes for small tiles

Triple = tuple[int, int, int]


# --- arguments


@dataclass(frozen=True)
class Pooling:
    """What to compute; sizes of the larger side (`big`: the forward pass's input) and of the smaller one (`small`: its output)."""

    batch: int
    channels: int
    big: Triple
    small: Triple
    kernel: Triple
    stride: Triple
    padding: Triple
    data_format: str
    output_format: str
    itemsize: int
    count_include_pad: bool

    def shape(self, big: bool) -> tuple[int, ...]:
        """The shape in HBM of one side, in its layout."""
        sizes, layout = (self.big, self.data_format) if big else (self.small, self.output_format)
        if layout == "NCDHW":
            return (self.batch, self.channels, *sizes)
        return (self.batch, *sizes, self.channels)


def pooling(
    operation: str,
    shape: Sequence[int],
    dtype: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    data_format: str,
    output_format: str | None,
    count_include_pad: bool = True,
    grad_shape: Sequence[int] | None = None,
    grad_dtype: Any = None,
) -> Pooling:
    """Check the arguments of a pooling.

    Raises:
        ValueError: wrong arguments; the message names the operation, the argument, its value and the cure.
    """
    output_format = data_format if output_format is None else output_format
    for name, layout in (("data_format", data_format), ("output_format", output_format)):
        if layout not in FORMATS:
            raise ValueError(f"{operation}: `{name}` is {layout!r}. Use one of {', '.join(map(repr, FORMATS))}.")
    tensor = "src_tensor" if grad_shape is None else "input_tensor"
    if len(shape) != 5:
        raise ValueError(
            f"{operation}: `{tensor}` has {len(shape)} dimensions, shape {tuple(shape)}. Reshape it to the five of {data_format!r}."
        )
    if min(shape) < 1:
        raise ValueError(
            f"{operation}: `{tensor}` has shape {tuple(shape)}, an empty array. Skip the call, or keep every size positive."
        )
    name_of_dtype = str(dtype).rsplit(".", 1)[-1]
    if name_of_dtype not in DTYPES:
        raise ValueError(f"{operation}: `{tensor}` has dtype {name_of_dtype}. Convert it to one of {', '.join(DTYPES)}.")
    if data_format == "NCDHW":
        batch, channels, *sizes = (int(n) for n in shape)
    else:
        batch, *sizes, channels = (int(n) for n in shape)
    kernel = _triple(operation, "kernel_size", kernel_size, 1)
    strides = kernel if stride is None else _triple(operation, "stride", stride, 1)
    pads = _triple(operation, "padding", padding, 0)
    small = []
    for axis, letter in enumerate("DHW"):
        if pads[axis] >= kernel[axis]:
            raise ValueError(
                f"{operation}: `padding` {pads[axis]} on axis {letter} is not below `kernel_size` {kernel[axis]}, so a window would hold "
                "nothing but padding. Use less padding."
            )
        room = sizes[axis] + 2 * pads[axis] - kernel[axis]
        if room < 0:
            raise ValueError(
                f"{operation}: `kernel_size` {kernel[axis]} does not fit on axis {letter}: `{tensor}` has {sizes[axis]} elements there "
                f"and `padding` adds {pads[axis]} on both sides. Use a smaller window, or more padding."
            )
        small.append(room // strides[axis] + 1)
    found = Pooling(
        batch,
        channels,
        (sizes[0], sizes[1], sizes[2]),
        (small[0], small[1], small[2]),
        kernel,
        strides,
        pads,
        data_format,
        output_format,
        DTYPES[name_of_dtype],
        bool(count_include_pad),
    )
    if grad_shape is not None:
        if tuple(grad_shape) != found.shape(False):
            raise ValueError(
                f"{operation}: `grad_output` has shape {tuple(grad_shape)}, but the pooling of `input_tensor` {tuple(shape)} has shape "
                f"{found.shape(False)} in {output_format!r}. Pass the gradient of that output, or the `output_format` that it has."
            )
        if str(grad_dtype).rsplit(".", 1)[-1] != name_of_dtype:
            raise ValueError(
                f"{operation}: `grad_output` has dtype {grad_dtype}, but `input_tensor` has {name_of_dtype}. Convert one of them."
            )
    return found


def _triple(operation: str, name: str, value: Any, least: int) -> Triple:
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * 3
    if len(values) != 3:
        raise ValueError(f"{operation}: `{name}` has {len(values)} values, {value!r}. Pass one int, or three (D, H, W).")
    for n in values:
        if isinstance(n, bool) or not hasattr(n, "__index__") or n < least:
            raise ValueError(f"{operation}: `{name}` is {value!r}. Pass ints of at least {least}.")
    return int(values[0]), int(values[1]), int(values[2])


# --- one axis


@dataclass(frozen=True)
class Piece:
    """result[dst + j * dst_step + r] = sum of source[src + j * src_step + t], t < taps, for j < cells and r < repeats."""

    dst: int
    dst_step: int
    cells: int
    repeats: int
    src: int
    src_step: int
    taps: int


@dataclass(frozen=True)
class PoolAxis:
    """One axis of the map, cut into blocks of `tile` cells.

    Attributes:
        source: elements of the source.
        result: elements of the result.
        kernel: of the pooling.
        stride: of the pooling.
        padding: of the pooling.
        backward: the direction.
        tile: cells per block.
    """

    source: int
    result: int
    kernel: int
    stride: int
    padding: int
    backward: bool
    tile: int = 0

    @property
    def up(self) -> int:
        """Elements of the result per cell."""
        return self.stride if self.backward else 1

    @property
    def down(self) -> int:
        """Elements of the source from cell to cell."""
        return 1 if self.backward else self.stride

    def reads(self, i: int) -> tuple[int, int]:
        """[lo, hi) of an element of the result, not clipped; empty if lo >= hi."""
        if self.backward:
            return (i + self.padding - self.kernel) // self.stride + 1, (i + self.padding) // self.stride + 1
        return i * self.stride - self.padding, i * self.stride - self.padding + self.kernel

    @property
    def origin(self) -> int:
        """Where the first cell of the result starts, 0 or a little before."""
        return -(self.padding % self.stride) if self.backward else 0

    @cached_property
    def cells(self) -> int:
        """Cells of the whole result."""
        return -(-(self.result - self.origin) // self.up)

    @cached_property
    def blocks(self) -> int:
        """Blocks of the whole result."""
        return -(-self.cells // self.tile)

    @cached_property
    def whole(self) -> bool:
        """Whether one block is all, so that it is clipped."""
        return self.blocks == 1

    def span(self, block: int) -> tuple[int, int]:
        """The elements [first, end) of the result that a block covers, clipped only if it is the only one."""
        if self.whole:
            return 0, self.result
        first = self.origin + block * self.tile * self.up
        return first, first + self.tile * self.up

    def window(self, block: int) -> tuple[int, int]:
        """The elements of the source that a block may read, clipped only if it is the only one."""
        if self.whole:
            return 0, self.source
        first, _ = self.span(block)
        low, high = 1 << 30, -(1 << 30)
        # the last cell differs from the first by a shift
        shift = (self.tile - 1) * self.down
        for i in range(first, first + self.up):
            lo, hi = self.reads(i)
            if lo < hi:
                low, high = min(low, lo), max(high, hi + shift)
        return low, high

    @cached_property
    def length(self) -> int:
        """Elements of the window."""
        low, high = self.window(0)
        return high - low

    @cached_property
    def size(self) -> int:
        """Elements of the result that a block covers."""
        first, end = self.span(0)
        return end - first

    @cached_property
    def most_taps(self) -> int:
        """The longest sum."""
        return -(-self.kernel // self.stride) if self.backward else self.kernel

    def pieces(self) -> tuple[Piece, ...]:
        """The sums of a block, in coordinates of its span and window: every element of the span is in one piece."""
        return _pieces(self)


@cache
def _pieces(axis: PoolAxis) -> tuple[Piece, ...]:
    first, end = axis.span(0)
    low, high = axis.window(0)
    # per phase of the cells: runs of cells whose sums differ by a shift alone
    runs: list[list[int]] = []  # dst, cells, src, taps
    for phase in range(axis.up):
        start = first + (axis.origin + phase - first) % axis.up
        open_run: list[int] | None = None
        for i in range(start, end, axis.up):
            lo, hi = axis.reads(i)
            lo, hi = max(lo, low), min(hi, high)
            taps = max(0, hi - lo)
            src = lo - low if taps else 0
            if open_run is not None and open_run[3] == taps and (not taps or src == open_run[2] + open_run[1] * axis.down):
                open_run[1] += 1
            else:
                open_run = [i - first, 1, src, taps]
                runs.append(open_run)
    # neighbouring phases with equal sums share one
    runs.sort()
    taken = [False] * len(runs)
    by_start = {run[0]: n for n, run in enumerate(runs)}
    found = []
    for n, (dst, cells, src, taps) in enumerate(runs):
        if taken[n]:
            continue
        repeats = 1
        while repeats < axis.up:
            other = by_start.get(dst + repeats)
            if other is None or taken[other] or runs[other][1] != cells or runs[other][3] != taps or runs[other][2] != src:
                break
            taken[other] = True
            repeats += 1
        found.append(Piece(dst, axis.up, cells, repeats, src, axis.down, taps))
    return tuple(found)


def clipped(low: int, high: int, size: int) -> tuple[int, int]:
    """[low, high) within [0, size); empty as (0, 0)."""
    low, high = max(0, low), min(high, size)
    return (low, high) if low < high else (0, 0)


# --- the plan


@dataclass(frozen=True)
class Transfer:
    """One DMA between HBM and `rows` x `count` lanes that follow each other.

    Attributes:
        lane: the first partition.
        rows: groups of lanes.
        row_stride: from group to group, in elements of HBM.
        count: lanes per group.
        lane_stride: from lane to lane.
        offset: of the first element in HBM.
        box: (first, count) in the tile of channels, depth, height, width.
    """

    lane: int
    rows: int
    row_stride: int
    count: int
    lane_stride: int
    offset: int
    box: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PoolPlan:
    """What the kernel does, in which order.

    Attributes:
        given: the arguments.
        axes: depth, height, width, with their tiles.
        backward: the direction.
        channel_tile: channels per lane; 0 if every lane is one plane.
        step: depth cells that are computed at a time.
        planes_at_once: source planes that are loaded at a time if a window is too large; 0 for all. Then `step` is 1.
        sbuf_bytes: bytes per partition that it needs.
    """

    given: Pooling
    axes: tuple[PoolAxis, PoolAxis, PoolAxis]
    backward: bool
    channel_tile: int
    step: int
    planes_at_once: int
    sbuf_bytes: int

    @property
    def chunks(self) -> int:
        """Tiles of channels."""
        return -(-self.given.channels // self.channel_tile) if self.channel_tile else self.given.channels

    @property
    def planes(self) -> int:
        """Planes, or examples x tiles of channels."""
        return self.given.batch * self.chunks

    @property
    def lanes(self) -> int:
        """Lanes of the whole result."""
        return self.planes * prod(axis.blocks for axis in self.axes)

    @property
    def channels(self) -> int:
        """Channels of a lane."""
        return max(1, self.channel_tile)

    def last(self, source: bool) -> bool:
        """Whether channels come last in the layout of the source (or of the result)."""
        big = source != self.backward
        return (self.given.data_format if big else self.given.output_format) == "NDHWC"

    @property
    def outer(self) -> int:
        """Channels of a lane that lie outside depth in its tiles."""
        return 1 if self.last(True) else self.channels

    @property
    def inner(self) -> int:
        """Channels of a lane that lie inside width in its tiles."""
        return self.channels if self.last(True) else 1

    @property
    def scale_first(self) -> bool:
        """Whether the source is scaled before the sums, not their result: where it is much smaller, or has shares of its own."""
        given = self.given
        return self.backward and (self.copies_only or not given.count_include_pad or prod(given.big) > 2 * prod(given.small))

    @property
    def copies_only(self) -> bool:
        """Whether no sum has two terms: then the result's own type holds every intermediate."""
        return all(axis.most_taps == 1 for axis in self.axes)

    def waves(self) -> Iterator[tuple[int, int]]:
        """Lanes [first, end) that are computed together."""
        count = -(-self.lanes // LANES)
        for wave in range(count):
            yield wave * self.lanes // count, (wave + 1) * self.lanes // count

    def work(self, core: int = 0, cores: int = 1) -> Iterator[tuple[tuple[int, int], list[Piece]]]:
        """Waves and the depth pieces of each that one core computes: tiles do not depend on the number of cores, nor do the sums."""
        pieces = self.depth_pieces()
        jobs = -(-self.lanes // LANES) * len(pieces)
        first, end = core * jobs // cores, (core + 1) * jobs // cores
        for number, wave in enumerate(self.waves()):
            start = number * len(pieces)
            own = pieces[max(0, first - start) : max(0, end - start)]
            if own:
                yield wave, own

    def planes_of(self, pieces: list[Piece]) -> tuple[int, int]:
        """The planes [first, end) of a window that some depth pieces read."""
        reading = [piece for piece in pieces if piece.taps]
        if not reading:
            return 0, 0
        return (
            min(piece.src for piece in reading),
            max(piece.src + (piece.cells - 1) * piece.src_step + piece.taps for piece in reading),
        )

    def _place(self, lane: int) -> tuple[int, int, Triple]:
        """(example, tile of channels, blocks) of a lane; the longest of the four counts runs fastest: its lanes share DMAs."""
        counts = [self.planes, *(axis.blocks for axis in self.axes)]
        index = [0, 0, 0, 0]
        for axis in sorted(range(4), key=lambda n: (-counts[n], n)):
            lane, index[axis] = divmod(lane, counts[axis])
        example, chunk = divmod(index[0], self.chunks)
        return example, chunk, (index[1], index[2], index[3])

    def strides(self, source: bool) -> tuple[int, int, int, int, int]:
        """Strides in HBM of example, channel, depth, height, width."""
        big = source != self.backward
        d, h, w = self.given.big if big else self.given.small
        c = self.given.channels
        if self.last(source):
            return d * h * w * c, 1, h * w * c, w * c, c
        return c * d * h * w, d * h * w, h * w, w, 1

    def _span(self, chunk: int) -> tuple[int, int]:
        """First channel and number of channels of a tile."""
        if not self.channel_tile:
            return chunk, 1
        return chunk * self.channel_tile, min(self.channel_tile, self.given.channels - chunk * self.channel_tile)

    def loads(self, wave: tuple[int, int], planes: tuple[int, int]) -> tuple[list[Transfer], list[tuple[int, int]]]:
        """How planes [first, end) of the windows are filled: the DMAs, and per axis the sizes of the margins to set to zero first."""
        steps = self.strides(True)
        lanes, margins = [], [[0, 0], [0, 0], [0, 0]]
        for lane in range(*wave):
            example, chunk, blocks = self._place(lane)
            channel, count = self._span(chunk)
            offset = example * steps[0] + channel * steps[1]
            box = [(0, count)]
            for n, axis in enumerate(self.axes):
                start, end = axis.window(blocks[n])
                if n == 0:
                    start, end = start + planes[0], start + planes[1]
                low, high = clipped(start, end, axis.source)
                before = low - start if high > low else end - start
                margins[n] = [max(margins[n][0], before), max(margins[n][1], end - high if high > low else 0)]
                box.append((before, high - low))
                offset += low * steps[2 + n]
            lanes.append((offset, tuple(box)))
        return _merged(lanes), [(low, high) for low, high in margins]

    def stores(self, wave: tuple[int, int], piece: Piece) -> list[Transfer]:
        """Where the planes of a depth piece go; repeats are stored again."""
        steps = self.strides(False)
        found = []
        for repeat in range(piece.repeats):
            lanes = []
            for lane in range(*wave):
                example, chunk, blocks = self._place(lane)
                channel, count = self._span(chunk)
                offset = example * steps[0] + channel * steps[1]
                box = [(0, count)]
                depth = self.axes[0]
                plane = depth.span(blocks[0])[0] + piece.dst + repeat
                low = max(0, -(plane // piece.dst_step)) if plane < 0 else 0
                high = min(piece.cells, -(-(depth.result - plane) // piece.dst_step))
                box.append((low, max(0, high - low)))
                offset += (plane + low * piece.dst_step) * steps[2]
                for n in (1, 2):
                    start, end = self.axes[n].span(blocks[n])
                    first, last = clipped(start, end, self.axes[n].result)
                    box.append((first - start, last - first))
                    offset += first * steps[2 + n]
                lanes.append((offset, tuple(box)))
            found += _merged(lanes)
        return found

    def shares(self, wave: tuple[int, int], axis: int) -> list[tuple[int, int, int, int, int, int]]:
        """(lane, rows, row stride, count, lane stride, offset) in the vector of an axis that `divisors` describes, of the windows' shares."""
        lanes = []
        for lane in range(*wave):
            _, _, blocks = self._place(lane)
            found = self.axes[axis]
            start = (found.window if self.backward else found.span)(blocks[axis])[0]
            lanes.append((start - self.divisors(axis)[0], ((0, 1),)))
        return [(t.lane, t.rows, t.row_stride, t.count, t.lane_stride, t.offset) for t in _merged(lanes)]

    def divisors(self, axis: int) -> tuple[int, list[int]]:
        """(window of the first entry, elements that count in each window); windows beyond the output count as full ones."""
        found = self.axes[axis]
        kernel, stride, padding = (x[axis] for x in (self.given.kernel, self.given.stride, self.given.padding))
        last = found.blocks - 1
        low = (found.window if self.backward else found.span)(0)[0]
        high = (found.window if self.backward else found.span)(last)[1]
        counts = []
        for window in range(low, high):
            if 0 <= window < self.given.small[axis]:
                first, end = clipped(window * stride - padding, window * stride - padding + kernel, self.given.big[axis])
                counts.append(end - first)
            else:
                counts.append(kernel)
        return low, counts

    def depth_pieces(self) -> list[Piece]:
        """The depth pieces of a lane in parts of up to `step` cells."""
        found = []
        for piece in self.axes[0].pieces():
            parts = -(-piece.cells // self.step)
            for part in range(parts):
                first, end = part * piece.cells // parts, (part + 1) * piece.cells // parts
                found.append(
                    Piece(
                        piece.dst + first * piece.dst_step,
                        piece.dst_step,
                        end - first,
                        piece.repeats,
                        piece.src + first * piece.src_step if piece.taps else 0,
                        piece.src_step,
                        piece.taps,
                    )
                )
        # in the order in which the source is loaded
        return sorted(found, key=lambda piece: (piece.src, piece.dst))

    @property
    def by_piece(self) -> bool:
        """Whether the depth pieces read disjoint planes, so that each may load its own."""
        end = 0
        for piece in self.depth_pieces():
            if piece.taps:
                if piece.src < end:
                    return False
                end = piece.src + (piece.cells - 1) * piece.src_step + piece.taps
        return True


def _merged(lanes: Sequence[tuple[int, tuple[tuple[int, int], ...]]]) -> list[Transfer]:
    """Lanes (offset, box) as few transfers: grids of neighbours with one box, evenly spaced."""
    runs: list[Transfer] = []
    i = 0
    while i < len(lanes):
        offset, box = lanes[i]
        count, stride = 1, 0
        if i + 1 < len(lanes) and lanes[i + 1][1] == box:
            stride = lanes[i + 1][0] - offset
        while stride >= 0 and i + count < len(lanes) and lanes[i + count] == (offset + count * stride, box):
            count += 1
        runs.append(Transfer(i, 1, 0, count, stride, offset, box))
        i += count
    found: list[Transfer] = []
    for run in runs:
        if found:
            last = found[-1]
            same = (last.count, last.lane_stride, last.box) == (run.count, run.lane_stride, run.box)
            step = run.offset - last.offset
            if same and step >= 0 and (last.rows == 1 or step == last.rows * last.row_stride):
                row_stride = step if last.rows == 1 else last.row_stride
                found[-1] = Transfer(last.lane, last.rows + 1, row_stride, last.count, last.lane_stride, last.offset, last.box)
                continue
        found.append(run)
    return [t for t in found if all(size > 0 for _, size in t.box)]


# --- the choice


def plan_pooling(given: Pooling, backward: bool, budget: int) -> PoolPlan:
    """The plan that is cheapest by a rough estimate.

    Args:
        given: the arguments, checked.
        backward: the direction.
        budget: bytes of SBUF per partition.

    Raises:
        Unsupported: even the smallest tile needs more.
    """
    source, result = (given.small, given.big) if backward else (given.big, given.small)
    axes = [PoolAxis(source[n], result[n], given.kernel[n], given.stride[n], given.padding[n], backward) for n in range(3)]
    by_plane = given.data_format == given.output_format == "NCDHW"
    channel_tiles = [0] if by_plane else _tiles(given.channels)
    cut = [[_with_tile(axis, tile) for tile in _tiles(axis.cells)] for axis in axes]
    best: tuple[float, PoolPlan] | None = None
    # width is cut only if nothing else fits, or reads too much
    for tried, width in enumerate(cut[2]):
        if best is not None and (best[0] < TOO_MANY or tried > 8):
            break
        for channel_tile in channel_tiles:
            for height in cut[1]:
                for depth in cut[0]:
                    found = _fit(given, (depth, height, width), backward, channel_tile, budget)
                    if found is not None and (best is None or found[0] < best[0]):
                        best = found
    if best is not None:
        return best[1]
    smallest = [_with_tile(axis, 1) for axis in axes]
    sizes = [max(axis.length, axis.size) for axis in smallest]
    what = "the elements that one step of `stride` makes" if backward else "one window"
    raise Unsupported(
        f"{what}, {sizes[1]} x {sizes[2]} per plane, do not fit in the {budget} B per partition of SBUF and {STRIDE} elements, "
        "whichever way the volume is tiled"
    )


def _with_tile(axis: PoolAxis, tile: int) -> PoolAxis:
    return PoolAxis(axis.source, axis.result, axis.kernel, axis.stride, axis.padding, axis.backward, tile)


def _tiles(cells: int) -> list[int]:
    """Even tile sizes, largest first."""
    found = []
    for pieces in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 43, 48, 64, 86, 96, 128, 171, 256, 512, cells):
        tile = -(-cells // min(pieces, cells))
        if tile not in found:
            found.append(tile)
    return found


def _fit(
    given: Pooling,
    axes: tuple[PoolAxis, PoolAxis, PoolAxis],
    backward: bool,
    channel_tile: int,
    budget: int,
) -> tuple[float, PoolPlan] | None:
    """(cost, plan) of a tiling, or None if it does not fit."""
    depth, height, width = axes
    channels = max(1, channel_tile)
    size = given.itemsize
    plane_in = height.length * width.length * channels
    middle = height.length * width.size * channels if backward else height.size * width.length * channels
    plane_out = height.size * width.size * channels
    inner_row = (width.size if backward else width.length) * channels
    if max(plane_in, middle, plane_out, inner_row) > STRIDE or max(a.size for a in axes) > COUNT:
        return None
    # strides of the passes over height and width; neighbouring sums are made in pairs
    for axis, inner in ((height, inner_row), (width, channels)):
        if axis.tile > 1 and max(2, axis.up, axis.down) * inner > STRIDE:
            return None
    first_channels = (given.output_format if backward else given.data_format) == "NCDHW"
    if channels > 1 and first_channels and depth.length * plane_in // channels > STRIDE:
        return None
    copies_only = all(axis.most_taps == 1 for axis in axes)
    between = size if copies_only else 4
    # the planes of one cell: two passes at a time, or the last one and the result, besides a result that is being stored
    summed = plane_in * (0 if depth.most_taps == 1 and channels == 1 else 4)
    unit = max(summed + middle * between, (middle + plane_out) * between, plane_out * (between + size)) + plane_out * size
    if any(axis.most_taps > 2 for axis in axes):
        # what GpSimd adds up on the side
        unit += max(plane_in, middle, plane_out) * (4 if backward else 2)
    left = budget - RESERVE
    if not given.count_include_pad:
        left -= 2 * 4 * (plane_in if backward else plane_out) // channels
    small_source = backward and (copies_only or not given.count_include_pad or prod(given.big) > 2 * prod(given.small))
    source = size + (between if small_source else 0)
    chunks = -(-given.channels // channel_tile) if channel_tile else given.channels
    lanes = given.batch * chunks * depth.blocks * height.blocks * width.blocks
    waves = -(-lanes // LANES)
    window = depth.length * plane_in
    buffers = 1 if waves == 1 else 2
    at_once = waiting = 0
    if window > ELEMENTS or buffers * window * source + unit > left:
        # a sum per plane of the result waits for the planes that come
        waiting = 4 * plane_in * (2 + sum(piece.cells for piece in depth.pieces() if piece.taps))
        at_once = min(depth.length, (left - unit - waiting) // (2 * plane_in * source), ELEMENTS // plane_in)
        if at_once < 1:
            return None
        step = 1
    else:
        largest = max(plane_in, middle, plane_out)
        step = max(1, min(depth.tile, (left - buffers * window * source) // unit, STRIDE // largest))
        if max(2, depth.down) * plane_in > STRIDE:
            step = 1
        # enough steps that loading, computing and storing overlap
        if waves < 4:
            step = min(step, max(1, -(-depth.tile // 4)))
    held = 2 * at_once * plane_in * source + waiting if at_once else buffers * window * source
    plan = PoolPlan(given, axes, backward, channel_tile, step, at_once, budget - left + held + step * unit)
    # an estimate in us: sums, copies, bytes and pieces of the DMAs
    groups = _groups(depth)
    planes = depth.tile * len(groups)
    sums = depth.tile * sum(1 for taps in groups if taps > 1) * plane_in * _taps_us(depth)
    sums += planes * (middle * _taps_us(width if backward else height) + plane_out * _taps_us(height if backward else width))
    engines = waves * (sums + 0.2 * planes * plane_out / 1200 + 0.25 * planes / step)
    reads = lanes * window * size
    writes = given.batch * given.channels * prod(axis.result for axis in axes) * size
    read_runs = reads / (size * _run(plan, True))
    write_runs = writes / (size * _run(plan, False))
    dma = max(
        ((reads + writes) / 23 + 16 * (read_runs + write_runs)) / 16000,
        1.3 * waves * (2 + depth.tile * depth.up / step) / 16,
    )
    cost = max(engines, dma) + 0.1 * (engines + dma) + 0.02 * waves
    # bytes are shared with other cores and kernels: do not buy time with many
    ratio = (reads + writes) / (size * (prod(given.shape(True)) + prod(given.shape(False))))
    return cost * (1 + 0.3 * max(0.0, ratio - 1.5)) + (TOO_MANY * ratio if ratio > 2.4 else 0.0), plan


def _groups(axis: PoolAxis) -> list[int]:
    """Terms of the different sums of one cell."""
    if not axis.backward:
        return [axis.kernel]
    most, full = axis.most_taps, axis.kernel % axis.stride == 0
    return [most] if full or most == 1 else [most, most - 1]


def _taps_us(axis: PoolAxis) -> float:
    taps = sum(_groups(axis)) / len(_groups(axis))
    return taps / 1600 if taps > 1 else 1 / 1200


def _run(plan: PoolPlan, source: bool) -> int:
    """Elements of a contiguous piece in HBM."""
    run = 1
    _, height, width = plan.axes
    sizes = [(a.length if source else a.size) for a in (height, width)]
    full = [a.whole for a in (height, width)]
    if plan.last(source):
        if plan.channels < plan.given.channels:
            return plan.channels
        run = plan.channels
    run *= min(sizes[1], width.source if source else width.result)
    return run * sizes[0] if full[1] else run
