# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.simulator`: how fast the NKI interpreter runs, with all checks on.

Two figures: the wall time of a 2048 x 2048 x 2048 matmul in bfloat16 with tiles of 128 x 128 x 512, and the time per instruction on small tiles,
where NumPy's work on the elements is small beside the interpreter's own. Meant to run on one core: `make bench-simulator` sets that.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import ml_dtypes
import numpy as np

import nki3d.simulator as nki

nl, nisa = nki.language, nki.isa


@nki.jit
def matmul(left_t, right):
    """[K, M], [K, N] -> [M, N], one tile of the result at a time."""
    depth, rows = left_t.shape
    _, columns = right.shape
    result = nl.ndarray((rows, columns), dtype=left_t.dtype, buffer=nl.shared_hbm)
    for m in range(rows // 128):
        for n in range(columns // 512):
            total = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in range(depth // 128):
                stationary = nl.ndarray((128, 128), dtype=left_t.dtype, buffer=nl.sbuf)
                moving = nl.ndarray((128, 512), dtype=right.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=stationary, src=left_t[k * 128 : (k + 1) * 128, m * 128 : (m + 1) * 128])
                nisa.dma_copy(dst=moving, src=right[k * 128 : (k + 1) * 128, n * 512 : (n + 1) * 512])
                nisa.nc_matmul(dst=total, stationary=stationary, moving=moving)
            tile = nl.ndarray((128, 512), dtype=result.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=total)
            nisa.dma_copy(dst=result[m * 128 : (m + 1) * 128, n * 512 : (n + 1) * 512], src=tile)
    return result


def time_matmul(size: int, repeats: int) -> float:
    """Median seconds of a square matmul, after one check of its values."""
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((size, size)).astype(ml_dtypes.bfloat16) for _ in range(2))
    expected = left.astype(np.float32).T @ right.astype(np.float32)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = matmul(left, right)
        seconds.append(time.perf_counter() - start)
    error = np.abs(result.astype(np.float32) - expected).max() / np.abs(expected).max()
    assert error < 2**-8, error
    return median(seconds)


def time_instructions(repeats: int) -> dict[str, float]:
    """Median microseconds of each instruction on tiles of 128 x 8, views included where a kernel would make them."""
    times: dict[str, float] = {}

    def clock(name: str, call: Callable[[], object]) -> None:
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        times[name] = 1e6 * median(samples)

    @nki.jit
    def kernel(x):
        f32 = nl.float32
        a, b, c = (nl.zeros((128, 8), f32) for _ in range(3))
        half, other = (nl.zeros((128, 8), nl.bfloat16) for _ in range(2))
        vector, one, statistics = nl.zeros((128, 1), f32), nl.zeros((128, 2), f32), nl.zeros((128, 6), f32)
        mask = nl.zeros((128, 8), nl.uint8)
        square, wide = nl.ndarray((8, 8), f32, buffer=nl.psum), nl.ndarray((8, 128), f32, buffer=nl.psum)
        strided = nl.ndarray((8, 4, 8), f32, buffer=nl.psum)
        register = nisa.register_alloc(0)
        clock("t[:, a:b]", lambda: a[:, 0:4])
        clock("nl.ndarray", lambda: nl.ndarray((128, 8), f32))
        clock("dma_copy", lambda: nisa.dma_copy(dst=a, src=x))
        clock("dma_copy to bfloat16", lambda: nisa.dma_copy(dst=half, src=x))
        clock("dma_transpose", lambda: nisa.dma_transpose(dst=nl.ndarray((8, 128), f32), src=x))
        clock("dma_compute", lambda: nisa.dma_compute(dst=a, srcs=[a, b], reduce_op=nl.add))
        clock("nc_matmul", lambda: nisa.nc_matmul(square, a, b))
        clock("nc_matmul bfloat16", lambda: nisa.nc_matmul(square, half, other))
        clock("nc_matmul, strided PSUM", lambda: nisa.nc_matmul(strided[:, 0:4, 0:8:4], a, b))
        clock("nc_transpose", lambda: nisa.nc_transpose(wide, a))
        clock("tensor_copy", lambda: nisa.tensor_copy(dst=a, src=b))
        clock("memset", lambda: nisa.memset(dst=a, value=0.0))
        clock("tensor_tensor", lambda: nisa.tensor_tensor(dst=c, data1=a, data2=b, op=nl.add))
        clock("tensor_scalar", lambda: nisa.tensor_scalar(c, a, nl.multiply, vector, op1=nl.add, operand1=1.0))
        clock("scalar_tensor_tensor", lambda: nisa.scalar_tensor_tensor(c, a, nl.multiply, 2.0, nl.add, b))
        clock("tensor_reduce", lambda: nisa.tensor_reduce(dst=vector, op=nl.add, data=a, axis=1))
        clock("tensor_scalar_reduce", lambda: nisa.tensor_scalar_reduce(c, a, nl.add, 1.0, nl.add, vector))
        clock("activation", lambda: nisa.activation(dst=c, op=nl.silu, data=a, bias=vector, scale=2.0))
        clock("activation_reduce", lambda: nisa.activation_reduce(c, nl.exp, a, nl.add, vector))
        clock("reciprocal", lambda: nisa.reciprocal(c, a))
        clock("tensor_copy_predicated", lambda: nisa.tensor_copy_predicated(c, a, mask))
        clock("select_reduce", lambda: nisa.select_reduce(c, mask, a, 0.0))
        clock("iota", lambda: nisa.iota(c, [[1, 8]], 0, 1))
        clock("affine_select", lambda: nisa.affine_select(c, [[1, 8]], 1, a, 0.0))
        clock("tensor_tensor_scan", lambda: nisa.tensor_tensor_scan(c, a, b, 0.0, nl.multiply, nl.add))
        clock("tensor_partition_reduce", lambda: nisa.tensor_partition_reduce(c[0:1], nl.add, a))
        clock("bn_stats", lambda: nisa.bn_stats(statistics, a))
        clock("bn_aggr", lambda: nisa.bn_aggr(one, statistics))
        clock("nc_stream_shuffle", lambda: nisa.nc_stream_shuffle(c, a, list(range(32))))
        clock("register_move", lambda: nisa.register_move(register, 1))

    kernel(np.zeros((128, 8), np.float32))
    return times


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2048, help="of the matmul (default 2048)")
    parser.add_argument("--repeats", type=int, default=3, help="of the matmul (default 3)")
    options = parser.parse_args()
    seconds = time_matmul(options.size, options.repeats)
    print(
        f"matmul {options.size} x {options.size} x {options.size}, bfloat16, tiles 128 x 128 x 512: {seconds:.2f} s (bar: 10 s at 2048)"
    )
    times = time_instructions(500)
    print("microseconds per call on tiles of 128 x 8, checks on:")
    for name, value in times.items():
        print(f"  {name:<26}{value:8.1f}")
    print(f"median {median(times.values()):.1f} us (bar: 60), slowest {max(times.values()):.1f} us")


if __name__ == "__main__":
    main()
