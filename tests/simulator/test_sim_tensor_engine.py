# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""nc_matmul and nc_transpose of the NKI interpreter on numbers worked out by hand."""

import ml_dtypes
import numpy as np
import pytest
from simkit import BF16, E4M3, E5M2, INF, NAN, apply, f32, i32, nisa, nki, nl, out, run, same, tile_of

TARGETS = ["trn2", "trn3"]


def psum(m, n, dtype=nl.float32):
    return nl.ndarray((m, n), dtype, buffer=nl.psum)


def matmul(stationary, moving, shape, dtype=nl.float32, target="trn2", **options):
    def body(dst, s, m):
        nisa.nc_matmul(dst, s, m, **options)

    return apply(body, shape, dtype, stationary, moving, target=target, buffer=nl.psum)


# Products


@pytest.mark.parametrize("target", TARGETS)
def test_matmul_multiplies_the_transposed_stationary_with_the_moving(target):
    # K = 2, M = 3, N = 2
    s = f32([1, 2, 3], [10, 20, 30])
    m = f32([1, 4], [2, 5])
    same(matmul(s, m, (3, 2), target=target), [[21, 54], [42, 108], [63, 162]])


def test_matmul_takes_positional_and_keyword_operands():
    def kernel(a, b):
        s, m = tile_of(a), tile_of(b)
        first, second = psum(1, 1), psum(1, 1)
        nisa.nc_matmul(first, s, m, False, False, False, None, (), (), nisa.matmul_perf_mode.none, "first")
        nisa.nc_matmul(moving=m, stationary=s, dst=second, accumulate=False, name="second")
        return out(first), out(second)

    one, two = run(kernel, f32([3], [4]), f32([5], [6]))
    same(one, [[39]])
    same(two, [[39]])


def test_matmul_of_bfloat16_multiplies_exactly_and_sums_in_float32():
    # 257 * 1 is no bfloat16, but 256 * 1 + 1 * 1 is exact in float32
    s = np.array([[256], [1]], BF16)
    m = np.array([[1], [1]], BF16)
    same(matmul(s, m, (1, 1)), [[257]])


def test_matmul_of_bfloat16_keeps_products_that_bfloat16_cannot_hold():
    # (1 + 2^-7)^2 = 1 + 2^-6 + 2^-14
    x = np.array([[1 + 2**-7]], BF16)
    same(matmul(x, x, (1, 1)), [[1 + 2**-6 + 2**-14]])


@pytest.mark.parametrize("kind", [np.float16, E4M3, E5M2], ids=["float16", "float8_e4m3", "float8_e5m2"])
def test_matmul_takes_the_narrow_types(kind):
    same(matmul(np.array([[1.5], [2]], kind), np.array([[2, -1], [0.5, 4]], kind), (1, 2)), [[4, 6.5]])


def test_matmul_mixes_narrow_types():
    same(matmul(np.array([[1.5], [2]], BF16), np.array([[2], [0.5]], E4M3), (1, 1)), [[4]])


def test_matmul_takes_the_ocp_fp8_on_trn3():
    x = np.array([[1.5], [2]], ml_dtypes.float8_e4m3fn)
    same(matmul(x, x, (1, 1), target="trn3"), [[6.25]])


def test_matmul_of_tfloat32_sees_ten_bits_of_mantissa():
    def kernel(x):
        wide = tile_of(x)
        narrow = nl.ndarray((1, 2), nl.tfloat32, buffer=nl.sbuf)
        nisa.tensor_copy(narrow, wide)
        ones = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
        nisa.memset(ones, 1.0)
        dst = psum(1, 2)
        nisa.nc_matmul(dst, ones, narrow)
        return out(dst)

    # 1 + 2^-11 lies half way and goes to even; 1 + 2^-10 stays
    same(run(kernel, f32([1 + 2**-11, 1 + 2**-10])), [[1, 1 + 2**-10]])


def test_matmul_rounds_once_to_a_bfloat16_destination_on_trn3():
    # 1 + 2^-8 is half way between 1 and 1 + 2^-7: to even
    s = f32([1], [1])
    m = f32([1, 1], [2**-8, 3 * 2**-8])
    got = matmul(s, m, (1, 2), nl.bfloat16, target="trn3")
    assert got.dtype == BF16
    same(got, [[1, 1 + 2**-6]])


def test_matmul_accumulates_into_bfloat16_on_trn3_with_one_rounding_per_matmul():
    def kernel(a):
        one, dst = tile_of(a), psum(1, 1, nl.bfloat16)
        nisa.nc_matmul(dst, one[0:1, 0:1], one[0:1, 0:1])
        for _ in range(4):
            # 2^-9 is lost each time, however often
            nisa.nc_matmul(dst, one[0:1, 0:1], one[0:1, 1:2])
        return out(dst)

    same(run(kernel, f32([1, 2**-9]), target="trn3"), [[1]])


def test_matmul_lets_nan_and_infinity_through_to_their_column_only():
    s = f32([1, 0], [1, 1])
    m = f32([NAN, INF, 1], [1, 1, 2])
    same(matmul(s, m, (2, 3)), [[NAN, INF, 3], [NAN, NAN, 2]])


def test_matmul_flattens_free_dimensions():
    # conv-style operands: moving [K, 2, 2], dst [M, 4]
    s = f32([1, 2])
    m = np.array([[[1, 2], [3, 4]]], np.float32)
    same(matmul(s, m, (2, 4)), [[1, 2, 3, 4], [2, 4, 6, 8]])


def test_matmul_reads_strided_and_broadcast_views():
    def kernel(a):
        x = tile_of(a)
        one = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
        nisa.memset(one, 1.0)
        every_second, repeated = psum(1, 3), psum(1, 6)
        nisa.nc_matmul(every_second, one, x[0:1, 0:6:2])
        nisa.nc_matmul(repeated, one, x[0:1, 0:2].expand_dim(1).broadcast(1, 3))
        return out(every_second), out(repeated)

    strided, repeated = run(kernel, f32([1, 2, 3, 4, 5, 6]))
    same(strided, [[1, 3, 5]])
    same(repeated, [[1, 2, 1, 2, 1, 2]])


def test_the_onezero_hints_change_nothing():
    s, m = f32([1, 0], [0, 1]), f32([3], [4])
    same(matmul(s, m, (2, 1), is_stationary_onezero=True), [[3], [4]])
    same(matmul(m, s, (1, 2), is_moving_onezero=True), [[3, 4]])


# Accumulation


def steps(flags, target="trn2"):
    """One PSUM element; per flag a matmul that gives 1, 10, 100, ..."""

    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 1)
        for i, flag in enumerate(flags):
            nisa.nc_matmul(dst, x[0:1, 0:1], x[0:1, i : i + 1], accumulate=flag)
        return out(dst)

    return run(kernel, f32([1, 10, 100, 1000]), target=target).item()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((None,), 1),
        ((None, None), 11),
        ((None, None, None), 111),
        ((False,), 1),
        ((False, True), 11),
        ((False, True, True), 111),
        ((False, None), 11),
        ((None, True), 11),
        ((None, False), 10),
        ((False, False), 10),
        ((None, None, False, None), 1100),
        ((False, True, False, True), 1100),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else str(v),
)
def test_accumulate_overwrites_or_adds(flags, expected, target):
    assert steps(flags, target) == expected


def test_accumulate_takes_the_truth_value_of_a_loop_counter():
    assert steps([i > 0 for i in range(3)]) == 111


def test_a_new_tensor_starts_a_new_accumulation():
    def kernel(a):
        x = tile_of(a)
        sums = []
        for i in range(2):
            dst = psum(1, 1)
            nisa.nc_matmul(dst, x[0:1, 0:1], x[0:1, i : i + 1])
            sums.append(out(dst))
        return tuple(sums)

    one, two = run(kernel, f32([1, 10]))
    assert (one.item(), two.item()) == (1, 10)


def test_start_bits_are_kept_per_element_of_overlapping_views():
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 8)
        one = x[0:1, 0:1]
        nisa.nc_matmul(dst[0:1, 0:4], one, x[0:1, 0:4])  # 1 1 1 1
        nisa.nc_matmul(dst[0:1, 2:6], one, x[0:1, 4:8])  # 10 10 10 10: adds to two, overwrites two
        return out(dst)

    same(run(kernel, f32([1, 1, 1, 1, 10, 10, 10, 10])), [[1, 1, 11, 11, 10, 10, NAN, NAN]])


def test_start_bits_follow_strided_two_dimensional_views():
    def kernel(a):
        x = tile_of(a)
        dst = nl.ndarray((1, 3, 4), nl.float32, buffer=nl.psum)
        one = x[0:1, 0:1]
        nisa.nc_matmul(dst[0:1, 0:3:2, 0:4:2], one, x[0:1, 0:4])  # rows 0, 2 and columns 0, 2: 1
        nisa.nc_matmul(dst[0:1, 0:2, 0:3], one, x[0:1, 4:10])  # rows 0, 1 and columns 0 to 2: 10
        nisa.nc_matmul(dst[0:1, 1:3, 1:4], one, x[0:1, 10:16])  # rows 1, 2 and columns 1 to 3: 100
        return out(dst)

    x = f32([1] * 4 + [10] * 6 + [100] * 6)
    same(run(kernel, x), [[[11, 10, 11, NAN], [10, 110, 110, 100], [1, 100, 101, 100]]])


def test_start_bits_are_kept_per_partition():
    def kernel(a, b):
        s, m = tile_of(a), tile_of(b)
        dst = psum(64, 1)
        nisa.nc_matmul(dst[0:32, :], s[:, 0:32], m)
        nisa.nc_matmul(dst, s, m)
        return out(dst)

    got = run(kernel, np.ones((1, 64), np.float32), f32([1]))
    same(got, [[2]] * 32 + [[1]] * 32)


@pytest.mark.parametrize("write", ["memset", "tensor_copy", "activation", "tensor_tensor"])
def test_what_another_engine_wrote_is_overwritten_by_the_next_matmul(write):
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 2)
        nisa.nc_matmul(dst, x[0:1, 0:1], x[0:1, 0:2])
        second = dst[0:1, 1:2]
        if write == "memset":
            nisa.memset(second, 7.0)
        elif write == "tensor_copy":
            nisa.tensor_copy(second, x[0:1, 2:3])
        elif write == "activation":
            nisa.activation(second, nl.copy, x[0:1, 2:3])
        else:
            nisa.tensor_tensor(second, x[0:1, 2:3], x[0:1, 2:3], nl.add)
        nisa.nc_matmul(dst, x[0:1, 0:1], x[0:1, 0:2])
        return out(dst)

    same(run(kernel, f32([1, 2, 7])), [[2, 2]])


def test_memset_zeros_stay_where_no_matmul_writes():
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 4)
        nisa.memset(dst, 0)
        nisa.nc_matmul(dst[0:1, 1:3], x[0:1, 0:1], x[0:1, 0:2])
        nisa.nc_matmul(dst[0:1, 2:4], x[0:1, 0:1], x[0:1, 0:2])
        return out(dst)

    same(run(kernel, f32([1, 2])), [[0, 1, 3, 2]])


@pytest.mark.parametrize("target", TARGETS)
def test_accumulate_true_needs_an_accumulation_to_add_to(target):
    with pytest.raises(nki.NkiValidationError, match=r"nc_matmul `accumulate`"):
        steps((True,), target)


def test_accumulate_true_checks_every_element():
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 4)
        nisa.nc_matmul(dst[0:1, 0:3], x[0:1, 0:1], x[0:1, 0:3])
        nisa.nc_matmul(dst, x[0:1, 0:1], x, accumulate=True)
        return out(dst)

    with pytest.raises(nki.NkiValidationError, match=r"nc_matmul `accumulate`"):
        run(kernel, f32([1, 2, 3, 4]))


def test_accumulate_true_after_memset_is_an_error_on_trn2():
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 1)
        nisa.memset(dst, 0.0)
        nisa.nc_matmul(dst, x, x, accumulate=True)
        return out(dst)

    with pytest.raises(nki.NkiValidationError, match=r"nc_matmul `accumulate`"):
        run(kernel, f32([1]))


def test_accumulate_true_after_memset_adds_on_trn3():
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 1)
        nisa.memset(dst, 5.0)
        nisa.nc_matmul(dst, x, x, accumulate=True)
        return out(dst)

    same(run(kernel, f32([2]), target="trn3"), [[9]])


def test_reading_psum_does_not_end_an_accumulation_that_continues_explicitly():
    def kernel(a):
        x = tile_of(a)
        dst = psum(1, 1)
        nisa.nc_matmul(dst, x, x, accumulate=False)
        before = out(dst)
        nisa.nc_matmul(dst, x, x, accumulate=True)
        return before, out(dst)

    before, after = run(kernel, f32([3]))
    assert (before.item(), after.item()) == (9, 18)


# Double row, tiles of the array


@pytest.mark.parametrize("target", TARGETS)
def test_double_row_contracts_two_rows_per_partition(target):
    # K = 2 partitions x 2 rows, M = 1, N = 2
    s = np.array([[[1], [2]], [[3], [4]]], E4M3)
    m = np.array([[[1, 2], [1, 0]], [[1, 0], [1, 0.5]]], E5M2)
    got = matmul(s, m, (1, 2), target=target, perf_mode=nisa.matmul_perf_mode.double_row)
    same(got, [[1 + 2 + 3 + 4, 2 + 2]])


def test_double_row_contracts_256_values():
    s = np.ones((128, 2, 1), E4M3)
    m = np.ones((128, 2, 3), E4M3)
    same(matmul(s, m, (1, 3), perf_mode=nisa.matmul_perf_mode.double_row), [[256] * 3])


def test_a_column_tile_writes_the_partitions_where_it_starts():
    def kernel(a, b):
        s, m = tile_of(a), tile_of(b)
        dst = psum(128, 1)
        nisa.memset(dst, 0.0)
        for d in range(4):
            nisa.nc_matmul(dst[nl.ds(32 * d, 2), :], s, m[:, d : d + 1], tile_size=(128, 32), tile_position=(0, 32 * d))
        return out(dst)

    got = run(kernel, f32([1, 2], [1, 2]), f32([1, 2, 3, 4], [1, 2, 3, 4]))
    expected = np.zeros((128, 1), np.float32)
    for d in range(4):
        expected[32 * d] = 2 * (d + 1)
        expected[32 * d + 1] = 4 * (d + 1)
    same(got, expected)


def test_a_row_tile_contracts_the_partitions_where_it_starts():
    def kernel(a, b):
        s, m = tile_of(a), tile_of(b)
        dst = psum(1, 1)
        nisa.nc_matmul(dst, s[64:96], m[64:96], tile_size=(32, 128), tile_position=(64, 0))
        return out(dst)

    s = np.zeros((128, 1), np.float32)
    s[64:96] = 2
    same(run(kernel, s, np.full((128, 1), 3, np.float32)), [[192]])


# Transposes


@pytest.mark.parametrize("target", TARGETS)
def test_transpose_mode_moves_nan_and_infinity_bit_for_bit(target):
    data = f32([NAN, 1, -0.0], [INF, -INF, 2])
    got = matmul(data, np.eye(2, dtype=np.float32), (3, 2), target=target, is_transpose=True)
    same(got, [[NAN, INF], [1, -INF], [0, 2]])
    assert np.signbit(got[2, 0])


def test_an_ordinary_matmul_with_the_identity_spreads_nan():
    data = f32([NAN, 1], [2, 3])
    got = matmul(data, np.eye(2, dtype=np.float32), (2, 2))
    same(got, [[NAN, NAN], [1, 3]])


def test_transpose_mode_may_write_16_bits():
    data = np.array([[1, 2, NAN], [4, 5, 6]], BF16)
    got = matmul(data, np.eye(2, dtype=BF16), (3, 2), nl.bfloat16, is_transpose=True)
    assert got.dtype == BF16
    same(got, [[1, 4], [2, 5], [NAN, 6]])


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum], ids=["sbuf", "psum"])
def test_nc_transpose_on_the_vector_engine_goes_to_either_memory(buffer):
    def body(dst, x):
        nisa.nc_transpose(dst, x, engine=nisa.engine.vector)

    same(apply(body, (3, 2), nl.float32, f32([1, 2, NAN], [4, INF, 6]), buffer=buffer), [[1, 4], [2, INF], [NAN, 6]])


@pytest.mark.parametrize("engine", [nisa.engine.tensor, nisa.engine.unknown], ids=["tensor", "unknown"])
def test_nc_transpose_to_psum(engine):
    def body(dst, x):
        nisa.nc_transpose(dst=dst, data=x, engine=engine)

    same(apply(body, (3, 2), nl.float32, f32([1, 2, NAN], [4, INF, 6]), buffer=nl.psum), [[1, 4], [2, INF], [NAN, 6]])


@pytest.mark.parametrize("kind", [BF16, np.int32, np.uint8], ids=["bfloat16", "int32", "uint8"])
def test_nc_transpose_keeps_the_type(kind):
    def body(dst, x):
        nisa.nc_transpose(dst, x, engine=nisa.engine.vector)

    data = np.array([[1, 2, 3], [4, 5, 6]], kind)
    got = apply(body, (3, 2), data.dtype, data)
    assert got.dtype == data.dtype
    same(got, [[1, 4], [2, 5], [3, 6]])


def test_nc_transpose_of_large_integers_is_exact():
    def body(dst, x):
        nisa.nc_transpose(dst, x, engine=nisa.engine.vector)

    got = apply(body, (2, 1), nl.int32, i32([2**31 - 1, 2**24 + 1]))
    assert got.tolist() == [[2**31 - 1], [2**24 + 1]]


def test_nc_transpose_flattens_free_dimensions():
    def body(dst, x):
        nisa.nc_transpose(dst, x)

    data = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    same(apply(body, (4, 2), nl.float32, data, buffer=nl.psum), [[0, 4], [1, 5], [2, 6], [3, 7]])


def test_nc_transpose_reads_psum_on_the_vector_engine():
    def kernel(a):
        x = tile_of(a, nl.psum)
        dst = nl.ndarray((2, 1), nl.float32, buffer=nl.sbuf)
        nisa.nc_transpose(dst, x)
        return out(dst)

    same(run(kernel, f32([1, 2])), [[1], [2]])


def test_nc_transpose_of_a_full_tile_on_the_tensor_engine():
    def body(dst, x):
        nisa.nc_transpose(dst, x, engine=nisa.engine.tensor)

    data = np.arange(128 * 128, dtype=np.float32).reshape(128, 128)
    same(apply(body, (128, 128), nl.float32, data, buffer=nl.psum), data.T)
