# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Element-wise instructions, copies and constants of the NKI interpreter on numbers worked out by hand."""

import ml_dtypes
import numpy as np
import pytest
from simkit import BF16, E4M3, E5M2, INF, NAN, apply, f32, i32, nisa, nki, nl, out, run, same, tile_of

HALF = 2.0**-9  # 1 + HALF is no bfloat16 and lies below half of the step 2^-7
EMPTY = f32([0])

# tensor_copy


@pytest.mark.parametrize("engine", ["unknown", "vector", "scalar", "gpsimd"])
def test_tensor_copy_copies_on_every_engine(engine):
    def body(dst, x):
        nisa.tensor_copy(dst, x, getattr(nisa.engine, engine))

    same(apply(body, (2, 2), nl.float32, f32([1, NAN], [-INF, -0.0])), [[1, NAN], [-INF, -0.0]])


def test_tensor_copy_by_keyword():
    same(apply(lambda dst, x: nisa.tensor_copy(src=x, dst=dst, name="c"), (1, 1), nl.float32, f32([5])), [[5]])


def test_tensor_copy_between_equal_types_is_bit_exact():
    # beyond 2^24: through float32 the last bit would go
    got = apply(nisa.tensor_copy, (1, 3), nl.int32, i32([2**24 + 1, 2**31 - 1, -(2**31)]))
    assert got.tolist() == [[2**24 + 1, 2**31 - 1, -(2**31)]]


def test_tensor_copy_between_types_goes_through_float32():
    got = apply(nisa.tensor_copy, (1, 2), nl.uint32, i32([2**24 + 1, 7]))
    assert got.tolist() == [[2**24, 7]]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (nl.bfloat16, [1 + HALF, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38], [1, 1, 1 + 2**-6, INF]),
        (nl.float16, [1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520], [1, 1 + 2**-9, 65504, INF]),
        (nl.float8_e5m2, [1.125, 1.375, 0.3], [1, 1.5, 0.3125]),
        (nl.float8_e4m3, [1.0625, 1.1875, 17], [1, 1.25, 16]),
        (nl.int32, [0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, INF], [0, 2, 2, 0, -2, 2**31 - 1, -(2**31), 2**31 - 1]),
        (nl.int16, [32767.4, 32768, -32769, 2.5], [32767, 32767, -32768, 2]),
        (nl.int8, [127.4, 128, -129, 3.5], [127, 127, -128, 4]),
        (nl.uint8, [-1, 255.4, 256, 0.5, 254.5, -INF], [0, 255, 255, 0, 254, 0]),
        (nl.uint16, [-1, 65535, 65536], [0, 65535, 65535]),
        (nl.uint32, [-1, 2.0**32, 2.0**31], [0, 2**32 - 1, 2**31]),
    ],
    ids=["bf16", "fp16", "e5m2", "e4m3", "int32", "int16", "int8", "uint8", "uint16", "uint32"],
)
def test_a_store_rounds_to_nearest_even_once_and_saturates_integers(dtype, values, expected):
    got = apply(nisa.tensor_copy, (1, len(values)), dtype, f32(values))
    assert got.astype(np.float64).tolist() == [expected]


def test_tensor_copy_keeps_nan_in_every_floating_type():
    for dtype in (nl.bfloat16, nl.float16, nl.float8_e4m3, nl.float8_e5m2):
        assert np.isnan(apply(nisa.tensor_copy, (1, 1), dtype, f32([NAN])).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 2, 2), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]), ((2, 1, 4), [[[1, 2, 3, 4]], [[5, 6, 7, 8]]])],
    ids=["2-2", "1-4"],
)
def test_tensor_copy_needs_equal_counts_not_equal_ranks(shape, expected):
    same(apply(nisa.tensor_copy, shape, nl.float32, f32([1, 2, 3, 4], [5, 6, 7, 8])), expected)


def test_tensor_copy_transposes_free_dimensions_by_its_views():
    def body(dst, x):
        nisa.tensor_copy(dst.reshape((1, 3, 2)), x.reshape((1, 2, 3)).permute((0, 2, 1)))

    same(apply(body, (1, 6), nl.float32, f32([1, 2, 3, 4, 5, 6])), [[1, 4, 2, 5, 3, 6]])


def test_tensor_copy_through_psum():
    def body(dst, x):
        nisa.tensor_copy(dst, x)

    same(apply(body, (1, 2), nl.float32, f32([1, 2]), buffer=nl.psum), [[1, 2]])


def test_tensor_copy_onto_an_overlapping_view_reads_before_it_writes():
    def kernel(a):
        x = tile_of(a)
        nisa.tensor_copy(x[:, 1:4], x[:, 0:3])
        return out(x)

    same(run(kernel, f32([1, 2, 3, 4])), [[1, 1, 2, 3]])


def test_tensor_copy_moves_rows_between_quadrants():
    def body(dst, x):
        nisa.memset(dst, 0.0)
        nisa.tensor_copy(dst[96:128], x[0:32])

    data = np.ones((32, 1), np.float32)
    same(apply(body, (128, 1), nl.float32, data), [[0]] * 96 + [[1]] * 32)


# memset


@pytest.mark.parametrize("engine", ["unknown", "vector", "gpsimd"])
def test_memset_fills(engine):
    def body(dst, _):
        nisa.memset(dst, 1.5, getattr(nisa.engine, engine))

    same(apply(body, (2, 2), nl.float32, EMPTY), [[1.5, 1.5], [1.5, 1.5]])


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (nl.float32, 0, 0),
        (nl.float32, -INF, -INF),
        (nl.float32, NAN, NAN),
        (nl.bfloat16, 1 + HALF, 1),
        (nl.int32, -7, -7),
        (nl.uint8, 255, 255),
        (nl.uint32, 2**32 - 1, 2**32 - 1),
        (nl.float8_e4m3, 2, 2),
        (nl.tfloat32, 1 + 2**-12, 1),
    ],
    ids=["int-in-float", "infinity", "nan", "bf16", "int32", "uint8", "uint32", "fp8", "tf32"],
)
def test_memset_converts_to_the_type(dtype, value, expected):
    same(apply(lambda dst, _: nisa.memset(value=value, dst=dst), (1, 2), dtype, EMPTY), [[expected, expected]])


def test_memset_of_a_part_leaves_the_rest():
    def body(dst, x):
        nisa.tensor_copy(dst, x)
        nisa.memset(dst[:, 1:4:2], 0.0)

    same(apply(body, (1, 4), nl.float32, f32([1, 2, 3, 4])), [[1, 0, 3, 0]])


@pytest.mark.parametrize("dtype", [nl.float8_e4m3fn_x4, nl.float8_e5m2_x4, nl.float4_e2m1fn_x4])
def test_memset_of_packed_types_takes_zero(dtype):
    def kernel(_):
        packed = nl.ndarray((1, 2), dtype, buffer=nl.sbuf)
        nisa.memset(packed, 0)
        return out(packed.view(nl.uint32 if dtype != nl.float4_e2m1fn_x4 else nl.uint16))

    assert run(kernel, EMPTY).tolist() == [[0, 0]]


# tensor_tensor

A, B = [4, -3, 0.5, 2], [2, 2, 0.5, -2]
BINARY = {
    "add": [6, -1, 1, 0],
    "subtract": [2, -5, 0, 4],
    "multiply": [8, -6, 0.25, -4],
    "maximum": [4, 2, 0.5, 2],
    "minimum": [2, -3, 0.5, -2],
    "equal": [0, 0, 1, 0],
    "not_equal": [1, 1, 0, 1],
    "greater_equal": [1, 0, 1, 1],
    "greater": [1, 0, 0, 1],
    "less_equal": [0, 1, 1, 0],
    "less": [0, 1, 0, 0],
    "power": [16, 9, 0.5**0.5, 0.25],
}


@pytest.mark.parametrize("op", BINARY)
def test_tensor_tensor_operators(op):
    got = apply(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, getattr(nl, op)), (1, 4), nl.float32, f32(A), f32(B))
    np.testing.assert_allclose(got, [BINARY[op]], rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "expected"), [("logical_and", [1, 0, 0, 0]), ("logical_or", [1, 1, 1, 0]), ("logical_xor", [0, 1, 1, 0])]
)
def test_tensor_tensor_logic_takes_any_number_but_0_as_true(op, expected):
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, getattr(nl, op)),
        (1, 4),
        nl.float32,
        f32([0.5, -2, 0, 0]),
        f32([3, 0, 1, 0]),
    )
    same(got, [expected])


@pytest.mark.parametrize(("op", "expected"), [("abs_max", [4, -3, 0.5, -2]), ("abs_min", [2, 2, 0.5, -2])])
def test_tensor_tensor_compares_magnitudes_and_keeps_signs_on_trn3(op, expected):
    # of equal magnitudes the second
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, getattr(nl, op)), (1, 4), nl.float32, f32(A), f32(B), target="trn3"
    )
    same(got, [expected])


def test_tensor_tensor_by_keyword_and_by_position():
    def keyword(dst, a, b):
        nisa.tensor_tensor(op=nl.subtract, data2=b, data1=a, dst=dst, engine=nisa.engine.vector, name="t")

    def position(dst, a, b):
        nisa.tensor_tensor(dst, a, b, nl.subtract, nisa.engine.gpsimd, "t")

    for body in (keyword, position):
        same(apply(body, (1, 2), nl.float32, f32([5, 1]), f32([2, 4])), [[3, -3]])


def test_tensor_tensor_rounds_bfloat16_once():
    # 1 + 2^-8 rounded in between would lose 2^-8; the sum 1 + 2^-7 is a bfloat16
    one = np.array([[1, 256]], BF16)
    two = np.array([[2**-7, 1]], BF16)
    got = apply(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add), (1, 2), nl.bfloat16, one, two)
    same(got, [[1 + 2**-7, 256]])  # 257 is half way between 256 and 258: to even


def test_tensor_tensor_of_bfloat16_inputs_gives_float32_where_asked():
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add),
        (1, 1),
        nl.float32,
        np.array([[256]], BF16),
        np.array([[1]], BF16),
    )
    same(got, [[257]])


def test_tensor_tensor_passes_nan_on():
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add), (1, 3), nl.float32, f32([NAN, INF, INF]), f32([1, 1, -INF])
    )
    same(got, [[NAN, INF, NAN]])


@pytest.mark.parametrize("which", [0, 1])
def test_tensor_tensor_writes_in_place(which):
    def kernel(a, b):
        tiles = [tile_of(a), tile_of(b)]
        nisa.tensor_tensor(tiles[which], tiles[0], tiles[1], nl.subtract)
        return out(tiles[which])

    same(run(kernel, f32([5, 1]), f32([2, 4])), [[3, -3]])


def test_tensor_tensor_squares_in_place():
    def kernel(a):
        x = tile_of(a)
        nisa.tensor_tensor(x, x, x, nl.multiply)
        return out(x)

    same(run(kernel, f32([3, -2])), [[9, 4]])


def test_tensor_tensor_takes_different_free_ranks():
    def body(dst, a, b):
        nisa.tensor_tensor(dst, a.reshape((1, 2, 2)), b, nl.add)

    same(apply(body, (1, 4, 1), nl.float32, f32([1, 2, 3, 4]), f32([10, 20, 30, 40])), [[[11], [22], [33], [44]]])


def test_tensor_tensor_reads_one_operand_from_psum_and_writes_psum():
    def kernel(a, b):
        x, y = tile_of(a, nl.psum), tile_of(b)
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.psum)
        nisa.tensor_tensor(dst, x, y, nl.add)
        nisa.tensor_tensor(dst, y, dst, nl.multiply)
        return out(dst)

    same(run(kernel, f32([1, 2]), f32([10, 20])), [[110, 440]])


def test_tensor_tensor_of_32_bit_integers_is_exact_by_default():
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add),
        (1, 2),
        nl.int32,
        i32([2**24 + 1, 2**30]),
        i32([2, 2**29 + 1]),
    )
    assert got.tolist() == [[2**24 + 3, 2**30 + 2**29 + 1]]


def test_tensor_tensor_of_32_bit_integers_on_the_vector_engine_goes_through_float32():
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add, engine=nisa.engine.vector),
        (1, 2),
        nl.int32,
        i32([2**24 + 1, 2**31 - 1]),
        i32([2, 2**31 - 1]),
    )
    # 2^24 + 1 becomes 2^24; the second sum, 2^32, saturates
    assert got.tolist() == [[2**24 + 2, 2**31 - 1]]


def test_tensor_tensor_of_32_bit_integers_in_psum_falls_back_to_the_vector_engine():
    def kernel(a, b):
        x = tile_of(a, nl.psum)
        dst = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst, x, tile_of(b), nl.add)
        return out(dst)

    got, p = nki.profile(kernel, target="trn2")(i32([2**24 + 1]), i32([2]))
    assert got.tolist() == [[2**24 + 2]]
    # the copy to PSUM and the sum
    assert (p.engines["vector"].instructions, p.engines["gpsimd"].instructions) == (2, 0)


def test_tensor_tensor_of_narrow_integers_saturates():
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add),
        (1, 3),
        nl.uint8,
        np.array([[200, 1, 0]], np.uint8),
        np.array([[100, 1, 0]], np.uint8),
    )
    assert got.tolist() == [[255, 2, 0]]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("bitwise_and", [0b1000, 0]),
        ("bitwise_or", [0b1110, 0xFF]),
        ("bitwise_xor", [0b0110, 0xFF]),
        ("left_shift", [0b110000000000 & 0xFF, 0xF0]),
        ("right_shift", [0, 0xF0]),
    ],
)
def test_tensor_tensor_works_on_bits(op, expected):
    right = [0b1010, 0x0F] if op.startswith("bitwise") else [10, 0]
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor(dst, a, b, getattr(nl, op)),
        (1, 2),
        nl.uint8,
        np.array([[0b1100, 0xF0]], np.uint8),
        np.array([right], np.uint8),
    )
    assert got.tolist() == [expected]


def test_bitwise_operators_convert_nothing():
    big = 2**30 + 1
    got = apply(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.bitwise_or), (1, 1), nl.int32, i32([big]), i32([2]))
    assert got.tolist() == [[big + 2]]


# tensor_scalar


@pytest.mark.parametrize(
    ("op", "reverse", "expected"),
    [
        ("add", False, [5, 1]),
        ("subtract", False, [1, -3]),
        ("subtract", True, [-1, 3]),
        ("multiply", False, [6, -2]),
        ("maximum", False, [3, 2]),
        ("minimum", False, [2, -1]),
        ("power", False, [9, 1]),
        ("power", True, [8, 0.5]),
        ("greater", False, [1, 0]),
        ("greater", True, [0, 1]),
        ("less_equal", False, [0, 1]),
        ("equal", False, [0, 0]),
        ("not_equal", False, [1, 1]),
    ],
)
def test_tensor_scalar_with_a_number(op, reverse, expected):
    got = apply(
        lambda dst, x: nisa.tensor_scalar(dst, x, getattr(nl, op), 2.0, reverse0=reverse), (1, 2), nl.float32, f32([3, -1])
    )
    np.testing.assert_allclose(got, [expected], rtol=1e-6)


def test_tensor_scalar_with_two_operators_and_both_reversed():
    def forward(dst, x):
        nisa.tensor_scalar(dst, x, nl.subtract, 1.0, False, nl.multiply, 3.0)

    def backward(dst, x):
        nisa.tensor_scalar(
            dst=dst, data=x, op0=nl.subtract, operand0=1.0, reverse0=True, op1=nl.subtract, operand1=10.0, reverse1=True
        )

    same(apply(forward, (1, 2), nl.float32, f32([4, 0])), [[9, -3]])
    same(apply(backward, (1, 2), nl.float32, f32([4, 0])), [[13, 9]])  # 10 - (1 - x)


def test_tensor_scalar_with_a_vector_per_partition():
    def body(dst, x, v, w):
        nisa.tensor_scalar(dst, x, nl.multiply, v, op1=nl.add, operand1=w)

    got = apply(body, (2, 2), nl.float32, f32([1, 2], [3, 4]), f32([10], [100]), f32([0.5], [-1]))
    same(got, [[10.5, 20.5], [299, 399]])


def test_tensor_scalar_broadcasts_over_every_free_dimension():
    def body(dst, x, v):
        nisa.tensor_scalar(dst, x.reshape((2, 2, 2)), nl.add, v)

    got = apply(body, (2, 4), nl.float32, f32([1, 2, 3, 4], [5, 6, 7, 8]), f32([10], [20]))
    same(got, [[11, 12, 13, 14], [25, 26, 27, 28]])


def test_tensor_scalar_takes_a_column_of_a_wider_tile_and_of_psum():
    def kernel(a, b):
        x, v = tile_of(a), tile_of(b, nl.psum)
        nisa.tensor_scalar(x, x, nl.add, v[:, 1:2])
        return out(x)

    same(run(kernel, f32([1, 2], [3, 4]), f32([0, 10], [0, 20])), [[11, 12], [23, 24]])


def test_tensor_scalar_rounds_once_after_both_operators():
    # 1 + 3 * 2^-9 is above the half way to 1 + 2^-7; rounded after the first operator it would end at 1
    def body(dst, x):
        nisa.tensor_scalar(dst, x, nl.add, HALF, op1=nl.add, operand1=2 * HALF)

    same(apply(body, (1, 1), nl.bfloat16, f32([1])), [[1 + 2**-7]])


def test_tensor_scalar_saturates_integers_and_rounds_halves_to_even():
    def body(dst, x):
        nisa.tensor_scalar(dst, x, nl.multiply, 0.5)

    got = apply(body, (1, 5), nl.int8, i32([1, 3, 5, 1000, -1000]))
    assert got.tolist() == [[0, 2, 2, 127, -128]]


@pytest.mark.parametrize(
    ("op", "target", "expected"), [("abs", "trn2", [2, 3]), ("square", "trn3", [4, 9]), ("relu", "trn3", [0, 3])]
)
@pytest.mark.parametrize("operand", [None, 0, 0.0], ids=["None", "int", "float"])
def test_tensor_scalar_unary_operators_take_none_or_zero(op, target, expected, operand):
    got = apply(
        lambda dst, x: nisa.tensor_scalar(dst, x, getattr(nl, op), operand), (1, 2), nl.float32, f32([-2, 3]), target=target
    )
    same(got, [expected])


def test_tensor_scalar_rsqrt():
    got = apply(lambda dst, x: nisa.tensor_scalar(dst, x, nl.rsqrt, 0.0), (1, 3), nl.float32, f32([4, 0.25, 1]))
    np.testing.assert_allclose(got, [[0.5, 2, 1]], rtol=1e-6)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ((nl.multiply, 2.0, False, nl.add, 1.0), [[7, -3]]),
        ((nl.multiply, 2.0), [[6, -4]]),
        ((nl.add, 2.0), [[5, 0]]),
    ],
    ids=["multiply-add", "multiply", "add"],
)
def test_tensor_scalar_on_the_scalar_engine(ops, expected, target):
    got = apply(
        lambda dst, x: nisa.tensor_scalar(dst, x, *ops, engine=nisa.engine.scalar),
        (1, 2),
        nl.float32,
        f32([3, -2]),
        target=target,
    )
    same(got, expected)


@pytest.mark.parametrize(
    ("op", "operand", "expected"),
    [
        ("bitwise_and", 0x0F, [0x05, 0x00]),
        ("bitwise_or", 0x0F, [0xAF, 0xFF]),
        ("bitwise_xor", 0xFF, [0x5A, 0x0F]),
        ("left_shift", 4, [0x50, 0x00]),
        ("right_shift", 4, [0x0A, 0x0F]),
        ("invert", None, [0x5A, 0x0F]),
    ],
)
def test_tensor_scalar_works_on_bits(op, operand, expected):
    got = apply(
        lambda dst, x: nisa.tensor_scalar(dst, x, getattr(nl, op), operand),
        (1, 2),
        nl.uint8,
        np.array([[0xA5, 0xF0]], np.uint8),
    )
    assert got.tolist() == [expected]


def test_tensor_scalar_chains_two_bitwise_operators():
    def body(dst, x):
        nisa.tensor_scalar(dst, x, nl.right_shift, 16, op1=nl.bitwise_and, operand1=0xFF)

    got = apply(body, (1, 1), nl.uint32, np.array([[0x00AB1234]], np.uint32))
    assert got.tolist() == [[0xAB]]


def test_tensor_scalar_reverses_shifts():
    def body(dst, x):
        nisa.tensor_scalar(dst, x, nl.left_shift, 1, reverse0=True, op1=nl.right_shift, operand1=64, reverse1=True)

    # 64 >> (1 << x)
    assert apply(body, (1, 3), nl.int32, i32([0, 1, 2])).tolist() == [[32, 16, 4]]


def test_bits_of_floats_are_reached_by_a_view():
    def kernel(a):
        x = tile_of(a)
        bits = x.view(nl.uint32)
        nisa.tensor_scalar(bits, bits, nl.bitwise_and, 0x7FFFFFFF)
        return out(x)

    same(run(kernel, f32([-1.5, 2, -INF])), [[1.5, 2, INF]])


def test_tensor_scalar_passes_nan_on_and_compares_it_as_false():
    got = apply(lambda dst, x: nisa.tensor_scalar(dst, x, nl.add, 1.0), (1, 1), nl.float32, f32([NAN]))
    same(got, [[NAN]])
    got = apply(lambda dst, x: nisa.tensor_scalar(dst, x, nl.equal, NAN), (1, 1), nl.float32, f32([NAN]))
    same(got, [[0]])


# scalar_tensor_tensor


def test_scalar_tensor_tensor_with_a_number():
    def body(dst, x, y):
        nisa.scalar_tensor_tensor(dst, x, nl.multiply, 2.0, nl.add, y)

    same(apply(body, (1, 2), nl.float32, f32([1, 2]), f32([10, 20])), [[12, 24]])


def test_scalar_tensor_tensor_with_a_vector_and_both_reversed():
    def body(dst, x, v, y):
        nisa.scalar_tensor_tensor(
            dst=dst, data=x, op0=nl.subtract, operand0=v, op1=nl.subtract, operand1=y, reverse0=True, reverse1=True
        )

    # y - (v - x)
    same(apply(body, (2, 1), nl.float32, f32([1], [2]), f32([10], [20]), f32([100], [200])), [[91], [182]])


def test_scalar_tensor_tensor_rounds_once_and_writes_in_place():
    def kernel(a, b):
        x, y = tile_of(a), tile_of(b)
        nisa.scalar_tensor_tensor(x, x, nl.add, HALF, nl.add, y)
        return out(x)

    one = np.array([[1]], BF16)
    same(run(kernel, one, np.array([[2 * HALF]], BF16)), [[1 + 2**-7]])


def test_scalar_tensor_tensor_takes_different_free_ranks():
    def body(dst, x, y):
        nisa.scalar_tensor_tensor(dst, x.reshape((1, 2, 2)), nl.multiply, 1.0, nl.add, y)

    same(apply(body, (1, 4), nl.float32, f32([1, 2, 3, 4]), f32([1, 1, 1, 1])), [[2, 3, 4, 5]])


# reciprocal


def test_reciprocal():
    got = apply(nisa.reciprocal, (1, 5), nl.float32, f32([2, -4, INF, 0, NAN]))
    same(got, [[0.5, -0.25, 0, INF, NAN]])


def test_reciprocal_rounds_to_the_destination_and_works_in_place():
    def kernel(a):
        x = tile_of(a)
        nisa.reciprocal(dst=x, data=x)
        return out(x)

    # 1/3 in bfloat16 is 171/512
    same(run(kernel, np.array([[3, 2]], BF16)), [[171 / 512, 0.5]])


# tensor_copy_predicated


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32], ids=["uint8", "uint16", "uint32"])
@pytest.mark.parametrize(("reverse", "expected"), [(False, [10, 2, 30]), (True, [1, 20, 3])])
def test_tensor_copy_predicated_copies_where_the_predicate_is_not_zero(kind, reverse, expected):
    def kernel(a, b, c):
        dst, src, predicate = tile_of(a), tile_of(b), tile_of(c)
        nisa.tensor_copy_predicated(dst, src, predicate, reverse)
        return out(dst)

    got = run(kernel, f32([1, 2, 3]), f32([10, 20, 30]), np.array([[1, 0, 200]], kind))
    same(got, [expected])


def test_tensor_copy_predicated_with_a_number_and_by_keyword():
    def kernel(a, c):
        dst, predicate = tile_of(a), tile_of(c)
        nisa.tensor_copy_predicated(src=-1.0, dst=dst, predicate=predicate, reverse_pred=True)
        return out(dst)

    same(run(kernel, f32([1, NAN, 3]), np.array([[1, 0, 1]], np.uint8)), [[1, -1, 3]])


def test_tensor_copy_predicated_takes_different_free_ranks_and_one_side_in_psum():
    def kernel(a, b, c):
        dst, src, predicate = tile_of(a), tile_of(b, nl.psum), tile_of(c)
        nisa.tensor_copy_predicated(dst, src.reshape((1, 2, 2)), predicate.reshape((1, 4, 1)))
        return out(dst)

    got = run(kernel, f32([1, 2, 3, 4]), f32([10, 20, 30, 40]), np.array([[0, 1, 1, 0]], np.uint8))
    same(got, [[1, 20, 30, 4]])


def test_tensor_copy_predicated_copies_bit_for_bit():
    def kernel(a, b, c):
        dst = tile_of(a)
        nisa.tensor_copy_predicated(dst, tile_of(b), tile_of(c))
        return out(dst)

    got = run(kernel, i32([0, 5]), i32([2**24 + 1, 6]), np.array([[1, 0]], np.uint8))
    assert got.tolist() == [[2**24 + 1, 5]]


# views that instructions use


def test_reads_of_new_memory_give_poison_and_do_not_raise():
    def kernel(_):
        tiles = [nl.ndarray((1, 2), dtype, buffer=nl.sbuf) for dtype in (nl.float32, nl.bfloat16, nl.int32, nl.uint8)]
        tiles.append(nl.ndarray((1, 2), nl.float32, buffer=nl.psum))
        summed = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(summed, tiles[0], tiles[2], nl.add)
        return (*(out(tile) for tile in tiles), out(summed), nl.ndarray((3,), nl.float32, buffer=nl.shared_hbm))

    real, half, integer, byte, psum, summed, hbm = run(kernel, EMPTY)
    for array in (real, half, psum, summed, hbm):
        assert np.isnan(array.astype(np.float32)).all()
    assert integer.tolist() == byte.tolist() == [[4, 4]]


@pytest.mark.parametrize(
    "kind", [np.float32, BF16, np.float16, E4M3, E5M2, ml_dtypes.float8_e4m3fn, np.int32, np.int16, np.int8, np.uint8]
)
def test_every_type_passes_through_hbm_sbuf_and_psum(kind):
    def kernel(a):
        return out(tile_of(a, nl.psum))

    data = np.array([[1, 2, 4]], kind)
    got = run(kernel, data, target="trn3")
    assert got.dtype == data.dtype
    same(got, data)


def test_booleans_are_bytes_inside_and_booleans_outside():
    def kernel(a):
        x = tile_of(a)
        assert x.dtype == nl.bool_
        nisa.tensor_scalar(x, x, nl.equal, 0.0)
        return out(x)

    got = run(kernel, np.array([[True, False]]))
    assert got.dtype == np.bool_
    assert got.tolist() == [[False, True]]


def test_errors_are_assertion_errors_too():
    def body(dst, x, y):
        nisa.tensor_tensor(dst, x, y, nl.add)

    with pytest.raises(AssertionError):
        apply(body, (1, 2), nl.float32, f32([1, 2]), f32([1]))
    assert issubclass(nki.NkiValidationError, AssertionError)
