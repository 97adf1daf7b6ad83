# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Short ways to run one instruction in the NKI interpreter, through its public API only."""

import ml_dtypes
import numpy as np

import nki3d.simulator as nki

nl, nisa = nki.language, nki.isa

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3
E5M2 = ml_dtypes.float8_e5m2
NAN, INF = float("nan"), float("inf")


def f32(*rows):
    """A float32 matrix, one argument per partition."""
    return np.array(rows, np.float32)


def i32(*rows):
    """An int32 matrix, one argument per partition."""
    return np.array(rows, np.int32)


def run(kernel, *arrays, target="trn2", lnc=1, **static):
    """What a kernel returns."""
    return nki.profile(kernel, target=target, lnc=lnc)(*arrays, **static)[0]


def cost(kernel, *arrays, target="trn2", lnc=1, record=False, **static):
    """What a kernel would cost."""
    return nki.profile(kernel, target=target, lnc=lnc, record=record)(*arrays, **static)[1]


def out(tile):
    """A tile of SBUF or PSUM, copied to an output in HBM bit for bit."""
    if tile.buffer is nl.psum:
        moved = nl.ndarray(tile.shape, tile.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(moved, tile)
        tile = moved
    result = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(result, tile)
    return result


def tile_of(array, buffer=nl.sbuf):
    """A new tile with the values of an argument in HBM."""
    tile = nl.ndarray(array.shape, array.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, array)
    if buffer is nl.psum:
        inside = nl.ndarray(array.shape, array.dtype, buffer=nl.psum)
        nisa.tensor_copy(inside, tile)
        return inside
    return tile


def apply(body, shape, dtype, *arrays, target="trn2", buffer=nl.sbuf):
    """`body(dst, *tiles)` with a new dst and the arrays in SBUF; the values of dst afterwards."""

    def kernel(*inputs):
        tiles = [tile_of(array) for array in inputs]
        dst = nl.ndarray(shape, dtype, buffer=buffer)
        body(dst, *tiles)
        return out(dst)

    return (
        run(kernel, *(arrays or (f32([0.0]),)), target=target) if arrays else run(lambda _: kernel(), f32([0.0]), target=target)
    )


def same(actual, expected):
    """Whether two arrays agree element by element, NaN with NaN and -0 with 0; the data types must agree, too."""
    actual = np.asarray(actual)
    expected = np.asarray(expected, actual.dtype)
    np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))
    assert actual.shape == expected.shape
