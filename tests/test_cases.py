# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What users of other libraries reported, as the smallest inputs that show it, with the right numbers written out.

Each docstring names the reports. Volumes of one row along W are written as that row.
"""

import functools
import itertools
import logging
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import terms
from tolerances import assert_close, assert_equal

import jax_nki3d
from jax_nki3d import avg_pooling_3d, avg_pooling_3d_backward, conv3d, conv3d_bwd, conv3d_transpose

# Tests that ask for an implementation themselves, or look at programs that one implementation alone makes.
OF_ONE_IMPLEMENTATION = re.compile(r"test_(h12|h16_refused|h17|h20_mixed|h24_(import|kernels|on_neuron|without)|every_case)")


def pytest_generate_tests(metafunc):
    """Every other test runs twice: as it stands, and with the NKI kernels in the interpreter."""
    alone = OF_ONE_IMPLEMENTATION.match(metafunc.function.__name__)
    metafunc.parametrize("implementation_in_force", [None] if alone else [None, "simulate"], ids=lambda name: name or "lax")


@pytest.fixture(autouse=True)
def _implementation(implementation_in_force):
    with jax_nki3d.options(implementation=implementation_in_force):
        yield


SIXTEEN_BITS = ("bfloat16", "float16")
ALL_DTYPES = ("float32", *SIXTEEN_BITS)


def row(*values, dtype="float32"):
    """A volume [1, 1, 1, 1, W]."""
    return jnp.asarray(values, dtype).reshape(1, 1, 1, 1, -1)


def taps(*values, dtype="float32"):
    """Filters [1, 1, W, 1, 1]."""
    return jnp.asarray(values, dtype).reshape(1, 1, -1, 1, 1)


def flip(filters):
    """To what conv3d_transpose takes."""
    return filters[::-1, ::-1, ::-1]


def along_w(**arguments):
    """Arguments that act on W alone: stride=2 becomes (1, 1, 2)."""
    neutral = {"padding": 0, "output_padding": 0}
    return {name: (neutral.get(name, 1),) * 2 + (value,) for name, value in arguments.items()}


def assert_row(actual, values):
    """The one row of a volume or of filters holds these values, exactly."""
    assert np.asarray(actual, np.float64).ravel().tolist() == list(values)


def pattern(*shape, dtype="float32"):
    """Small integers that repeat along no axis: 3, -2, 0, 2, -3, -1, 1 and again."""
    return jnp.asarray((np.arange(np.prod(shape)) * 5 % 7 - 3) * -1, dtype).reshape(shape)


def weighted(a) -> int:
    """A sum in which every element's place counts: sum of a[i] * (i % 101)."""
    flat = np.asarray(a, np.float64).ravel()
    return int(flat @ (np.arange(flat.size) % 101))


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_h01_padding_of_the_transpose_crops_its_output(dtype):
    """jax-ml/jax#32267, jax-ml/jax#17618, google/flax#4593"""
    w = flip(taps(1, 10, 100, dtype=dtype))
    y = conv3d_transpose(row(1, 2, 3, dtype=dtype), w, **along_w(stride=2, padding=1))
    assert_row(y, [10, 102, 20, 203, 30])
    assert y.dtype == dtype


def test_h01_sizes():
    """jax-ml/jax#32267, jax-ml/jax#17618, google/flax#4593"""
    x, w = jnp.ones((1, 1, 2, 2, 2)), jnp.ones((3, 3, 3, 1, 1))
    assert conv3d_transpose(x, w).shape == (1, 1, 4, 4, 4)
    # (n - 1) * stride - 2 * padding + dilation * (K - 1) + 1
    y = conv3d_transpose(x, w, stride=(1, 2, 3), padding=(1, 0, 2), dilation=(1, 2, 3))
    assert y.shape == (1, 1, 2, 7, 6)
    # A pair with equal arguments restores the size.
    for stride, padding in itertools.product((1, 2, 3), (0, 1, 2)):
        window = {"stride": stride, "padding": padding}
        there = jax.eval_shape(functools.partial(conv3d, **window), jnp.ones((1, 1, 7, 7, 7)), w)
        rest = (7 + 2 * padding - 3) % stride
        back = jax.eval_shape(functools.partial(conv3d_transpose, **window, output_padding=rest), there, w)
        assert back.shape == (1, 1, 7, 7, 7)


@pytest.mark.parametrize("filter_shape", ["KDHW_CI_CO", "KDHW_CO_CI"])
def test_h02_orientation_and_channel_order(filter_shape):
    """google/flax#3137, jax-ml/jax#11252, patrick-kidger/equinox#728"""
    w = jnp.arange(1.0, 37.0).reshape(1, 2, 3, 2, 3)  # [K_d, K_h, K_w, C_in, C_out]
    given = flip(w) if filter_shape == "KDHW_CI_CO" else flip(w).swapaxes(3, 4)
    delta = jnp.zeros((1, 2, 2, 2, 2)).at[0, 1, 0, 0, 0].set(1)  # in channel 1
    y = conv3d_transpose(delta, given, stride=(2, 3, 4), filter_shape=filter_shape)
    assert y.shape == (1, 3, 3, 5, 7)
    block = [
        [[4, 10, 16], [22, 28, 34]],
        [[5, 11, 17], [23, 29, 35]],
        [[6, 12, 18], [24, 30, 36]],
    ]
    assert_equal(y[0, :, 0, :2, :3], block)
    assert float(y.sum()) == sum(range(4, 37, 6)) + sum(range(5, 37, 6)) + sum(range(6, 37, 6))


def test_h02_adjoint():
    """google/flax#3137, jax-ml/jax#11252, patrick-kidger/equinox#728"""
    w, v, u = pattern(1, 2, 3, 3, 2), pattern(2, 2, 3, 3, 3), pattern(2, 3, 3, 7, 9)
    y = conv3d(u, w, stride=(1, 2, 3))
    back = conv3d_transpose(v, flip(w), stride=(1, 2, 3), output_padding=(0, 1, 0), filter_shape="KDHW_CO_CI")
    assert y.shape == v.shape
    assert back.shape == u.shape
    assert float((y * v).sum()) == float((u * back).sum()) != 0


def test_h03_output_padding_picks_the_size():
    """pytorch/pytorch#70518, pytorch/pytorch#2119, jax-ml/jax#4592, samuela/torch2jax#3, keras-team/keras#22439"""
    x, w = pattern(1, 2, 2, 4, 4), pattern(1, 3, 3, 2, 3)
    plain = conv3d_transpose(x, w, stride=(1, 2, 2), padding=(0, 1, 1))
    padded = conv3d_transpose(x, w, stride=(1, 2, 2), padding=(0, 1, 1), output_padding=(0, 1, 1))
    assert plain.shape == (1, 3, 2, 7, 7)
    assert padded.shape == (1, 3, 2, 8, 8)
    assert_equal(padded[..., :7, :7], plain)
    y = conv3d_transpose(row(1, 2), flip(taps(1, 10)), jnp.full(1, 7.0), **along_w(stride=2, output_padding=1))
    assert_row(y, [8, 17, 9, 27, 7])
    with pytest.raises(ValueError, match="`output_padding` must be smaller"):
        conv3d_transpose(x, w, stride=2, output_padding=2)


def test_h04_stride_beyond_the_kernel():
    """pytorch/pytorch#63314"""
    window = along_w(stride=2)
    y, pullback = jax.vjp(functools.partial(conv3d_transpose, **window), row(2, 3), taps(5), jnp.full(1, 7.0))
    assert_row(y, [17, 7, 22])
    dx, dw, db = pullback(row(1.5, 0.25, 0.7))
    np.testing.assert_allclose(np.ravel(dx), [7.5, 3.5], rtol=2e-7)
    np.testing.assert_allclose(np.ravel(dw), [5.1], rtol=2e-7)
    np.testing.assert_allclose(db, [2.45], rtol=2e-7)  # the hole counts here alone


def test_h05_stride_and_dilation_together():
    """apache/mxnet#11203"""
    y = conv3d_transpose(row(1, 2, 3), flip(taps(1, 10, 100)), **along_w(stride=2, padding=2, dilation=2))
    assert_row(y, [12, 0, 123, 0, 230])


def test_h06_padding_beyond_the_kernel():
    """openxla/xla#48713, jax-ml/jax#11517, tillahoffmann/jax-mps#150"""
    y = conv3d_transpose(row(1, 2, 3, 4), taps(1), **along_w(stride=2, padding=1))
    assert_row(y, [0, 2, 0, 3, 0])
    y = conv3d_transpose(row(1, 2, 3, 4), flip(taps(1, 10)), **along_w(stride=2, padding=3))
    assert_row(y, [20, 3])
    (dx,) = conv3d_bwd(row(*range(8)), row(1, 2, 3), taps(1, 10), padding=(0, 0, 3), compute_dw=False, compute_db=False)
    assert_row(dx, [23, 34, 45])
    dx, dw, db = conv3d_bwd(row(*range(5)), row(1, 2, 3), taps(1, 10), padding=(0, 0, 0, 0, 3, 0))
    assert_row(dx, [23, 34, 40])
    assert_row(dw, [3 * 1 + 4 * 2, 2 * 1 + 3 * 2 + 4 * 3])
    assert_row(db, [10])


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_h06_depth_one_volumes_with_many_channels(axis):
    """openxla/xla#48713, jax-ml/jax#11517, tillahoffmann/jax-mps#150: the wrong rows came with more channels"""
    x = jnp.moveaxis(pattern(2, 20, 1, 1, 6), 4, axis)
    w = jnp.moveaxis(pattern(1, 1, 2, 20, 8), 2, axis - 2)
    pads = [0] * 6
    pads[2 * (axis - 2)] = 5
    y, pullback = jax.vjp(functools.partial(conv3d, padding=pads), x, w)
    dx, dw = pullback(jnp.ones_like(y))
    expected = oracle.conv3d_bwd(*wide(jnp.ones_like(y), x, w), padding=tuple(pads))
    assert_equal(y, oracle.conv3d(*wide(x, w), padding=tuple(pads)))
    assert_equal(dx, expected[0])
    assert_equal(dw, expected[1])


def test_h07_input_that_no_window_reaches():
    """mlpack/mlpack#2986"""
    x, w, dy = row(*range(6)), taps(1, 2, 3), row(1, 10)
    dx, dw, db = conv3d_bwd(dy, x, w, **along_w(stride=2))
    assert_row(dx, [1, 2, 13, 20, 30, 0])
    assert_row(dw, [20, 31, 42])
    assert_row(db, [11])
    (through_grad,) = jax.vjp(lambda x: conv3d(x, w, **along_w(stride=2)), x)[1](dy)
    assert_row(through_grad, [1, 2, 13, 20, 30, 0])


def test_h08_gradient_of_a_window_that_is_mostly_padding():
    """pytorch/pytorch#15501"""
    x = jnp.asarray([[7.0, 3.0], [3.0, 2.0]]).reshape(2, 1, 1, 1, 2)
    w = jnp.asarray([[3.0, 4.0], [6.0, 2.0]]).reshape(1, 1, 2, 1, 2)  # filters (3, 6) and (4, 2)
    window = along_w(stride=2, padding=1, dilation=2)
    y = conv3d(x, w, **window)
    assert_equal(y.reshape(2, 2), [[18, 6], [12, 4]])
    dx, dw, db = conv3d_bwd(jnp.ones_like(y), x, w, **window)
    assert_equal(dx.reshape(2, 2), [[0, 8], [0, 8]])
    assert_equal(dw.reshape(2, 2), [[0, 0], [5, 5]])
    assert_equal(db, [2, 2])


def test_h09_stride_and_dilation_of_the_filter_gradient():
    """huggingface/candle#2337, iree-org/iree-turbine#1223"""
    x, w = pattern(2, 3, 6, 7, 8), pattern(2, 3, 2, 3, 4)
    window = {"stride": (1, 2, 3), "dilation": (3, 2, 1), "padding": (1, 0, 2, 1, 0, 3)}
    y, pullback = jax.vjp(functools.partial(conv3d, **window), x, w)
    assert y.shape == (2, 4, 4, 3, 4)
    dy = pattern(*y.shape)
    dx, dw = pullback(dy)
    expected_dx, expected_dw, expected_db = oracle.conv3d_bwd(*wide(dy, x, w), **window)
    assert_equal(dx, expected_dx)
    assert_equal(dw, expected_dw)
    for actual, expected in zip(conv3d_bwd(dy, x, w, **window), (expected_dx, expected_dw, expected_db), strict=True):
        assert_equal(actual, expected)
    # The oracle may be wrong, too: these sums were computed elsewhere.
    assert (weighted(y), weighted(dx), weighted(dw)) == H09_SUMS


H09_SUMS = (9545, -7247, 4173)


def test_h10_six_paddings():
    """pytorch/pytorch#17150, pytorch/pytorch#3230, pytorch/pytorch#37881, jcmgray/autoray#35, huggingface/diffusers#12800"""
    x = jnp.arange(24.0).reshape(1, 1, 2, 3, 4)
    w = jnp.arange(1.0, 9.0).reshape(2, 2, 2, 1, 1)
    pads = (1, 0, 0, 2, 3, 0)
    y = conv3d(x, w, padding=pads)
    assert y.shape == (1, 1, 2, 4, 6)
    assert float(y.sum()) == 6009
    dx, dw, db = conv3d_bwd(jnp.ones_like(y), x, w, padding=pads)
    assert_row(dw, [45, 66, 42, 60, 198, 276, 156, 216])
    assert_equal(dx[0, 0, 0, 0], [14, 14, 14, 8])
    assert_row(db, [48])
    assert_equal(conv3d(x, w, padding=[(1, 0), (0, 2), (3, 0)]), y)


def test_h11_empty_batch():
    """pytorch/pytorch#12013, pytorch/pytorch#26214, FluxML/NNlib.jl#763, tensorflow/tensorflow#13643"""
    x, w, b = jnp.zeros((0, 2, 4, 4, 4)), pattern(2, 2, 2, 2, 3), jnp.ones(3)
    y, pullback = jax.vjp(functools.partial(conv3d, padding=1), x, w, b)
    assert y.shape == (0, 3, 5, 5, 5)
    dx, dw, db = pullback(y)
    assert_equal(dx, np.zeros(x.shape))
    assert_equal(dw, np.zeros(w.shape))
    assert_equal(db, [0, 0, 0])
    for gradient, like in zip(conv3d_bwd(y, x, w, padding=1), (x, w, b), strict=True):
        assert_equal(gradient, np.zeros(like.shape))

    y, pullback = jax.vjp(functools.partial(conv3d_transpose, stride=2), x, w, b)
    assert y.shape == (0, 3, 8, 8, 8)
    for gradient, like in zip(pullback(y), (x, w, b), strict=True):
        assert_equal(gradient, np.zeros(like.shape))

    y, pullback = jax.vjp(lambda x: avg_pooling_3d(x, 2), x)
    assert y.shape == (0, 2, 2, 2, 2)
    assert pullback(y)[0].shape == x.shape
    assert avg_pooling_3d_backward(y, x, 2).shape == x.shape


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: conv3d(jnp.zeros((1, 1, 2, 4, 4)), jnp.zeros((3, 3, 3, 1, 1))),
            ("axis D", "2 elements", "kernel is 3", "0 + 0"),
        ),
        (
            lambda: conv3d(jnp.zeros((1, 1, 4, 4, 4)), jnp.zeros((3, 3, 3, 1, 1)), dilation=2),
            ("axis D", "4 elements", "kernel is 5", "`dilation` 2", "`stride` 1"),
        ),
        (
            lambda: conv3d_transpose(jnp.zeros((1, 1, 1, 4, 4)), jnp.zeros((1, 1, 1, 1, 1)), padding=1),
            ("axis D", "1 elements", "kernel of 1", "`padding` 1", "`stride` 1"),
        ),
        (
            lambda: avg_pooling_3d(jnp.zeros((1, 1, 2, 4, 4)), 3),
            ("axis D", "2 elements", "`kernel_size` is 3", "`stride` 3", "adds 0"),
        ),
    ],
    ids=["conv3d", "dilated", "transposed", "pooling"],
)
def test_h12_window_that_does_not_fit(call, said):
    """keras-team/keras#22418, keras-team/keras#22919, keras-team/keras#16953, chainer/chainer#1627, pytorch/pytorch#20141"""
    with pytest.raises(ValueError, match="axis") as caught:
        call()
    for fragment in said:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_h13_divisor_at_pads(dtype):
    """google/flax#2448, google/flax#1848, tensorflow/tensorflow#48773"""
    x, dy = row(2, 4, 6, 8, dtype=dtype), row(3, 30, dtype=dtype)
    window = {"kernel_size": (1, 1, 3), "stride": (1, 1, 2), "padding": (0, 0, 1)}
    for counted, y_row, dx_row in ((True, [2, 6], [1, 11, 10, 10]), (False, [3, 6], [1.5, 11.5, 10, 10])):
        y, pullback = jax.vjp(lambda x, c=counted: avg_pooling_3d(x, **window, count_include_pad=c), x)
        assert_row(y, y_row)
        assert_row(pullback(dy)[0], dx_row)
        assert_row(avg_pooling_3d_backward(dy, x, **window, count_include_pad=counted), dx_row)


def test_h13_gaps_leftovers_and_overlaps():
    """google/flax#2448, google/flax#1848, tensorflow/tensorflow#48773"""
    gaps = {"kernel_size": (1, 1, 2), "stride": (1, 1, 3)}
    assert_row(avg_pooling_3d_backward(row(2, 4), row(*range(7)), **gaps), [1, 1, 0, 2, 2, 0, 0])
    assert_row(avg_pooling_3d(row(*range(7)), **gaps), [0.5, 3.5])
    overlaps = {"kernel_size": (1, 1, 3), "stride": 1}
    assert_row(avg_pooling_3d_backward(row(3, 6, 9), row(*range(5)), **overlaps), [1, 3, 6, 5, 3])
    assert_row(avg_pooling_3d(row(*range(5)), **overlaps), [1, 2, 3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_h14_layouts(dtype):
    """pytorch/pytorch#171869, FluxML/Flux.jl#978, tensorflow/tensorflow#19887"""
    first = pattern(3, 5, 2, 3, 4, dtype=dtype)
    last = jnp.moveaxis(first, 1, 4)
    w, b = pattern(2, 1, 2, 5, 6, dtype=dtype), pattern(6, dtype=dtype)
    operations = {
        "conv3d": lambda x, layout: conv3d(x, w, b, stride=(1, 2, 1), padding=1, data_format=layout),
        "conv3d_transpose": lambda x, layout: conv3d_transpose(x, w, b, stride=2, data_format=layout),
        "avg_pooling_3d": lambda x, layout: avg_pooling_3d(x, 2, 1, data_format=layout),
    }
    for operation in operations.values():
        y, pull_first = jax.vjp(lambda x, f=operation: f(x, "NCDHW"), first)
        z, pull_last = jax.vjp(lambda x, f=operation: f(x, "NDHWC"), last)
        assert_equal(jnp.moveaxis(z, 4, 1), np.asarray(y, np.float64))
        dy = pattern(*y.shape, dtype=dtype)
        (dx,), (dz,) = pull_first(dy), pull_last(jnp.moveaxis(dy, 1, 4))
        assert_equal(jnp.moveaxis(dz, 4, 1), np.asarray(dx, np.float64))
    # One number of each layout, by hand: batch 2, channel 4, first window.
    pooled = avg_pooling_3d(last, 2, 1, data_format="NDHWC", output_format="NCDHW")
    assert pooled.shape == (3, 5, 1, 2, 3)
    by_hand = np.mean([float(last[2, d, h, k, 4]) for d, h, k in itertools.product(range(2), repeat=3)])
    assert float(pooled[2, 4, 0, 0, 0]) == by_hand


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_h15_pool_of_ones(dtype):
    """huggingface/candle#3719, ROCm/MIOpen#2109, tracel-ai/cubek#639, jax-ml/ml_dtypes#63"""
    assert_row(avg_pooling_3d(jnp.ones((1, 1, 16, 16, 16), dtype), 16), [1.0])
    y = avg_pooling_3d(jnp.ones((1, 2, 17, 18, 16), dtype), 16, 1)
    assert_equal(y, np.ones((1, 2, 2, 3, 1)), dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_h15_pool_backward(dtype):
    """huggingface/candle#3719, ROCm/MIOpen#2109, tracel-ai/cubek#639, jax-ml/ml_dtypes#63"""
    # Every element of the middle lies in all of the 8 * 8 * 8 windows that can hold it, and gets 1 / 512 from each.
    x = jax.ShapeDtypeStruct((1, 1, 15, 15, 15), jnp.dtype(dtype))
    dx = avg_pooling_3d_backward(jnp.ones((1, 1, 8, 8, 8), dtype), x, 8, 1)
    assert dx.dtype == dtype
    assert float(dx[0, 0, 7, 7, 7]) == 1.0
    assert float(dx[0, 0, 0, 0, 0]) == 1 / 512
    assert float(dx[0, 0, 0, 7, 7]) == 1 / 8
    assert_equal(
        avg_pooling_3d_backward(jnp.ones((1, 1, 1, 1, 1), dtype), jnp.ones((1, 1, 4, 4, 4), dtype), 4),
        np.full((1, 1, 4, 4, 4), 1 / 64),
    )
    # Overlaps of a window whose share is no binary fraction: 3 of 3 in the middle, 1 and 2 at the ends, rounded once.
    dx = avg_pooling_3d_backward(row(1, 1, 1, dtype=dtype), row(*range(5), dtype=dtype), (1, 1, 3), 1)
    assert_row(dx, [float(jnp.asarray(v, dtype)) for v in (1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_h15_bias_gradient(dtype):
    """huggingface/candle#3719, ROCm/MIOpen#2109, tracel-ai/cubek#639, jax-ml/ml_dtypes#63"""
    x, w, b = (jnp.ones(s, dtype) for s in ((1, 1, 32, 32, 32), (1, 1, 1, 1, 1), (1,)))
    y, pullback = jax.vjp(conv3d, x, w, b)
    _, dw, db = pullback(jnp.ones_like(y))
    assert_row(db, [32768])
    assert_row(dw, [32768])
    assert db.dtype == dw.dtype == dtype
    for gradient in conv3d_bwd(jnp.ones_like(y), x, w, compute_dx=False):
        assert_row(gradient, [32768])
    _, dw, db = jax.vjp(conv3d_transpose, x, w, b)[1](jnp.ones_like(y))
    assert_row(db, [32768])
    assert_row(dw, [32768])


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_h15_long_sums_and_cancellation(dtype):
    """huggingface/candle#3719, ROCm/MIOpen#2109, tracel-ai/cubek#639, jax-ml/ml_dtypes#63"""
    x, w = jnp.ones((1, 8, 8, 8, 8), dtype), jnp.ones((8, 8, 8, 8, 1), dtype)
    assert_row(conv3d(x, w), [4096])
    half = w.at[:, 4:].multiply(-1) * jnp.asarray(32, dtype)
    assert_row(conv3d(jnp.asarray(64, dtype) * x, half), [0])
    (dx,) = conv3d_bwd(
        jnp.ones((1, 8, 1, 1, 1), dtype), x[:, :1], jnp.ones((8, 8, 8, 1, 8), dtype), compute_dw=False, compute_db=False
    )
    assert_equal(dx, np.full((1, 1, 8, 8, 8), 8.0), dtype)
    # A transposed convolution whose middle element collects a product of every tap and channel.
    y = conv3d_transpose(x, w, padding=7)
    assert_row(y, [4096])


FORMS = {
    "stride": [
        2,
        (2, 2, 2),
        [2, 2, 2],
        np.int64(2),
        np.int32(2),
        np.array([2, 2, 2]),
        (np.int64(2), 2, np.uint8(2)),
        np.array(2),
    ],
    "padding": [1, (1, 1, 1), [1, 1, 1], np.int64(1), np.array([1, 1, 1])],
    "dilation": [2, (2, 2, 2), [2, 2, 2], np.int64(2), np.array([2, 2, 2])],
    "output_padding": [1, (1, 1, 1), [1, 1, 1], np.int64(1), np.array([1, 1, 1])],
    "kernel_size": [2, (2, 2, 2), [2, 2, 2], np.int64(2), np.array([2, 2, 2])],
}
SIX_PADDINGS = [(1,) * 6, [1] * 6, np.ones(6, int), ((1, 1),) * 3, [[1, 1], [1, 1], [1, 1]], np.ones((3, 2), int)]


def form_cases():
    x, w = pattern(1, 2, 6, 6, 6), pattern(2, 2, 2, 2, 2)
    y = conv3d(x, w, stride=2, padding=1, dilation=2)
    pooled = avg_pooling_3d(x, 2, 2, 1)
    conv = {"stride": 2, "padding": 1, "dilation": 2}
    yield "conv3d", lambda **k: conv3d(x, w, **{**conv, **k}), ("stride", "padding", "dilation")
    yield "conv3d_bwd", lambda **k: conv3d_bwd(y, x, w, **{**conv, **k}), ("stride", "padding", "dilation")
    names = ("stride", "padding", "dilation", "output_padding")
    yield "conv3d_transpose", lambda **k: conv3d_transpose(x, w, **{**conv, "output_padding": 1, **k}), names
    pool, names = {"kernel_size": 2, "stride": 2, "padding": 1}, ("kernel_size", "stride", "padding")
    yield "avg_pooling_3d", lambda **k: avg_pooling_3d(x, **{**pool, **k}), names
    yield "avg_pooling_3d_backward", lambda **k: avg_pooling_3d_backward(pooled, x, **{**pool, **k}), names


@pytest.mark.parametrize("operation", ["conv3d", "conv3d_bwd", "conv3d_transpose", "avg_pooling_3d", "avg_pooling_3d_backward"])
def test_h16_forms_of_one_argument_are_one_program(operation, caplog):
    """google/flax#5495, google/flax#2000, google/flax#3729, google/flax#1234, jax-ml/jax#2190, patrick-kidger/equinox#135"""
    (call, names), *_ = ((f, n) for o, f, n in form_cases() if o == operation)
    expected = jax.tree.map(lambda a: np.asarray(a, np.float64), call())
    program = str(jax.make_jaxpr(call)())
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        for name in names:
            forms = FORMS[name] + (SIX_PADDINGS if name == "padding" and operation in ("conv3d", "conv3d_bwd") else [])
            for form in forms:
                jax.tree.map(assert_equal, call(**{name: form}), expected)
                assert str(jax.make_jaxpr(functools.partial(call, **{name: form}))()) == program
        # The form of an argument does not reach the keys of JAX's caches.
        assert not [r for r in caplog.records if "compiling" in r.getMessage().lower() and operation in r.getMessage()]


def test_h16_jit_traces_once():
    """google/flax#5495, google/flax#2000, google/flax#3729, google/flax#1234, jax-ml/jax#2190, patrick-kidger/equinox#135"""
    x, w = pattern(1, 2, 6, 6, 6), pattern(2, 2, 2, 2, 2)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def f(x, w):
        return avg_pooling_3d(conv3d(x, w, stride=[1, 2, 1], padding=np.array([1, 0, 1])), [2, 1, 2])

    for _ in range(3):
        f(x, w)

    @functools.partial(jax.jit, static_argnames="stride")
    @chex.assert_max_traces(n=2)
    def g(x, w, stride):
        return conv3d(x, w, stride=stride)

    for stride in (2, (2, 2, 2), 2, (2, 2, 2)):
        g(x, w, stride=stride)


def test_h16_stride_of_the_pool_defaults_to_its_kernel():
    """google/flax#5495, google/flax#2000, google/flax#3729, google/flax#1234, jax-ml/jax#2190, patrick-kidger/equinox#135"""
    x = pattern(1, 1, 4, 4, 6)
    assert avg_pooling_3d(x, 2).shape == (1, 1, 2, 2, 3)
    assert_equal(avg_pooling_3d(x, (2, 1, 3)), np.asarray(avg_pooling_3d(x, (2, 1, 3), (2, 1, 3)), np.float64))
    dy = jnp.ones((1, 1, 2, 4, 2))
    assert_equal(avg_pooling_3d_backward(dy, x, (2, 1, 3)), np.full(x.shape, np.float32(1) / np.float32(6)))


@pytest.mark.parametrize("bad", [(2, 2), (2, 2, 2, 2), 2.0, (2, 2.0, 2), "2", "SAME_LOWER", True, None])
@pytest.mark.parametrize("operation", ["conv3d", "conv3d_bwd", "conv3d_transpose", "avg_pooling_3d", "avg_pooling_3d_backward"])
def test_h16_refused_forms_name_the_argument(operation, bad):
    """google/flax#5495, google/flax#2000, google/flax#3729, google/flax#1234, jax-ml/jax#2190, patrick-kidger/equinox#135"""
    (call, names), *_ = ((f, n) for o, f, n in form_cases() if o == operation)
    for name in names:
        if bad is None and name == "stride" and operation.startswith("avg"):
            continue  # the kernel's
        with pytest.raises((TypeError, ValueError), match=f"{operation}: `{name}` must "):
            call(**{name: bad})


SLOW_FORWARD = [(16, 32, 32, 4, 2, 1), (8, 64, 64, 2, 2, 0), (12, 16, 16, 3, 2, 1)]  # size, C_in, C_out, K, stride, padding
SLOW_BACKWARD = [(32, 32, 32, 4, 2, 1), (24, 16, 32, 3, 2, 1), (24, 3, 32, 7, 2, 3)]


def programs(function, *shapes):
    """StableHLO and compiled HLO of a function of float32 arrays."""
    lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return lowered.as_text(), lowered.compile().as_text()


def assert_no_convolution(*texts):
    for text in texts:
        assert not re.search(r"stablehlo\.convolution|[= ]convolution\(|lhs_dilate|convolution_general", text)


@pytest.mark.parametrize(("size", "c_in", "c_out", "k", "stride", "padding"), SLOW_FORWARD)
def test_h17_transposed_forward_has_no_dilated_convolution(size, c_in, c_out, k, stride, padding):
    """jax-ml/jax#31662, jax-ml/jax#8537, jax-ml/jax#23783, openxla/xla#34273, patrick-kidger/equinox#1259,
    tensorflow/tensorflow#19611"""
    texts = programs(
        functools.partial(conv3d_transpose, stride=stride, padding=padding), (1, c_in, *(size,) * 3), (k, k, k, c_in, c_out)
    )
    assert_no_convolution(*texts)
    assert "dot_general" in texts[0]


@pytest.mark.parametrize(("size", "c_in", "c_out", "k", "stride", "padding"), SLOW_BACKWARD)
def test_h17_strided_backward_has_no_dilated_convolution(size, c_in, c_out, k, stride, padding):
    """jax-ml/jax#31662, jax-ml/jax#8537, jax-ml/jax#23783, openxla/xla#34273, patrick-kidger/equinox#1259,
    tensorflow/tensorflow#19611"""
    out = (size + 2 * padding - k) // stride + 1
    texts = programs(
        functools.partial(conv3d_bwd, stride=stride, padding=padding),
        (1, c_out, *(out,) * 3),
        (1, c_in, *(size,) * 3),
        (k, k, k, c_in, c_out),
    )
    assert_no_convolution(*texts)
    assert "dot_general" in texts[0]


def test_h17_the_check_sees_what_lax_does():
    """jax-ml/jax#31662, jax-ml/jax#8537, jax-ml/jax#23783, openxla/xla#34273, patrick-kidger/equinox#1259,
    tensorflow/tensorflow#19611"""

    def plain(x, w):
        numbers = ("NCDHW", "DHWIO", "NCDHW")
        return jax.lax.conv_transpose(x, w, (2, 2, 2), "VALID", dimension_numbers=numbers)

    for text in programs(plain, (1, 2, 4, 4, 4), (3, 3, 3, 2, 2)):
        with pytest.raises(AssertionError):
            assert_no_convolution(text)


def h18_loss(filters, **options):
    return (conv3d(row(1, 2, 3), filters.reshape(1, 1, 2, 1, 1), **options) ** 2).sum()


def test_h18_second_order():
    """jax-ml/jax#16049, google-research/t5x#351, pytorch/xla#2333"""
    w = jnp.ones(2)
    assert_equal(jax.hessian(h18_loss)(w), [[10, 16], [16, 26]])
    for forward_mode in (False, True):
        loss = functools.partial(h18_loss, forward_mode=forward_mode)
        assert_equal(jax.jit(jax.hessian(loss))(w), [[10, 16], [16, 26]])
        assert_equal(jax.jacrev(jax.grad(loss))(w), [[10, 16], [16, 26]])
        assert_equal(jax.grad(lambda w, f=loss: jax.grad(f)(w)[0])(w), [10, 16])
    # A gradient penalty through a stride: sum over the inputs of (d/dx sum y)^2 = (a)^2 + (b)^2 on reached elements.
    y = row(1, 2, 3, 4, 5)

    def penalty(w):
        dx = jax.grad(lambda x: conv3d(x, w, **along_w(stride=2)).sum())(y)
        return (dx**2).sum()

    assert float(penalty(taps(3, 5))) == 2 * 9 + 2 * 25
    assert_row(jax.grad(penalty)(taps(3, 5)), [12, 20])


def test_h18_forward_mode():
    """jax-ml/jax#16049, google-research/t5x#351, pytorch/xla#2333"""
    w, loss = jnp.ones(2), functools.partial(h18_loss, forward_mode=True)
    # y = (3, 5); dy/dw = ((1, 2), (2, 3)), so the gradient is 2 (3 + 10, 6 + 15).
    value, slope = jax.jvp(loss, (w,), (jnp.asarray([1.0, 0.0]),))
    assert (float(value), float(slope)) == (34, 26)
    assert_equal(jax.jacfwd(loss)(w), [26, 42])
    assert_equal(jax.jacfwd(jax.jacfwd(loss))(w), [[10, 16], [16, 26]])
    with jax_nki3d.options(forward_mode=True):
        assert_equal(jax.jacfwd(h18_loss)(w), [26, 42])
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\)"):
        jax.jvp(h18_loss, (w,), (w,))


def test_h18_other_operations():
    """jax-ml/jax#16049, google-research/t5x#351, pytorch/xla#2333"""
    up = along_w(stride=2)

    def spread(w, **options):
        return (conv3d_transpose(row(1, 2), flip(w.reshape(1, 1, 2, 1, 1)), **up, **options) ** 2).sum()

    # y = (a, b, 2a, 2b).
    assert_equal(jax.hessian(spread)(jnp.ones(2)), [[10, 0], [0, 10]])
    assert_equal(jax.jacfwd(functools.partial(spread, forward_mode=True))(jnp.ones(2)), [10, 10])

    def pooled(x, **options):
        return (avg_pooling_3d(x.reshape(1, 1, 1, 1, 2), (1, 1, 2), **options) ** 2).sum()

    assert_equal(jax.hessian(pooled)(jnp.asarray([2.0, 4.0])), [[0.5, 0.5], [0.5, 0.5]])
    assert_equal(jax.jacfwd(functools.partial(pooled, forward_mode=True))(jnp.asarray([2.0, 4.0])), [3, 3])

    def filter_gradient(dy, **options):
        return conv3d_bwd(dy.reshape(1, 1, 1, 1, 2), row(1, 2, 3), taps(1, 1), **options)[1].ravel()

    assert_equal(jax.jacfwd(functools.partial(filter_gradient, forward_mode=True))(jnp.ones(2)), [[1, 2], [2, 3]])
    assert_equal(jax.jacrev(filter_gradient)(jnp.ones(2)), [[1, 2], [2, 3]])

    def shares(dy, **options):
        return avg_pooling_3d_backward(dy.reshape(1, 1, 1, 1, 1), row(0, 0), (1, 1, 2), **options).ravel()

    assert_equal(jax.jacfwd(functools.partial(shares, forward_mode=True))(jnp.ones(1)), [[0.5], [0.5]])
    assert_equal(jax.jacrev(shares)(jnp.ones(1)), [[0.5], [0.5]])


def loop(function, in_axes, *operands):
    """What vmap means."""
    size = next(o.shape[a] for o, a in zip(operands, in_axes, strict=True) if a is not None)
    results = [
        function(*(o if a is None else jnp.take(o, i, axis=a) for o, a in zip(operands, in_axes, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def assert_vmap_is_loop(function, in_axes, *operands):
    actual, expected = jax.vmap(function, in_axes)(*operands), loop(function, in_axes, *operands)
    jax.tree.map(lambda a, e: assert_equal(a, np.asarray(e, np.float64)), actual, expected)


AXES_OF_TWO = [axes for axes in itertools.product((0, 2, None), repeat=2) if any(a is not None for a in axes)]


@pytest.mark.parametrize("in_axes", AXES_OF_TWO)
@pytest.mark.parametrize("operation", [conv3d, conv3d_transpose])
def test_h19_vmap_of_some_operands(operation, in_axes):
    """jax-ml/jax#9073, jax-ml/jax#11948, jax-ml/jax#39451, jax-ml/jax#32157"""
    f = functools.partial(operation, stride=(1, 2, 1))
    x_shape, w_shape = (1, 2, 3, 3, 3), (2, 1, 2, 2, 3)
    operands = [
        pattern(*shape) if axis is None else pattern(*shape[:axis], 3, *shape[axis:])
        for shape, axis in zip((x_shape, w_shape), in_axes, strict=True)
    ]
    assert_vmap_is_loop(f, in_axes, *operands)

    def gradients(x, w):
        return jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))(x, w)

    assert_vmap_is_loop(gradients, in_axes, *operands)


def test_h19_per_example_gradients():
    """jax-ml/jax#9073, jax-ml/jax#11948, jax-ml/jax#39451, jax-ml/jax#32157"""
    x, w = pattern(3, 2, 3, 3, 3), pattern(2, 2, 2, 2, 3)
    each = jax.vmap(jax.grad(lambda w, x: conv3d(x[None], w).sum()), in_axes=(None, 0))(w, x)
    together = jax.grad(lambda w: conv3d(x, w).sum())(w)
    assert each.shape == (3, *w.shape)
    assert_equal(each.sum(axis=0), np.asarray(together, np.float64))
    assert not np.array_equal(each[0], each[1])


@pytest.mark.parametrize(
    "in_axes", [axes for axes in itertools.product((0, None), repeat=3) if any(a is not None for a in axes)]
)
def test_h19_vmap_of_conv3d_bwd(in_axes):
    """jax-ml/jax#9073, jax-ml/jax#11948, jax-ml/jax#39451, jax-ml/jax#32157: dy unbatched is the case that crashed"""
    shapes = (1, 3, 2, 2, 2), (1, 2, 3, 3, 3), (2, 2, 2, 2, 3)
    operands = [pattern(*(() if a is None else (3,)), *s) for s, a in zip(shapes, in_axes, strict=True)]
    assert_vmap_is_loop(conv3d_bwd, in_axes, *operands)


def test_h19_nested_and_pooling():
    """jax-ml/jax#9073, jax-ml/jax#11948, jax-ml/jax#39451, jax-ml/jax#32157"""
    x, w = pattern(2, 3, 1, 2, 3, 3, 3), pattern(2, 2, 2, 2, 3)
    inner = functools.partial(jax.vmap(conv3d, in_axes=(0, None)))
    assert_vmap_is_loop(lambda x: inner(x, w), (0,), x)
    over_both = jax.vmap(jax.vmap(conv3d, in_axes=(0, None)), in_axes=(None, 0))(x[0], jnp.stack([w, -w]))
    assert_equal(over_both[1], -np.asarray(over_both[0], np.float64))
    assert_vmap_is_loop(lambda x: avg_pooling_3d(x, 2), (0,), x[0])
    assert_vmap_is_loop(lambda x: avg_pooling_3d(x, 2, 1), (4,), jnp.moveaxis(x[0], 0, 4))
    assert_vmap_is_loop(
        lambda dy: avg_pooling_3d_backward(dy, jax.ShapeDtypeStruct((1, 2, 4, 4, 4), dy.dtype), 2, 1), (0,), x[0]
    )


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_h20_gradients_have_the_dtypes_of_their_operands(dtype):
    """jax-ml/jax#36734, jax-ml/jax#31592, jax-ml/jax#10818"""
    x, w = pattern(1, 2, 3, 3, 3, dtype=dtype), pattern(2, 2, 2, 2, 3, dtype=dtype)
    for bias_dtype, operation in itertools.product((dtype, "float32"), (conv3d, conv3d_transpose)):
        y, pullback = jax.vjp(operation, x, w, jnp.ones(3, bias_dtype))
        dx, dw, db = pullback(jnp.ones_like(y))
        assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype, dtype, dtype, bias_dtype)
        reference = jax.vjp(operation, x.astype("float32"), w.astype("float32"), jnp.ones(3))
        for actual, exact in zip((y, dx, dw, db), (reference[0], *reference[1](jnp.ones(y.shape))), strict=True):
            assert_equal(actual, np.asarray(exact.astype(actual.dtype), np.float64))
    y, pullback = jax.vjp(lambda x: avg_pooling_3d(x, 2, 1), x)
    assert y.dtype == pullback(y)[0].dtype == dtype


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_h20_values_within_one_rounding(dtype, rng):
    """jax-ml/jax#36734, jax-ml/jax#31592, jax-ml/jax#10818"""
    x, w = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 3, 5, 4, 6), (3, 2, 3, 3, 4)))
    y, pullback = jax.vjp(functools.partial(conv3d, stride=2, padding=1), x, w)
    dy = jnp.asarray(rng.standard_normal(y.shape), dtype)
    assert_close(y, terms(functools.partial(oracle.conv3d, stride=2, padding=1), x, w), dtype)
    for i, gradient in enumerate(pullback(dy)):
        expected = terms(lambda *o, i=i: oracle.conv3d_bwd(*o, stride=2, padding=1)[i], dy, x, w)
        assert_close(gradient, expected, dtype)


def test_h20_mixed_dtypes_are_refused():
    """jax-ml/jax#36734, jax-ml/jax#31592, jax-ml/jax#10818"""
    x, w = pattern(1, 2, 3, 3, 3, dtype="bfloat16"), pattern(2, 2, 2, 2, 3)
    for operation in (conv3d, conv3d_transpose):
        with pytest.raises(TypeError, match=r"`filters` has dtype float32, but `x_in` has bfloat16\. Cast one of them"):
            operation(x, w)


def test_h21_all_subsets_of_the_gradients():
    """pytorch/pytorch#75298, pytorch/pytorch#75219, pytorch/pytorch#172310"""
    x, w, dy = row(1, 2, 3), taps(10, 100), row(1, 2)
    whole = {"compute_dx": [10, 120, 200], "compute_dw": [5, 8], "compute_db": [3]}
    for flags in itertools.product((False, True), repeat=3):
        asked = dict(zip(whole, flags, strict=True))
        if not any(flags):
            with pytest.raises(ValueError, match="nothing to compute"):
                conv3d_bwd(dy, x, w, **asked)
            continue
        gradients = conv3d_bwd(dy, x, w, **asked)
        assert isinstance(gradients, tuple)
        for gradient, name in zip(gradients, [n for n in whole if asked[n]], strict=True):
            assert_row(gradient, whole[name])


def test_h21_only_what_is_needed_is_read():
    """pytorch/pytorch#75298, pytorch/pytorch#75219, pytorch/pytorch#172310"""
    x, w, dy = row(1, 2, 3), taps(10, 100), row(1, 2)
    nan_x, nan_w = jnp.full_like(x, jnp.nan), jnp.full_like(w, jnp.nan)
    assert_row(conv3d_bwd(dy, nan_x, nan_w, compute_dx=False, compute_dw=False)[0], [3])
    assert_row(conv3d_bwd(dy, nan_x, w, compute_dw=False)[0], [10, 120, 200])
    assert_row(conv3d_bwd(dy, x, nan_w, compute_dx=False)[0], [5, 8])
    # Through grad, too: what nobody wants is not in the program.
    text = jax.jit(jax.grad(lambda b: conv3d(x, w, b).sum())).lower(jnp.zeros(1)).as_text()
    assert "dot_general" not in text


@pytest.mark.parametrize("operation", [conv3d, conv3d_transpose])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("GELU", [-0.158655, 0.345731, 1.954500]),
        ("GELU_Tanh_Approx", [-0.158808, 0.345714, 1.954598]),
        ("SiLU", [-0.268941, 0.311230, 1.761594]),
        ("Swish", [-0.154204, 0.350388, 1.935659]),
        ("ReLU", [0, 0.5, 2]),
    ],
)
def test_h22_activations(name, values, operation):
    """goodfire-ai/spd#624, huggingface/pytorch-image-models#2105, google/gemma_pytorch#33"""
    x, one = row(-1, 0.5, 2), taps(1)
    for form in (jax_nki3d.ActFnType[name], name, name.lower(), name.upper()):
        np.testing.assert_allclose(np.ravel(operation(x, one, activation_fn=form)), values, rtol=0, atol=6e-7)
    # Under grad the value is the same.
    y, pullback = jax.vjp(lambda x: operation(x, one, activation_fn=name), x)
    np.testing.assert_allclose(np.ravel(y), values, rtol=0, atol=6e-7)
    slopes = oracle.ACTIVATIONS[name](np.array([-1, 0.5, 2]))[1]
    np.testing.assert_allclose(np.ravel(pullback(jnp.ones_like(y))[0]), slopes, rtol=0, atol=1e-6)


def test_h22_slope_of_relu_at_zero():
    """goodfire-ai/spd#624, huggingface/pytorch-image-models#2105, google/gemma_pytorch#33"""
    slope = jax.grad(lambda x: conv3d(x, taps(1), activation_fn="ReLU").sum())(row(-1, 0, 1))
    assert_row(slope, [0, 0, 1])


def test_h23_same_is_not_symmetric_padding():
    """google/flax#2993, jax-ml/jax#17618"""
    x, w = row(1, 2, 3, 4), taps(1, 10, 100)
    assert_row(conv3d(x, w, **along_w(stride=2, padding=1)), [210, 432])
    assert_row(conv3d(x, w, **along_w(stride=2), padding="SAME"), [321, 43])
    assert_row(conv3d(x, w, **along_w(stride=2), padding=(0, 0, 0, 0, 0, 1)), [321, 43])
    assert_row(conv3d(x, w, **along_w(stride=2), padding="VALID"), [321])
    # Without a stride the two agree for odd kernels.
    assert_row(conv3d(x, w, padding="SAME"), [210, 321, 432, 43])
    assert_row(conv3d(x, w, **along_w(padding=1)), [210, 321, 432, 43])
    # Dilated: five elements wide, two on either side.
    assert_row(conv3d(x, w, **along_w(dilation=2), padding="SAME"), [310, 420, 31, 42])
    dx, dw, db = conv3d_bwd(row(1, 2), x, w, **along_w(stride=2), padding="SAME")
    assert_row(dx, [1, 10, 102, 20])
    assert_row(dw, [7, 10, 3])
    assert_row(db, [3])
    with pytest.raises((TypeError, ValueError), match="`padding` must be"):
        conv3d_transpose(x, w, padding="SAME")


def test_h24_import_needs_no_accelerator_and_no_framework():
    """aws-neuron/aws-neuron-sdk#1295, aws-neuron/aws-neuron-sdk#1152, aws-neuron/aws-neuron-sdk#347,
    aws-neuron/nki-samples#134"""
    heavy = ("nki", "neuronxcc", "jax_neuronx", "flax", "haiku", "equinox", "torch")
    code = f"import jax_nki3d, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def calls_on_five_operations():
    x, w = jnp.ones((1, 1, 2, 2, 2)), jnp.ones((1, 1, 1, 1, 1))
    return {
        "conv3d": lambda **k: conv3d(x, w, **k),
        "conv3d_transpose": lambda **k: conv3d_transpose(x, w, **k),
        "conv3d_bwd": lambda **k: conv3d_bwd(x, x, w, **k),
        "avg_pooling_3d": lambda **k: avg_pooling_3d(x, 1, **k),
        "avg_pooling_3d_backward": lambda **k: avg_pooling_3d_backward(x, x, 1, **k),
    }


@pytest.mark.parametrize("operation", calls_on_five_operations())
def test_h24_kernels_by_name_are_refused_where_they_cannot_run(operation):
    """aws-neuron/aws-neuron-sdk#1295, aws-neuron/aws-neuron-sdk#1152, aws-neuron/aws-neuron-sdk#347,
    aws-neuron/nki-samples#134"""
    call = calls_on_five_operations()[operation]
    with pytest.raises(NotImplementedError, match=rf"{operation}: `implementation` is 'nki', but nki is not installed.*'lax'"):
        call(implementation="nki")
    with (
        jax_nki3d.options(implementation="nki"),
        pytest.raises(NotImplementedError, match=f"{operation}: `implementation`"),
    ):
        call()
    jax.tree.map(lambda a, b: assert_equal(a, np.asarray(b)), call(implementation="lax"), call(implementation="simulate"))


def test_h24_seven_taps_over_three_channels():
    """aws-neuron/aws-neuron-sdk#1295, aws-neuron/aws-neuron-sdk#1152, aws-neuron/aws-neuron-sdk#347,
    aws-neuron/nki-samples#134"""
    x, w = pattern(1, 3, 9, 9, 9), pattern(7, 7, 7, 3, 4)
    window = {"stride": 2, "padding": 3}
    y = conv3d(x, w, **window)
    assert y.shape == (1, 4, 5, 5, 5)
    assert_equal(y, oracle.conv3d(*wide(x, w), **window))
    ones = jnp.ones_like(y)
    gradients = conv3d_bwd(ones, x, w, **window)
    for actual, expected in zip(gradients, oracle.conv3d_bwd(*wide(ones, x, w), **window), strict=True):
        assert_equal(actual, expected)
    assert_equal(gradients[2], [125, 125, 125, 125])
    assert (weighted(y), weighted(gradients[0]), weighted(gradients[1])) == H24_SUMS


H24_SUMS = (-6877, -99359, 5956)


def test_h24_on_neuron_without_a_kernel_lax_runs_and_says_so_once(caplog, monkeypatch):
    """aws-neuron/aws-neuron-sdk#1295, aws-neuron/aws-neuron-sdk#1152, aws-neuron/aws-neuron-sdk#347,
    aws-neuron/nki-samples#134"""
    monkeypatch.setattr(jax_nki3d._neuron, "_logged", set())
    x = jnp.ones((1, 1, 2, 2, 2))
    for operation, call in calls_on_five_operations().items():
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="jax_nki3d"):
            for scale in (1.0, 2.0):  # two programs
                text = (
                    jax.jit(lambda x, c=call, s=scale: jax.tree.map(lambda y: s * x.sum() * y, c()))
                    .trace(x)
                    .lower(lowering_platforms=("neuron",))
                )
                assert "stablehlo" in text.as_text()
        said = [r.getMessage() for r in caplog.records if r.name == "jax_nki3d"]
        assert len(said) == 1, said
        assert said[0].startswith(f"{operation} runs as lax on platform neuron: ")
    # On CPU there is nothing to say, nor where lax was asked for.
    monkeypatch.setattr(jax_nki3d._neuron, "_logged", set())
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jax_nki3d"):
        jax.jit(lambda x: avg_pooling_3d(x, 1)).lower(x)
        jax.jit(lambda x: avg_pooling_3d(x, 1, implementation="lax")).trace(x).lower(lowering_platforms=("neuron",))
    assert not [r for r in caplog.records if r.name == "jax_nki3d"]


def test_every_case_has_a_test():
    """All 24, and each names its reports."""
    tests = [f for name, f in globals().items() if re.match(r"test_h\d\d_", name)]
    assert {int(f.__name__[6:8]) for f in tests} == set(range(1, 25))
    assert all(re.match(r"[\w.-]+/[\w.-]+#\d+", f.__doc__) for f in tests)
