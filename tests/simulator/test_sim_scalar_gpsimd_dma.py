# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Activations, index patterns, shuffles and DMAs of the NKI interpreter on numbers worked out by hand."""

import math

import numpy as np
import pytest
from simkit import BF16, INF, NAN, apply, f32, i32, nisa, nki, nl, out, run, same, tile_of

cmd = nisa.reduce_cmd


def u32(*rows):
    return np.array(rows, np.uint32)


def column(rows=1, dtype=nl.float32):
    return nl.ndarray((rows, 1), dtype, buffer=nl.sbuf)


# activation


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def normal(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def softplus(x):
    return math.log1p(math.exp(x))


EVERYWHERE = [-3.0, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5]
POSITIVE = [2.0**-20, 0.3, 1.0, 2.5, 2.0**20]
TABLE = {
    "copy": (lambda x: x, EVERYWHERE),
    "square": (lambda x: x * x, EVERYWHERE),
    "sigmoid": (sigmoid, EVERYWHERE),
    "relu": (lambda x: max(x, 0.0), EVERYWHERE),
    "gelu": (lambda x: x * normal(x), EVERYWHERE),
    "gelu_dx": (lambda x: normal(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi), EVERYWHERE),
    "gelu_apprx_tanh": (
        lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        EVERYWHERE,
    ),
    "gelu_apprx_sigmoid": (lambda x: x * sigmoid(1.702 * x), EVERYWHERE),
    "gelu_apprx_sigmoid_dx": (
        lambda x: sigmoid(1.702 * x) * (1 + 1.702 * x * (1 - sigmoid(1.702 * x))),
        EVERYWHERE,
    ),
    "silu": (lambda x: x * sigmoid(x), EVERYWHERE),
    "silu_dx": (lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x))), EVERYWHERE),
    "tanh": (math.tanh, EVERYWHERE),
    "softplus": (softplus, EVERYWHERE),
    "mish": (lambda x: x * math.tanh(softplus(x)), EVERYWHERE),
    "erf": (math.erf, EVERYWHERE),
    "erf_dx": (lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x), EVERYWHERE),
    "exp": (math.exp, EVERYWHERE),
    "log": (math.log, POSITIVE),
    "sin": (math.sin, EVERYWHERE),
    "arctan": (math.atan, [-1.5, -0.25, 0.0, 0.5, 1.5]),
    "sqrt": (math.sqrt, POSITIVE),
    "rsqrt": (lambda x: 1 / math.sqrt(x), POSITIVE),
    "reciprocal": (lambda x: 1 / x, [-3.0, -(2.0**-10), 0.3, 7.0]),
    "sign": (lambda x: float((x > 0) - (x < 0)), EVERYWHERE),
    "abs": (abs, EVERYWHERE),
}


@pytest.mark.parametrize("op", TABLE)
def test_activation_evaluates_its_formula(op):
    formula, points = TABLE[op]
    got = apply(lambda dst, x: nisa.activation(dst, getattr(nl, op), x), (1, len(points)), nl.float32, f32(points))
    exact = [formula(float(np.float32(x))) for x in points]
    np.testing.assert_allclose(got, [exact], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [
        ("sigmoid", 0, 1),
        ("tanh", -1, 1),
        ("gelu", 0, 100),
        ("gelu_apprx_tanh", 0, 100),
        ("gelu_apprx_sigmoid", 0, 100),
        ("silu", 0, 100),
        ("softplus", 0, 100),
        ("mish", 0, 100),
        ("erf", -1, 1),
        ("gelu_dx", 0, 1),
        ("silu_dx", 0, 1),
    ],
)
def test_activation_neither_overflows_nor_cancels_far_from_zero(op, low, high):
    got = apply(lambda dst, x: nisa.activation(dst, getattr(nl, op), x), (1, 2), nl.float32, f32([-100, 100]))
    np.testing.assert_allclose(got, [[low, high]], atol=1e-6)


def test_sin_extrapolates_a_cubic_outside_its_range():
    got = apply(lambda dst, x: nisa.activation(dst, nl.sin, x), (1, 4), nl.float32, f32([9, -9, math.pi / 2, -math.pi / 2]))
    np.testing.assert_allclose(got[0, :2], [27.65, -27.65], atol=0.01)
    np.testing.assert_allclose(got[0, 2:], [1, -1], rtol=1e-6)


def test_nl_sin_and_cos_reduce_their_argument():
    def kernel(a):
        x = tile_of(a)
        return out(nl.sin(x)), out(nl.cos(x))

    x = f32([9, -9, 0.5, 30])
    sin, cos = run(kernel, x)
    np.testing.assert_allclose(sin, np.sin(x), atol=1e-5)
    np.testing.assert_allclose(cos, np.cos(x), atol=1e-5)


def test_activation_scales_and_shifts_by_numbers_and_vectors():
    def numbers(dst, x, _, __):
        nisa.activation(dst, nl.relu, x, 1.0, -2.0)

    def vectors(dst, x, scale, bias):
        nisa.activation(bias=bias, scale=scale, data=x, op=nl.copy, dst=dst)

    data = (f32([1, -1], [2, 0]), f32([10], [100]), f32([1], [2]))
    same(apply(numbers, (2, 2), nl.float32, *data), [[0, 3], [0, 1]])
    same(apply(vectors, (2, 2), nl.float32, *data), [[11, -9], [202, 2]])


def test_activation_takes_a_bias_of_another_type():
    def body(dst, x, bias):
        nisa.activation(dst, nl.copy, x, bias=bias)

    same(apply(body, (1, 1), nl.float32, f32([1]), np.array([[0.5]], BF16)), [[1.5]])


def test_activation_rounds_once_to_its_destination_and_saturates_integers():
    def body(dst, x):
        nisa.activation(dst, nl.copy, x, scale=3.0, bias=1.0)

    # 3 * 2^-9 + 1 rounds up; 3 * 2^-9 alone is exact
    same(apply(body, (1, 1), nl.bfloat16, f32([2**-9])), [[1 + 2**-7]])
    assert apply(body, (1, 3), nl.uint8, f32([100, -1, 0.5])).tolist() == [[255, 0, 2]]


def test_activation_works_in_place_through_psum_and_passes_nan_on():
    def kernel(a):
        x = tile_of(a, nl.psum)
        nisa.activation(x, nl.square, x)
        return out(x)

    same(run(kernel, f32([3, NAN, -INF])), [[9, NAN, INF]])


def test_activation_takes_different_free_ranks():
    def body(dst, x):
        nisa.activation(dst.reshape((1, 2, 2)), nl.copy, x, scale=2.0)

    same(apply(body, (1, 4), nl.float32, f32([1, 2, 3, 4])), [[2, 4, 6, 8]])


def test_activation_sums_what_it_computed_before_rounding():
    def kernel(a):
        x, res = tile_of(a), column()
        dst = nl.ndarray((1, 2), nl.bfloat16, buffer=nl.sbuf)
        nisa.activation(dst, nl.copy, x, reduce_op=nl.add, reduce_res=res, reduce_cmd=cmd.reset_reduce)
        return out(dst), out(res)

    tile, res = run(kernel, f32([1 + 2**-9, 1]))
    same(tile, [[1, 1]])
    same(res, [[2 + 2**-9]])


def chain(*commands):
    """One activation of [1, 2] per command; the registers at the end."""

    def kernel(a):
        x, res = tile_of(a), column()
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.activation(dst, nl.copy, x, reduce_op=nl.add, reduce_cmd=cmd.reset)
        for command in commands:
            nisa.activation(dst, nl.copy, x, reduce_op=nl.add, reduce_cmd=command)
        nisa.activation(dst, nl.copy, x, reduce_op=nl.add, reduce_res=res, reduce_cmd=cmd.idle)
        return out(res)

    return run(kernel, f32([1, 2])).item()


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ((), 0),
        ((cmd.reduce,), 3),
        ((cmd.reduce, cmd.reduce), 6),
        ((cmd.reduce, cmd.idle), 3),
        ((cmd.reduce, cmd.reset), 0),
        ((cmd.reduce, cmd.reset_reduce), 3),
        ((cmd.reset_reduce, cmd.reduce, cmd.reduce), 9),
    ],
    ids=lambda v: "-".join(c.name for c in v) or "none" if isinstance(v, tuple) else str(v),
)
def test_activation_keeps_its_registers_between_instructions(commands, expected):
    assert chain(*commands) == expected


def test_the_registers_of_scalar_belong_to_the_partitions_of_their_operand():
    def kernel(a):
        x, res = tile_of(a), column(64)
        for first, scale in ((0, 1.0), (32, 10.0)):
            part = x[first : first + 32]
            nisa.activation(part, nl.copy, part, scale=scale, reduce_op=nl.add, reduce_cmd=cmd.reset_reduce)
        nisa.activation(x, nl.copy, x, reduce_op=nl.add, reduce_res=res, reduce_cmd=cmd.idle)
        return out(res)

    same(run(kernel, np.ones((64, 2), np.float32)), [[2]] * 32 + [[20]] * 32)


def test_activation_reduce_resets_and_reduces_over_all_free_dimensions():
    def kernel(a):
        x, res = tile_of(a), column(2)
        dst = nl.ndarray((2, 2, 2), nl.float32, buffer=nl.sbuf)
        for _ in range(2):
            nisa.activation_reduce(dst, nl.square, x, nl.add, res, bias=1.0, scale=2.0)
        return out(dst), out(res)

    x = np.array([[[0, 1], [2, 3]], [[0, 0], [0, -1]]], np.float32)
    tile, res = run(kernel, x)
    same(tile, [[[1, 9], [25, 49]], [[1, 1], [1, 1]]])
    same(res, [[84], [4]])


def test_activation_reduce_by_keyword_may_write_its_result_over_its_destination():
    def kernel(a):
        x = tile_of(a)
        nisa.activation_reduce(dst=x, op=nl.copy, data=x, reduce_op=nl.add, reduce_res=x[:, 0:1])
        return out(x)

    same(run(kernel, f32([1, 2, 4])), [[7, 2, 4]])


# activate2 (trn3)


@pytest.mark.parametrize(
    ("op0", "op1", "expected"),
    [
        ("multiply", "add", [3 * 2 + 5]),
        ("multiply", "subtract", [3 * 2 - 5]),
        ("multiply", "bypass", [3 * 2]),
        ("add", "bypass", [3 + 2]),
        ("subtract", "bypass", [3 - 2]),
        ("bypass", "bypass", [3]),
    ],
)
def test_activate2_operator_pairs(op0, op1, expected):
    def body(dst, x):
        nisa.activate2(dst, nl.copy, x, 2.0, 5.0, getattr(nl, op0), getattr(nl, op1))

    same(apply(body, (1, 1), nl.float32, f32([3]), target="trn3"), [expected])


def test_activate2_reverses_and_takes_vectors():
    def body(dst, x, one, two):
        nisa.activate2(
            dst=dst, op=nl.abs, data=x, imm0=one, imm1=two, op0=nl.multiply, op1=nl.subtract, reverse0=True, reverse1=True
        )

    same(apply(body, (2, 1), nl.float32, f32([3], [4]), f32([2], [1]), f32([5], [9]), target="trn3"), [[1], [5]])


def test_activate2_prelu():
    def body(dst, x):
        nisa.activate2(dst, nl.prelu, x, 0.0, 0.0, nl.bypass, nl.bypass, relu_param=0.25)

    same(apply(body, (1, 3), nl.float32, f32([-4, 0, 2]), target="trn3"), [[-1, 0, 2]])


@pytest.mark.parametrize(("op", "expected"), [("add", -2), ("maximum", 2), ("minimum", -5), ("abs_max", -5), ("abs_min", 1)])
def test_activate2_reduces(op, expected):
    def kernel(a):
        x, res = tile_of(a), column()
        nisa.activate2(
            x,
            nl.copy,
            x,
            0.0,
            0.0,
            nl.bypass,
            nl.bypass,
            reduce_op=getattr(nl, op),
            reduce_res=res,
            reduce_cmd=cmd.reset_reduce,
        )
        return out(res)

    same(run(kernel, f32([2, -5, 1]), target="trn3"), [[expected]])


# iota, affine_select


def test_iota():
    def body(dst, _):
        nisa.iota(dst, [[10, 2], [1, 3]], 5, 100)

    same(apply(body, (2, 6), nl.int32, f32([0])), [[5, 6, 7, 15, 16, 17], [105, 106, 107, 115, 116, 117]])


def test_iota_of_four_dimensions_by_keyword_with_negative_steps():
    def body(dst, _):
        nisa.iota(dst=dst, pattern=[[8, 1], [4, 2], [2, 1], [-1, 2]], offset=1, channel_multiplier=-3)

    same(apply(body, (2, 2, 2), nl.float32, f32([0])), [[[1, 0], [5, 4]], [[-2, -3], [2, 1]]])


def test_iota_counts_in_32_bit_integers_and_then_converts():
    def body(dst, _):
        nisa.iota(dst, [[1, 2]], offset=2**24)

    assert apply(body, (1, 2), nl.int32, f32([0])).tolist() == [[2**24, 2**24 + 1]]
    same(apply(body, (1, 2), nl.float32, f32([0])), [[2**24, 2**24]])


def test_affine_select_makes_a_causal_mask():
    def body(dst, x):
        # row - column >= 0
        nisa.affine_select(dst, [[-1, 3]], 1, x, -1.0, nl.greater_equal)

    ones = np.ones((3, 3), np.float32)
    same(apply(body, (3, 3), nl.float32, ones), [[1, -1, -1], [1, 1, -1], [1, 1, 1]])


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("equal", [0, 1, 0]),
        ("not_equal", [1, 0, 1]),
        ("greater", [0, 0, 1]),
        ("greater_equal", [0, 1, 1]),
        ("less", [1, 0, 0]),
        ("less_equal", [1, 1, 0]),
    ],
)
def test_affine_select_compares_with_zero(op, expected):
    def body(dst, x):
        nisa.affine_select(
            dst=dst,
            pattern=[[1, 3]],
            channel_multiplier=0,
            on_true_tile=x,
            on_false_value=0.0,
            cmp_op=getattr(nl, op),
            offset=-1,
        )

    same(apply(body, (1, 3), nl.float32, f32([1, 1, 1])), [expected])


def test_affine_select_compares_for_equality_by_default_and_works_in_place():
    def kernel(a):
        x = tile_of(a)
        nisa.affine_select(x, [[1, 2], [2, 2]], 0, x, NAN, offset=-2)
        return out(x)

    # values -2, 0, -1, 1
    same(run(kernel, f32([1, 2, 3, 4])), [[NAN, 2, NAN, NAN]])


def test_affine_select_converts_through_float32():
    def body(dst, x):
        nisa.affine_select(dst, [[1, 2]], 0, x, 3.0)

    same(apply(body, (1, 2), nl.bfloat16, f32([1 + 2**-9, 5])), [[1, 3]])


def test_affine_select_of_integers_is_exact_and_saturates_what_it_fills_in():
    def body(value):
        return lambda dst, x: nisa.affine_select(dst, [[1, 2]], 0, x, value)

    x = i32([2**24 + 1, 5])
    assert apply(body(3.0), (1, 2), nl.int32, x).tolist() == [[2**24 + 1, 3]]
    assert apply(body(-3e38), (1, 2), nl.int32, x).tolist() == [[2**24 + 1, -(2**31)]]


# nc_stream_shuffle, nc_n_gather


def test_nc_stream_shuffle_moves_partitions_within_each_quadrant():
    mask = [31 - i for i in range(32)]
    mask[0], mask[1] = 255, 0

    def kernel(a, b):
        dst = tile_of(b)
        nisa.nc_stream_shuffle(dst, tile_of(a), mask)
        return out(dst)

    src = np.arange(64, dtype=np.float32).reshape(64, 1)
    got = run(kernel, src, np.full((64, 1), -1, np.float32))
    for quadrant in (0, 32):
        assert got[quadrant : quadrant + 4, 0].tolist() == [-1, quadrant, quadrant + 29, quadrant + 28]
        assert got[quadrant + 31, 0] == quadrant


def test_nc_stream_shuffle_in_place():
    def kernel(a):
        x = tile_of(a)
        nisa.nc_stream_shuffle(src=x, dst=x, shuffle_mask=[1, 0] + [255] * 30)
        return out(x)

    got = run(kernel, np.arange(32, dtype=np.int32).reshape(32, 1))
    assert got[:, 0].tolist() == [1, 0, *range(2, 32)]


def test_nc_n_gather_gathers_within_each_partition():
    got = apply(
        lambda dst, x, i: nisa.nc_n_gather(dst, x.reshape((2, 2, 2)), i),
        (2, 3),
        nl.float32,
        f32([1, 2, 3, 4], [5, 6, 7, 8]),
        u32([3, 0, 0], [1, 2, 3]),
    )
    same(got, [[4, 1, 1], [6, 7, 8]])


# dma_copy


def copied(body, shape, dtype, *arrays):
    """`body(dst, *arrays)` with a new dst in shared HBM."""

    def kernel(*inputs):
        dst = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
        body(dst, *inputs)
        return dst

    return run(kernel, *arrays)


def test_dma_copy_between_hbm_tensors():
    same(copied(nisa.dma_copy, (2, 2), nl.float32, f32([1, NAN], [3, -0.0])), [[1, NAN], [3, -0.0]])


def test_dma_copy_takes_all_its_options():
    def body(dst, src):
        nisa.dma_copy(
            src=src,
            dst=dst,
            priority=None,
            oob_mode=nisa.oob_mode.error,
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.sync,
            name="copy",
        )

    same(copied(body, (1, 1), nl.float32, f32([5])), [[5]])


@pytest.mark.parametrize("mode", ["none", "swdge", "hwdge", "unknown"])
def test_dma_copy_of_static_addresses_runs_in_every_mode(mode):
    same(
        copied(lambda dst, src: nisa.dma_copy(dst, src, dge_mode=getattr(nisa.dge_mode, mode)), (1, 1), nl.float32, f32([5])),
        [[5]],
    )


@pytest.mark.parametrize(
    ("source", "dtype", "values", "expected"),
    [
        (np.float32, nl.bfloat16, [1 + 2**-9, 1 + 3 * 2**-8, NAN], [1, 1 + 2**-6, NAN]),
        (BF16, nl.float32, [1.5, -INF], [1.5, -INF]),
        (np.float32, nl.int8, [0.5, 1.5, 300], [0, 2, 127]),
        (np.int32, nl.float32, [2**24 + 1, -3], [2**24, -3]),
        (np.int32, nl.uint8, [-1, 256, 7], [0, 255, 7]),
    ],
    ids=["f32-bf16", "bf16-f32", "f32-int8", "int32-f32", "int32-uint8"],
)
def test_dma_copy_converts_through_float32(source, dtype, values, expected):
    got = copied(nisa.dma_copy, (1, len(values)), dtype, np.array([values], source))
    same(got, [expected])


def test_dma_copy_of_equal_types_is_bit_exact():
    assert copied(nisa.dma_copy, (1, 1), nl.int32, i32([2**24 + 1])).tolist() == [[2**24 + 1]]


def test_dma_copy_reads_four_dimensions_into_two_and_back():
    data = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2)

    def kernel(a):
        tile = nl.ndarray((4, 4), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(tile, a)
        back = nl.ndarray((2, 2, 2, 2), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(back, tile)
        return out(tile), back

    flat, back = run(kernel, data)
    same(flat, data.reshape(4, 4))
    same(back, data)


def test_dma_copy_of_a_permuted_view_permutes():
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    same(copied(lambda dst, src: nisa.dma_copy(dst, src.permute((1, 0))), (3, 2), nl.float32, data), data.T)


def test_dma_copy_of_overlapping_windows_makes_im2col():
    same(
        copied(lambda dst, src: nisa.dma_copy(dst, src.ap([[1, 3], [1, 2]], offset=0)), (3, 2), nl.float32, f32([1, 2, 3, 4])),
        [[1, 2], [2, 3], [3, 4]],
    )


def test_dma_copy_repeats_one_row_to_all_partitions():
    def body(dst, src):
        nisa.dma_copy(dst, src.broadcast(0, 3))

    same(copied(body, (3, 2), nl.float32, f32([1, 2])), [[1, 2]] * 3)


def test_dma_copy_to_a_strided_view_leaves_the_rest():
    def kernel(a):
        tile = nl.ndarray((1, 4), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(tile[:, 0:4:2], a)
        return out(tile)

    assert run(kernel, i32([7, 8])).tolist() == [[7, 4, 8, 4]]


def test_dma_copy_starts_at_any_partition():
    def kernel(a):
        tile = nl.ndarray((8, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(tile[3:5], a)
        return out(tile)

    assert run(kernel, i32([7], [8])).tolist() == [[4]] * 3 + [[7], [8]] + [[4]] * 3


ROWS = f32([0, 1], [10, 11], [20, 21], [30, 31])


def gather(indices, mode=nisa.oob_mode.error, select=False):
    def kernel(a, i):
        index = tile_of(i)
        dst = nl.ndarray((i.shape[0], 2), nl.float32, buffer=nl.sbuf)
        nisa.memset(dst, -1.0)
        rows = a.vector_select(0, index) if select else a.ap([[2, i.shape[0]], [1, 2]], vector_offset=index, indirect_dim=0)
        nisa.dma_copy(dst, rows, oob_mode=mode)
        return out(dst)

    return run(kernel, ROWS, np.array(indices, np.uint32).reshape(-1, 1))


@pytest.mark.parametrize("select", [False, True], ids=["ap", "vector_select"])
def test_dma_copy_gathers_rows(select):
    same(gather([2, 0, 2], select=select), [[20, 21], [0, 1], [20, 21]])


def test_dma_copy_skips_or_reports_rows_out_of_bounds():
    same(gather([3, 4, 1], nisa.oob_mode.skip), [[30, 31], [-1, -1], [10, 11]])
    with pytest.raises(nki.NkiValidationError, match="4"):
        gather([3, 4, 1])


def test_dma_copy_gathers_parts_of_rows():
    def kernel(a, i):
        dst = nl.ndarray((2, 1), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst, a.ap([[2, 2], [1, 1]], offset=1, vector_offset=tile_of(i)))
        return out(dst)

    same(run(kernel, ROWS, u32([3], [1])), [[31], [11]])


@pytest.mark.parametrize("skip", [False, True])
def test_dma_copy_scatters_rows(skip):
    def kernel(a, i):
        values, index = tile_of(a), tile_of(i)
        dst = nl.ndarray((4, 2), nl.float32, buffer=nl.shared_hbm)
        zeros = nl.zeros((4, 2), nl.float32)
        nisa.dma_copy(dst, zeros)
        mode = nisa.oob_mode.skip if skip else nisa.oob_mode.error
        nisa.dma_copy(dst.ap([[2, 2], [1, 2]], vector_offset=index), values, oob_mode=mode)
        return dst

    data, expected = f32([1, 2], [3, 4]), np.zeros((4, 2), np.float32)
    expected[3] = [1, 2]
    if skip:
        same(run(kernel, data, u32([3], [9])), expected)
        return
    expected[0] = [3, 4]
    same(run(kernel, data, u32([3], [0])), expected)
    with pytest.raises(nki.NkiValidationError, match="9"):
        run(kernel, data, u32([3], [9]))


@pytest.mark.parametrize("how", ["register", "tensor", "select", "ds", "index"])
def test_dma_copy_reads_at_a_run_time_offset(how):
    def kernel(a, i):
        cell = tile_of(i)
        register = nisa.register_alloc()
        nisa.register_load(register, cell)
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        sources = {
            "register": lambda: a.ap([[2, 1], [1, 2]], scalar_offset=register, indirect_dim=0),
            "tensor": lambda: a.ap([[2, 1], [1, 2]], scalar_offset=cell, indirect_dim=0),
            "select": lambda: a.select(0, cell),
            "ds": lambda: a[nl.ds(register, 1)],
            "index": lambda: a[cell],
        }
        nisa.dma_copy(dst, sources[how]())
        return out(dst)

    same(run(kernel, ROWS, i32([2])), [[20, 21]])


def test_a_run_time_offset_counts_in_strides_of_its_dimension():
    def kernel(a):
        register = nisa.register_alloc(1)
        dst = nl.ndarray((4, 1), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst, a.ap([[2, 4], [1, 1]], scalar_offset=register, indirect_dim=1))
        return out(dst)

    same(run(kernel, ROWS), [[1], [11], [21], [31]])


def test_a_run_time_offset_out_of_bounds_is_an_error_or_skipped():
    def kernel(a, mode):
        register = nisa.register_alloc(4)
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.memset(dst, -1.0)
        nisa.dma_copy(dst, a.ap([[2, 1], [1, 2]], scalar_offset=register), oob_mode=mode)
        return out(dst)

    same(run(kernel, ROWS, mode=nisa.oob_mode.skip), [[-1, -1]])
    with pytest.raises(nki.NkiValidationError, match="4"):
        run(kernel, ROWS, mode=nisa.oob_mode.error)


def test_run_time_offsets_serve_engines_too():
    def kernel(a, i):
        x, register = tile_of(a), nisa.register_alloc()
        nisa.register_load(register, i)
        dst = nl.ndarray((2, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst, x[:, nl.ds(register, 1)])
        return out(dst)

    same(run(kernel, f32([1, 2, 3], [4, 5, 6]), i32([2])), [[3], [6]])


@pytest.mark.parametrize("priority", [0, 3])
def test_dma_copy_takes_a_priority_on_trn3(priority):
    def kernel(a):
        dst = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst, a, priority=priority)
        return dst

    same(run(kernel, f32([5]), target="trn3"), [[5]])


# dma_transpose


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 3), (1, 0)), ((2, 3, 4), (2, 1, 0)), ((2, 3, 4, 5), (3, 1, 2, 0))],
    ids=["2-d", "3-d", "4-d"],
)
@pytest.mark.parametrize("source", ["hbm", "sbuf"])
@pytest.mark.parametrize("given", [True, False], ids=["axes", "default"])
def test_dma_transpose(shape, axes, source, given):
    data = np.arange(math.prod(shape)).reshape(shape).astype(BF16)

    def kernel(a):
        src = tile_of(a) if source == "sbuf" else a
        dst = nl.ndarray(tuple(shape[axis] for axis in axes), nl.bfloat16, buffer=nl.sbuf)
        if given:
            nisa.dma_transpose(dst, src, axes)
        else:
            nisa.dma_transpose(src=src, dst=dst)
        return out(dst)

    same(run(kernel, data), data.transpose(axes))


def test_dma_transpose_in_hardware():
    data = np.arange(16 * 128).reshape(16, 128).astype(BF16)

    def kernel(a):
        dst = nl.ndarray((128, 16), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_transpose(dst, a, dge_mode=nisa.dge_mode.hwdge)
        return out(dst)

    same(run(kernel, data), data.T)


def test_dma_transpose_gathers_rows():
    data = np.arange(32 * 4).reshape(32, 4).astype(BF16)
    index = np.arange(16, dtype=np.uint32)[::-1].reshape(16, 1) * 2

    def kernel(a, i):
        dst = nl.ndarray((4, 16), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_transpose(dst, a.ap([[4, 16], [1, 4]], vector_offset=tile_of(i)), axes=(1, 0))
        return out(dst)

    same(run(kernel, data, np.ascontiguousarray(index)), data[index[:, 0]].T)


# dma_compute


def test_dma_compute_sums_in_float32_and_rounds_once():
    def body(dst, a, b, c):
        nisa.dma_compute(dst, [a, b, c], nl.add)

    parts = [np.array([[v]], BF16) for v in (256, 1, 1)]
    # 256 + 1 rounded in between would stay 256
    same(copied(body, (1, 1), nl.bfloat16, *parts), [[258]])


def test_dma_compute_reads_sbuf_takes_unit_scales_and_writes_in_place():
    def kernel(a, b):
        x = tile_of(a)
        nisa.dma_compute(dst=x, srcs=(x, b), reduce_op=nl.add, scales=[1.0, 1.0])
        return out(x)

    same(run(kernel, f32([1, 2]), f32([10, 20])), [[11, 22]])


def test_dma_compute_takes_16_sources():
    def body(dst, a):
        nisa.dma_compute(dst, [a] * 16, nl.add)

    same(copied(body, (1, 1), nl.float32, f32([1])), [[16]])


def test_dma_compute_scatters_sums():
    def kernel(table, values, i):
        result = nl.ndarray((4, 2), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result, table)
        rows = result.ap([[2, 2], [1, 2]], vector_offset=tile_of(i))
        nisa.dma_compute(rows, [rows, tile_of(values)], nl.add)
        return result

    got = run(kernel, ROWS, f32([100, 200], [300, 400]), u32([3], [0]))
    same(got, [[300, 401], [10, 11], [20, 21], [130, 231]])


def test_dma_compute_gathers_sums():
    def kernel(table, values, i):
        x = tile_of(values)
        nisa.dma_compute(x, [x, table.ap([[2, 2], [1, 2]], vector_offset=tile_of(i))], nl.add)
        return out(x)

    same(run(kernel, ROWS, f32([100, 200], [300, 400]), u32([3], [0])), [[130, 231], [300, 401]])
