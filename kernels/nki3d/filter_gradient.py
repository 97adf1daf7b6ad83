# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The dw and db of conv3d_bwd: they carry out a `planning.filter_gradient.FilterGradientPlan`.

Memory, from slow to fast:

- HBM: dy [B, C_out, D_out, H_out, W_out], x [B, C_in, D, H, W]; dw [taps, C_in, C_out], db [C_out].
- SBUF: rows of x and dy as they are (channels on the partitions), and transposed (columns of the width on the partitions).
- PSUM: the sums of all taps, in float32, from the first position to the last.

Pseudocode:

    for each tile of output and of input channels, for each pass over some taps:
        for each example and load of rows:
            load x and dy, transpose them: x once per tap of the width
            for each output plane and block of rows:
                for each box of neighbours: nc_matmul(psum, transposed x, transposed dy)
        add the block's elements, each shifted by its stride; round once; store dw
"""

from ._nki import nisa, nl

__all__ = ["bias_gradient", "filter_gradient"]


def filter_gradient(dy, x, result, plan, db, channels):
    """Compute dw of some output channels, and db on the way.

    Args:
        dy: [B, C_out, D_out, H_out, W_out] in HBM.
        x: [B, C_in, D, H, W] in HBM.
        result: [taps, C_in, C_out] in HBM.
        plan: the `FilterGradientPlan`.
        db: [C_out] in HBM, or None: the sum of dy, which is here anyway.
        channels: the output channels [first, end): those of this core.
    """
    for column in range(channels[0], channels[1], plan.column_tile):
        columns = min(plan.column_tile, channels[1] - column)
        total = None
        if db != None:  # noqa: E711
            total = nl.zeros((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
        for row in range(0, plan.channels[0], plan.row_tile):
            rows = min(plan.row_tile, plan.channels[0] - row)
            sums = []
            for some in plan.passes:
                # dy is the same for all input channels and passes: it is added up once
                bias = total if row == 0 and some[0] == 0 else None
                sums.extend(_sum_pass(dy, x, row, rows, column, columns, some, plan, bias))
            _store(sums, result, row, rows, column, columns, plan)
        if db != None:  # noqa: E711
            _store_bias(total, db, column, columns)


def _sum_pass(dy, x, row, rows, column, columns, some, plan, bias):
    """The sums of pieces [first, end) over all positions, each [neighbours x rows, block rows x columns] in SBUF, float32."""
    banks = []
    for _ in range(0, some[1] - some[0], plan.per_bank):
        bank = nl.ndarray((128, plan.per_bank, plan.rows * columns), dtype=nl.float32, buffer=nl.psum)
        banks.append(bank)
    started = [False] * (some[1] - some[0])
    for example in range(x.shape[0]):
        for d, h, w in plan.loads():
            turned_x = _load_x(x, example, row, rows, d, h, w, plan)
            turned_dy = _load_dy(dy, example, column, columns, d, h, w, plan, bias)
            lanes = turned_dy.shape[0]
            for plane in range(d[1] - d[0]):
                for block in range(h[1] - h[0]):
                    moving = turned_dy[:, plane, block * plan.rows : (block + 1) * plan.rows, :]
                    for i in range(some[0], some[1]):
                        piece = plan.pieces[i]
                        if not plan.reaches(piece, d[0] + plane, h[0] + block):
                            continue
                        started[i - some[0]] = True
                        z = plane * plan.axes[0].step + plan.unit[0] * piece.first[0]
                        y = block * plan.axes[1].step + plan.unit[1] * piece.first[1]
                        stationary = turned_x[
                            0:lanes,
                            piece.first[2] : piece.first[2] + piece.count[2],
                            z : z + plan.unit[0] * (piece.count[0] - 1) + 1 : plan.unit[0],
                            y : y + plan.unit[1] * (piece.count[1] - 1) + 1 : plan.unit[1],
                            :,
                        ]
                        place = i - some[0]
                        used = piece.count[0] * piece.count[1] * piece.count[2] * rows
                        bank = banks[place // plan.per_bank]
                        nisa.nc_matmul(dst=bank[0:used, place % plan.per_bank, :], stationary=stationary, moving=moving)
    sums = []
    for i in range(some[0], some[1]):
        piece = plan.pieces[i]
        place = i - some[0]
        used = piece.count[0] * piece.count[1] * piece.count[2] * rows
        evicted = nl.ndarray((used, plan.rows * columns), dtype=nl.float32, buffer=nl.sbuf)
        if started[place]:
            bank = banks[place // plan.per_bank]
            nisa.tensor_copy(dst=evicted, src=bank[0:used, place % plan.per_bank, :], engine=nisa.engine.scalar)
        else:
            # taps that meet padding only
            nisa.memset(dst=evicted, value=0.0, engine=nisa.engine.gpsimd)
        sums.append(evicted)
    return sums


# --- loading and transposing


def _load_x(x, example, row, rows, d, h, w, plan):
    """x with columns of the width on the partitions: [groups x width, K_w, planes, rows, C_in], 0 where there is no input."""
    planes, lines = plan.window(d, h)
    turned = nl.ndarray((plan.groups * plan.pitch, plan.taps[2], planes, lines, rows), dtype=x.dtype, buffer=nl.sbuf)
    width = plan.axes[2]
    whole = plan.groups * plan.pitch == plan.groups * (w[1] - w[0])
    for group in range(plan.groups):
        z, y = _clipped(plan, group, d, h)
        whole = whole and z[2] and y[2]
    for tap, offset in width.reads[0]:
        first, end = width.valid_blocks(offset)
        if not whole or first > w[0] or end < w[1]:
            nisa.memset(dst=turned[:, tap], value=0.0, engine=nisa.engine.gpsimd)
    for group in range(plan.groups):
        z, y = _clipped(plan, group, d, h)
        top = (z[3], y[3])
        if z[0] < z[1] and y[0] < y[1]:
            low, high = _columns(width, w)
            if low < high:
                loaded = nl.ndarray((rows, z[1] - z[0], y[1] - y[0], high - low), dtype=x.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=loaded, src=x[example, row : row + rows, z[0] : z[1], y[0] : y[1], low:high])
                phases = _phases(loaded, width.step)
                for tap, offset in width.reads[0]:
                    first, end = width.valid_blocks(offset)
                    first, end = max(first, w[0]), min(end, w[1])
                    if first < end:
                        column = width.step * first + offset - low
                        start = column // width.step
                        for plane in range(z[1] - z[0]):
                            source = phases[column % width.step][:, plane, :, start : start + end - first]
                            lane = group * plan.pitch + first - w[0]
                            place = turned[
                                lane : lane + end - first, tap, z[0] - top[0] + plane, y[0] - top[1] : y[1] - top[1], :
                            ]
                            _transpose(place, source)
    return turned


def _clipped(plan, group, d, h):
    """Planes and rows of x that a group reads: (first, end, whether all exist, the first that is asked for)."""
    origin = plan.origin(group)
    asked = plan.window(d, h)
    result = []
    for axis in range(2):
        top = plan.axes[axis].step * (origin[axis] + (d, h)[axis][0]) + plan.first[axis]
        first, end = max(0, top), min(plan.axes[axis].size, top + asked[axis])
        result.append((first, end, first == top and end == top + asked[axis], top))
    return result


def _phases(loaded, step):
    """The columns of each phase of the stride, side by side: what is transposed must be contiguous, or the DMA moves single elements."""
    if step == 1:
        return [loaded]
    phases = []
    for phase in range(min(step, loaded.shape[3])):
        columns = loaded[:, :, :, phase : loaded.shape[3] : step]
        packed = nl.ndarray(columns.shape, dtype=loaded.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=packed, src=columns, engine=nisa.engine.scalar if phase % 2 == 0 else nisa.engine.vector)
        phases.append(packed)
    return phases


def _columns(width, w):
    """The input columns [low, high) that a tile of output columns reads."""
    low, high = width.size, 0
    for _, offset in width.reads[0]:
        first, end = width.valid_blocks(offset)
        first, end = max(first, w[0]), min(end, w[1])
        if first < end:
            low = min(low, width.step * first + offset)
            high = max(high, width.step * (end - 1) + offset + 1)
    return low, high


def _load_dy(dy, example, column, columns, d, h, w, plan, bias):
    """dy with columns of the width on the partitions: [groups x width, planes, rows, C_out], 0 where there is no output."""
    planes, lines = d[1] - d[0], (h[1] - h[0]) * plan.rows
    lanes = (plan.groups - 1) * plan.pitch + w[1] - w[0]
    if plan.groups * plan.pitch != plan.groups * (w[1] - w[0]):
        lanes = plan.groups * plan.pitch
    turned = nl.ndarray((lanes, planes, lines, columns), dtype=dy.dtype, buffer=nl.sbuf)
    depth, height = plan.axes[0].out, plan.axes[1].out
    whole = lanes == plan.groups * (w[1] - w[0])
    last = plan.origin(plan.groups - 1)
    if not whole or last[0] + d[1] > depth or (last[1] + h[1]) * plan.rows > height:
        nisa.memset(dst=turned, value=0.0, engine=nisa.engine.gpsimd)
    for group in range(plan.groups):
        origin = plan.origin(group)
        z = (origin[0] + d[0], min(depth, origin[0] + d[1], origin[0] + plan.extent[0]))
        y = ((origin[1] + h[0]) * plan.rows, min(height, (origin[1] + h[1]) * plan.rows))
        if z[0] < z[1] and y[0] < y[1]:
            loaded = nl.ndarray((columns, z[1] - z[0], y[1] - y[0], w[1] - w[0]), dtype=dy.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=loaded, src=dy[example, column : column + columns, z[0] : z[1], y[0] : y[1], w[0] : w[1]])
            if bias != None:  # noqa: E711
                _add(bias, loaded)
            for plane in range(z[1] - z[0]):
                lane = group * plan.pitch
                _transpose(turned[lane : lane + w[1] - w[0], plane, 0 : y[1] - y[0], :], loaded[:, plane])
    return turned


def _transpose(place, source):
    """[columns of the width, rows, channels] = [channels, rows, columns of the width]^T."""
    if source.dtype != nl.float32:
        nisa.dma_transpose(dst=place, src=source)
        return
    for line in range(source.shape[1]):
        turned = nl.ndarray((source.shape[2], source.shape[0]), dtype=source.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=source[:, line, :])
        moved = nl.ndarray((source.shape[2], source.shape[0]), dtype=source.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=moved, src=turned)
        # any start partition: a DMA
        nisa.dma_copy(dst=place[:, line, :], src=moved)


# --- the end


def _store(sums, result, row, rows, column, columns, plan):
    """Add the elements of the block, tap by tap, and store [taps x C_in, C_out] rounded once."""
    taps = plan.taps[0] * plan.taps[1] * plan.taps[2]
    per_tile = max(1, 128 // rows)
    for first in range(0, taps, per_tile):
        several = min(per_tile, taps - first)
        parts = []
        for element in range(plan.rows):
            part = nl.ndarray((several * rows, columns), dtype=nl.float32, buffer=nl.sbuf)
            for t in range(several):
                piece, neighbour = _place(first + t, element, plan)
                nisa.dma_copy(
                    dst=part[t * rows : (t + 1) * rows, :],
                    src=sums[piece][neighbour * rows : (neighbour + 1) * rows, element * columns : (element + 1) * columns],
                )
            parts.append(part)
        total = parts[0]
        for element in range(1, plan.rows):
            nisa.tensor_tensor(dst=total, data1=total, data2=parts[element], op=nl.add)
        rounded = nl.ndarray((several * rows, columns), dtype=result.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded, src=total, engine=nisa.engine.scalar)
        for t in range(several):
            nisa.dma_copy(
                dst=result[first + t, row : row + rows, column : column + columns], src=rounded[t * rows : (t + 1) * rows, :]
            )


def _place(tap, element, plan):
    """The piece and the neighbour in it that hold a tap of an element."""
    k_d = tap // (plan.taps[1] * plan.taps[2])
    k_h = tap // plan.taps[2] % plan.taps[1]
    k_w = tap % plan.taps[2]
    position = (plan.lattice_of(0, k_d, 0), plan.lattice_of(1, k_h, element), k_w)
    found = (0, 0)
    for i in range(len(plan.pieces)):
        piece = plan.pieces[i]
        inside = True
        for axis in range(3):
            inside = inside and piece.first[axis] <= position[axis] and position[axis] < piece.first[axis] + piece.count[axis]
        if inside:
            q_d, q_h, q_w = position[0] - piece.first[0], position[1] - piece.first[1], position[2] - piece.first[2]
            found = (i, (q_w * piece.count[0] + q_d) * piece.count[1] + q_h)
    return found


def bias_gradient(dy, result, budget, channels):
    """db [C_out] = the sum of dy over examples and positions, in float32, rounded once; of the output channels [first, end)."""
    planes, lines, width = dy.shape[2], dy.shape[3], dy.shape[4]
    itemsize = 4 if dy.dtype == nl.float32 else 2
    several = max(1, min(lines, min(65536, budget // (4 * itemsize)) // width))
    for column in range(channels[0], channels[1], 128):
        columns = min(128, channels[1] - column)
        total = nl.zeros((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
        for example in range(dy.shape[0]):
            deep = max(1, min(planes, min(65536, budget // (4 * itemsize)) // (several * width)))
            for plane in range(0, planes, deep):
                end = min(planes, plane + deep)
                for line in range(0, lines, several):
                    stop = min(lines, line + several)
                    part = nl.ndarray((columns, end - plane, stop - line, width), dtype=dy.dtype, buffer=nl.sbuf)
                    nisa.dma_copy(dst=part, src=dy[example, column : column + columns, plane:end, line:stop, :])
                    _add(total, part)
        _store_bias(total, result, column, columns)


def _add(total, part):
    """Add all elements of each partition to `total`, in float32."""
    partial = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=partial, op=nl.add, data=part, axis=(1, 2, 3))
    nisa.tensor_tensor(dst=total, data1=total, data2=partial, op=nl.add)


def _store_bias(total, result, column, columns):
    rounded = nl.ndarray((columns, 1), dtype=result.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=total)
    nisa.dma_copy(dst=result[column : column + columns].expand_dim(1), src=rounded)
