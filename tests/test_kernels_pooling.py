# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The pooling kernels in the simulator against the oracle, and their planner on geometries too large to run."""

import functools
import itertools
import math

import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import terms, three
from pairwise import pairwise
from tolerances import assert_close

import nki3d.simulator as nki
from nki3d.avg_pooling_3d import avg_pooling_3d
from nki3d.avg_pooling_3d_backward import avg_pooling_3d_backward
from nki3d.planning.pooling import ELEMENTS, LANES, STRIDE, PoolAxis, Unsupported, plan_pooling, pooling

BUDGET = {"trn2": 212_992, "trn3": 262_144}
NARROW = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# ---- cases: every pair of values of two factors appears --------------------------------------------------------------

# one window per axis: (size, kernel, stride, padding)
AXES = (
    (6, 2, 2, 0),
    (7, 3, 2, 1),
    (6, 3, 1, 1),
    (5, 1, 1, 0),
    (9, 2, 4, 0),  # gaps
    (8, 4, 2, 2),
    (5, 5, 5, 0),  # the whole axis
    (7, 4, 3, 3),  # more padding than torch has
    (9, 5, 1, 2),
    (4, 7, 2, 3),  # a window that is longer than the axis
    (8, 1, 3, 0),
    (9, 3, 7, 2),
)
FACTORS = {
    "d": AXES,
    "h": AXES,
    "w": AXES,
    "planes": ((1, 1), (2, 3), (1, 32), (3, 43), (1, 130)),
    "dtype": tuple(NARROW),
    "layouts": tuple(itertools.product(("NCDHW", "NDHWC"), repeat=2)),
    "count_include_pad": (True, False),
    "target": ("trn2", "trn3"),
    "lnc": (1, 2),
}


CASES = pairwise(FACTORS, rows=300, seed=3)


class Case:
    """One geometry with operands, and both kernels on it."""

    def __init__(
        self, rng, size, kernel, stride, padding, planes=(1, 2), dtype="float32", layouts=("NCDHW", "NCDHW"), pad=True
    ):
        self.size, self.dtype, self.layouts, self.pad = size, dtype, layouts, pad
        self.window = {"kernel": kernel, "stride": stride, "padding": padding}
        self.share = oracle.shares(size, kernel, stride, padding, pad)
        self.x = rng.standard_normal((*planes, *size)).astype(NARROW[dtype])
        self.dy = rng.standard_normal((*planes, *self.share.shape)).astype(NARROW[dtype])

    def arguments(self):
        return (
            self.window["kernel"],
            self.window["stride"],
            self.window["padding"],
            self.layouts[0],
            self.layouts[1],
            self.pad,
        )

    def forward(self, target="trn2", lnc=1, x=None):
        x = to_layout(self.x if x is None else x, self.layouts[0])
        y, cost = nki.profile(avg_pooling_3d, target=target, lnc=lnc)(x, *self.arguments(), lnc == 2)
        return from_layout(np.asarray(y), self.layouts[1]), cost

    def backward(self, target="trn2", lnc=1, dy=None):
        dy, x = to_layout(self.dy if dy is None else dy, self.layouts[1]), to_layout(self.x, self.layouts[0])
        dx, cost = nki.profile(avg_pooling_3d_backward, target=target, lnc=lnc)(dy, x, *self.arguments(), lnc == 2)
        return from_layout(np.asarray(dx), self.layouts[0]), cost

    def forward_terms(self, x=None):
        return terms(functools.partial(oracle.avg_pooling_3d, **self.window), self.x if x is None else x, self.share)

    def backward_terms(self, dy=None):
        def operation(dy, share):
            return oracle.avg_pooling_3d_backward(dy, share, self.size, **self.window)

        return terms(operation, self.dy if dy is None else dy, self.share)

    def plan(self, backward, target="trn2"):
        shape = to_layout(self.x, self.layouts[0]).shape
        kernel, stride, padding, data_format, output_format, pad = self.arguments()
        given = pooling("test", shape, self.dtype, kernel, stride, padding, data_format, output_format, pad)
        return plan_pooling(given, backward, BUDGET[target])


def to_layout(x, layout):
    return x if layout == "NCDHW" else np.ascontiguousarray(np.moveaxis(x, 1, -1))


def from_layout(x, layout):
    return x if layout == "NCDHW" else np.moveaxis(x, -1, 1)


def without_one_element(values, reached):
    """The operand with its largest element that any result reads set to zero: the least that a kernel can miss."""
    spoilt = values.copy()
    magnitude = np.where(reached, np.abs(values.astype(np.float64)), -1)
    spoilt[np.unravel_index(np.argmax(magnitude), values.shape)] = 0
    return spoilt


def case_of(values, rng):
    d, h, w, planes, dtype, layouts, pad, target, lnc = (values[name] for name in FACTORS)
    size, kernel, stride, padding = (tuple(axis[n] for axis in (d, h, w)) for n in range(4))
    return Case(rng, size, kernel, stride, padding, planes, dtype, layouts, pad), target, lnc


def assert_each_element_is_written_once(cost, result, plan, cores):
    """Together with finite values: new memory is NaN. If padding does not count, each core also writes reciprocals in float32."""
    reciprocals = 0 if plan.given.count_include_pad else sum(len(plan.divisors(axis)[1]) for axis in range(3))
    assert cost.hbm_write_bytes == result.nbytes + 4 * cores * reciprocals


@pytest.mark.parametrize("number", range(len(CASES)))
def test_forward_agrees_with_the_oracle(number, rng):
    case, target, lnc = case_of(CASES[number], rng)
    y, cost = case.forward(target, lnc)
    assert np.isfinite(y.astype(np.float32)).all()
    assert_each_element_is_written_once(cost, y, case.plan(False, target), lnc)
    expected = case.forward_terms()
    assert_close(y, expected, case.dtype)
    assert cost.sbuf_peak_bytes <= case.plan(False, target).sbuf_bytes <= BUDGET[target]
    reached = case.backward_terms().count > 0
    wrong = case.forward_terms(without_one_element(case.x, reached)).value
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_close(wrong.astype(NARROW[case.dtype]), expected, case.dtype)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_backward_agrees_with_the_oracle(number, rng):
    case, target, lnc = case_of(CASES[number], rng)
    dx, cost = case.backward(target, lnc)
    assert_each_element_is_written_once(cost, dx, case.plan(True, target), lnc)
    assert np.isfinite(dx.astype(np.float32)).all()
    expected = case.backward_terms()
    assert_close(dx, expected, case.dtype)
    assert cost.sbuf_peak_bytes <= case.plan(True, target).sbuf_bytes <= BUDGET[target]
    wrong = case.backward_terms(without_one_element(case.dy, np.full(case.dy.shape, True))).value
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_close(wrong.astype(NARROW[case.dtype]), expected, case.dtype)


# ---- sizes that are tiled ----------------------------------------------------------------------------------------------

LARGE = {
    "planes of 512 x 512": ((2, 512, 512), (1, 2, 2), None, 0, (1, 1), "bfloat16"),
    "window of 64": ((2, 512, 512), (2, 64, 64), None, 0, (1, 1), "bfloat16"),
    "window of 64 with stride 32": ((2, 256, 320), (1, 64, 64), (1, 32, 32), (0, 32, 32), (1, 2), "float32"),
    "window of 64 planes, streamed": ((66, 64, 80), (64, 64, 64), (2, 64, 16), (1, 3, 0), (1, 2), "bfloat16"),
    "halos in depth and height": ((20, 96, 96), 3, 1, 1, (1, 3), "bfloat16"),
    "halos and gaps": ((23, 130, 70), (5, 3, 2), (2, 4, 3), (2, 1, 1), (2, 2), "float32"),
    "more planes than partitions": ((9, 40, 40), (2, 3, 3), (2, 2, 2), (0, 1, 1), (3, 67), "bfloat16"),
    "many channels": ((4, 6, 6), 2, None, 0, (1, 2048), "bfloat16"),
}


@pytest.mark.parametrize("layouts", [("NCDHW", "NCDHW"), ("NDHWC", "NDHWC"), ("NDHWC", "NCDHW")], ids="-".join)
@pytest.mark.parametrize("name", LARGE)
def test_large_volumes(name, layouts, rng):
    size, kernel, stride, padding, planes, dtype = LARGE[name]
    case = Case(rng, size, three(kernel), three(kernel if stride is None else stride), padding, planes, dtype, layouts)
    for backward, (result, cost), expected in (
        (False, case.forward(), case.forward_terms()),
        (True, case.backward(), case.backward_terms()),
    ):
        assert_close(result, expected, dtype)
        assert cost.sbuf_peak_bytes <= case.plan(backward).sbuf_bytes
        ideal = (case.x.size + case.dy.size) * case.x.itemsize
        assert cost.hbm_read_bytes + cost.hbm_write_bytes <= 2.5 * ideal


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_the_mean_of_ones_over_a_whole_volume_is_one(dtype, layout, rng):
    case = Case(rng, (16, 16, 16), 16, 16, 0, (2, 3), dtype, (layout, layout))
    y, _ = case.forward(x=np.ones_like(case.x))
    np.testing.assert_array_equal(y.astype(np.float32), np.ones((2, 3, 1, 1, 1), np.float32))
    dx, _ = case.backward(dy=np.ones_like(case.dy))
    np.testing.assert_array_equal(dx.astype(np.float32), np.full(case.x.shape, 2.0**-12, np.float32))


def test_sums_do_not_stall_in_the_narrow_type(rng):
    """256 + 1 is 256 in bfloat16: a mean of 27 such terms shows where a sum ran. Backward, 27 windows meet."""
    case = Case(rng, (6, 6, 6), 3, 1, 1, (1, 1), "bfloat16")
    x = np.where(np.indices(case.x.shape).sum(0) % 9 == 0, 256, 1).astype(case.x.dtype)
    assert_close(case.forward(x=x)[0], case.forward_terms(x), "bfloat16")
    assert_close(case.backward(dy=x)[0], case.backward_terms(x), "bfloat16")


# ---- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", CASES[::4], ids=str)
def test_two_cores_give_the_same_bits(values, rng):
    case, target, _ = case_of(values, rng)
    for kernel in (case.forward, case.backward):
        one, two = kernel(target, 1)[0], kernel(target, 2)[0]
        assert one.tobytes() == two.tobytes()


def test_two_cores_share_the_work(rng):
    case = Case(rng, (16, 32, 32), 3, 1, 1, (1, 32), "float32")
    for kernel in (case.forward, case.backward):
        (y, one), (same, two) = kernel(), kernel(lnc=2)
        assert y.tobytes() == same.tobytes()
        assert two.engines["vector"].cycles < 0.65 * one.engines["vector"].cycles


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("stride", [1, 2, (2, 3, 5)])
def test_forward_and_backward_are_adjoint(stride, pad, rng):
    """On small integers and divisors that are powers of two, both sides are exact."""
    case = Case(rng, (6, 9, 8), (2, 4, 2), three(stride), (0, 2, 0), (2, 3), "float32", pad=pad)
    x = rng.integers(-8, 9, case.x.shape).astype(np.float32)
    dy = rng.integers(-8, 9, case.dy.shape).astype(np.float32)
    if not pad:
        x, dy = x * 3, dy * 3  # divisors of the border: 2 of 4, and 1 or 3 where the last window leaves the volume
    y, dx = case.forward(x=x)[0].astype(np.float64), case.backward(dy=dy)[0].astype(np.float64)
    left, right = (y * dy).sum(), (x * dx).sum()
    assert left == right if pad else math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-3)


@pytest.mark.parametrize("layouts", FACTORS["layouts"], ids="-".join)
@pytest.mark.parametrize("pad", [True, False])
def test_infinity_reaches_its_own_windows_only(layouts, pad, rng):
    """Nothing is multiplied by a zero of the padding, and no plane touches another."""
    case = Case(rng, (5, 6, 7), 3, (1, 2, 2), 1, (2, 5), "bfloat16", layouts, pad)
    for kernel, operand, expected in (
        (functools.partial(case.forward), case.x, case.forward_terms),
        (functools.partial(case.backward), case.dy, case.backward_terms),
    ):
        name = "x" if operand is case.x else "dy"
        spoilt, mark = operand.copy(), np.zeros(operand.shape)
        for at in ((0, 0, 0, 0, 0), (1, 3, 2, 1, 2)):
            spoilt[at], mark[at] = np.inf, 1
        reached = expected(mark).value > 0
        result = kernel(**{name: spoilt})[0].astype(np.float32)
        np.testing.assert_array_equal(np.isinf(result), reached)
        assert np.isfinite(result[~reached]).all()


def test_gaps_are_exact_zeros(rng):
    case = Case(rng, (7, 8, 9), (1, 2, 1), (3, 3, 4), 0, (1, 2), "float16")
    dx, _ = case.backward()
    untouched = np.broadcast_to(case.backward_terms().count == 0, dx.shape)
    assert untouched.any()
    assert not dx[untouched].astype(np.float32).any()
    assert dx[~untouched].astype(np.float32).any()


# ---- cost: the rows of the public kernels' figures ---------------------------------------------------------------------

# vector cycles (with the fast modes) of the vendor's kernels on trn2, computed; ours at most
ROWS = {
    "forward k2 s2": (False, 2, 2, 0, 229_376, 20_000),
    "backward k2 s2": (True, 2, 2, 0, 8_192, 8_000),
    "forward k3 s2 p1": (False, 3, 2, 1, 384_384, 42_000),
    "backward k3 s2 p1": (True, 3, 2, 1, 105_888, 40_000),
    "forward k3 s1 p1": (False, 3, 1, 1, 2_789_376, 120_000),
    "backward k3 s1 p1": (True, 3, 1, 1, 1_298_948, 120_000),
}


@pytest.mark.parametrize("name", ROWS)
def test_cost_stays_below_the_public_kernels(name, rng):
    backward, kernel, stride, padding, theirs, ours = ROWS[name]
    case = Case(rng, (32, 64, 64), kernel, stride, padding, (1, 32), "bfloat16")
    result, cost = case.backward() if backward else case.forward()
    assert_close(result, case.backward_terms() if backward else case.forward_terms(), "bfloat16")
    assert cost.engines["vector"].cycles <= ours < theirs
    times = [cost.engines[engine].us for engine in ("vector", "scalar", "gpsimd")]
    assert max(times) <= 1.25 * cost.engines["vector"].us or max(times) < cost.dma_us
    assert cost.hbm_read_bytes + cost.hbm_write_bytes <= 1.15 * (case.x.nbytes + case.dy.nbytes)


# ---- arguments -----------------------------------------------------------------------------------------------------------

WRONG = {
    "rank": (((2, 3, 4, 5), "float32", 2, None, 0, "NCDHW", None), "`src_tensor` has 4 dimensions"),
    "empty": (((2, 3, 0, 5, 5), "float32", 2, None, 0, "NCDHW", None), "empty"),
    "dtype": (((1, 1, 4, 4, 4), "int32", 2, None, 0, "NCDHW", None), "`src_tensor` has dtype int32"),
    "layout": (((1, 1, 4, 4, 4), "float32", 2, None, 0, "NCHW", None), "`data_format` is 'NCHW'"),
    "output layout": (((1, 1, 4, 4, 4), "float32", 2, None, 0, "NCDHW", "CDHW"), "`output_format` is 'CDHW'"),
    "two kernel sizes": (((1, 1, 4, 4, 4), "float32", (2, 2), None, 0, "NCDHW", None), "`kernel_size` has 2 values"),
    "no kernel": (((1, 1, 4, 4, 4), "float32", 0, None, 0, "NCDHW", None), "`kernel_size` is 0"),
    "a bool": (((1, 1, 4, 4, 4), "float32", True, None, 0, "NCDHW", None), "`kernel_size` is True"),
    "stride": (((1, 1, 4, 4, 4), "float32", 2, (1, 0, 1), 0, "NCDHW", None), "`stride` is"),
    "negative padding": (((1, 1, 4, 4, 4), "float32", 2, 1, -1, "NCDHW", None), "`padding` is -1"),
    "padding": (((1, 1, 4, 4, 4), "float32", 2, 1, (0, 2, 0), "NCDHW", None), "`padding` 2 on axis H"),
    "window": (((1, 1, 4, 4, 4), "float32", (2, 2, 7), 1, (0, 0, 1), "NCDHW", None), "does not fit on axis W"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    arguments, text = WRONG[name]
    with pytest.raises(ValueError, match=r"pool: .*\.$") as error:
        pooling("pool", *arguments)
    assert text in str(error.value)


def test_a_wrong_gradient_is_refused():
    given = ((1, 2, 4, 4, 4), "float32", 2, None, 0, "NCDHW", None, True)
    assert pooling("pool", *given, (1, 2, 2, 2, 2), "float32").small == (2, 2, 2)
    with pytest.raises(ValueError, match="`grad_output` has shape"):
        pooling("pool", *given, (1, 2, 2, 2, 3), "float32")
    with pytest.raises(ValueError, match="`grad_output` has dtype"):
        pooling("pool", *given, (1, 2, 2, 2, 2), "bfloat16")
    with pytest.raises(ValueError, match="avg_pooling_3d_backward: `grad_output`"):
        avg_pooling_3d_backward(np.ones((1, 1, 2, 2, 3), np.float32), np.ones((1, 1, 4, 4, 4), np.float32), 2)


def test_what_does_not_fit_is_refused_with_the_reason():
    given = pooling("pool", (1, 1, 1, 1024, 1024), "float32", (1, 1024, 1024), None, 0, "NCDHW", None)
    for backward in (False, True):
        with pytest.raises(Unsupported, match="1024 x 1024 per plane, do not fit in the 212992 B"):
            plan_pooling(given, backward, BUDGET["trn2"])


# ---- the planner, on what is too large to run --------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 12), st.integers(13, 130), st.sampled_from([96, 128, 256, 500, 512, 1024]))


@st.composite
def geometries(draw, sizes=SIZES, most=64):
    axes = []
    for _ in range(3):
        size = draw(sizes)
        kernel = draw(st.integers(1, min(most, 2 * size)))
        least = max(0, -(-(kernel - size) // 2))
        padding = draw(st.integers(min(least, kernel - 1), max(least, min(kernel - 1, kernel // 2 + 2))))
        if size + 2 * padding < kernel or padding >= kernel:
            kernel, padding = 1, 0
        axes.append((size, kernel, draw(st.one_of(st.just(kernel), st.integers(1, most))), padding))
    size, kernel, stride, padding = (tuple(axis[n] for axis in axes) for n in range(4))
    batch, channels = draw(st.sampled_from([(1, 1), (1, 3), (2, 32), (4, 64), (1, 2048), (8, 20)]))
    data_format, output_format = draw(st.sampled_from(FACTORS["layouts"]))
    shape = (batch, channels, *size) if data_format == "NCDHW" else (batch, *size, channels)
    dtype, pad = draw(st.sampled_from(tuple(NARROW))), draw(st.booleans())
    return pooling("test", shape, dtype, kernel, stride, padding, data_format, output_format, pad)


def check_axis(axis, most_blocks=4):
    """Blocks cover the result once, and their pieces read what the elements of the result read."""
    ends = [axis.span(block) for block in range(axis.blocks)]
    assert ends[0][0] <= 0
    assert ends[-1][1] >= axis.result
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    found = {}
    for piece in axis.pieces():
        for j, r in itertools.product(range(piece.cells), range(piece.repeats)):
            i = piece.dst + j * piece.dst_step + r
            assert i not in found
            start = piece.src + j * piece.src_step
            found[i] = (start, start + piece.taps) if piece.taps else (0, 0)
    assert sorted(found) == list(range(axis.size))
    for block in sorted({0, axis.blocks // 2, axis.blocks - 1})[:most_blocks]:
        low, high = axis.window(block)
        assert high - low == axis.length
        first, _ = axis.span(block)
        for i, (start, end) in found.items():
            lo, hi = axis.reads(first + i)
            if axis.whole:
                lo, hi = max(lo, 0), min(hi, axis.source)
            expected = (lo - low, hi - low) if lo < hi else (0, 0)
            assert (start, end) == expected
            assert 0 <= start <= end <= axis.length


@settings(max_examples=2000)
@given(geometries(), st.booleans(), st.sampled_from(["trn2", "trn3"]))
def test_plans_tile_the_result_and_keep_the_capacity(geometry, backward, target):
    try:
        plan = plan_pooling(geometry, backward, BUDGET[target])
    except Unsupported:
        # only where the smallest window, or cell of the result, is large
        tiles = [PoolAxis(*n, backward, 1) for n in axis_arguments(geometry, backward)]
        assert max(tiles[1].length, tiles[1].size) * max(tiles[2].length, tiles[2].size) > 8192
        return
    assert plan.sbuf_bytes <= BUDGET[target]
    depth, height, width = plan.axes
    planes = plan.planes_at_once or depth.length
    assert planes * height.length * width.length * plan.channels <= ELEMENTS
    assert height.length * width.length * plan.channels <= STRIDE + 1
    for axis in plan.axes:
        check_axis(axis)
    assert plan.chunks * plan.channels >= geometry.channels > (plan.chunks - 1) * plan.channels
    if plan.lanes < 50_000:
        waves = list(plan.waves())
        assert [first for first, _ in waves] == [0, *(end for _, end in waves[:-1])]
        assert waves[-1][1] == plan.lanes
        assert max(end - first for first, end in waves) <= LANES


def axis_arguments(geometry, backward):
    source, result = (geometry.small, geometry.big) if backward else (geometry.big, geometry.small)
    return list(zip(source, result, geometry.kernel, geometry.stride, geometry.padding, strict=True))


@settings(max_examples=150)
@given(geometries(st.integers(1, 9), most=5), st.booleans(), st.integers(1, 2), st.integers(400, 6000))
def test_transfers_write_each_element_once_and_read_within_the_source(geometry, backward, cores, budget):
    """With a budget so small that everything is tiled."""
    try:
        plan = plan_pooling(geometry, backward, budget + 8192)
    except Unsupported:
        return
    if math.prod(geometry.shape(True)) > 40_000:
        return
    written = np.zeros(math.prod(geometry.shape(backward)), np.int64)
    size = math.prod(geometry.shape(not backward))
    for core in range(cores):
        for wave, pieces in plan.work(core, cores):
            assert plan.loads(wave, (0, plan.axes[0].length))
            for transfer in plan.loads(wave, plan.planes_of(pieces))[0]:
                index = addresses(transfer, plan.strides(True), 1)
                assert index.min() >= 0
                assert index.max() < size
            for piece in pieces:
                for transfer in plan.stores(wave, piece):
                    np.add.at(written, addresses(transfer, plan.strides(False), piece.dst_step).ravel(), 1)
    assert (written == 1).all()


def addresses(transfer, strides, depth_step):
    steps = [transfer.row_stride, transfer.lane_stride, strides[1], strides[2] * depth_step, strides[3], strides[4]]
    counts = [transfer.rows, transfer.count, *(count for _, count in transfer.box)]
    total = np.array(transfer.offset)
    for step, count in zip(steps, counts, strict=True):
        total = np.add.outer(total, step * np.arange(count))
    return total


@pytest.mark.parametrize("backward", [False, True])
def test_plans_of_the_largest_volumes(backward):
    for shape, kernel, stride in (
        ((1, 1, 512, 512, 512), 2, 2),
        ((1, 2048, 64, 64, 64), 3, 1),
        ((1, 2, 512, 512, 512), 64, 64),
    ):
        plan = plan_pooling(pooling("test", shape, "bfloat16", kernel, stride, 0, "NCDHW", None), backward, BUDGET["trn2"])
        read = plan.lanes * math.prod(axis.length for axis in plan.axes)
        source = math.prod(plan.given.shape(not backward))
        assert read <= 2 * source + math.prod(plan.given.shape(backward))
        for axis in plan.axes:
            check_axis(axis)
