# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The body that conv3d, conv3d_transpose and the dx of conv3d_bwd share: it carries out a `planning.gather.GatherPlan`.

Memory, from slow to fast:

- HBM: x [B, C_in, D, H, W], filters, the result [B, C_out, D_out, H_out, W_out].
- SBUF: the weights (per tile of output channels), one window of the input at a time, and the outputs of a window until they are stored.
- PSUM: one bank per tile of positions, summed in float32 over all taps and input channels, evicted once with bias and activation.

Pseudocode:

    for each tile of output channels (all at once if their weights fit):
        load the weights
        for each example and window:
            load the window, once per input element
            for each column tile, for each tile of up to 512 positions:
                for each group of neighbours: nc_matmul(psum, weights, view of the window)
                staged = activation(psum + bias)
            store staged: rows of the result, whole
"""

from ._nki import nisa, nl
from .planning.gather import flat_tail

__all__ = ["gather"]

# PSUM has 8 banks: while some are filled, others are evicted
TILES_AT_ONCE = 6


def gather(x, filters, transposed, bias, result, plan, activation, sbm, sharded):
    """Compute every element of `result`.

    Args:
        x: [B, C_in, D, H, W] in HBM.
        filters: [taps, C_in, C_out] in HBM, or [taps, C_out, C_in] if `transposed`.
        transposed: see there.
        bias: [C_out] in HBM, or None.
        result: [B, C_out, D_out, H_out, W_out] in HBM.
        plan: the `GatherPlan`.
        activation: a function of nl, or None.
        sbm: a `SbufManager`, or None.
        sharded: whether the cores share the windows.
    """
    cores, core = 1, 0
    if sharded:
        cores, core = nl.num_programs(0), nl.program_id(0)
    passes = []
    if plan.weights_stay:
        passes.append(range(plan.column_tiles))
    else:
        for tile in range(plan.column_tiles):
            passes.append(range(tile, tile + 1))
    every_tap = plan.taps[0] * plan.taps[1] * plan.taps[2]
    for tiles in passes:
        _open(sbm)
        weights, biases = [], []
        for tile in tiles:
            first = tile * plan.column_tile
            columns = min(plan.column_tile, plan.columns_out - first)
            stay = []
            if plan.part == every_tap:
                stay = _load_weights(filters, transposed, plan, first, columns, x.dtype, sbm)
            weights.append(stay)
            biases.append(_load_bias(bias, plan, first, columns, sbm))
        unit = 0
        for example in range(x.shape[0]):
            for chunk in plan.chunks():
                if unit % cores == core:
                    _open(sbm)
                    window = plan.window(chunk)
                    inputs = _load_window(x, example, window, plan, sbm)
                    for i in range(len(tiles)):
                        _columns(
                            x,
                            filters,
                            transposed,
                            weights[i],
                            biases[i],
                            inputs,
                            window,
                            result,
                            example,
                            chunk,
                            tiles[i],
                            plan,
                            activation,
                            sbm,
                        )
                    _close(sbm)
                unit += 1
        _close(sbm)


# --- SBUF: weights


def _load_raw(filters, transposed, row, rows, column, columns, tap, taps, dtype, sbm):
    """Taps [tap, tap + taps) as a view [rows, taps, columns] in SBUF."""
    if not transposed:
        raw = _tile((rows, taps, columns), dtype, sbm)
        nisa.dma_copy(dst=raw, src=filters[tap : tap + taps, row : row + rows, column : column + columns].permute((1, 0, 2)))
        return raw
    if dtype == nl.float32:
        # a DMA transposes 2-byte types only: the tensor engine does it, one tap at a time
        loaded = _tile((columns, taps, rows), dtype, sbm)
        nisa.dma_copy(dst=loaded, src=filters[tap : tap + taps, column : column + columns, row : row + rows].permute((1, 0, 2)))
        raw = _tile((rows, taps, columns), dtype, sbm)
        for t in range(taps):
            turned = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=turned, data=loaded[:, t, :])
            nisa.tensor_copy(dst=raw[:, t, :], src=turned)
        return raw
    turned = _tile((rows, columns, taps), dtype, sbm)
    nisa.dma_transpose(dst=turned, src=filters[tap : tap + taps, column : column + columns, row : row + rows])
    raw = _tile((rows, taps, columns), dtype, sbm)
    nisa.tensor_copy(dst=raw, src=turned.permute((0, 2, 1)), engine=nisa.engine.gpsimd)
    return raw


def _load_weights(filters, transposed, plan, column, columns, dtype, sbm):
    """Per tile of input channels and column tile, the stationary matrices [rows, groups, columns]."""
    every_tap = plan.taps[0] * plan.taps[1] * plan.taps[2]
    matrices = []
    for tile in range(plan.row_tiles):
        row = tile * plan.row_tile
        rows = min(plan.row_tile, plan.rows_in - row)
        raw = _load_raw(filters, transposed, row, rows, column, columns, 0, every_tap, dtype, sbm)
        per_column = []
        for part in plan.columns:
            per_column.append(_matrix(raw, part, plan, rows, columns, dtype, sbm))
        matrices.append(per_column)
    return matrices


def _matrix(raw, part, plan, rows, columns, dtype, sbm):
    """The stationary matrices of a column tile: the taps themselves, or copies of them between zeros."""
    if len(part.copies) == 0:
        return raw
    stacked = plan.stacked
    matrix = _tile((stacked * rows, len(part.groups), len(part.elements) * columns), dtype, sbm)
    nisa.memset(dst=matrix, value=0.0, engine=nisa.engine.gpsimd)
    for copy in part.copies:
        taps = raw[:, copy.tap : copy.tap + copy.tap_step * (copy.count - 1) + 1 : copy.tap_step, :]
        last_group = copy.group + copy.group_step * (copy.count - 1)
        for i in range(copy.rows):
            shifted = taps
            if i > 0:
                shifted = raw[:, copy.tap + i : copy.tap + i + copy.tap_step * (copy.count - 1) + 1 : copy.tap_step, :]
            first = (copy.row + i) * rows
            place = matrix[
                first : first + rows,
                copy.group : last_group + 1 : copy.group_step,
                copy.element * columns : (copy.element + 1) * columns,
            ]
            if stacked == 1:
                nisa.tensor_copy(dst=place, src=shifted, engine=nisa.engine.gpsimd)
            else:
                # a move between partitions that no engine can make
                nisa.dma_copy(dst=place, src=shifted)
    return matrix


def _load_bias(bias, plan, column, columns, sbm):
    """The bias once per element of a column tile, [columns, 1], float32; None without one."""
    if bias == None:  # noqa: E711
        return None
    most = 1
    for part in plan.columns:
        most = max(most, len(part.elements))
    tile = _tile((most * columns, 1), nl.float32, sbm)
    for i in range(most):
        nisa.dma_copy(dst=tile[i * columns : (i + 1) * columns, :], src=bias[column : column + columns].expand_dim(1))
    return tile


# --- SBUF: the window


def _load_window(x, example, window, plan, sbm):
    """Per tile of input channels, the window [rows, D, H, W] (stacked: on `stacked` groups of partitions, each shifted by one neighbour)."""
    sizes = (window[0][1] - window[0][0], window[1][1] - window[1][0], window[2][1] - window[2][0])
    inputs = []
    for tile in range(plan.row_tiles):
        row = tile * plan.row_tile
        rows = min(plan.row_tile, plan.rows_in - row)
        if plan.stacked == 1:
            inside = _tile((rows, max(1, sizes[0]), max(1, sizes[1]), max(1, sizes[2])), x.dtype, sbm)
            if sizes[0] * sizes[1] * sizes[2] > 0:
                nisa.dma_copy(dst=inside, src=_part(x, example, row, rows, window))
            inputs.append(inside)
        else:
            inputs.append(_load_stacked(x, example, rows, window, sizes, plan, sbm))
    return inputs


def _part(x, example, row, rows, window):
    return x[example, row : row + rows, window[0][0] : window[0][1], window[1][0] : window[1][1], window[2][0] : window[2][1]]


def _load_stacked(x, example, rows, window, sizes, plan, sbm):
    length = sizes[0] * sizes[1] * sizes[2]
    tail = flat_tail(plan, sizes)
    flat = _tile((plan.stacked * rows, length + tail), x.dtype, sbm)
    first = flat[0:rows, 0:length].reshape((rows, sizes[0], sizes[1], sizes[2]))
    low, high, inside = [], [], []
    for axis in range(3):
        begin = min(max(window[axis][0], 0), plan.axes[axis].size)
        end = max(begin, min(window[axis][1], plan.axes[axis].size))
        inside.append((begin, end))
        low.append(begin - window[axis][0])
        high.append(end - window[axis][0])
    # zeros around what exists: planes, then rows, then columns
    _zero(first[:, 0 : low[0]] if low[0] > 0 else None)
    _zero(first[:, high[0] : sizes[0]] if high[0] < sizes[0] else None)
    if high[0] > low[0]:
        planes = first[:, low[0] : high[0]]
        _zero(planes[:, :, 0 : low[1]] if low[1] > 0 else None)
        _zero(planes[:, :, high[1] : sizes[1]] if high[1] < sizes[1] else None)
        if high[1] > low[1]:
            lines = planes[:, :, low[1] : high[1]]
            _zero(lines[:, :, :, 0 : low[2]] if low[2] > 0 else None)
            _zero(lines[:, :, :, high[2] : sizes[2]] if high[2] < sizes[2] else None)
            if high[2] > low[2]:
                nisa.dma_copy(dst=lines[:, :, :, low[2] : high[2]], src=_part(x, example, 0, rows, inside))
    _zero(flat[0:rows, length : length + tail] if tail > 0 else None)
    group = 0
    for q_d in range(plan.stack[0]):
        for q_h in range(plan.stack[1]):
            for q_w in range(plan.stack[2]):
                shift = ((q_d * plan.unit[0]) * sizes[1] + q_h * plan.unit[1]) * sizes[2] + q_w * plan.unit[2]
                if group > 0:
                    nisa.dma_copy(
                        dst=flat[group * rows : (group + 1) * rows, 0:length], src=flat[0:rows, shift : shift + length]
                    )
                group += 1
    return flat[:, 0:length].reshape((plan.stacked * rows, sizes[0], sizes[1], sizes[2]))


def _zero(view):
    if view != None:  # noqa: E711
        nisa.memset(dst=view, value=0.0, engine=nisa.engine.gpsimd)


# --- PSUM


def _columns(x, filters, transposed, weights, bias, inputs, window, result, example, chunk, tile, plan, activation, sbm):
    """All outputs of a window for one tile of output channels."""
    first = tile * plan.column_tile
    columns = min(plan.column_tile, plan.columns_out - first)
    width = plan.axes[2]
    low = width.block * chunk.w[0]
    high = min(width.out, width.block * chunk.w[1])
    sizes = chunk.sizes
    evictions = 0
    rows = plan.rows_of(chunk)
    if plan.merged:
        # one element per column tile: all of them fill one tile, so that a store moves whole planes
        _open(sbm)
        staged = _tile((columns, rows[0][1] - rows[0][0], rows[1][1] - rows[1][0], high - low), x.dtype, sbm)
    for c in range(len(plan.columns)):
        part = plan.columns[c]
        if part.phase == 0 and not plan.merged:
            # the phases of the width follow each other and fill one tile
            _open(sbm)
            staged = _tile((len(part.elements) * columns, sizes[0], sizes[1], high - low), x.dtype, sbm)
        boxes = []
        for box in plan.tiles(chunk, part.phase):
            boxes.append(box)
        for start in range(0, len(boxes), TILES_AT_ONCE):
            several = boxes[start : start + TILES_AT_ONCE]
            sums = _accumulate(x, filters, transposed, weights, inputs, window, several, first, columns, c, plan, sbm)
            for i in range(len(several)):
                box = several[i]
                position = width.block * box.w[0] + part.phase - low
                across = (position, position + width.block * (box.sizes[2] - 1) + 1)
                if plan.merged:
                    down = _interleaved(plan.axes[0], box.d, part.elements[0][0], rows[0])
                    along = _interleaved(plan.axes[1], box.h, part.elements[0][1], rows[1])
                    if down[1] == 0 or along[1] == 0:
                        continue
                    place = staged[
                        :,
                        down[0] : down[0] + plan.axes[0].block * (down[1] - 1) + 1 : plan.axes[0].block,
                        along[0] : along[0] + plan.axes[1].block * (along[1] - 1) + 1 : plan.axes[1].block,
                        across[0] : across[1] : width.block,
                    ]
                    psum = sums[i][:, 0 : down[1], 0 : along[1], :]
                else:
                    place = staged[
                        :,
                        box.d[0] - chunk.d[0] : box.d[1] - chunk.d[0],
                        box.h[0] - chunk.h[0] : box.h[1] - chunk.h[0],
                        across[0] : across[1] : width.block,
                    ]
                    psum = sums[i]
                _evict(place, psum, bias, activation, plan.vector_share > 0 and evictions % plan.vector_share == 0)
                evictions += 1
        if part.phase == width.block - 1 and not plan.merged:
            _store(staged, part.elements, columns, first, result, example, chunk, plan)
            _close(sbm)
    if plan.merged:
        nisa.dma_copy(
            dst=result[example, first : first + columns, rows[0][0] : rows[0][1], rows[1][0] : rows[1][1], low:high],
            src=staged,
        )
        _close(sbm)


def _interleaved(axis, blocks, element, rows):
    """Where an element of some blocks lies among the staged rows: (first, count)."""
    first = axis.block * blocks[0] + element
    count = max(0, min(blocks[1] - blocks[0], (axis.out - first + axis.block - 1) // axis.block))
    return first - rows[0], count


def _accumulate(x, filters, transposed, weights, inputs, window, boxes, column, columns, c, plan, sbm):
    """The sums of some position tiles, one PSUM bank each, [columns, blocks of d, h, w]."""
    part = plan.columns[c]
    every_tap = plan.taps[0] * plan.taps[1] * plan.taps[2]
    sums, orders = [], []
    for box in boxes:
        sizes = box.sizes
        psum = nl.ndarray((len(part.elements) * columns, sizes[0], sizes[1], sizes[2]), dtype=nl.float32, buffer=nl.psum)
        order = _ordered(part.groups, box, plan)
        if len(order) == 0 or order[0][1] != box:
            # no matmul writes every element
            nisa.memset(dst=psum, value=0.0)
        sums.append(psum)
        orders.append(order)
    for tap in range(0, every_tap, plan.part):
        taps = min(plan.part, every_tap - tap)
        for r in range(plan.row_tiles):
            row = r * plan.row_tile
            rows = min(plan.row_tile, plan.rows_in - row)
            if plan.part < every_tap:
                matrix = _load_raw(filters, transposed, row, rows, column, columns, tap, taps, x.dtype, sbm)
            else:
                matrix = weights[r][c]
            for i in range(len(boxes)):
                for g, region in orders[i]:
                    group = part.groups[g]
                    if group.tap < 0:
                        _multiply(sums[i], matrix[:, g, :], inputs[r], group, region, boxes[i], window, plan)
                    elif tap <= group.tap and group.tap < tap + taps:
                        _multiply(sums[i], matrix[:, group.tap - tap, :], inputs[r], group, region, boxes[i], window, plan)
    return sums


def _ordered(groups, box, plan):
    """The groups that reach a tile and the blocks that they reach; one that reaches all of them comes first."""
    order: list = []
    rest: list = []
    for g in range(len(groups)):
        region = plan.reach(groups[g], box)
        if region != None:  # noqa: E711
            if region == box and len(order) == 0:
                order.append((g, region))
            else:
                rest.append((g, region))
    order.extend(rest)
    return order


def _multiply(psum, stationary, inputs, group, region, box, window, plan):
    """Add one group of neighbours to the blocks that it reaches."""
    starts, ends = [], []
    for axis in range(3):
        blocks = (region.d, region.h, region.w)[axis]
        step = plan.axes[axis].step
        start = step * blocks[0] + group.offset[axis] - window[axis][0]
        starts.append(start)
        ends.append(start + step * (blocks[1] - blocks[0] - 1) + 1)
    moving = inputs[
        :,
        starts[0] : ends[0] : plan.axes[0].step,
        starts[1] : ends[1] : plan.axes[1].step,
        starts[2] : ends[2] : plan.axes[2].step,
    ]
    target = psum[
        :,
        region.d[0] - box.d[0] : region.d[1] - box.d[0],
        region.h[0] - box.h[0] : region.h[1] - box.h[0],
        region.w[0] - box.w[0] : region.w[1] - box.w[0],
    ]
    nisa.nc_matmul(dst=target, stationary=stationary, moving=moving)


def _evict(place, psum, bias, activation, by_vector):
    """place = activation(psum + bias), rounded once."""
    if bias == None and activation == None:  # noqa: E711
        engine = nisa.engine.vector if by_vector else nisa.engine.scalar
        nisa.tensor_copy(dst=place, src=psum, engine=engine)
        return
    op = nl.copy if activation == None else activation  # noqa: E711
    if bias == None:  # noqa: E711
        nisa.activation(dst=place, op=op, data=psum)
    else:
        nisa.activation(dst=place, op=op, data=psum, bias=bias[0 : psum.shape[0], :])


def _store(staged, elements, columns, column, result, example, chunk, plan):
    """Write the rows of each element of the blocks to their planes and rows of the result."""
    depth, height, width = plan.axes
    low = width.block * chunk.w[0]
    high = min(width.out, width.block * chunk.w[1])
    for i in range(len(elements)):
        e_d, e_h = elements[i]
        planes = min(chunk.d[1], (depth.out - e_d + depth.block - 1) // depth.block) - chunk.d[0]
        lines = min(chunk.h[1], (height.out - e_h + height.block - 1) // height.block) - chunk.h[0]
        if planes > 0 and lines > 0:
            d = depth.block * chunk.d[0] + e_d
            h = height.block * chunk.h[0] + e_h
            nisa.dma_copy(
                dst=result[
                    example,
                    column : column + columns,
                    d : d + depth.block * (planes - 1) + 1 : depth.block,
                    h : h + height.block * (lines - 1) + 1 : height.block,
                    low:high,
                ],
                src=staged[i * columns : (i + 1) * columns, 0:planes, 0:lines, :],
            )


# --- allocation


def _tile(shape, dtype, sbm):
    if sbm == None:  # noqa: E711
        return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    return sbm.alloc_stack(shape, dtype)


def _open(sbm):
    if sbm != None:  # noqa: E711
        sbm.open_scope()


def _close(sbm):
    if sbm != None:  # noqa: E711
        sbm.close_scope()
