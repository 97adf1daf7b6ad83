# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of the convolution kernels: every output once, every tap where it belongs, capacity kept; for thousands of random geometries.

Plans are plain Python: nothing runs here, so that volumes of 512³ and 2048 channels are planned, too.
"""

import itertools
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki3d.planning.axis import convolution_axis, lattice, transposed_axis
from nki3d.planning.conv import conv3d_plan, conv3d_transpose_plan, dx_plan
from nki3d.planning.filter_gradient import filter_gradient_plan
from nki3d.planning.gather import Box, Unsupported, flat_tail

BUDGET = 212992  # bytes of SBUF per partition that trn2 has for a kernel
MANY = settings(max_examples=2000)


def out_of(size, taps, stride, dilation, pads):
    return (size + sum(pads) - dilation * (taps - 1) - 1) // stride + 1


@st.composite
def one_axis(draw, largest):
    """(size, taps, stride, dilation, front, back) of an axis on which the kernel fits."""
    taps = draw(st.sampled_from((1, 2, 3, 3, 4, 5, 7)))
    stride, dilation = draw(st.sampled_from((1, 1, 2, 2, 3, 4))), draw(st.sampled_from((1, 1, 1, 2, 3)))
    front, back = draw(st.integers(0, taps)), draw(st.integers(0, taps))
    least = max(1, dilation * (taps - 1) + 1 - front - back)
    return draw(st.integers(least, max(least, largest))), taps, stride, dilation, front, back


CHANNELS = st.one_of(st.integers(1, 24), st.sampled_from((32, 48, 64, 96, 128, 130, 256)))


@st.composite
def geometries(draw, largest=12, channels=CHANNELS):
    axes = [draw(one_axis(largest)) for _ in range(3)]
    size, taps, stride, dilation, front, back = zip(*axes, strict=True)
    return {
        "size": size,
        "taps": taps,
        "stride": stride,
        "dilation": dilation,
        "padding": tuple(itertools.chain(*zip(front, back, strict=True))),
        "channels": (draw(channels), draw(channels)),
        "itemsize": draw(st.sampled_from((2, 4))),
        "cores": draw(st.sampled_from((1, 2))),
        "batch": draw(st.integers(1, 3)),
        "packed": draw(st.sampled_from((True, True, True, False))),
    }


def outs(g):
    return tuple(
        out_of(g["size"][i], g["taps"][i], g["stride"][i], g["dilation"][i], g["padding"][2 * i : 2 * i + 2]) for i in range(3)
    )


def plan_or_reason(make, *arguments):
    try:
        return make(*arguments), None
    except Unsupported as reason:
        return None, str(reason)


# ---- axes ------------------------------------------------------------------------------------------------------------


@MANY
@given(one_axis(40), st.integers(1, 5))
def test_a_convolution_axis_reads_what_a_convolution_reads(axis, r):
    size, taps, stride, dilation, front, back = axis
    found = convolution_axis(size, taps, stride, dilation, (front, back), r)
    assert found.out == out_of(size, taps, stride, dilation, (front, back))
    for o in range(found.out):
        block, element = divmod(o, found.block)
        read = {tap: found.step * block + offset for tap, offset in found.reads[element]}
        assert read == {k: stride * o + dilation * k - front for k in range(taps)}


@MANY
@given(one_axis(12), st.integers(1, 3), st.integers(0, 5))
def test_a_transposed_axis_reads_what_reaches_an_output(axis, r, extra):
    size, taps, stride, dilation, padding, _ = axis
    out = max(1, (size - 1) * stride + dilation * (taps - 1) + 1 - 2 * padding + extra)
    found = transposed_axis(size, taps, stride, dilation, padding, out, r)
    for o in range(out):
        block, element = divmod(o, found.block)
        read = {(tap, found.step * block + offset) for tap, offset in found.reads[element]}
        reach = {(k, i) for k in range(taps) for i in range(-40, size + 40) if stride * i + dilation * k - padding == o}
        assert read == reach


@given(one_axis(30), st.integers(1, 4))
def test_valid_blocks_are_those_whose_input_exists(axis, r):
    size, taps, stride, dilation, front, back = axis
    found = convolution_axis(size, taps, stride, dilation, (front, back), r)
    for offset in found.offsets(tuple(range(found.block))):
        first, end = found.valid_blocks(offset)
        for block in range(found.blocks):
            assert (first <= block < end) == (0 <= found.step * block + offset < size)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=8, unique=True))
def test_a_lattice_holds_its_offsets_and_no_finer_one_is_needed(offsets):
    first, unit, count = lattice(tuple(sorted(offsets)))
    points = [first + unit * i for i in range(count)]
    assert set(offsets) <= set(points)
    assert (points[0], points[-1]) == (min(offsets), max(offsets))


# ---- gathers ---------------------------------------------------------------------------------------------------------


def check_gather(plan, budget):
    """Coverage, matrices and capacity of a plan."""
    blocks = plan.blocks
    # blocks: each chunk once, each tile once
    for axis in range(3):
        ends = sorted({(chunk.d, chunk.h, chunk.w)[axis] for chunk in plan.chunks()})
        assert [first for first, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == blocks[axis]
    assert len(list(plan.chunks())) == prod(-(-blocks[i] // plan.chunk[i]) for i in range(3))
    # columns: each element and phase once
    elements = [(*element, column.phase) for column in plan.columns for element in column.elements]
    assert sorted(elements) == sorted(itertools.product(*(range(axis.block) for axis in plan.axes)))
    for column in plan.columns:
        chunk = next(plan.chunks())
        tiles = list(plan.tiles(chunk, column.phase))
        covered = sum(prod(tile.sizes) for tile in tiles)
        assert covered == prod(chunk.sizes[:2]) * max(0, min(chunk.w[1], plan.phase_blocks(column.phase)) - chunk.w[0])
        assert all(prod(tile.sizes) <= 512 for tile in tiles)
        assert len(column.elements) * plan.column_tile <= 128
        check_matrix(plan, column)
    assert plan.stacked * plan.row_tile <= 128
    # bytes: weights, a window, two sets of staged outputs
    direct = all(not column.copies for column in plan.columns)
    taps = prod(plan.taps)
    weights = plan.part * plan.column_tile * plan.itemsize * plan.row_tiles
    if not direct:
        assert plan.part == taps
        weights += (
            sum(len(c.groups) * len(c.elements) for c in plan.columns if c.copies)
            * plan.column_tile
            * plan.itemsize
            * plan.row_tiles
        )
    if plan.weights_stay:
        weights *= plan.column_tiles
    for chunk in plan.chunks():
        window = [high - low for low, high in plan.window(chunk)]
        input_bytes = prod(window) * plan.itemsize * plan.row_tiles
        if plan.stacked > 1:
            input_bytes += flat_tail(plan, tuple(window)) * plan.itemsize
        staged = prod(chunk.sizes) * plan.axes[2].block * plan.itemsize
        if plan.merged:
            staged *= plan.axes[0].block * plan.axes[1].block
        assert weights + input_bytes + staged <= budget


def check_matrix(plan, column):
    """Every tap of every element is in the matrix once, at the neighbour that it reads."""
    expected = {}
    for element, (e_d, e_h) in enumerate(column.elements):
        pairs = (plan.axes[0].reads[e_d], plan.axes[1].reads[e_h], plan.axes[2].reads[column.phase])
        for (k_d, n_d), (k_h, n_h), (k_w, n_w) in itertools.product(*pairs):
            expected[element, (k_d * plan.taps[1] + k_h) * plan.taps[2] + k_w] = (n_d, n_h, n_w)
    found = {}
    if not column.copies:
        assert len(column.elements) == 1 or not column.groups
        found = {(0, group.tap): group.offset for group in column.groups}
    for copy in column.copies:
        for m in range(copy.count):
            group = column.groups[copy.group + copy.group_step * m]
            for i in range(copy.rows):
                q, offset = copy.row + i, []
                for axis in (2, 1, 0):
                    q, position = divmod(q, plan.stack[axis])
                    offset.insert(0, group.offset[axis] + plan.unit[axis] * position)
                place = copy.element, copy.tap + copy.tap_step * m + i
                assert place not in found
                found[place] = tuple(offset)
    assert found == expected


@MANY
@given(geometries())
def test_plans_of_convolutions(g):
    plan, _ = plan_or_reason(
        conv3d_plan, g["size"], g["taps"], g["stride"], g["padding"], g["dilation"], g["channels"], g["itemsize"], BUDGET, g["cores"],
        g["batch"], g["packed"],
    )  # fmt: skip
    if plan is not None:
        assert tuple(axis.out for axis in plan.axes) == outs(g)
        check_gather(plan, BUDGET)


@MANY
@given(geometries(), st.integers(0, 2))
def test_plans_of_transposed_convolutions(g, extra):
    crop = g["padding"][::2]
    out = tuple(
        max(1, (g["size"][i] - 1) * g["stride"][i] + g["dilation"][i] * (g["taps"][i] - 1) + 1 - 2 * crop[i] + extra)
        for i in range(3)
    )
    plan, _ = plan_or_reason(
        conv3d_transpose_plan, g["size"], g["taps"], g["stride"], crop, g["dilation"], out, g["channels"], g["itemsize"], BUDGET,
        g["cores"], g["batch"], g["packed"],
    )  # fmt: skip
    if plan is not None:
        check_gather(plan, BUDGET)


@MANY
@given(geometries())
def test_plans_of_dx(g):
    plan, _ = plan_or_reason(
        dx_plan, g["size"], outs(g), g["taps"], g["stride"], g["padding"], g["dilation"], g["channels"], g["itemsize"], BUDGET,
        g["cores"], g["batch"], g["packed"],
    )  # fmt: skip
    if plan is not None:
        assert tuple(axis.out for axis in plan.axes) == g["size"]
        check_gather(plan, BUDGET)


# ---- dw --------------------------------------------------------------------------------------------------------------


def check_filter_gradient(plan, budget):
    counts = (*plan.count, plan.taps[2])
    # neighbours: each in one piece
    seen = [
        position
        for piece in plan.pieces
        for position in itertools.product(*(range(f, f + n) for f, n in zip(piece.first, piece.count, strict=True)))
    ]
    assert sorted(seen) == sorted(itertools.product(*map(range, counts)))
    assert [i for first, end in plan.passes for i in range(first, end)] == list(range(len(plan.pieces)))
    for piece in plan.pieces:
        assert prod(piece.count) * plan.row_tile <= 128
    for first, end in plan.passes:
        assert -(-(end - first) // plan.per_bank) <= 8
    assert plan.rows * plan.column_tile <= 512
    assert plan.groups * plan.pitch <= 128
    # positions: each output in one group and one load
    planes, blocks = plan.extent
    assert plan.width >= min(128, plan.axes[2].out)
    loads = list(plan.loads())
    assert sum((d[1] - d[0]) * (h[1] - h[0]) * (w[1] - w[0]) for d, h, w in loads) == planes * blocks * plan.axes[2].out
    if plan.group_axis == 0:
        assert planes * plan.groups >= plan.axes[0].out
        assert blocks == plan.axes[1].blocks
    else:
        assert blocks * plan.groups >= plan.axes[1].blocks
        assert planes == plan.axes[0].out
    for element in range(plan.rows):
        for tap in range(plan.taps[1]):
            assert 0 <= plan.lattice_of(1, tap, element) < plan.count[1]
    # bytes of one load
    window = plan.window((0, plan.chunk[0]), (0, plan.chunk[1]))
    turned = (
        plan.taps[2] * window[0] * window[1] * plan.row_tile + prod(plan.chunk) * plan.rows * plan.column_tile
    ) * plan.itemsize
    assert turned <= budget


@MANY
@given(geometries())
def test_plans_of_dw(g):
    plan, _ = plan_or_reason(
        filter_gradient_plan,
        g["size"],
        outs(g),
        g["taps"],
        g["stride"],
        g["padding"],
        g["dilation"],
        g["channels"],
        g["itemsize"],
        BUDGET,
    )
    if plan is not None:
        check_filter_gradient(plan, BUDGET)


# ---- large, and too large --------------------------------------------------------------------------------------------

LARGE = [
    ((512, 512, 512), (3, 3, 3), (1, 1, 1), (1,) * 6, (16, 16)),
    ((512, 512, 512), (7, 7, 7), (2, 2, 2), (3,) * 6, (1, 32)),
    ((16, 64, 64), (3, 3, 3), (1, 1, 1), (1,) * 6, (2048, 2048)),
    ((4, 720, 1280), (3, 3, 3), (1, 1, 1), (2, 0, 1, 1, 1, 1), (96, 96)),
    ((32, 32, 32), (4, 4, 4), (2, 2, 2), (1,) * 6, (1280, 320)),
]


@pytest.mark.parametrize(("size", "taps", "stride", "padding", "channels"), LARGE, ids=str)
def test_large_volumes_and_many_channels_are_planned(size, taps, stride, padding, channels):
    out = tuple(out_of(size[i], taps[i], stride[i], 1, padding[2 * i : 2 * i + 2]) for i in range(3))
    ones = (1, 1, 1)
    check_gather(conv3d_plan(size, taps, stride, padding, ones, channels, 2, BUDGET), BUDGET)
    check_gather(dx_plan(size, out, taps, stride, padding, ones, channels, 2, BUDGET), BUDGET)
    check_filter_gradient(filter_gradient_plan(size, out, taps, stride, padding, ones, channels, 2, BUDGET), BUDGET)


def test_what_cannot_fit_is_refused_with_a_reason():
    with pytest.raises(Unsupported, match="262144 taps are 262144 matmuls"):
        conv3d_plan((64, 64, 64), (64, 64, 64), (1, 1, 1), (0,) * 6, (1, 1, 1), (64, 64), 4, BUDGET)
    with pytest.raises(Unsupported, match="smallest window does not fit"):
        conv3d_plan((16, 64, 64), (16, 32, 32), (1, 1, 1), (0,) * 6, (1, 1, 1), (2048, 64), 4, BUDGET)
    with pytest.raises(Unsupported, match="one row of outputs and its neighbours do not fit"):
        filter_gradient_plan((64, 64, 4096), (1, 1, 4096), (64, 64, 1), (1, 1, 1), (0,) * 6, (1, 1, 1), (128, 64), 4, BUDGET)


def test_two_cores_get_equal_shares():
    plan = conv3d_plan((16, 32, 32), (3, 3, 3), (1, 1, 1), (1,) * 6, (1, 1, 1), (32, 32), 2, BUDGET, 2, 1)
    assert len(list(plan.chunks())) % 2 == 0


def test_unpacked_plans_multiply_no_zeros():
    plan = conv3d_plan((8, 8, 8), (3, 3, 3), (1, 1, 1), (1,) * 6, (1, 1, 1), (4, 4), 2, BUDGET, 1, 1, False)
    assert plan.stacked == 1
    assert all(not column.copies for column in plan.columns)
    whole = Box(*((0, size) for size in plan.blocks))
    for column in plan.columns:
        for group in column.groups:
            region = plan.reach(group, whole)
            assert prod(region.sizes) == prod(8 - abs(offset) for offset in group.offset)
