# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reductions, scans, statistics, selections and searches of the NKI interpreter on numbers worked out by hand."""

import numpy as np
import pytest
from simkit import BF16, INF, NAN, apply, f32, i32, nisa, nki, nl, out, run, same, tile_of

LOWEST = float(np.finfo(np.float32).min)
cmd = nisa.reduce_cmd


def u8(*rows):
    return np.array(rows, np.uint8)


def column(dtype=nl.float32, rows=1):
    return nl.ndarray((rows, 1), dtype, buffer=nl.sbuf)


# tensor_reduce


@pytest.mark.parametrize(
    ("op", "expected"),
    [("add", [6, 0]), ("multiply", [6, 6]), ("maximum", [3, 3]), ("minimum", [1, -2])],
)
def test_tensor_reduce_operators(op, expected):
    x = f32([1, 2, 3], [-2, 3, -1])
    got = apply(lambda dst, x: nisa.tensor_reduce(dst, getattr(nl, op), x, 1), (2, 1), nl.float32, x)
    same(got, np.reshape(expected, (2, 1)))


@pytest.mark.parametrize(("op", "expected"), [("logical_and", [1, 0]), ("logical_or", [1, 1]), ("logical_xor", [1, 0])])
def test_tensor_reduce_logic(op, expected):
    x = f32([1, 2, 3], [0.5, 0, 7])
    got = apply(lambda dst, x: nisa.tensor_reduce(dst, getattr(nl, op), x, 1), (2, 1), nl.float32, x)
    same(got, np.reshape(expected, (2, 1)))


@pytest.mark.parametrize(("op", "expected"), [("bitwise_and", 0b1000), ("bitwise_or", 0b1111), ("bitwise_xor", 0b1101)])
def test_tensor_reduce_bits(op, expected):
    x = u8([0b1100, 0b1010, 0b1011])
    got = apply(lambda dst, x: nisa.tensor_reduce(dst, getattr(nl, op), x, 1), (1, 1), nl.uint8, x)
    assert got.tolist() == [[expected]]


CUBE = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)


@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        (3, (1, 2, 2), [1, 5, 9, 13]),
        ((3,), (1, 4), [1, 5, 9, 13]),
        ((2, 3), (1, 2), [6, 22]),
        ([3, 2], (1, 2, 1, 1), [6, 22]),
        ((1, 2, 3), (1, 1), [28]),
    ],
    ids=["3", "(3,)", "(2,3)", "[3,2]", "(1,2,3)"],
)
def test_tensor_reduce_takes_the_last_axes(axis, shape, expected):
    got = apply(lambda dst, x: nisa.tensor_reduce(dst, nl.add, x, axis), shape, nl.float32, CUBE)
    same(got, np.reshape(expected, shape))


def test_tensor_reduce_keepdims_and_negate_by_keyword():
    def body(dst, x):
        nisa.tensor_reduce(dst=dst, data=x, op=nl.maximum, axis=(2, 3), negate=True, keepdims=True)

    same(apply(body, (1, 2, 1, 1), nl.float32, CUBE), [[[[-3]], [[-7]]]])


def test_tensor_reduce_reduces_any_dimension_of_a_permuted_view():
    def body(dst, x):
        nisa.tensor_reduce(dst, nl.add, x.permute((0, 2, 3, 1)), 3)

    same(apply(body, (1, 2, 2), nl.float32, CUBE), [[[4, 6], [8, 10]]])


def test_tensor_reduce_sums_in_float32_and_rounds_once():
    # in bfloat16, 256 + 1 would stay 256 each time
    x = np.array([[256] + [1] * 6], BF16)
    same(apply(lambda dst, x: nisa.tensor_reduce(dst, nl.add, x, 1), (1, 1), nl.bfloat16, x), [[262]])
    same(apply(lambda dst, x: nisa.tensor_reduce(dst, nl.add, x, 1), (1, 1), nl.float32, x), [[262]])


def test_tensor_reduce_saturates_integers_and_spreads_nan():
    got = apply(lambda dst, x: nisa.tensor_reduce(dst, nl.add, x, 1), (1, 1), nl.uint8, u8([200, 100]))
    assert got.tolist() == [[255]]
    same(apply(lambda dst, x: nisa.tensor_reduce(dst, nl.add, x, 1), (1, 1), nl.float32, f32([1, NAN])), [[NAN]])


def test_tensor_reduce_writes_into_its_operand():
    def kernel(a):
        x = tile_of(a)
        nisa.tensor_reduce(x[:, 0:1], nl.add, x, 1)
        return out(x)

    same(run(kernel, f32([1, 2, 3])), [[6, 2, 3]])


def test_tensor_reduce_of_overlapping_windows():
    def kernel(a):
        x = tile_of(a)
        dst = nl.ndarray((1, 3), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst, nl.add, x.ap([[4, 1], [1, 3], [1, 2]]), 2)
        return out(dst)

    same(run(kernel, f32([1, 2, 4, 8])), [[3, 6, 12]])


# tensor_partition_reduce


@pytest.mark.parametrize(("op", "expected"), [("add", [4, 8]), ("average", [2, 4]), ("maximum", [3, 7]), ("max", [3, 7])])
def test_tensor_partition_reduce(op, expected):
    got = apply(lambda dst, x: nisa.tensor_partition_reduce(dst, getattr(nl, op), x), (1, 2), nl.float32, f32([1, 7], [3, 1]))
    same(got, [expected])


@pytest.mark.parametrize(("op", "expected"), [("bitwise_or", [0b110]), ("bitwise_and", [0b100])])
def test_tensor_partition_reduce_bits(op, expected):
    got = apply(
        lambda dst, x: nisa.tensor_partition_reduce(data=x, op=getattr(nl, op), dst=dst),
        (1, 1),
        nl.uint8,
        u8([0b110], [0b100]),
    )
    assert got.tolist() == [expected]


# tensor_scalar_reduce


@pytest.mark.parametrize(("op", "expected"), [("add", 12), ("multiply", 48), ("maximum", 6), ("minimum", 2), ("max", 6)])
def test_tensor_scalar_reduce(op, expected):
    def kernel(a):
        x, res = tile_of(a), column()
        nisa.tensor_scalar_reduce(x, x, nl.multiply, 2.0, getattr(nl, op), res)
        return out(x), out(res)

    tile, res = run(kernel, f32([1, 2, 3]))
    same(tile, [[2, 4, 6]])
    same(res, [[expected]])


def test_tensor_scalar_reduce_chains_over_tiles():
    def kernel(a):
        x, res = tile_of(a), column()
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(dst, x[:, 0:2], nl.add, 0.0, nl.add)
        nisa.tensor_scalar_reduce(dst, x[:, 2:4], nl.add, 0.0, nl.add, reduce_cmd=cmd.reduce)
        nisa.tensor_scalar_reduce(dst, x[:, 4:6], nl.add, 0.0, nl.add, res, reduce_cmd=cmd.reduce, reduce_res_negate=True)
        return out(res)

    same(run(kernel, f32([1, 2, 10, 20, 100, 200])), [[-333]])


def test_tensor_scalar_reduce_loads_a_start():
    def kernel(a, b):
        x, start, res, again = tile_of(a), tile_of(b), column(rows=2), column(rows=2)
        nisa.tensor_scalar_reduce(
            x, x, nl.add, 0.0, nl.maximum, res, reduce_cmd=cmd.load_reduce, reduce_init=start, reduce_res_negate=True
        )
        # the registers themselves were not negated
        nisa.tensor_scalar_reduce(x, x, nl.add, 0.0, nl.maximum, again, reduce_cmd=cmd.reduce)
        return out(res), out(again)

    res, again = run(kernel, f32([1, 2], [3, 4]), f32([5], [0]))
    same(res, [[-5], [-4]])
    same(again, [[5], [4]])


# tensor_scalar_cumulative


def test_tensor_scalar_cumulative_sums_along_the_free_dimension():
    got = apply(
        lambda dst, x: nisa.tensor_scalar_cumulative(dst, x, nl.multiply, nl.add, 2.0), (1, 4), nl.float32, f32([1, 2, 3, 4])
    )
    same(got, [[2, 6, 12, 20]])


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        # reg = op1(element, reg)
        ("subtract", [1, 4 - 1, 2 - 3]),
        ("multiply", [1, 4, 8]),
        ("maximum", [1, 4, 4]),
        ("minimum", [1, 1, 1]),
    ],
)
def test_tensor_scalar_cumulative_operators(op, expected):
    got = apply(
        lambda dst, x: nisa.tensor_scalar_cumulative(dst, x, nl.add, getattr(nl, op), 0.0),
        (1, 3),
        nl.float32,
        f32([1, 4, 2]),
    )
    same(got, [expected])


def test_tensor_scalar_cumulative_continues_and_loads():
    def kernel(a):
        x = tile_of(a)
        dst = nl.ndarray((1, 6), nl.float32, buffer=nl.sbuf)
        step = nisa.tensor_scalar_cumulative
        step(dst[:, 0:2], x[:, 0:2], nl.add, nl.add, 0.0, imm1=100.0, reduce_cmd=cmd.load_reduce)
        step(dst[:, 2:4], x[:, 2:4], nl.add, nl.add, 0.0, reduce_cmd=cmd.reduce)
        step(dst[:, 4:6], x[:, 4:6], nl.add, nl.add, 0.0)
        return out(dst)

    same(run(kernel, f32([1, 2, 3, 4, 5, 6])), [[101, 103, 106, 110, 5, 11]])


# tensor_tensor_scan


def test_tensor_tensor_scan():
    # s = a * s + b
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, 1.0, nl.multiply, nl.add),
        (1, 3),
        nl.float32,
        f32([2, 3, 0.5]),
        f32([1, 1, 10]),
    )
    same(got, [[3, 10, 15]])


def test_tensor_tensor_scan_with_a_vector_and_both_reversed():
    def body(dst, a, b, start):
        nisa.tensor_tensor_scan(
            dst=dst, data0=a, data1=b, initial=start, op0=nl.subtract, op1=nl.subtract, reverse0=True, reverse1=True
        )

    # s = b - (s - a)
    got = apply(body, (2, 2), nl.float32, f32([1, 2], [0, 0]), f32([10, 20], [5, 5]), f32([3], [1]))
    same(got, [[10 - (3 - 1), 20 - (8 - 2)], [4, 1]])


def test_tensor_tensor_scan_keeps_its_state_in_float32():
    ones = np.array([[1, 1, 1, 1]], BF16)
    got = apply(
        lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, 256.0, nl.multiply, nl.add), (1, 4), nl.bfloat16, ones, ones
    )
    # 257, 258, 259, 260 rounded one by one: 257 and 259 lie half way and go to even
    same(got, [[256, 258, 260, 260]])


def test_tensor_tensor_scan_in_place():
    def kernel(a, b):
        x, y = tile_of(a), tile_of(b)
        nisa.tensor_tensor_scan(y, x, y, 0.0, nl.multiply, nl.add)
        return out(y)

    same(run(kernel, f32([1, 1, 1]), f32([1, 2, 3])), [[1, 3, 6]])


# bn_stats, bn_aggr


def test_bn_stats_counts_even_and_odd_elements_apart():
    got = apply(nisa.bn_stats, (1, 6), nl.float32, f32([1, 10, 3, 10, 5]))
    # even: 1, 3, 5, mean 3, squares 4 + 0 + 4; odd: 10, 10
    same(got, [[3, 3, 8, 2, 10, 0]])


def test_bn_aggr_joins_statistics_of_several_tiles():
    def kernel(a):
        x = tile_of(a)
        stats = nl.ndarray((2, 2, 6), nl.float32, buffer=nl.sbuf)
        nisa.bn_stats(stats[:, 0], x[:, 0:3])
        nisa.bn_stats(dst=stats[:, 1], data=x[:, 3:8])
        dst = nl.ndarray((2, 2), nl.float32, buffer=nl.sbuf)
        nisa.bn_aggr(dst, stats)
        return out(dst)

    x = f32([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 8, 8, 8, 8])
    np.testing.assert_allclose(run(kernel, x), [[4.5, 5.25], [4, 16]], rtol=1e-6)


def test_bn_stats_and_bn_aggr_agree_with_numpy_on_512_elements():
    def kernel(a):
        stats, dst = nl.ndarray((4, 6), nl.float32, buffer=nl.sbuf), nl.ndarray((4, 2), nl.float32, buffer=nl.sbuf)
        nisa.bn_stats(stats, tile_of(a))
        nisa.bn_aggr(dst, stats)
        return out(dst)

    x = np.random.default_rng(3).normal(5, 2, (4, 512)).astype(np.float32)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(run(kernel, x), np.stack([wide.mean(1), wide.var(1)], 1), rtol=1e-5)


# select_reduce


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16], ids=["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize(("reverse", "expected"), [(False, [1, -9, 3]), (True, [-9, 2, -9])])
def test_select_reduce_selects(kind, reverse, expected):
    got = apply(
        lambda dst, p, x: nisa.select_reduce(dst, p, x, -9.0, reverse_pred=reverse),
        (1, 3),
        nl.float32,
        np.array([[1, 0, 5]], kind),
        f32([1, 2, 3]),
    )
    same(got, [expected])


def test_select_reduce_takes_the_maximum_over_tiles_and_a_vector_for_false():
    def kernel(p, a, b):
        predicate, x, otherwise, res = tile_of(p), tile_of(a), tile_of(b), column(rows=2)
        dst = nl.ndarray((2, 4), nl.float32, buffer=nl.sbuf)
        for i, command in ((0, cmd.reset_reduce), (2, cmd.reduce)):
            part = slice(i, i + 2)
            nisa.select_reduce(
                dst=dst[:, part],
                predicate=predicate[:, part],
                on_true=x[:, part],
                on_false=otherwise,
                reduce_res=res if i else None,
                reduce_cmd=command,
                reduce_op=nl.maximum,
            )
        return out(dst), out(res)

    tile, res = run(kernel, u8([1, 1, 0, 1], [0, 0, 0, 0]), f32([7, 2, 9, 4], [1, 2, 3, 4]), f32([-1], [-2]))
    same(tile, [[7, 2, -1, 4], [-2, -2, -2, -2]])
    same(res, [[7], [-2]])


def test_select_reduce_takes_different_free_ranks():
    got = apply(
        lambda dst, p, x: nisa.select_reduce(dst, p.reshape((1, 2, 2)), x, 0.0),
        (1, 4),
        nl.float32,
        u8([1, 0, 0, 1]),
        f32([1, 2, 3, 4]),
    )
    same(got, [[1, 0, 0, 4]])


# range_select


def ranged(x, low, high, dtype=nl.float32, op0=nl.greater_equal, op1=nl.less, **options):
    def kernel(a, b, c):
        tile, one, two, res = tile_of(a), tile_of(b), tile_of(c), column(rows=a.shape[0])
        dst = nl.ndarray(a.shape, dtype, buffer=nl.sbuf)
        nisa.range_select(dst, tile, op0, op1, one, two, reduce_res=res, **options)
        return out(dst), out(res)

    return run(kernel, x, low, high)


def test_range_select_keeps_the_columns_between_the_bounds():
    tile, res = ranged(f32([1, 9, 3, 4], [1, 2, 3, 4]), f32([2], [0]), f32([4], [1]))
    same(tile, [[LOWEST, LOWEST, 3, 4], [1, LOWEST, LOWEST, LOWEST]])
    same(res, [[4], [1]])


def test_range_select_counts_from_range_start():
    tile, res = ranged(f32([1, 9, 3, 4]), f32([11]), f32([12]), range_start=10, on_false_value=LOWEST)
    same(tile, [[LOWEST, 9, LOWEST, LOWEST]])
    same(res, [[9]])


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("equal", [0, 0, 1]),
        ("less", [1, 1, 0]),
        ("less_equal", [1, 1, 1]),
        ("greater", [0, 0, 0]),
        ("greater_equal", [0, 0, 1]),
    ],
)
def test_range_select_comparisons(op, expected):
    tile, _ = ranged(f32([1, 1, 1]), f32([2]), f32([0]), op0=getattr(nl, op), op1=nl.greater_equal)
    assert (tile == 1).tolist() == [[bool(e) for e in expected]]


def test_range_select_gives_minus_infinity_in_bfloat16_and_the_lowest_float32_in_its_result():
    tile, res = ranged(f32([1, 2]), f32([5]), f32([6]), nl.bfloat16)
    same(tile, [[-INF, -INF]])
    same(res, [[LOWEST]])


# exponential (trn3)


def test_exponential_subtracts_the_maximum_and_sums():
    def kernel(a, b):
        x, largest, res = tile_of(a), tile_of(b), column(rows=2)
        nisa.exponential(x, x, largest, res, cmd.reset_reduce)
        return out(x), out(res)

    tile, res = run(kernel, f32([0, 1], [2, 2]), f32([1], [2]), target="trn3")
    np.testing.assert_allclose(tile, [[np.exp(-1), 1], [1, 1]], rtol=1e-6)
    np.testing.assert_allclose(res, [[1 + np.exp(-1)], [2]], rtol=1e-6)


def test_exponential_chains_and_loads():
    def kernel(a):
        x, res = tile_of(a), column()
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.exponential(dst=dst, src=x, reduce_cmd=cmd.load_reduce, reduce_init=10.0)
        nisa.exponential(dst=dst, src=x, max_value=0.0, reduce_res=res, reduce_cmd=cmd.reduce)
        return out(res)

    same(run(kernel, f32([0, 0]), target="trn3"), [[14]])


def test_the_accumulators_of_vector_are_shared():
    def kernel(a, p):
        x, predicate, res = tile_of(a), tile_of(p), column()
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(dst, x, nl.add, 0.0, nl.maximum)
        nisa.select_reduce(dst, predicate, x, 0.0, res, cmd.reduce)
        return out(res)

    same(run(kernel, f32([3, 8]), u8([1, 0])), [[8]])


# searches


def test_max8_gives_the_eight_largest_in_descending_order():
    x = f32([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [-1, -2, -3, -4, -5, -6, -7, -8, -9, -INF])
    same(apply(nisa.max8, (2, 8), nl.float32, x), [[9, 6, 5, 5, 4, 3, 3, 2], [-1, -2, -3, -4, -5, -6, -7, -8]])


def test_max8_takes_several_free_dimensions():
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    same(apply(lambda dst, x: nisa.max8(src=x, dst=dst), (1, 8), nl.bfloat16, x), [[11, 10, 9, 8, 7, 6, 5, 4]])


SEARCHED = f32([1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8])
WANTED = f32([3, 8, 8, 8, 8, 8, 8, 8])


@pytest.mark.parametrize(("dtype", "absent"), [(nl.uint32, 2**32 - 1), (nl.uint16, 2**16 - 1)])
def test_nc_find_index8_finds_the_first_free_occurrence(dtype, absent):
    got = apply(nisa.nc_find_index8, (1, 8), dtype, SEARCHED, WANTED)
    assert got.tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]
    got = apply(nisa.nc_find_index8, (1, 8), dtype, SEARCHED, f32([9, 1, 2, 9, 4, 8, 9, 8]))
    assert got.tolist() == [[absent, 0, 1, absent, 3, 4, absent, 5]]


def test_nc_match_replace8_pairs_duplicates_from_the_last():
    def kernel(a, b):
        dst, where = nl.ndarray((1, 11), nl.float32, buffer=nl.sbuf), nl.ndarray((1, 8), nl.uint32, buffer=nl.sbuf)
        nisa.nc_match_replace8(dst, tile_of(a), tile_of(b), imm=-1.0, dst_idx=where)
        return out(dst), out(where)

    tile, where = run(kernel, SEARCHED, WANTED)
    same(tile, [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]])
    assert where.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]


def test_nc_match_replace8_replaces_first_occurrences_only_and_in_place():
    def kernel(a, b):
        x = tile_of(a)
        nisa.nc_match_replace8(x, x, tile_of(b), 0.0)
        return out(x)

    same(run(kernel, f32([5, 5, 7, 5, 1, 1, 2, 3]), f32([5, 7, 9, 9, 9, 9, 9, 9])), [[0, 5, 0, 5, 1, 1, 2, 3]])


@pytest.mark.parametrize("kind", [np.float32, np.int32], ids=["float32", "int32"])
def test_nonzero_with_count_works_on_every_16th_partition(kind):
    def kernel(a):
        dst = nl.ndarray((17, 9), nl.int32, buffer=nl.sbuf)
        nisa.nonzero_with_count(dst, tile_of(a), index_offset=16, padding_val=-1)
        return out(dst)

    x = np.ones((17, 8), kind)
    x[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    x[16] = 0
    got = run(kernel, x)
    assert got[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert got[16].tolist() == [-1] * 8 + [0]
    assert (got[1:16] == 4).all()  # untouched


def test_accumulators_are_private_to_the_partitions_of_their_operand():
    def kernel(a):
        x = tile_of(a)
        res = column(rows=64)
        nisa.tensor_scalar_reduce(x[0:32], x[0:32], nl.add, 0.0, nl.add)
        nisa.tensor_scalar_reduce(x[32:64], x[32:64], nl.multiply, 3.0, nl.add)
        nisa.tensor_scalar_reduce(x, x, nl.multiply, 0.0, nl.add, res, reduce_cmd=cmd.reduce)
        return out(res)

    same(run(kernel, np.ones((64, 2), np.float32)), [[2]] * 32 + [[6]] * 32)


def test_the_accumulators_of_vector_are_unknown_after_an_idle_instruction():
    def kernel(a, p):
        x, predicate, res = tile_of(a), tile_of(p), column()
        dst = nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(dst, x, nl.add, 0.0, nl.maximum)
        nisa.select_reduce(dst, predicate, x, 0.0)
        nisa.tensor_scalar_reduce(dst, x, nl.add, 0.0, nl.maximum, res, reduce_cmd=cmd.reduce)
        return out(res)

    same(run(kernel, f32([3, 8]), u8([1, 0])), [[NAN]])


def test_a_result_needs_one_element_per_partition():
    def kernel(a):
        x = tile_of(a)
        nisa.tensor_scalar_reduce(x, x, nl.add, 0.0, nl.add, x)

    with pytest.raises(nki.NkiValidationError, match="tensor_scalar_reduce `reduce_res`"):
        run(kernel, f32([1, 2]))


def test_integers_of_32_bits_reduce_through_float32():
    got = apply(lambda dst, x: nisa.tensor_reduce(dst, nl.maximum, x, 1), (1, 1), nl.int32, i32([2**24 + 1, 5]))
    assert got.tolist() == [[2**24]]
