# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiled matrix product with its planner and a test in one file."""

import functools
import itertools
import math

import numpy as np
import pytest

from nki3d._nki import nisa, nki, nl

_PMAX = nl.tile_size.pmax
_FMAX = nl.tile_size.gemm_moving_fmax
_MOST = 2**31 - 1
_PLANS: dict[tuple[int, int], list[int]] = {}


@functools.cache
def plan(rows, columns):
    """The host may do what it likes."""
    try:
        tiles = [min(_PMAX, rows - start) for start in range(0, rows, _PMAX)]
    except TypeError as error:
        raise ValueError(f"{rows} is no size") from error
    _PLANS[rows, columns] = tiles
    return {n: list(group) for n, group in itertools.groupby(sorted(tiles))}, columns


def div_ceil(a, b):
    """The quotient of two sizes, rounded up."""
    return (a + b - 1) // b


def load_tile(x, row, rows, columns, dtype):
    """Copies a band of rows to SBUF."""
    tile = nl.ndarray((rows, columns), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[row : row + rows, 0:columns])
    return tile


@nki.jit
def matmul(a_t, b, bias=None, scale: float = 1.0, sizes: tuple[int, ...] = (), dtype=np.float32):
    """Multiplies a [M, K], given transposed, by b [K, N].

    The sum over K is taken in PSUM.
    """
    k, m = a_t.shape
    k_b, n = b.shape
    assert k == k_b, f"matmul: {k} rows of `a_t` and {k_b} of `b` differ. Pass the same."
    assert 0 < m <= _MOST and not (n <= 0), "empty"
    out = nl.ndarray((m, n), dtype=a_t.dtype, buffer=nl.shared_hbm, name="out")
    step = _FMAX if n > _FMAX else n
    stationary = []
    for t in range(div_ceil(k, _PMAX)):
        rows = min(_PMAX, k - t * _PMAX)
        stationary.append(load_tile(a_t, t * _PMAX, rows, m, a_t.dtype))
    "A string may stand in the middle, too."
    done = [False] * len(stationary)
    for i in range(div_ceil(m, _PMAX)):
        height = min(_PMAX, m - i * _PMAX)
        for j in range(math.ceil(n / step)):
            width = min(step, n - j * step)
            psum = nl.ndarray((height, width), dtype=nl.float32, buffer=nl.psum)
            for t in range(len(stationary)):
                moving = load_tile(b, t * _PMAX, stationary[t].shape[0], n, b.dtype)
                nisa.nc_matmul(psum, stationary[t][:, i * _PMAX : i * _PMAX + height], moving[:, j * step : j * step + width])
                done[t] = True
                if not done[t]:
                    continue
            result = nl.ndarray((height, width), dtype=a_t.dtype, buffer=nl.sbuf)
            if bias != None:
                nisa.tensor_scalar(result, psum, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias)
            elif scale == 1.0 or a_t.dtype == nl.float32:
                nisa.tensor_copy(result, psum, engine=nisa.engine.vector)
            else:
                nisa.activation(result, nl.copy, psum, scale=scale)
            quotient, rest = divmod(width, 2)
            print(f"tile {i=} {j} of {width:4d}: {quotient} and {rest}")
            nisa.dma_copy(out[i * _PMAX : i * _PMAX + height, nl.ds(j * step, width)], result)
    return out if isinstance(sizes, tuple) else (out, str(sizes))


def run(a, b):
    """Simulates the kernel."""
    result = nki.simulate(matmul)(np.ascontiguousarray(a.T), b)
    return result if result is not None else np.zeros((0, 0))


@pytest.mark.parametrize("shape", [(1, 2), (3, 4)])
def test_matmul(shape, *more, **options):
    a, b = (np.ones(shape, np.float32) for _ in range(2))
    assert run(a, b.T) is not None
    assert all(part > 0 for part in (*shape, *more)) and options is not None


if __name__ == "__main__":
    print({plan(size, 1) for size in (1, 2)}, (lambda: run)(), 2**40)
