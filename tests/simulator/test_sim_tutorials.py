# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole kernels of the kind that tutorials teach, in the NKI interpreter, against NumPy in float64.

Every kernel takes `mistake`: with it, it does one thing wrong, and the comparison must notice.
"""

import math

import numpy as np
import pytest
from simkit import BF16, nisa, nki, nl, run

TYPES = [np.float32, BF16]
# what one rounding costs, with room for a few of them and for partial sums above the result
UNIT = {np.dtype(np.float32): 2.0**-20, np.dtype(BF16): 2.0**-8}


def agree(got, wanted, terms=1):
    """Whether a result of `terms` added terms is within the roundings of its type."""
    unit = UNIT[got.dtype]
    error = np.abs(got.astype(np.float64) - wanted)
    return got.shape == wanted.shape and bool((error <= unit * math.sqrt(terms) + unit * np.abs(wanted)).all())


def sample(rng, *shape, dtype):
    return rng.normal(size=shape).astype(dtype)


def wide(array):
    return array.astype(np.float64)


@pytest.fixture
def numbers():
    return np.random.default_rng(20250101)


def check(kernel, arrays, wanted, terms=1, target="trn2", **static):
    """The kernel agrees with NumPy, and its mistaken twin does not."""
    assert agree(run(kernel, *arrays, target=target, mistake=False, **static), wanted, terms)
    assert not agree(run(kernel, *arrays, target=target, mistake=True, **static), wanted, terms)


typed = pytest.mark.parametrize("dtype", TYPES, ids=["float32", "bfloat16"])
on_both = pytest.mark.parametrize("target", ["trn2", "trn3"])


# Addition


def add_kernel(a, b, mistake):
    """a + b in tiles of 128 x 512."""
    rows, columns = a.shape
    result = nl.ndarray((rows, columns), a.dtype, buffer=nl.shared_hbm)
    for r in nl.affine_range(rows // 128):
        for c in nl.affine_range(columns // 512):
            where = (nl.ds(r * 128, 128), nl.ds(c * 512, 512))
            x = nl.ndarray((128, 512), a.dtype, buffer=nl.sbuf)
            y = nl.ndarray((128, 512), b.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=x, src=a[where])
            nisa.dma_copy(dst=y, src=b[where if not mistake or r == 0 else (nl.ds(0, 128), where[1])])
            nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
            nisa.dma_copy(dst=result[where], src=x)
    return result


@typed
@on_both
def test_addition_in_tiles(numbers, dtype, target):
    a, b = (sample(numbers, 256, 1024, dtype=dtype) for _ in range(2))
    check(add_kernel, (a, b), wide(a) + wide(b), target=target)


def add_with_nl(a, b, mistake):
    result = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    x, y = nl.load(a), nl.load(b)
    nl.store(result, value=nl.subtract(x, y) if mistake else nl.add(x, y))
    return result


@typed
def test_addition_with_functions_of_tiles(numbers, dtype):
    a, b = (sample(numbers, 128, 512, dtype=dtype) for _ in range(2))
    check(add_with_nl, (a, b), wide(a) + wide(b))


# Matrix products


def matmul_tiled(lhs_t, rhs, mistake):
    """lhs_t [K, M]^T @ rhs [K, N]: for every tile of the result, all of K in one PSUM bank."""
    k_size, m_size = lhs_t.shape
    n_size = rhs.shape[1]
    result = nl.ndarray((m_size, n_size), lhs_t.dtype, buffer=nl.shared_hbm)
    for m in range(m_size // 128):
        for n in range(n_size // 512):
            total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for k in range(k_size // 128):
                x = nl.ndarray((128, 128), lhs_t.dtype, buffer=nl.sbuf)
                y = nl.ndarray((128, 512), rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=x, src=lhs_t[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
                nisa.dma_copy(dst=y, src=rhs[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
                nisa.nc_matmul(dst=total, stationary=x, moving=y, accumulate=False if mistake else None)
            tile = nl.ndarray((128, 512), result.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=total)
            nisa.dma_copy(dst=result[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], src=tile)
    return result


def matmul_hoisted(lhs_t, rhs, mistake):
    """As above, but each block of columns of `rhs` is loaded once and stays in SBUF while all rows of the result use it."""
    k_tiles, m_tiles, n_tiles = lhs_t.shape[0] // 128, lhs_t.shape[1] // 128, rhs.shape[1] // 512
    result = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), lhs_t.dtype, buffer=nl.shared_hbm)
    left = nl.ndarray((128, k_tiles, lhs_t.shape[1]), lhs_t.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=left, src=lhs_t.reshape_dim(0, (k_tiles, 128)).permute((1, 0, 2)))
    for n in range(n_tiles):
        right = nl.ndarray((128, k_tiles, 512), rhs.dtype, buffer=nl.sbuf)
        for k in range(k_tiles):
            nisa.dma_copy(dst=right[:, k], src=rhs[nl.ds(k * 128, 128), nl.ds((0 if mistake else n) * 512, 512)])
        for m in range(m_tiles):
            total = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for k in range(k_tiles):
                nisa.nc_matmul(total, left[:, k, nl.ds(m * 128, 128)], right[:, k], accumulate=k > 0)
            tile = nl.ndarray((128, 512), result.dtype, buffer=nl.sbuf)
            nisa.activation(tile, nl.copy, total)
            nisa.dma_copy(dst=result[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], src=tile)
    return result


def matmul_blocked(lhs_t, rhs, mistake):
    """Blocks of K are outermost: sums of PSUM are added to a result in SBUF, in float32."""
    k_tiles, m_tiles, n_tiles = lhs_t.shape[0] // 128, lhs_t.shape[1] // 128, rhs.shape[1] // 512
    result = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), lhs_t.dtype, buffer=nl.shared_hbm)
    sums = nl.zeros((128, m_tiles, n_tiles, 512), nl.float32)
    for k in range(k_tiles):
        x = nl.load(lhs_t[nl.ds(k * 128, 128)])
        y = nl.load(rhs[nl.ds(k * 128, 128)])
        for m in range(m_tiles):
            for n in range(n_tiles):
                part = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
                nisa.nc_matmul(part, x[:, nl.ds(m * 128, 128)], y[:, nl.ds(n * 512, 512)])
                here = sums[:, m, n]
                if mistake and k == 1:
                    nisa.tensor_copy(here, part)
                else:
                    nisa.tensor_tensor(here, here, part, nl.add)
    for m in range(m_tiles):
        rounded = nl.ndarray((128, n_tiles * 512), result.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(rounded, sums[:, m].flatten_dims(1, 2))
        nisa.dma_copy(result[nl.ds(m * 128, 128)], rounded)
    return result


@typed
@pytest.mark.parametrize("kernel", [matmul_tiled, matmul_hoisted, matmul_blocked], ids=["tiled", "hoisted", "blocked"])
def test_matrix_products(numbers, dtype, kernel):
    lhs_t, rhs = sample(numbers, 384, 256, dtype=dtype), sample(numbers, 384, 1024, dtype=dtype)
    check(kernel, (lhs_t, rhs), wide(lhs_t).T @ wide(rhs), terms=384)


def test_hoisting_saves_bytes_and_changes_no_bit(numbers):
    arrays = sample(numbers, 256, 256, dtype=BF16), sample(numbers, 256, 1024, dtype=BF16)
    (tiled, one), (hoisted, two) = (nki.profile(kernel)(*arrays, mistake=False) for kernel in (matmul_tiled, matmul_hoisted))
    assert (tiled == hoisted).all()
    # the result has 2 x 2 tiles: the naive kernel reads either operand twice
    assert one.hbm_read_bytes == 2 * (256 * 256 + 256 * 1024) * 2
    assert two.hbm_read_bytes == (256 * 256 + 256 * 1024) * 2
    assert one.engines["tensor"].cycles == two.engines["tensor"].cycles == 8 * 512


# Average pooling


def average_pool(x, pool, mistake):
    """[C, H, W] by windows of pool x pool, read through a view of five dimensions."""
    channels, height, width = x.shape
    tile = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    windows = tile.ap(
        [
            [height * width, channels],
            [pool * width, height // pool],
            [pool, width // pool],
            [1 if mistake else width, pool],
            [1, pool],
        ]
    )
    total = nl.sum(windows, axis=[3, 4], dtype=nl.float32)
    mean = nl.ndarray(total.shape, x.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=mean, data=total, op0=nl.multiply, operand0=1.0 / pool**2)
    result = nl.ndarray(mean.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=mean)
    return result


@typed
@pytest.mark.parametrize("pool", [2, 3])
def test_average_pooling(numbers, dtype, pool):
    x = sample(numbers, 8, 6, 12, dtype=dtype)
    wanted = wide(x).reshape(8, 6 // pool, pool, 12 // pool, pool).mean((2, 4))
    check(average_pool, (x,), wanted, terms=pool * pool, pool=pool)


# Transposes of free dimensions


def transpose_free(x, rows, mistake):
    """[P, F1 x F2] to [P, F2 x F1], a column of F1 elements per tensor_copy."""
    partitions, size = x.shape
    columns = size // rows
    source, target = nl.load(x), nl.ndarray((partitions, size), x.dtype, buffer=nl.sbuf)
    for c in range(columns):
        nisa.tensor_copy(
            dst=target[:, nl.ds(c * rows, rows)],
            src=source[:, nl.ds(c * rows, rows)] if mistake else source[:, c : size - columns + c + 1 : columns],
        )
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(result, target)
    return result


def transpose_view(x, rows, mistake):
    """The same with one instruction on a permuted view."""
    partitions, size = x.shape
    source, target = nl.load(x), nl.ndarray((partitions, size), x.dtype, buffer=nl.sbuf)
    view = source.reshape_dim(1, (rows, -1))
    nisa.tensor_copy(target, view if mistake else view.permute((0, 2, 1)))
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(result, target)
    return result


@typed
@pytest.mark.parametrize("kernel", [transpose_free, transpose_view], ids=["columns", "view"])
def test_transposes_of_free_dimensions(numbers, dtype, kernel):
    x = sample(numbers, 16, 6 * 10, dtype=dtype)
    wanted = wide(x).reshape(16, 6, 10).transpose(0, 2, 1).reshape(16, 60)
    check(kernel, (x,), wanted, rows=6)
    # it moves bits only
    assert (wide(run(kernel, x, rows=6, mistake=False)) == wanted).all()


# A fused activation


def fused(x, scale, bias, kind, mistake):
    """act(x * scale + bias) with a scale and a bias per partition, and the sum of each row, on Scalar."""
    tile, s, b = nl.load(x), nl.load(scale), nl.load(bias)
    total = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.sbuf)
    values = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=values,
        op={"gelu": nl.gelu, "silu": nl.silu}[kind],
        data=tile,
        scale=s,
        bias=0.0 if mistake else b,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    rounded = nl.ndarray(total.shape, x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(rounded, total)
    result = nl.ndarray((x.shape[0], x.shape[1] + 1), x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(result[:, 0 : x.shape[1]], values)
    nisa.dma_copy(result[:, x.shape[1] : x.shape[1] + 1], rounded)
    return result


def activated(x, kind):
    if kind == "silu":
        return x / (1 + np.exp(-x))
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@typed
@on_both
@pytest.mark.parametrize("kind", ["gelu", "silu"])
def test_a_fused_activation_with_its_row_sums(numbers, dtype, kind, target):
    x = sample(numbers, 32, 100, dtype=dtype)
    scale, bias = sample(numbers, 32, 1, dtype=np.float32), sample(numbers, 32, 1, dtype=np.float32)
    values = activated(wide(x) * wide(scale) + wide(bias), kind)
    wanted = np.concatenate([values, values.sum(1, keepdims=True)], 1)
    check(fused, (x, scale, bias), wanted, terms=100, target=target, kind=kind)


# Rows: softmax, root mean square


def softmax(x, mistake):
    """exp(x - max) / sum over the rows, in float32 inside."""
    rows, columns = x.shape
    tile = nl.load(x)
    lowest = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=lowest, op=nl.maximum, data=tile, axis=1, negate=True)
    powers, total = nl.ndarray((rows, columns), nl.float32), nl.ndarray((rows, 1), nl.float32)
    half = columns // 2
    for i, part in enumerate((slice(0, half), slice(half, columns))):
        nisa.activation(
            powers[:, part],
            nl.exp,
            tile[:, part],
            bias=lowest,
            reduce_op=nl.add,
            reduce_res=total if i else None,
            # the mistake: the second half forgets the sum of the first
            reduce_cmd=nisa.reduce_cmd.reduce if i and not mistake else nisa.reduce_cmd.reset_reduce,
        )
    nisa.reciprocal(total, total)
    result, rounded = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm), nl.ndarray(x.shape, x.dtype)
    nisa.tensor_scalar(rounded, powers, nl.multiply, total)
    nl.store(result, rounded)
    return result


@typed
def test_softmax_over_rows(numbers, dtype):
    x = (sample(numbers, 64, 200, dtype=np.float32) * 5).astype(dtype)
    powers = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    check(softmax, (x,), powers / powers.sum(1, keepdims=True))


def test_softmax_does_not_overflow(numbers):
    x = sample(numbers, 4, 20, dtype=np.float32) + np.float32(1e4)
    powers = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    assert agree(run(softmax, x, mistake=False), powers / powers.sum(1, keepdims=True))


def rms_norm(x, weight, mistake):
    """x / sqrt(mean(x^2) + 1e-6) * weight, the weights repeated to all partitions by the DMA."""
    rows, columns = x.shape
    tile = nl.load(x)
    weights = nl.ndarray((rows, columns), weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(weights, weight.broadcast(0, rows))
    squares, total = nl.ndarray((rows, columns), nl.float32), nl.ndarray((rows, 1), nl.float32)
    nisa.activation_reduce(dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total)
    nisa.tensor_scalar(total, total, nl.multiply, 1.0 if mistake else 1.0 / columns, op1=nl.add, operand1=1e-6)
    nisa.activation(total, nl.rsqrt, total)
    scaled = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(scaled, tile, nl.multiply, total, nl.multiply, weights)
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(result, scaled)
    return result


@typed
@on_both
def test_root_mean_square_norm_over_rows(numbers, dtype, target):
    x, weight = sample(numbers, 96, 160, dtype=dtype), sample(numbers, 1, 160, dtype=dtype)
    wanted = wide(x) / np.sqrt((wide(x) ** 2).mean(1, keepdims=True) + 1e-6) * wide(weight)
    check(rms_norm, (x, weight), wanted, target=target)


# A convolution: the pattern that needs start bits per element


def convolve(x, weight, mistake):
    """[C, W] with [3, C, M], padding 1: taps at the border write fewer columns of PSUM."""
    channels, width = x.shape
    tile = nl.load(x)
    filters = nl.ndarray((channels, 3, weight.shape[2]), weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(filters, weight.permute((1, 0, 2)))
    total = nl.ndarray((weight.shape[2], width), nl.float32, buffer=nl.psum)
    for tap in range(3):
        first, last = max(0, 1 - tap), min(width, width + 1 - tap)
        shift = 0 if mistake else tap - 1
        nisa.nc_matmul(total[:, first:last], filters[:, tap], tile[:, max(0, first + shift) : last + shift])
    rounded = nl.ndarray(total.shape, x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(rounded, total)
    result = nl.ndarray(total.shape, x.dtype, buffer=nl.shared_hbm)
    nl.store(result, rounded)
    return result


@typed
def test_a_padded_convolution_accumulates_partial_regions(numbers, dtype):
    x, weight = sample(numbers, 20, 50, dtype=dtype), sample(numbers, 3, 20, 10, dtype=dtype)
    padded = np.pad(wide(x), ((0, 0), (1, 1)))
    wanted = sum(wide(weight)[tap].T @ padded[:, tap : tap + 50] for tap in range(3))
    check(convolve, (x, weight), wanted, terms=60)
