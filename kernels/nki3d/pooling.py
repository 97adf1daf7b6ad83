# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The body that avg_pooling_3d and avg_pooling_3d_backward share: it carries out a `planning.pooling.PoolPlan`.

Memory, from slow to fast:

- HBM: the source and the result, each read or written once (windows of neighbouring tiles overlap by a few planes or rows), and, if padding
  does not count, three vectors of reciprocals.
- SBUF: the window of each lane (partition) for a wave of up to 128 lanes; sums of a few planes in float32; the result of these planes.
- PSUM: one operand of an addition, where the Vector engine then reads it twice as fast.

All sums run in float32 and are rounded once, when the result is written; where no two terms meet (a backward pass with stride >= kernel) the
source is scaled and rounded once and the rest are copies. Zeros are written where a window leaves the volume; nothing is multiplied by them.

Pseudocode:

    for each wave of lanes:
        load the windows, planes of all lanes at a time
        backward: scale them
        for each piece of the depth axis, a few planes:
            sum over depth; sum over height, over width (backward: width, height)
            forward: scale, round
            store the planes; a plane that repeats is stored again
"""

from ._nki import nisa, nl

__all__ = ["pool"]

# per instruction and partition
ELEMENTS = 65536
PSUM_ELEMENTS = 2048
STRIDE = 32767
# sums of up to so many terms are shared with GpSimd, which adds two at a time
ADDED = 6


class Block(nl.NKIObject):
    """Elements [outer, size, inner] of each partition, contiguous in a tile [P, elements] from `offset` on."""

    def __init__(self, tile, offset, outer, size, inner):
        self.tile = tile
        self.offset = offset
        self.outer = outer
        self.size = size
        self.inner = inner

    def view(self, start, step, count, outer, inner, taps=1):
        """[P, outer, count, inner(, taps)] for a part (first, count) of the outer and of the inner dimension."""
        pattern = [
            [self.tile.shape[1], self.tile.shape[0]],
            [self.size * self.inner, outer[1]],
            [step * self.inner, count],
            [1, inner[1]],
        ]
        if taps > 1:
            pattern.append([self.inner, taps])
        first = self.offset + (outer[0] * self.size + start) * self.inner + inner[0]
        return self.tile.ap(pattern, offset=first)

    def regrouped(self, outer, size, inner):
        """The same elements in other groups."""
        return Block(self.tile, self.offset, outer, size, inner)


class Load(nl.NKIObject):
    """Microseconds that each engine has been given, by the simulator's rules: work goes where it ends first."""

    def __init__(self):
        self.vector = 0.0
        self.gpsimd = 0.0
        self.scalar = 0.0


def pool(source, result, plan, lnc_shard):
    """Compute every element of `result`.

    Args:
        source: the pooling's input (backward: the gradient of its output) in HBM.
        result: its output (backward: the gradient of its input) in HBM.
        plan: the `PoolPlan`.
        lnc_shard: whether the cores share the lanes.
    """
    cores, core = 1, 0
    if lnc_shard:
        cores, core = nl.num_programs(0), nl.program_id(0)
    load = Load()
    given = plan.given
    reciprocals = None
    if not given.count_include_pad:
        reciprocals = []
        for axis in range(3):
            reciprocals.append(_reciprocals(plan, axis))
    for wave, pieces in plan.work(core, cores):
        _wave(source, result, plan, wave, pieces, reciprocals, load)


def _wave(source, result, plan, wave, pieces, reciprocals, load):
    _, height, width = plan.axes
    outer, inner = plan.outer, plan.inner
    lanes = wave[1] - wave[0]
    scale = 1.0 / (plan.given.kernel[0] * plan.given.kernel[1] * plan.given.kernel[2])
    shares = None
    if reciprocals != None:  # noqa: E711
        shares = _shares(plan, wave, lanes, reciprocals, load)
    window = None
    by_piece = plan.by_piece
    first, end = plan.planes_of(pieces)
    if plan.planes_at_once == 0 and not by_piece and first < end:
        window = _window(source, plan, wave, lanes, first, end, scale, shares, load)
    totals: list = []
    if plan.planes_at_once > 0:
        totals = _streamed(source, plan, wave, lanes, pieces, scale, shares, load)
    zeros = None
    for n in range(len(pieces)):
        piece = pieces[n]
        if piece.taps == 0:
            # planes that no window reaches
            if zeros == None:  # noqa: E711
                zeros = _new(lanes, outer * plan.step * height.size * width.size * inner, result.dtype)
                _zero(zeros, load)
            done = Block(zeros, 0, outer, piece.cells, height.size * width.size * inner)
        else:
            if plan.planes_at_once > 0:
                planes = totals[n]
                totals[n] = None
            elif by_piece:
                first, end = plan.planes_of([piece])
                window = _window(source, plan, wave, lanes, first, end, scale, shares, load)
                planes = _depth(window, piece, 0, lanes, load)
            else:
                planes = _depth(window, piece, piece.src - first, lanes, load)
            done = _plane_sums(planes, plan, piece.cells, lanes, result.dtype, scale, shares, piece, load)
        _store(result, plan, wave, piece, done)


def _new(lanes, elements, dtype):
    return nl.ndarray((lanes, elements), dtype=dtype, buffer=nl.sbuf)


# --- HBM: transfers


def _pattern(transfer, strides, depth_stride):
    """A transfer's elements in HBM: groups of lanes, lanes, channels, depth, height, width."""
    box = transfer.box
    return [
        [transfer.row_stride, transfer.rows],
        [transfer.lane_stride, transfer.count],
        [strides[1], box[0][1]],
        [depth_stride, box[1][1]],
        [strides[3], box[2][1]],
        [strides[4], box[3][1]],
    ]


def _window(source, plan, wave, lanes, first, end, scale, shares, load):
    """Planes [first, end) of the lanes' windows, zero outside the volume; backward, scaled. [P, outer, planes, height * width * inner]."""
    _, height, width = plan.axes
    outer, inner = plan.outer, plan.inner
    depth = end - first
    row = width.length * inner
    tile = _new(lanes, outer * depth * height.length * row, source.dtype)
    transfers, margins = plan.loads(wave, (first, end))
    # margins: planes, rows, columns
    groups = [
        Block(tile, 0, outer, depth, height.length * row),
        Block(tile, 0, outer * depth, height.length, row),
        Block(tile, 0, outer * depth * height.length, width.length, inner),
    ]
    for axis in range(3):
        group = groups[axis]
        low, high = margins[axis]
        if low + high >= group.size:
            low, high = group.size, 0
        if low > 0:
            _zero(group.view(0, 1, low, (0, group.outer), (0, group.inner)), load)
        if high > 0:
            _zero(group.view(group.size - high, 1, high, (0, group.outer), (0, group.inner)), load)
    strides = plan.strides(True)
    for transfer in transfers:
        channels, planes, rows, columns = transfer.box
        there = source.ap(_pattern(transfer, strides, strides[2]), offset=transfer.offset)
        lanes_in = transfer.rows * transfer.count
        part = tile[transfer.lane : transfer.lane + lanes_in]
        if inner == 1:
            here = part.reshape((lanes_in, outer, depth, height.length, width.length))
            here = here[
                :,
                0 : channels[1],
                planes[0] : planes[0] + planes[1],
                rows[0] : rows[0] + rows[1],
                columns[0] : columns[0] + columns[1],
            ]
        else:
            here = part.reshape((lanes_in, depth, height.length, width.length, inner))
            here = here[
                :,
                planes[0] : planes[0] + planes[1],
                rows[0] : rows[0] + rows[1],
                columns[0] : columns[0] + columns[1],
                0 : channels[1],
            ]
            there = there.permute((0, 1, 3, 4, 5, 2))
        nisa.dma_copy(dst=here, src=there)
    window = Block(tile, 0, outer, depth, height.length * row)
    if not plan.scale_first:
        return window
    dtype = source.dtype if plan.copies_only else nl.float32
    scaled = Block(_new(lanes, outer * depth * height.length * row, dtype), 0, outer, depth, height.length * row)
    if shares == None:  # noqa: E711
        _scaled_copy(scaled.tile, window.tile, scale, load)
    else:
        _shared(scaled.tile, window.tile, shares, first, depth, outer, height.length * width.length, inner, load)
    return scaled


def _store(result, plan, wave, piece, done):
    """Store the planes of a depth piece, [P, outer, cells, height * width * inner] in the layout of the result."""
    _, height, width = plan.axes
    strides = plan.strides(False)
    for transfer in plan.stores(wave, piece):
        channels, planes, rows, columns = transfer.box
        there = result.ap(_pattern(transfer, strides, strides[2] * piece.dst_step), offset=transfer.offset)
        lanes_in = transfer.rows * transfer.count
        part = done.tile[transfer.lane : transfer.lane + lanes_in, 0 : plan.channels * piece.cells * height.size * width.size]
        if plan.last(False):
            here = part.reshape((lanes_in, piece.cells, height.size, width.size, plan.channels))
            here = here[
                :,
                planes[0] : planes[0] + planes[1],
                rows[0] : rows[0] + rows[1],
                columns[0] : columns[0] + columns[1],
                0 : channels[1],
            ]
            there = there.permute((0, 1, 3, 4, 5, 2))
        else:
            here = part.reshape((lanes_in, plan.channels, piece.cells, height.size, width.size))
            here = here[
                :,
                0 : channels[1],
                planes[0] : planes[0] + planes[1],
                rows[0] : rows[0] + rows[1],
                columns[0] : columns[0] + columns[1],
            ]
        nisa.dma_copy(dst=there, src=here)


# --- SBUF: the three passes


def _depth(window, piece, src, lanes, load):
    """The sums of a depth piece, [P, outer, cells, plane], of planes from `src` on; a view of the window if each has one term."""
    if piece.taps == 1 and piece.src_step == 1 and window.outer == 1:
        return Block(window.tile, window.offset + src * window.inner, 1, piece.cells, window.inner)
    dtype = nl.float32 if piece.taps > 1 else window.tile.dtype
    planes = Block(_new(lanes, window.outer * piece.cells * window.inner, dtype), 0, window.outer, piece.cells, window.inner)
    _sums(planes, 0, 1, window, src, piece.src_step, piece.cells, piece.taps, load)
    return planes


def _streamed(source, plan, wave, lanes, pieces, scale, shares, load):
    """The sums of depth pieces of one cell each, whose window is loaded some planes at a time."""
    totals: list = [None] * len(pieces)
    first, end = plan.planes_of(pieces)
    for start in range(first, end, plan.planes_at_once):
        stop = min(start + plan.planes_at_once, end)
        window = _window(source, plan, wave, lanes, start, stop, scale, shares, load)
        outer, inner = window.outer, window.inner
        for n in range(len(pieces)):
            low = max(pieces[n].src, start)
            count = min(pieces[n].src + pieces[n].taps, stop) - low
            if count > 0:
                part = window.view(low - start, 1, 1, (0, outer), (0, inner))
                if count > 1 or totals[n] == None:  # noqa: E711
                    summed = Block(_new(lanes, outer * inner, nl.float32), 0, outer, 1, inner)
                    _sums(summed, 0, 1, window, low - start, 1, 1, count, load)
                    part = summed.view(0, 1, 1, (0, outer), (0, inner))
                if totals[n] == None:  # noqa: E711
                    totals[n] = summed
                else:
                    added = Block(_new(lanes, outer * inner, nl.float32), 0, outer, 1, inner)
                    total = totals[n].view(0, 1, 1, (0, outer), (0, inner))
                    _add(added.view(0, 1, 1, (0, outer), (0, inner)), total, part, load)
                    totals[n] = added
    return totals


def _plane_sums(planes, plan, cells, lanes, dtype, scale, shares, piece, load):
    """Height and width of some planes, to the result's type and layout."""
    _, height, width = plan.axes
    outer, inner = plan.outer, plan.inner
    count = outer * cells
    same_layout = plan.last(True) == plan.last(False) or plan.channels == 1
    between = dtype if plan.copies_only else nl.float32
    order = (1, 2)
    if plan.backward:
        # the wide copies come last, in rows
        order = (2, 1)
    remaining = []
    for n in order:
        if not _is_identity(plan.axes[n]):
            remaining.append(n)
    sizes = [0, height.length, width.length]
    current = planes
    finished = False
    for i in range(len(remaining)):
        n = remaining[i]
        axis = plan.axes[n]
        # backward, the last sum is the result
        finished = plan.scale_first and same_layout and i == len(remaining) - 1
        if n == 1:
            grouped = current.regrouped(count, sizes[1], sizes[2] * inner)
        else:
            grouped = current.regrouped(count * sizes[1], sizes[2], inner)
        target = Block(
            _new(lanes, grouped.outer * axis.size * grouped.inner, dtype if finished else between),
            0,
            grouped.outer,
            axis.size,
            grouped.inner,
        )
        _axis(target, grouped, axis, load)
        sizes[n] = axis.size
        current = target
    whole = height.size * width.size
    if finished:
        return current
    done = Block(_new(lanes, count * whole * inner, dtype), 0, outer, cells, whole * inner)
    flat = current.regrouped(outer, cells, whole * inner)
    if not same_layout:
        # [outer, cells, plane] and [cells, plane, inner] are exchanged
        data = flat.view(0, 1, cells, (0, outer), (0, whole * inner))
        if plan.last(True):
            here = done.tile.reshape((lanes, inner, cells, whole)).permute((0, 2, 3, 1))
            data = data.reshape((lanes, cells, whole, inner))
        else:
            here = done.tile.reshape((lanes, cells, whole, outer)).permute((0, 3, 1, 2))
    else:
        here = done.view(0, 1, cells, (0, outer), (0, whole * inner))
        data = flat.view(0, 1, cells, (0, outer), (0, whole * inner))
    if plan.scale_first:
        _copy(here, data, load)
    elif shares == None:  # noqa: E711
        _scaled_copy(here, data, scale, load)
    else:
        shared = flat
        if not same_layout:
            shared = Block(_new(lanes, count * whole * inner, nl.float32), 0, outer, cells, whole * inner)
        else:
            shared = done
        _shared(
            shared.view(0, 1, cells, (0, outer), (0, whole * inner)),
            data.reshape((lanes, outer, cells, whole * inner)),
            shares,
            piece.dst,
            cells,
            outer,
            whole,
            inner,
            load,
        )
        if not same_layout:
            moved = shared.view(0, 1, cells, (0, outer), (0, whole * inner))
            if plan.last(True):
                moved = moved.reshape((lanes, cells, whole, inner))
            _copy(here, moved, load)
    return done


def _is_identity(axis):
    pieces = axis.pieces()
    return len(pieces) == 1 and pieces[0].taps == 1 and pieces[0].repeats == 1 and axis.size == axis.length


def _axis(target, source, axis, load):
    """All pieces of height or width: [P, outer, size, inner] from [P, outer, length, inner]."""
    all_of = (0, target.outer)
    columns = (0, target.inner)
    for piece in axis.pieces():
        if piece.taps == 0:
            for r in range(piece.repeats):
                _zero(target.view(piece.dst + r, piece.dst_step, piece.cells, all_of, columns), load)
        elif piece.taps == 1:
            _repeat(target, piece, source, piece.src, piece.src_step, 0, load)
        else:
            _sums(target, piece.dst, piece.dst_step, source, piece.src, piece.src_step, piece.cells, piece.taps, load)
            if piece.repeats > 1:
                _repeat(target, piece, target, piece.dst, piece.dst_step, 1, load)


def _repeat(target, piece, source, start, step, first, load):
    """Copy source cells to repeats [first, ...) of the cells of a piece."""
    parts = _parts(target.outer, target.inner * piece.cells * (piece.repeats - first), 1)
    for outer in parts:
        count = piece.repeats - first
        if target.size * target.inner > STRIDE or source.size * source.inner > STRIDE:
            count = 1
        if count == 1:
            for r in range(first, piece.repeats):
                _copy(
                    target.view(piece.dst + r, piece.dst_step, piece.cells, outer, (0, target.inner)),
                    source.view(start, step, piece.cells, outer, (0, source.inner)),
                    load,
                )
        else:
            begin = target.offset + (outer[0] * target.size + piece.dst + first) * target.inner
            there = target.tile.ap(
                [
                    [target.tile.shape[1], target.tile.shape[0]],
                    [target.size * target.inner, outer[1]],
                    [piece.dst_step * target.inner, piece.cells],
                    [target.inner, count],
                    [1, target.inner],
                ],
                offset=begin,
            )
            begin = source.offset + (outer[0] * source.size + start) * source.inner
            here = source.tile.ap(
                [
                    [source.tile.shape[1], source.tile.shape[0]],
                    [source.size * source.inner, outer[1]],
                    [step * source.inner, piece.cells],
                    [0, count],
                    [1, source.inner],
                ],
                offset=begin,
            )
            _copy(there, here, load)


def _parts(outer, per_outer, taps):
    """The outer dimension in runs (first, count) that one instruction can take."""
    most = max(1, ELEMENTS // (per_outer * taps))
    parts = []
    for first in range(0, outer, most):
        parts.append((first, min(most, outer - first)))
    return parts


# --- sums, on Vector and GpSimd


def _sums(target, dst, dst_step, source, src, src_step, cells, taps, load):
    """target[dst + j * dst_step] = sum of source[src + j * src_step + t], t < taps >= 1, for j < cells and all of outer and inner."""
    if taps == 1:
        _copy(
            target.view(dst, dst_step, cells, (0, target.outer), (0, target.inner)),
            source.view(src, src_step, cells, (0, source.outer), (0, source.inner)),
            load,
        )
        return
    total = target.outer * cells * target.inner
    vector, gpsimd = _prices(src_step, cells, taps)
    # what GpSimd takes so that both end together
    share = 0.0
    if gpsimd > 0.0 and total >= 512:
        ahead = load.vector + vector * total - load.gpsimd
        share = min(1.0, max(0.0, ahead / ((vector + gpsimd) * total)))
    box = [(0, target.outer), (0, cells), (0, target.inner)]
    cut = 0
    if target.outer == 1:
        cut = 1 if cells > 3 else 2
    taken = int(box[cut][1] * share + 0.5)
    if cut == 1 and taken < box[cut][1]:
        # pairs stay together
        taken = taken - taken % 2
    if taken > 0:
        part = [box[0], box[1], box[2]]
        part[cut] = (0, taken)
        _gpsimd_sums(target, dst, dst_step, source, src, src_step, part, taps, load)
    if taken < box[cut][1]:
        part = [box[0], box[1], box[2]]
        part[cut] = (taken, box[cut][1] - taken)
        _vector_sums(target, dst, dst_step, source, src, src_step, part, taps, load)


def _prices(src_step, cells, taps):
    """Microseconds per sum on Vector and on GpSimd; 0.0 on an engine that does not take it."""
    pairs = src_step == 1 and taps > 2 and cells > 1
    vector, added = taps * 1.0, 2.0 * (taps - 1)
    if pairs:
        vector, added = min(vector, (taps - 1) / 2.0 + 1.0), (taps - 2) + 2.0
    elif taps == 2:
        # Scalar moves one term to PSUM where it has the time
        vector = 1.5
    return vector / 960.0, added / 1200.0 if taps <= ADDED else 0.0


def _gpsimd_sums(target, dst, dst_step, source, src, src_step, box, taps, load):
    """Additions on GpSimd, intermediate sums in float32."""
    outer, cell, inner = box
    lanes = target.tile.shape[0]
    if src_step == 1 and taps > 2 and cell[1] > 1:
        pairs = cell[1] // 2
        shared = Block(_new(lanes, outer[1] * pairs * inner[1], nl.float32), 0, outer[1], pairs, inner[1])
        into = shared.view(0, 1, pairs, (0, outer[1]), (0, inner[1]))
        _chain(into, source, src + cell[0] + 1, 2, pairs, outer, inner, taps - 1, load)
        for side in range(2):
            there = target.view(dst + (cell[0] + side) * dst_step, 2 * dst_step, pairs, outer, inner)
            here = source.view(src + cell[0] + side * taps, 2, pairs, outer, inner)
            _gpsimd_add(there, here, into, load)
        if cell[1] % 2:
            last = cell[0] + cell[1] - 1
            there = target.view(dst + last * dst_step, 1, 1, outer, inner)
            _chain(there, source, src + last, 1, 1, outer, inner, taps, load)
        return
    there = target.view(dst + cell[0] * dst_step, dst_step, cell[1], outer, inner)
    _chain(there, source, src + cell[0] * src_step, src_step, cell[1], outer, inner, taps, load)


def _chain(into, source, start, step, cells, outer, inner, taps, load):
    """into = the sum of `taps` shifted views, one after the other."""
    total = source.view(start, step, cells, outer, inner)
    for t in range(1, taps):
        there = into
        if t < taps - 1 and into.dtype != nl.float32:
            there = nl.ndarray(into.shape, dtype=nl.float32, buffer=nl.sbuf)
        _gpsimd_add(there, total, source.view(start + t, step, cells, outer, inner), load)
        total = there


def _gpsimd_add(dst, data1, data2, load):
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.add, engine=nisa.engine.gpsimd)
    load.gpsimd += max(64.0, 2.0 * _free(dst)) / 1200.0


def _vector_sums(target, dst, dst_step, source, src, src_step, box, taps, load):
    """The same on Vector: long sums by tensor_reduce, short ones with one operand in PSUM."""
    outer, cell, inner = box
    pairs = cell[1] // 2
    if src_step == 1 and taps > 2 and pairs > 0:
        for part in _psum_parts(outer, (0, pairs), inner, taps):
            o, p, i = part
            shared = nl.ndarray((target.tile.shape[0], o[1], p[1], i[1]), dtype=nl.float32, buffer=nl.psum)
            first = src + cell[0] + 2 * p[0]
            _psum_sum(shared, source, first + 1, 2, p[1], o, i, taps - 1, load)
            for side in range(2):
                there = target.view(dst + (cell[0] + 2 * p[0] + side) * dst_step, 2 * dst_step, p[1], o, i)
                _vector_add(there, shared, source.view(first + side * taps, 2, p[1], o, i), load)
        if cell[1] % 2:
            last = cell[0] + cell[1] - 1
            _reduce(target, dst + last * dst_step, 1, source, src + last, 1, 1, outer, inner, taps, load)
        return
    start, into = src + cell[0] * src_step, dst + cell[0] * dst_step
    size = outer[1] * cell[1] * inner[1]
    moved = load.scalar + size / 1200.0 <= load.vector + (taps - 1) * size / 960.0
    if taps <= 4 and size >= 256 and moved:
        for part in _psum_parts(outer, cell, inner, taps):
            o, c, i = part
            first = src + c[0] * src_step
            there = target.view(dst + c[0] * dst_step, dst_step, c[1], o, i)
            _psum_chain(there, source, first, src_step, c[1], o, i, taps, load)
        return
    _reduce(target, into, dst_step, source, start, src_step, cell[1], outer, inner, taps, load)


def _psum_parts(outer, cells, inner, taps):
    """Parts of [outer, cells, inner] that PSUM and one instruction can take."""
    parts = []
    most = max(1, min(PSUM_ELEMENTS, ELEMENTS // taps))
    most_inner = min(inner[1], most)
    most_cells = min(cells[1], max(1, most // most_inner))
    most_outer = min(outer[1], max(1, most // (most_inner * most_cells)))
    for o in range(0, outer[1], most_outer):
        for c in range(0, cells[1], most_cells):
            for i in range(0, inner[1], most_inner):
                parts.append(
                    (
                        (outer[0] + o, min(most_outer, outer[1] - o)),
                        (cells[0] + c, min(most_cells, cells[1] - c)),
                        (inner[0] + i, min(most_inner, inner[1] - i)),
                    )
                )
    return parts


def _psum_sum(into, source, start, step, cells, outer, inner, taps, load):
    """into (PSUM) = the sum of `taps` terms, of which Scalar moves one there if it has the time."""
    size = outer[1] * cells * inner[1]
    if taps <= 4 and load.scalar + size / 1200.0 <= load.vector + (taps - 1) * size / 960.0:
        _psum_chain(into, source, start, step, cells, outer, inner, taps, load)
    else:
        _reduce_into(into, source, start, step, cells, outer, inner, taps, load)


def _psum_chain(into, source, start, step, cells, outer, inner, taps, load):
    """into = the sum of `taps` shifted views: the first moves to PSUM by Scalar, the others are added to what lies there."""
    total = nl.ndarray((source.tile.shape[0], outer[1], cells, inner[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.activation(dst=total, op=nl.copy, data=source.view(start, step, cells, outer, inner))
    load.scalar += max(64.0, _free(total)) / 1200.0
    for t in range(1, taps):
        there = into if t == taps - 1 else total
        _vector_add(there, total, source.view(start + t, step, cells, outer, inner), load)


def _vector_add(dst, data1, data2, load):
    """One of the two in PSUM."""
    nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.add, engine=nisa.engine.vector)
    load.vector += max(64.0, _free(dst)) / 960.0


def _reduce(target, dst, dst_step, source, src, src_step, cells, outer, inner, taps, load):
    """tensor_reduce in parts that one instruction can take."""
    most_outer, most_cells = outer[1], cells
    if source.size * source.inner > STRIDE or target.size * target.inner > STRIDE:
        most_outer = 1
    if src_step * source.inner > STRIDE or dst_step * target.inner > STRIDE:
        most_cells = 1
    most_inner = max(1, min(inner[1], ELEMENTS // taps))
    most_cells = max(1, min(most_cells, ELEMENTS // (taps * most_inner)))
    most_outer = max(1, min(most_outer, ELEMENTS // (taps * most_inner * most_cells)))
    for o in range(0, outer[1], most_outer):
        for c in range(0, cells, most_cells):
            for i in range(0, inner[1], most_inner):
                o_part = (outer[0] + o, min(most_outer, outer[1] - o))
                i_part = (inner[0] + i, min(most_inner, inner[1] - i))
                count = min(most_cells, cells - c)
                there = target.view(dst + c * dst_step, dst_step, count, o_part, i_part)
                _reduce_into(there, source, src + c * src_step, src_step, count, o_part, i_part, taps, load)


def _reduce_into(into, source, start, step, cells, outer, inner, taps, load):
    nisa.tensor_reduce(dst=into, op=nl.add, data=source.view(start, step, cells, outer, inner, taps), axis=4)
    load.vector += max(64.0, 1.0 * taps * cells * outer[1] * inner[1]) / 960.0


def _add(dst, data1, data2, load):
    """Both in SBUF, on the engine that ends first."""
    size = _free(dst)
    if load.gpsimd + 2 * size / 1200.0 < load.vector + 2 * size / 960.0:
        _gpsimd_add(dst, data1, data2, load)
    else:
        nisa.tensor_tensor(dst=dst, data1=data1, data2=data2, op=nl.add, engine=nisa.engine.vector)
        load.vector += max(64.0, 2.0 * size) / 960.0


# --- copies, on all three


def _free(view):
    size = 1
    for n in view.shape[1:]:
        size = size * n
    return size


def _copy(dst, src, load):
    """dst = src, rounded if the types differ, on the engine that ends first."""
    size = _free(dst)
    factor = 1.0
    if dst.dtype != nl.float32 and src.dtype != nl.float32:
        factor = 0.25
        if dst.strides[-1] != 1 or src.strides[-1] != 1:
            factor = 0.5
    vector = load.vector + max(64.0, size * factor) / 960.0
    scalar = load.scalar + max(64.0, size) / 1200.0
    gpsimd = load.gpsimd + max(64.0, size) / 1200.0
    if scalar <= vector and scalar <= gpsimd:
        nisa.activation(dst=dst, op=nl.copy, data=src)
        load.scalar = scalar
    elif vector <= gpsimd:
        nisa.tensor_copy(dst=dst, src=src, engine=nisa.engine.vector)
        load.vector = vector
    else:
        nisa.tensor_copy(dst=dst, src=src, engine=nisa.engine.gpsimd)
        load.gpsimd = gpsimd


def _scaled_copy(dst, src, scale, load):
    """dst = src * scale on Scalar, or on Vector if that ends sooner."""
    size = _free(dst)
    factor = 1.0
    if dst.dtype != nl.float32 and src.dtype != nl.float32:
        factor = 0.5
    scalar = load.scalar + max(64.0, size) / 1200.0
    vector = load.vector + max(64.0, size * factor) / 960.0
    if scalar <= vector:
        nisa.activation(dst=dst, op=nl.copy, data=src, scale=scale)
        load.scalar = scalar
    else:
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=scale, engine=nisa.engine.vector)
        load.vector = vector


def _zero(view, load):
    """On GpSimd, or on Vector if that ends sooner."""
    size = max(64.0, 1.0 * _free(view))
    if load.gpsimd + size / 1200.0 <= load.vector + size / 960.0:
        nisa.memset(dst=view, value=0.0, engine=nisa.engine.gpsimd)
        load.gpsimd += size / 1200.0
    else:
        nisa.memset(dst=view, value=0.0, engine=nisa.engine.vector)
        load.vector += size / 960.0


# --- padding that does not count


def _reciprocals(plan, axis):
    """In HBM, for each window of an axis: 1 / the elements that count."""
    _, counts = plan.divisors(axis)
    tile = _new(1, len(counts), nl.float32)
    first = 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or counts[i] != counts[first]:
            nisa.memset(dst=tile[:, first:i], value=1.0 / counts[first], engine=nisa.engine.gpsimd)
            first = i
    vector = nl.ndarray((len(counts),), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=vector, src=tile)
    return vector


def _shares(plan, wave, lanes, reciprocals, load):
    """The shares of a wave: per lane those of its depth, and those of height times width."""
    found = []
    for axis in range(3):
        length = plan.axes[axis].length if plan.backward else plan.axes[axis].size
        tile = _new(lanes, length, nl.float32)
        for lane, rows, row_stride, count, stride, offset in plan.shares(wave, axis):
            nisa.dma_copy(
                dst=tile[lane : lane + rows * count],
                src=reciprocals[axis].ap([[row_stride, rows], [stride, count], [1, length]], offset=offset),
            )
        found.append(tile)
    rows, columns = found[1].shape[1], found[2].shape[1]
    plane = _new(lanes, rows * columns, nl.float32)
    nisa.tensor_tensor(
        dst=plane.reshape((lanes, rows, columns)),
        data1=found[1].expand_dim(2).broadcast(2, columns),
        data2=found[2].expand_dim(1).broadcast(1, rows),
        op=nl.multiply,
    )
    load.vector += max(64.0, 2.0 * rows * columns) / 960.0
    return found[0], plane


def _shared(dst, src, shares, first, planes, outer, plane, inner, load):
    """dst = src times the shares of planes [first, first + planes); both [P, outer, planes, plane * inner]."""
    lanes = shares[1].shape[0]
    to, data = dst.reshape((lanes, outer, planes, plane, inner)), src.reshape((lanes, outer, planes, plane, inner))
    share = shares[1].reshape((lanes, 1, plane, 1)).broadcast(1, outer).broadcast(3, inner)
    for d in range(planes):
        nisa.scalar_tensor_tensor(
            dst=to[:, :, d],
            data=data[:, :, d],
            op0=nl.multiply,
            operand0=shares[0][:, first + d : first + d + 1],
            op1=nl.multiply,
            operand1=share,
        )
        load.vector += max(64.0, 2.0 * outer * plane * inner) / 960.0
