# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Costs that the NKI interpreter reports, against numbers worked out by hand from the published cost formulas."""

import numpy as np
import pytest
from simkit import BF16, cost, f32, nisa, nki, nl, out, tile_of

BF, FP32 = nl.bfloat16, nl.float32
EMPTY = f32([0])
eng, cmd = nisa.engine, nisa.reduce_cmd
# N in the rows below: elements per partition
N = 512


def sb(*shape, dtype=FP32):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def ps(*shape, dtype=FP32):
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def matmul(k, m, n, dtype=BF, other=None, dst=None, **options):
    nisa.nc_matmul(ps(m, n) if dst is None else dst, sb(k, m, dtype=dtype), sb(k, n, dtype=other or dtype), **options)


def double_row(n):
    e = nl.float8_e4m3
    nisa.nc_matmul(ps(128, n), sb(128, 2, 128, dtype=e), sb(128, 2, n, dtype=e), perf_mode=nisa.matmul_perf_mode.double_row)


def copy(n, src=BF, dst=BF, step=1, source=nl.sbuf, target=nl.sbuf, engine=eng.unknown):
    wide = nl.ndarray((128, n * step), src, buffer=source)
    nisa.tensor_copy(nl.ndarray((128, n), dst, buffer=target), wide[:, 0 : n * step : step], engine=engine)


def scalar(n, dtype=BF, step=1, engine=eng.unknown, dst=None):
    wide = sb(128, n * step, dtype=dtype)
    nisa.tensor_scalar(
        sb(128, n, dtype=dst or dtype), wide[:, 0 : n * step : step], nl.multiply, 2.0, op1=nl.add, operand1=1.0, engine=engine
    )


def tensor(n, dtype=FP32, dst=None, op=nl.add, two=nl.sbuf, to=nl.sbuf, step=1):
    one = sb(128, n * step, dtype=dtype)[:, 0 : n * step : step]
    nisa.tensor_tensor(nl.ndarray((128, n), dst or dtype, buffer=to), one, nl.ndarray((128, n), dtype, buffer=two), op)


def stt(n, dtype, op0=nl.subtract, op1=nl.multiply):
    nisa.scalar_tensor_tensor(sb(128, n, dtype=dtype), sb(128, n, dtype=dtype), op0, 1.0, op1, sb(128, n, dtype=dtype))


def reduce(n, op=nl.add, dtype=FP32, dst=None):
    nisa.tensor_reduce(sb(128, 1, dtype=dst or dtype), op, sb(128, n, dtype=dtype), 1)


def activation(n, op=nl.exp, result=False):
    options = {"reduce_op": nl.add, "reduce_res": sb(128, 1), "reduce_cmd": cmd.reset_reduce} if result else {}
    nisa.activation(sb(128, n), op, sb(128, n), **options)


def predicated(n, source=nl.sbuf):
    nisa.tensor_copy_predicated(sb(128, n), nl.ndarray((128, n), FP32, buffer=source), sb(128, n, dtype=nl.uint8))


def transpose(p, f, engine):
    dst = ps(f, p) if engine is eng.tensor else sb(f, p)
    nisa.nc_transpose(dst, sb(p, f), engine)


def ranged(n):
    nisa.range_select(sb(128, n), sb(128, n), nl.greater, nl.less, sb(128, 1), sb(128, 1))


# id, kernel, engine, cycles on trn2, cycles on trn3
CYCLES = [
    # max(min(64, M), N), times 4 in float32
    ("matmul-bf16", lambda: matmul(128, 128, 512), "tensor", 512, 512),
    ("matmul-bf16-few-rows", lambda: matmul(8, 128, 512), "tensor", 512, 512),
    ("matmul-bf16-few-columns", lambda: matmul(128, 128, 32), "tensor", 64, 64),
    ("matmul-bf16-small", lambda: matmul(128, 16, 8), "tensor", 16, 16),
    ("matmul-fp16", lambda: matmul(128, 128, 300, nl.float16), "tensor", 300, 300),
    ("matmul-fp8", lambda: matmul(128, 128, 512, nl.float8_e4m3), "tensor", 512, 512),
    ("matmul-tf32", lambda: matmul(128, 128, 512, nl.tfloat32), "tensor", 512, 512),
    ("matmul-fp32", lambda: matmul(128, 128, 512, FP32), "tensor", 2048, 2048),
    ("matmul-fp32-small", lambda: matmul(128, 16, 8, FP32), "tensor", 64, 64),
    ("matmul-double-row", lambda: double_row(512), "tensor", 512, 512),
    # max(P, min(64, F))
    ("transpose-tall", lambda: transpose(128, 16, eng.tensor), "tensor", 128, 128),
    ("transpose-wide", lambda: transpose(16, 128, eng.tensor), "tensor", 64, 64),
    ("transpose-small", lambda: transpose(20, 30, eng.tensor), "tensor", 30, 30),
    ("transpose-vector", lambda: transpose(32, 32, eng.vector), "vector", 64, 64),
    # max(64, N)
    ("copy-fp32", lambda: copy(N, FP32, FP32), "vector", 512, 512),
    ("copy-fp32-floor", lambda: copy(10, FP32, FP32), "vector", 64, 64),
    ("copy-fp32-at-floor", lambda: copy(64, FP32, FP32), "vector", 64, 64),
    ("copy-fp32-above-floor", lambda: copy(65, FP32, FP32), "vector", 65, 65),
    ("copy-gpsimd", lambda: copy(N, BF, BF, engine=eng.gpsimd), "gpsimd", 512, 512),
    ("copy-scalar-fp32", lambda: copy(N, FP32, FP32, engine=eng.scalar), "scalar", 512, 512),
    ("copy-scalar-bf16", lambda: copy(N, engine=eng.scalar), "scalar", 512, 256),
    # 16-bit modes of Vector: a quarter in SBUF and contiguous, a half strided or with one side in PSUM
    ("copy-bf16", lambda: copy(N), "vector", 128, 128),
    ("copy-bf16-floor", lambda: copy(200), "vector", 64, 64),
    ("copy-bf16-at-floor", lambda: copy(256), "vector", 64, 64),
    ("copy-bf16-above-floor", lambda: copy(260), "vector", 65, 65),
    ("copy-bf16-fp16", lambda: copy(N, BF, nl.float16), "vector", 128, 128),
    ("copy-bf16-strided", lambda: copy(N, step=2), "vector", 256, 256),
    ("copy-bf16-strided-floor", lambda: copy(100, step=2), "vector", 64, 64),
    ("copy-bf16-to-psum", lambda: copy(N, target=nl.psum), "vector", 256, 256),
    ("copy-bf16-from-psum", lambda: copy(N, source=nl.psum), "vector", 256, 256),
    ("copy-bf16-psum-strided", lambda: copy(N, source=nl.psum, step=2), "vector", 512, 512),
    ("copy-bf16-within-psum", lambda: copy(N, source=nl.psum, target=nl.psum), "vector", 512, 512),
    ("copy-bf16-to-fp32", lambda: copy(N, BF, FP32), "vector", 512, 512),
    ("copy-fp32-to-bf16", lambda: copy(N, FP32, BF), "vector", 512, 512),
    ("copy-psum-fp32", lambda: copy(N, FP32, BF, source=nl.psum), "vector", 512, 512),
    ("scalar-bf16", lambda: scalar(N), "vector", 128, 128),
    ("scalar-bf16-strided", lambda: scalar(N, step=2), "vector", 256, 256),
    ("scalar-fp32", lambda: scalar(N, FP32), "vector", 512, 512),
    ("scalar-mixed", lambda: scalar(N, BF, dst=FP32), "vector", 512, 512),
    ("scalar-engine-fp32", lambda: scalar(N, FP32, engine=eng.scalar), "scalar", 512, 512),
    ("scalar-engine-bf16", lambda: scalar(N, engine=eng.scalar), "scalar", 512, 256),
    ("rsqrt-gpsimd", lambda: nisa.tensor_scalar(sb(1, N), sb(1, N), nl.rsqrt, 0.0), "gpsimd", 2048, 2048),
    # max(64, N) with one input in PSUM, N / 2 all in 16 bits, else max(64, 2 N)
    ("tensor-fp32", lambda: tensor(N), "vector", 1024, 1024),
    ("tensor-fp32-floor", lambda: tensor(20), "vector", 64, 64),
    ("tensor-psum", lambda: tensor(N, two=nl.psum), "vector", 512, 512),
    ("tensor-bf16", lambda: tensor(N, BF), "vector", 256, 256),
    ("tensor-bf16-maximum", lambda: tensor(N, BF, op=nl.maximum), "vector", 256, 256),
    ("tensor-bf16-strided", lambda: tensor(N, BF, step=2), "vector", 256, 256),
    ("tensor-bf16-floor", lambda: tensor(100, BF), "vector", 64, 64),
    ("tensor-bf16-to-fp32", lambda: tensor(N, BF, FP32), "vector", 1024, 1024),
    ("tensor-bf16-to-psum", lambda: tensor(N, BF, to=nl.psum), "vector", 256, 256),
    ("tensor-bf16-psum", lambda: tensor(N, BF, two=nl.psum), "vector", 512, 512),
    # 2 N; N for one pair of operators in 16 bits
    ("stt-fp32", lambda: stt(N, FP32), "vector", 1024, 1024),
    ("stt-bf16", lambda: stt(N, BF), "vector", 512, 512),
    ("stt-bf16-odd", lambda: stt(N - 1, BF), "vector", 1022, 1022),
    ("stt-bf16-others", lambda: stt(N, BF, nl.multiply, nl.add), "vector", 1024, 1024),
    # N, or N / 2 in bfloat16 for add and maximum
    ("reduce-fp32", lambda: reduce(N), "vector", 512, 512),
    ("reduce-bf16-add", lambda: reduce(N, dtype=BF), "vector", 256, 256),
    ("reduce-bf16-maximum", lambda: reduce(N, nl.maximum, BF), "vector", 256, 256),
    ("reduce-bf16-minimum", lambda: reduce(N, nl.minimum, BF), "vector", 512, 512),
    ("reduce-bf16-to-fp32", lambda: reduce(N, dtype=BF, dst=FP32), "vector", 512, 512),
    # Scalar
    ("activation", lambda: activation(N), "scalar", 512, 512),
    ("activation-floor", lambda: activation(10), "scalar", 64, 64),
    ("activation-result", lambda: activation(N, result=True), "scalar", 576, 576),
    ("activation-reduce", lambda: nisa.activation_reduce(sb(1, N), nl.exp, sb(1, N), nl.add, sb(1, 1)), "scalar", 576, 576),
    (
        "activation-reduce-floor",
        lambda: nisa.activation_reduce(sb(1, 8), nl.exp, sb(1, 8), nl.add, sb(1, 1)),
        "scalar",
        128,
        128,
    ),
    ("reciprocal-scalar", lambda: activation(N, nl.reciprocal), "scalar", 512, 512),
    # Others
    ("reciprocal", lambda: nisa.reciprocal(sb(1, N), sb(1, N)), "vector", 4096, 4096),
    ("reciprocal-at-floor", lambda: nisa.reciprocal(sb(1, 8), sb(1, 8)), "vector", 64, 64),
    ("iota", lambda: nisa.iota(sb(1, N, dtype=nl.int32), [[1, N]]), "gpsimd", 662, 662),
    ("iota-small", lambda: nisa.iota(sb(1, 1, dtype=nl.int32), [[1, 1]]), "gpsimd", 151, 151),
    ("affine-select", lambda: nisa.affine_select(sb(1, N), [[1, N]], 0, sb(1, N), 0.0), "gpsimd", 662, 662),
    ("bn-stats", lambda: nisa.bn_stats(sb(1, 6), sb(1, N)), "vector", 512, 512),
    ("bn-aggr-floor", lambda: nisa.bn_aggr(sb(1, 2), sb(1, 6)), "vector", 64, 64),
    ("bn-aggr", lambda: nisa.bn_aggr(sb(1, 2), sb(1, 60)), "vector", 260, 260),
    ("range-select", lambda: ranged(N), "vector", 512, 512),
    ("shuffle", lambda: nisa.nc_stream_shuffle(sb(32, N), sb(32, N), list(range(32))), "vector", 512, 512),
    ("scan", lambda: nisa.tensor_tensor_scan(sb(1, N), sb(1, N), sb(1, N), 0.0, nl.add, nl.add), "vector", 1024, 1024),
    ("predicated", lambda: predicated(N), "vector", 1024, 1024),
    ("predicated-psum", lambda: predicated(N, nl.psum), "vector", 512, 512),
    (
        "scalar-reduce",
        lambda: nisa.tensor_scalar_reduce(sb(1, N), sb(1, N), nl.add, 0.0, nl.add, sb(1, 1)),
        "vector",
        576,
        576,
    ),
    # four times the throughput of exp on Scalar (trn3 only)
    ("exponential", lambda: nisa.exponential(sb(1, N), sb(1, N)), "vector", None, 128),
    ("exponential-floor", lambda: nisa.exponential(sb(1, 8), sb(1, 8)), "vector", None, 64),
]
ROWS = [
    pytest.param(kernel, engine, target, cycles, id=f"{name}-{target}")
    for name, kernel, engine, *both in CYCLES
    for target, cycles in zip(("trn2", "trn3"), both, strict=True)
    if cycles is not None
]
CLOCKS = {
    "trn2": {"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2},
    "trn3": {"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2},
}


def alone(body, target="trn2"):
    def kernel(_):
        body()

    return cost(kernel, EMPTY, target=target)


@pytest.mark.parametrize(("body", "engine", "target", "cycles"), ROWS)
def test_cycles_of_one_instruction(body, engine, target, cycles):
    p = alone(body, target)
    assert p.engines[engine].cycles == pytest.approx(cycles, rel=1e-12)
    assert p.engines[engine].us == pytest.approx(cycles / CLOCKS[target][engine] / 1000, rel=1e-12)
    # nothing else ran
    assert {name: e.instructions for name, e in p.engines.items()} == {
        name: int(name == engine) for name in ("tensor", "vector", "scalar", "gpsimd")
    }
    assert (p.instructions, p.dma_instructions) == (1, 0)
    assert p.overlapped_us == pytest.approx(p.engines[engine].us)
    assert p.serial_us == pytest.approx(p.engines[engine].us)


def test_cycles_do_not_depend_on_the_number_of_partitions():
    for rows in (1, 32, 128):
        assert alone(lambda rows=rows: nisa.memset(sb(rows, 300), 0.0)).engines["vector"].cycles == 300


def test_cycles_do_not_depend_on_the_data():
    def kernel(a):
        x = tile_of(a)
        nisa.activation(x, nl.exp, x)

    for value in (0.0, np.nan, np.inf):
        assert cost(kernel, np.full((1, 100), value, np.float32)).engines["scalar"].cycles == 100


def test_contiguity_is_that_of_the_innermost_dimension():
    def body():
        nisa.tensor_copy(sb(128, 16, 32, dtype=BF), sb(128, 16, 64, dtype=BF)[:, :, 0:32])

    assert alone(body).engines["vector"].cycles == 128


def test_cycles_of_an_engine_add_up():
    def body():
        copy(N)
        copy(N, FP32, FP32)
        matmul(128, 128, 512)
        matmul(128, 128, 64)
        activation(100)

    p = alone(body)
    assert {name: (e.instructions, e.cycles) for name, e in p.engines.items()} == {
        "tensor": (2, 576),
        "vector": (2, 640),
        "scalar": (1, 100),
        "gpsimd": (0, 0),
    }


# Multiply-adds


@pytest.mark.parametrize(
    ("body", "multiply_adds", "utilization"),
    [
        (lambda: matmul(128, 128, 512), 8388608, 1.0),
        (lambda: matmul(64, 128, 512), 4194304, 0.5),
        (lambda: matmul(128, 128, 512, FP32), 8388608, 0.25),
        (lambda: matmul(128, 128, 32), 524288, 0.5),
        (lambda: double_row(512), 16777216, 2.0),
        (lambda: transpose(128, 128, eng.tensor), 0, 0.0),
        (lambda: copy(N), 0, 0.0),
    ],
    ids=["full", "half-rows", "fp32", "few-columns", "double-row", "transpose", "no-matmul"],
)
def test_utilization_is_multiply_adds_over_the_arrays_capacity(body, multiply_adds, utilization):
    p = alone(body)
    assert p.multiply_adds == multiply_adds
    assert p.tensor_utilization == pytest.approx(utilization, rel=1e-12)


# DMA


def moved(kernel, *arrays, target="trn2"):
    p = cost(kernel, *arrays, target=target)
    return p.hbm_read_bytes, p.hbm_write_bytes, p.dma_instructions


X = np.ones((128, 512), np.float32)


def hbm(*shape, dtype=FP32):
    return nl.ndarray(shape, dtype, buffer=nl.hbm)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (lambda a: nisa.dma_copy(sb(128, 512), a), (262144, 0, 1)),
        (lambda a: nisa.dma_copy(hbm(128, 512), sb(128, 512)), (0, 262144, 1)),
        (lambda a: nisa.dma_copy(hbm(128, 512), a), (262144, 262144, 1)),
        (lambda a: nisa.dma_copy(sb(128, 512), sb(128, 512)), (0, 0, 1)),
        (lambda a: nisa.dma_copy(sb(128, 512, dtype=BF), a), (262144, 0, 1)),
        (lambda a: nisa.dma_copy(hbm(128, 512, dtype=BF), a), (262144, 131072, 1)),
        (lambda a: nisa.dma_copy(sb(64, 256), a[0:64, 0:512:2]), (65536, 0, 1)),
        (lambda a: nisa.dma_copy(sb(128, 512), a[0:1].broadcast(0, 128)), (262144, 0, 1)),
        (lambda a: nisa.dma_copy(sb(100, 20), a.ap([[1, 100], [1, 20]], offset=0)), (8000, 0, 1)),
        (lambda a: nisa.dma_transpose(sb(16, 128), a[:, 0:16]), (8192, 0, 1)),
        (lambda a: nisa.dma_compute(hbm(128, 512), [a, a, a], nl.add), (786432, 262144, 1)),
        (lambda a: nisa.dma_compute(sb(128, 512), [a, sb(128, 512)], nl.add), (262144, 0, 1)),
        (lambda a: nl.load(a), (262144, 0, 1)),
    ],
    ids=[
        "load",
        "store",
        "hbm-to-hbm",
        "sbuf-to-sbuf",
        "load-as-bf16",
        "hbm-to-bf16",
        "strided",
        "stride-0",
        "overlapping",
        "transpose",
        "sum-of-three",
        "sum-with-sbuf",
        "nl-load",
    ],
)
def test_bytes_at_both_ends_of_a_dma(kernel, expected):
    def body(a):
        kernel(a)

    assert moved(body, X) == expected


def test_a_gather_reads_the_rows_that_it_moves():
    def kernel(a, i):
        index = sb(4, 1, dtype=nl.uint32)
        nisa.dma_copy(index, i)
        nisa.dma_copy(sb(4, 512), a.ap([[512, 4], [1, 512]], vector_offset=index))

    assert moved(kernel, X, np.zeros((4, 1), np.uint32)) == (16 + 4 * 2048, 0, 2)


def load(rows):
    def kernel(a):
        nisa.dma_copy(sb(rows, 512), a[0:rows])

    return kernel


@pytest.mark.parametrize(("target", "bytes_per_ns"), [("trn2", 23), ("trn3", 33)])
@pytest.mark.parametrize(("rows", "engines"), [(8, 1), (9, 2), (64, 8), (128, 16)])
def test_a_transfer_uses_one_dma_engine_per_8_partitions(rows, engines, target, bytes_per_ns):
    machine = nki.MACHINES[target].replace(dma_descriptor_ns=0.0)
    p = cost(load(rows), X, target=machine)
    transfer = rows * 2048 / bytes_per_ns / engines
    # a DMA alone: semaphore to start, then the transfer
    assert p.serial_us == pytest.approx((1300 + transfer) / 1000, rel=1e-12)


@pytest.mark.parametrize(("target", "peak"), [("trn2", 368), ("trn3", 528)])
def test_busy_dma_engines_move_their_peak_together(target, peak):
    machine = nki.MACHINES[target].replace(dma_descriptor_ns=0.0, dma_fixed_ns=0.0)
    for rows in (8, 128):
        assert cost(load(rows), X, target=machine).dma_us == pytest.approx(rows * 2048 / peak / 1000, rel=1e-12)


def test_a_dma_of_hbm_to_hbm_uses_all_engines():
    machine = nki.MACHINES["trn2"].replace(dma_descriptor_ns=0.0, dma_fixed_ns=0.0)
    p = cost(lambda a: nisa.dma_copy(hbm(128, 512), a), X, target=machine)
    assert p.dma_us == p.serial_us == pytest.approx(262144 / 368 / 1000, rel=1e-12)


def test_descriptors_count_contiguous_pieces():
    def pieces(body):
        return cost(lambda a: body(a), X).dma_descriptors

    # a row of SBUF ends with its partition
    assert pieces(lambda a: nisa.dma_copy(sb(128, 512), a)) == 128
    assert pieces(lambda a: nisa.dma_copy(sb(64, 512), a[0:64])) == 64
    assert pieces(lambda a: nisa.dma_copy(hbm(128, 512), a)) == 1
    # every element of a strided row is a piece
    assert pieces(lambda a: nisa.dma_copy(sb(2, 256), a[0:2, 0:512:2])) == 512
    assert pieces(lambda a: nisa.dma_copy(sb(2, 4, 32), a.reshape((128, 4, 128))[0:2, :, 0:32])) == 8


def test_many_small_pieces_take_longer_than_one_large_one():
    def strided(a):
        nisa.dma_copy(sb(128, 256), a[:, 0:512:2])

    def packed(a):
        nisa.dma_copy(sb(128, 256), a[:, 0:256])

    assert cost(strided, X).dma_us > 2 * cost(packed, X).dma_us


# Memory


def test_sbuf_peak_is_the_most_that_is_live_at_one_time():
    def both(a):
        one, two = tile_of(a), tile_of(a)
        nisa.tensor_tensor(one, one, two, nl.add)
        return out(one)

    def one_by_one(a):
        first = out(tile_of(a))
        return first, out(tile_of(a))

    assert cost(both, X).sbuf_peak_bytes == 4096
    assert cost(one_by_one, X).sbuf_peak_bytes == 2048


def test_sbuf_bytes_are_per_partition():
    for rows in (1, 128):
        assert alone(lambda rows=rows: nisa.memset(sb(rows, 100, dtype=BF), 0.0)).sbuf_peak_bytes == 200


@pytest.mark.parametrize(("width", "banks"), [(1, 1), (512, 1), (513, 2), (1024, 2), (4096, 8)])
def test_psum_is_counted_in_whole_banks(width, banks):
    p = alone(lambda: nisa.memset(ps(1, width), 0.0))
    assert (p.psum_banks, p.sbuf_peak_bytes) == (banks, 0)


def test_psum_banks_are_those_that_are_live_at_one_time():
    def kernel(a):
        x = tile_of(a)
        total = nl.zeros((64, 64), FP32)
        for _ in range(5):
            product = ps(64, 64)
            nisa.nc_matmul(product, x[:, 0:64], x[:, 0:64])
            nisa.tensor_tensor(total, total, product, nl.add)
        return out(total)

    assert cost(kernel, X).psum_banks == 1


# A whole kernel


def scaled_product(a, b):
    """128 x 128 x 512 in bfloat16, scaled on Scalar, with 2 loads and 1 store."""
    x, y = tile_of(a), tile_of(b)
    product = ps(128, 512)
    nisa.nc_matmul(product, x, y)
    result = sb(128, 512, dtype=BF)
    nisa.activation(result, nl.copy, product, scale=2.0)
    return out(result)


ARRAYS = (np.ones((128, 128), BF16), np.ones((128, 512), BF16))


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_a_whole_kernel(target):
    p = cost(scaled_product, *ARRAYS, target=target)
    assert (p.target, p.lnc, p.cores, p.recording, p.scheduled_us) == (target, 1, (), (), None)
    assert list(p.engines) == ["tensor", "vector", "scalar", "gpsimd"]
    assert (p.engines["tensor"].cycles, p.engines["scalar"].cycles, p.engines["vector"].cycles) == (512, 512, 0)
    assert p.engines["tensor"].us == pytest.approx(512 / 2400)
    assert p.engines["scalar"].us == pytest.approx(512 / 1200)
    assert (p.hbm_read_bytes, p.hbm_write_bytes) == (32768 + 131072, 131072)
    assert (p.dma_instructions, p.instructions) == (3, 5)
    # 256 B and 1024 B of operands; the result of 1024 B comes after them
    assert (p.sbuf_peak_bytes, p.psum_banks) == (1280, 1)
    assert (p.multiply_adds, p.tensor_utilization) == (8388608, 1.0)
    assert p.overlapped_us == max(p.dma_us, *(e.us for e in p.engines.values()))
    assert p.serial_us > p.overlapped_us


def test_the_busiest_engine_or_the_dma_decides_how_long_all_take_together():
    machine = nki.MACHINES["trn2"].replace(dma_descriptor_ns=0.0, dma_fixed_ns=0.0)
    p = cost(scaled_product, *ARRAYS, target=machine)
    # 294912 B at 368 B / ns are 0.801 us, Scalar needs 0.427 us
    assert p.overlapped_us == pytest.approx(294912 / 368 / 1000)
    fast = machine.replace(dma_engine_bytes_per_ns=2300.0)
    assert cost(scaled_product, *ARRAYS, target=fast).overlapped_us == pytest.approx(512 / 1200)


def test_nothing_overlaps_in_the_serial_time():
    machine = nki.MACHINES["trn2"].replace(dma_descriptor_ns=0.0)
    p = cost(scaled_product, *ARRAYS, target=machine)
    assert p.serial_us == pytest.approx((512 / 2.4 + 512 / 1.2 + 3 * 1300 + 294912 / 368) / 1000)


def test_the_text_of_a_profile_is_a_table():
    p = cost(scaled_product, *ARRAYS)
    text = str(p)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    for name in ("tensor", "vector", "scalar", "gpsimd", "dma"):
        assert name in rows
    assert "trn2" in text
    assert "simulated" in text
    assert rows["vector"] == ["vector", "0", "0", "0.00"]
    assert rows["scalar"] == ["scalar", "1", "512", "0.43"]
    assert rows["dma"][1] == "3"
    for number in ("8,388,608", "100.0%", "163,840", "131,072", "1,280"):
        assert number in text
    assert f"{p.overlapped_us:.2f}" in text
    assert f"{p.serial_us:.2f}" in text


@pytest.mark.parametrize(("name", "target"), [("gen3", "trn2"), ("gen4", "trn3"), ("trn2", "trn2"), ("trn3", "trn3")])
def test_targets_have_two_names(name, target):
    assert cost(lambda a: None, EMPTY, target=name).target == target


def test_an_empty_kernel_costs_nothing():
    p = cost(lambda a: None, EMPTY)
    assert (p.instructions, p.serial_us, p.overlapped_us, p.sbuf_peak_bytes, p.psum_banks) == (0, 0, 0, 0, 0)
    assert p.tensor_utilization == 0


# Recordings


def test_a_recording_keeps_instructions_in_order():
    p = cost(scaled_product, *ARRAYS, record=True)
    assert [i.name for i in p.recording] == ["dma_copy", "dma_copy", "nc_matmul", "activation", "dma_copy"]
    assert [i.engine for i in p.recording] == ["dma", "dma", "tensor", "scalar", "dma"]
    assert [i.index for i in p.recording] == [0, 1, 2, 3, 4]
    assert [i.bytes for i in p.recording] == [32768, 131072, 0, 0, 131072]
    assert [i.cycles for i in p.recording] == [0, 0, 512, 512, 0]


def ends(recording):
    return [i.start_us + i.us for i in recording]


def test_a_recorded_instruction_starts_when_its_operands_are_written():
    p = cost(scaled_product, *ARRAYS, record=True)
    one, two, product, scale, store = p.recording
    end = ends(p.recording)
    # two loads on different queues
    assert one.start_us == two.start_us == 0
    assert product.start_us == pytest.approx(max(end[0], end[1]))
    assert scale.start_us == pytest.approx(end[2])
    assert store.start_us == pytest.approx(end[3])
    assert p.scheduled_us == pytest.approx(end[4])
    assert p.overlapped_us <= p.scheduled_us <= p.serial_us


def test_a_recorded_engine_does_one_instruction_after_the_other():
    def kernel(_):
        for _ in range(3):
            nisa.memset(sb(1, 96), 0.0)
        nisa.activation(sb(1, 120), nl.exp, sb(1, 120))

    p = cost(kernel, EMPTY, record=True)
    assert [i.start_us for i in p.recording] == pytest.approx([0, 0.1, 0.2, 0])
    assert p.scheduled_us == pytest.approx(0.3)


def test_a_recorded_write_waits_for_earlier_reads_and_writes():
    def kernel(_):
        x, y = sb(1, 96), sb(1, 96)
        nisa.memset(x, 0.0)
        nisa.activation(y, nl.exp, x)
        nisa.memset(x, 1.0)  # after the read of x
        nisa.memset(y, 1.0, engine=eng.gpsimd)  # after the write of y

    p = cost(kernel, EMPTY, record=True)
    end = ends(p.recording)
    assert p.recording[1].start_us == pytest.approx(end[0])
    assert p.recording[2].start_us == pytest.approx(end[1])
    assert p.recording[3].start_us == pytest.approx(end[1])


def test_a_profile_with_and_without_recording_agree():
    plain, recorded = cost(scaled_product, *ARRAYS), cost(scaled_product, *ARRAYS, record=True)
    assert plain.engines == recorded.engines
    assert (plain.serial_us, plain.overlapped_us) == (recorded.serial_us, recorded.overlapped_us)


def test_a_recording_is_drawn_and_saved(tmp_path):
    from matplotlib.figure import Figure

    p = cost(scaled_product, *ARRAYS, record=True)
    path = tmp_path / "timeline.png"
    figure = p.plot(path)
    assert isinstance(figure, Figure)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    assert isinstance(p.plot(), Figure)


def test_a_profile_without_recording_cannot_be_drawn():
    with pytest.raises(RuntimeError, match="record=True"):
        cost(scaled_product, *ARRAYS).plot()


# Two cores


def halves(a):
    """Each core doubles half of the rows; core 1 takes one more instruction."""
    result = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    core, rows = nl.program_id(0), a.shape[0] // 2
    tile = tile_of(a[nl.ds(core * rows, rows)])
    for _ in range(1 + core):
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nisa.dma_copy(result[nl.ds(core * rows, rows)], tile)
    return result


def test_two_cores_count_together_and_take_the_time_of_the_slower():
    p = cost(halves, X, lnc=2)
    assert (p.lnc, len(p.cores)) == (2, 2)
    assert (p.hbm_read_bytes, p.hbm_write_bytes, p.dma_instructions, p.instructions) == (262144, 262144, 4, 7)
    assert [core.engines["vector"].cycles for core in p.cores] == [512, 1024]
    assert (p.engines["vector"].instructions, p.engines["vector"].cycles) == (3, 1024)
    assert [core.hbm_read_bytes for core in p.cores] == [131072, 131072]
    assert p.sbuf_peak_bytes == 2048
    assert p.overlapped_us == max(core.overlapped_us for core in p.cores)
    assert p.serial_us == p.cores[1].serial_us > p.cores[0].serial_us
    assert "2 cores" in str(p)


def test_two_cores_halve_the_time_of_one():
    one, two = cost(halves_alone, X), cost(halves_alone, X, lnc=2)
    assert two.engines["gpsimd"].cycles * 2 == one.engines["gpsimd"].cycles == 1024
    assert two.hbm_read_bytes == one.hbm_read_bytes


def halves_alone(a):
    result = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    for i in range(2 // nl.num_programs()):
        rows = nl.ds(64 * (nl.program_id() + i), 64)
        tile = tile_of(a[rows])
        nisa.memset(tile, 0.0, engine=eng.gpsimd)
        nisa.dma_copy(result[rows], tile)
    return result
