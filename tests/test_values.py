# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of the five operations against the oracle, over geometries that Hypothesis draws."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from oracle import Terms, terms
from tolerances import activated, assert_close, assert_equal, roundoff, sum_bound

import jax_nki3d
from jax_nki3d._geometry import Geometry
from jax_nki3d._lax import native, plan, pooling, products

# ---- geometries ------------------------------------------------------------------------------------------------------


@st.composite
def axes(draw, *, symmetric=False, pooling=False):
    """(size, kernel, stride, dilation, pad front, pad back) of one axis on which the window fits."""
    kernel = draw(st.sampled_from((1, 2, 3, 4)))
    stride = draw(st.sampled_from((1, 2, 3, 4)))
    dilation = 1 if pooling else draw(st.sampled_from((1, 2, 3)))
    window = (kernel - 1) * dilation + 1
    most = kernel - 1 if pooling else min(window + 1, 5)
    front = draw(st.integers(0, most))
    back = front if symmetric else draw(st.integers(0, most))
    size = draw(st.integers(max(1, window - front - back), max(9, window)))
    return size, kernel, stride, dilation, front, back


@st.composite
def convolutions(draw, *, symmetric=False):
    """Keyword arguments and sizes of a convolution."""
    drawn = [draw(axes(symmetric=symmetric)) for _ in range(3)]
    if draw(st.integers(0, 9)) == 0:  # the 7-tap stem of ResNets
        axis = draw(st.integers(0, 2))
        drawn[axis] = (draw(st.integers(7, 9)), 7, drawn[axis][2], 1, 3, 3)
    size, kernel, stride, dilation, front, back = zip(*drawn, strict=True)
    return {
        "size": size,
        "kernel": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": tuple(itertools.chain(*zip(front, back, strict=True))),
        "batch": draw(st.sampled_from((0, 1, 1, 2, 3))),
        "c_in": draw(st.integers(1, 5)),
        "c_out": draw(st.integers(1, 5)),
        "bias": draw(st.booleans()),
        "data_format": draw(st.sampled_from(("NCDHW", "NDHWC"))),
        "seed": draw(st.integers(0, 2**16)),
    }


@st.composite
def transposed_convolutions(draw):
    """Keyword arguments and sizes of a transposed convolution that leaves something."""
    drawn = []
    for _ in range(3):
        kernel, stride, dilation = (draw(st.integers(1, most)) for most in (4, 4, 3))
        size = draw(st.integers(1, 5))
        extra = draw(st.integers(0, max(stride, dilation) - 1))
        whole = (size - 1) * stride + (kernel - 1) * dilation + 1
        # A crop beyond the kernel is legal, as long as an element of the uncropped output remains.
        padding = draw(st.integers(0, max(0, min((whole + extra - 1) // 2, whole - 1, (kernel - 1) * dilation + 2))))
        drawn.append((size, kernel, stride, dilation, padding, extra))
    size, kernel, stride, dilation, padding, extra = zip(*drawn, strict=True)
    return {
        "size": size,
        "kernel": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
        "output_padding": extra,
        "filter_shape": draw(st.sampled_from(("KDHW_CI_CO", "KDHW_CO_CI"))),
        "batch": draw(st.sampled_from((0, 1, 1, 2, 3))),
        "c_in": draw(st.integers(1, 5)),
        "c_out": draw(st.integers(1, 5)),
        "bias": draw(st.booleans()),
        "data_format": draw(st.sampled_from(("NCDHW", "NDHWC"))),
        "seed": draw(st.integers(0, 2**16)),
    }


@st.composite
def poolings(draw):
    """Keyword arguments and sizes of a pooling."""
    size, kernel, stride, _, padding, _ = zip(*(draw(axes(symmetric=True, pooling=True)) for _ in range(3)), strict=True)
    return {
        "size": size,
        "kernel": kernel,
        "stride": draw(st.sampled_from((stride, None))),
        "padding": padding,
        "count_include_pad": draw(st.booleans()),
        "batch": draw(st.sampled_from((0, 1, 1, 2, 3))),
        "channels": draw(st.integers(1, 5)),
        "data_format": draw(st.sampled_from(("NCDHW", "NDHWC"))),
        "output_format": draw(st.sampled_from((None, "NCDHW", "NDHWC"))),
        "seed": draw(st.integers(0, 2**16)),
    }


# A few that the smaller grids use: every argument differs between the axes, and each has something that goes wrong easily.
CONVOLUTIONS = {
    "dense": {
        "size": (4, 5, 6),
        "kernel": (3, 2, 3),
        "stride": (1, 1, 1),
        "dilation": (1, 1, 1),
        "padding": (1, 1, 1, 0, 1, 1),
    },
    "strided": {
        "size": (7, 8, 6),
        "kernel": (3, 3, 2),
        "stride": (2, 3, 2),
        "dilation": (1, 1, 2),
        "padding": (1, 0, 0, 2, 2, 1),
    },
    "dilated": {
        "size": (6, 7, 8),
        "kernel": (2, 3, 2),
        "stride": (1, 2, 3),
        "dilation": (3, 2, 1),
        "padding": (1, 0, 2, 1, 0, 3),
    },
    "far": {"size": (2, 3, 4), "kernel": (1, 2, 3), "stride": (2, 2, 1), "dilation": (1, 1, 1), "padding": (2, 3, 4, 1, 0, 4)},
    "holes": {
        "size": (5, 6, 8),
        "kernel": (1, 2, 2),
        "stride": (2, 3, 4),
        "dilation": (1, 1, 1),
        "padding": (0, 0, 0, 0, 0, 0),
    },
    "thin": {"size": (1, 9, 1), "kernel": (3, 4, 2), "stride": (3, 1, 2), "dilation": (1, 2, 3), "padding": (4, 1, 3, 3, 3, 4)},
}
for _convolution in CONVOLUTIONS.values():
    _convolution.update(batch=2, c_in=3, c_out=4, bias=True, data_format="NCDHW", seed=0)
TRANSPOSED = {
    "upsampling": {"size": (2, 3, 4), "kernel": (2, 2, 2), "stride": (2, 2, 2), "dilation": (1, 1, 1), "padding": (0, 0, 0)},
    "overlapping": {"size": (3, 4, 2), "kernel": (4, 3, 3), "stride": (2, 2, 1), "dilation": (1, 1, 2), "padding": (1, 1, 2)},
    "distinct": {"size": (3, 2, 4), "kernel": (2, 3, 4), "stride": (3, 2, 1), "dilation": (1, 2, 3), "padding": (1, 0, 4)},
    "cropped": {"size": (4, 4, 3), "kernel": (1, 2, 2), "stride": (2, 2, 3), "dilation": (1, 1, 1), "padding": (1, 3, 2)},
}
for _key, _extra in zip(TRANSPOSED, ((0, 0, 0), (1, 1, 0), (2, 1, 2), (1, 0, 2)), strict=True):
    TRANSPOSED[_key].update(output_padding=_extra, filter_shape="KDHW_CI_CO", batch=2, c_in=3, c_out=4, bias=True)
    TRANSPOSED[_key].update(data_format="NCDHW", seed=0)
POOLINGS = {
    "halving": {"size": (4, 6, 8), "kernel": (2, 2, 2), "stride": None, "padding": (0, 0, 0), "count_include_pad": True},
    "overlapping": {
        "size": (5, 6, 7),
        "kernel": (3, 2, 3),
        "stride": (1, 1, 2),
        "padding": (1, 0, 1),
        "count_include_pad": False,
    },
    "gaps": {"size": (7, 8, 9), "kernel": (2, 1, 3), "stride": (3, 2, 4), "padding": (1, 0, 2), "count_include_pad": True},
}
for _pooling in POOLINGS.values():
    _pooling.update(batch=2, channels=3, data_format="NCDHW", output_format=None, seed=0)


# ---- operands and calls ----------------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, shape, dtype: str) -> np.ndarray:
    """Normal numbers that `dtype` represents."""
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def last(a, data_format: str):
    """Channels first -> `data_format`."""
    return a if data_format == "NCDHW" else np.moveaxis(a, 1, 4)


def first(a, data_format: str):
    """`data_format` -> channels first."""
    return a if data_format == "NCDHW" else np.moveaxis(np.asarray(a), 4, 1)


def as_float64(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


def convolution_operands(case, dtype: str):
    """dy, x, filters, bias: channels first."""
    rng = np.random.default_rng(case["seed"])
    window = oracle.Window(case["kernel"], case["stride"], case["padding"], case["dilation"])
    x = normal(rng, (case["batch"], case["c_in"], *case["size"]), dtype)
    filters = normal(rng, (*case["kernel"], case["c_in"], case["c_out"]), dtype)
    dy = normal(rng, (case["batch"], case["c_out"], *window.out(case["size"])), dtype)
    return dy, x, filters, normal(rng, (case["c_out"],), dtype)


def transposed_operands(case, dtype: str):
    """dy, x, filters, bias: channels first."""
    rng = np.random.default_rng(case["seed"])
    arguments = [case[name] for name in ("size", "kernel", "stride", "padding", "dilation", "output_padding")]
    channels = (case["c_in"], case["c_out"]) if case["filter_shape"] == "KDHW_CI_CO" else (case["c_out"], case["c_in"])
    x = normal(rng, (case["batch"], case["c_in"], *case["size"]), dtype)
    filters = normal(rng, (*case["kernel"], *channels), dtype)
    dy = normal(rng, (case["batch"], case["c_out"], *oracle.transposed_size(*arguments)), dtype)
    return dy, x, filters, normal(rng, (case["c_out"],), dtype)


def pick(case, *names):
    return {name: case[name] for name in names}


def value_and_vjp(function, operands, ct):
    """(value, cotangents) in one compiled program."""

    def both(operands, ct):
        value, pullback = jax.vjp(function, *operands)
        return value, pullback(ct)

    return jax.jit(both)(operands, ct)


def check_conv3d(case, dtype: str, **options) -> None:
    """conv3d and its gradients through jax.vjp."""
    dy, x, filters, bias = convolution_operands(case, dtype)
    window, layout = pick(case, "stride", "padding", "dilation"), case["data_format"]
    biases = [bias] if case["bias"] else []
    operation = functools.partial(jax_nki3d.conv3d, **window, data_format=layout, **options)
    y, gradients = value_and_vjp(operation, (last(x, layout), filters, *biases), last(dy, layout))
    assert_close(first(y, layout), terms(functools.partial(oracle.conv3d, **window), x, filters, *biases), dtype)
    expected = convolution_gradients(window, dy, x, filters)[: len(gradients)]
    for gradient, term in zip((first(gradients[0], layout), *gradients[1:]), expected, strict=True):
        assert_close(gradient, term, dtype)


def convolution_gradients(window, dy, x, filters) -> list[Terms]:
    """Terms of dx, dw, db."""
    return [terms(lambda *o, i=i: oracle.conv3d_bwd(*o, **window)[i], dy, x, filters) for i in range(3)]


def check_conv3d_transpose(case, dtype: str, **options) -> None:
    """conv3d_transpose and its gradients through jax.vjp."""
    dy, x, filters, bias = transposed_operands(case, dtype)
    window = pick(case, "stride", "padding", "dilation", "output_padding", "filter_shape")
    layout, biases = case["data_format"], [bias] if case["bias"] else []
    operation = functools.partial(jax_nki3d.conv3d_transpose, **window, data_format=layout, **options)
    y, gradients = value_and_vjp(operation, (last(x, layout), filters, *biases), last(dy, layout))
    assert_close(first(y, layout), terms(functools.partial(oracle.conv3d_transpose, **window), x, filters, *biases), dtype)
    for i, gradient in enumerate((first(gradients[0], layout), *gradients[1:])):
        expected = terms(lambda *o, i=i: oracle.conv3d_transpose_bwd(*o, **window)[i], dy, x, filters)
        assert_close(gradient, expected, dtype)


def check_conv3d_bwd(case, dtype: str, **options) -> None:
    """conv3d_bwd, and the gradients of its own results with respect to dy, x and the filters."""
    dy, x, filters, _ = convolution_operands(case, dtype)
    window, layout = pick(case, "stride", "padding", "dilation"), case["data_format"]
    operation = functools.partial(jax_nki3d.conv3d_bwd, **window, data_format=layout, **options)
    rng = np.random.default_rng(case["seed"] + 1)
    ct_dx, ct_dw, ct_db = (normal(rng, a, dtype) for a in (x.shape, filters.shape, (case["c_out"],)))
    operands = (last(dy, layout), last(x, layout), filters)
    results, pulled = value_and_vjp(operation, operands, (last(ct_dx, layout), ct_dw, ct_db))
    for result, term in zip(
        (first(results[0], layout), *results[1:]), convolution_gradients(window, dy, x, filters), strict=True
    ):
        assert_close(result, term, dtype)
    # Each result is linear in dy and one other operand, so that its gradients are the same three maps once more; one may be
    # the sum of up to three results, each already rounded.
    into_dy = [
        terms(functools.partial(oracle.conv3d, **window), ct_dx, filters),
        terms(functools.partial(oracle.conv3d, **window), x, ct_dw),
        terms(lambda ct, like: like * ct[None, :, None, None, None], ct_db, np.ones(dy.shape)),
    ]
    into_x = terms(lambda *o: oracle.conv3d_bwd(*o, **window)[0], dy, x, ct_dw)
    into_filters = terms(lambda *o: oracle.conv3d_bwd(*o, **window)[1], dy, ct_dx, filters)
    assert_close(first(pulled[0], layout), rounded_then_added(into_dy, dtype), dtype)
    assert_close(first(pulled[1], layout), into_x, dtype)
    assert_close(pulled[2], into_filters, dtype)


def rounded_then_added(parts, dtype: str) -> Terms:
    """The sum of results that were each rounded to `dtype`, added in it one by one."""
    magnitudes = sum(np.abs(p.value) for p in parts)
    inherited = sum(sum_bound(p, dtype) for p in parts) + len(parts) * roundoff(dtype) * magnitudes * 1.01
    value = sum(p.value for p in parts)
    return Terms(value, sum(p.count for p in parts), np.zeros(value.shape), inherited)


def check_avg_pooling_3d(case, dtype: str, **options) -> None:
    """avg_pooling_3d and its gradient; avg_pooling_3d_backward and its gradient."""
    rng = np.random.default_rng(case["seed"])
    x_format = case["data_format"]
    y_format = case["output_format"] or x_format
    window = pick(case, "kernel", "stride", "padding")
    share = oracle.shares(case["size"], *window.values(), case["count_include_pad"])
    x = normal(rng, (case["batch"], case["channels"], *case["size"]), dtype)
    dy = normal(rng, (*x.shape[:2], *share.shape), dtype)
    arguments = dict(kernel_size=case["kernel"], **pick(case, "stride", "padding", "count_include_pad"), **options)
    arguments.update(data_format=x_format, output_format=case["output_format"])
    forward = terms(functools.partial(oracle.avg_pooling_3d, **window), x, share)
    backward = terms(lambda dy, share: oracle.avg_pooling_3d_backward(dy, share, case["size"], **window), dy, share)

    pool = functools.partial(jax_nki3d.avg_pooling_3d, **arguments)
    y, (dx,) = value_and_vjp(pool, (last(x, x_format),), last(dy, y_format))
    assert_close(first(y, y_format), forward, dtype)
    assert_close(first(dx, x_format), backward, dtype)

    def unpool(dy):
        return jax_nki3d.avg_pooling_3d_backward(dy, jax.ShapeDtypeStruct(last(x, x_format).shape, x.dtype), **arguments)

    dx, (y,) = value_and_vjp(unpool, (last(dy, y_format),), last(x, x_format))
    assert_close(first(dx, x_format), backward, dtype)
    assert_close(first(y, y_format), forward, dtype)


# ---- float32, over many geometries -----------------------------------------------------------------------------------


@given(convolutions())
def test_conv3d_and_its_gradients(case):
    event(f"batch {case['batch']}")
    check_conv3d(case, "float32")


@given(transposed_convolutions())
def test_conv3d_transpose_and_its_gradients(case):
    event(f"filter_shape {case['filter_shape']}")
    check_conv3d_transpose(case, "float32")


@settings(max_examples=30)
@given(convolutions())
def test_conv3d_bwd_and_its_gradients(case):
    check_conv3d_bwd(case, "float32")


@given(poolings())
def test_pooling_both_ways_and_their_gradients(case):
    check_avg_pooling_3d(case, "float32")


@settings(max_examples=20)
@given(convolutions(), st.sampled_from([flags for flags in itertools.product((False, True), repeat=3) if any(flags)]))
def test_any_subset_of_conv3d_bwd_equals_the_whole(case, flags):
    dy, x, filters, _ = convolution_operands(case, "float32")
    window = pick(case, "stride", "padding", "dilation")
    asked = dict(zip(("compute_dx", "compute_dw", "compute_db"), flags, strict=True))
    some = jax_nki3d.conv3d_bwd(dy, x, filters, **window, **asked)
    wanted = [e for e, flag in zip(convolution_gradients(window, dy, x, filters), flags, strict=True) if flag]
    for gradient, expected in zip(some, wanted, strict=True):
        assert_close(gradient, expected, "float32")


# ---- other dtypes, layouts and modes, over a small grid --------------------------------------------------------------

SIXTEEN_BITS = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv3d_in_16_bits(name, dtype):
    check_conv3d(CONVOLUTIONS[name], dtype)
    if name in ("dilated", "far"):
        check_conv3d_bwd(CONVOLUTIONS[name], dtype)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_conv3d_transpose_in_16_bits(name, dtype):
    check_conv3d_transpose(TRANSPOSED[name], dtype)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_in_16_bits(name, dtype):
    check_avg_pooling_3d(POOLINGS[name], dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv3d_in_float64(name):
    check_conv3d(CONVOLUTIONS[name], "float64")
    if name in ("strided", "thin"):
        check_conv3d_bwd(CONVOLUTIONS[name], "float64")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", TRANSPOSED)
def test_conv3d_transpose_in_float64(name):
    check_conv3d_transpose(TRANSPOSED[name], "float64")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_in_float64(name):
    check_avg_pooling_3d(POOLINGS[name], "float64")


@pytest.mark.parametrize(("data_format", "filter_shape"), [("NCDHW", "KDHW_CO_CI"), ("NDHWC", "KDHW_CI_CO")])
def test_layouts_with_forward_mode_on(data_format, filter_shape):
    """Without the custom_vjp, gradients come from the primitives' own rules."""
    check_conv3d({**CONVOLUTIONS["dilated"], "data_format": data_format}, "float32", forward_mode=True)
    check_conv3d_bwd({**CONVOLUTIONS["strided"], "data_format": data_format}, "float32", forward_mode=True)
    transposed = {**TRANSPOSED["distinct"], "data_format": data_format, "filter_shape": filter_shape}
    check_conv3d_transpose(transposed, "float32", forward_mode=True)
    pooled = {**POOLINGS["gaps"], "data_format": data_format, "output_format": "NDHWC"}
    check_avg_pooling_3d(pooled, "float32", forward_mode=True)


@pytest.mark.parametrize("name", oracle.ACTIVATIONS)
@pytest.mark.parametrize("operation", ["conv3d", "conv3d_transpose"])
def test_activations_and_their_gradients(operation, name):
    case = CONVOLUTIONS["strided"] if operation == "conv3d" else TRANSPOSED["overlapping"]
    operands = convolution_operands if operation == "conv3d" else transposed_operands
    dy, x, filters, bias = operands(case, "float32")
    window = pick(case, "stride", "padding", "dilation", *(["output_padding"] if operation == "conv3d_transpose" else []))
    function = functools.partial(getattr(jax_nki3d, operation), **window, activation_fn=name)
    y, gradients = value_and_vjp(function, (x, filters, bias), dy)
    z = terms(functools.partial(getattr(oracle, operation), **window), x, filters, bias)
    value, slope = oracle.ACTIVATIONS[name](z.value)
    assert_close(y, activated(z, value), "float32")
    # The slope moves at most 1.5 times as far as z, and is evaluated in a few roundings.
    if name == "ReLU":
        assert np.abs(z.value).min() > sum_bound(z, "float32").max(), "a value so near to the kink has no certain slope"
        error = np.zeros_like(z.value)
    else:
        error = 1.5 * sum_bound(z, "float32") + 8 * roundoff("float32") * (1 + np.abs(z.value))
    backward = getattr(oracle, f"{operation}_bwd")
    for i, gradient in enumerate(gradients):
        expected = terms(lambda *o, i=i: backward(*o, **window)[i], dy * slope, x, filters)
        inherited = backward(np.abs(dy) * error, np.abs(x), np.abs(filters), **window)[i]
        assert_close(gradient, expected._replace(inherited=inherited.astype(np.float64)), "float32")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", oracle.ACTIVATIONS)
def test_activations_in_16_bits_are_rounded_once(name, dtype):
    case = CONVOLUTIONS["strided"]
    _, x, filters, bias = convolution_operands(case, dtype)
    window = pick(case, "stride", "padding", "dilation")
    z = terms(functools.partial(oracle.conv3d, **window), x, filters, bias)
    expected = activated(z, oracle.ACTIVATIONS[name](z.value)[0])
    assert_close(jax_nki3d.conv3d(x, filters, bias, **window, activation_fn=name), expected, dtype)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", oracle.ACTIVATIONS)
def test_activations_in_16_bits_under_grad(name, dtype, jit):
    """The value before the activation is kept in 16 bits; the activation and its slope there are then rounded once each."""
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = np.linspace(-7, 7, 225).astype(narrow).reshape(1, 1, 1, 15, 15)
    one = np.ones((1, 1, 1, 1, 1), narrow)

    def forward(x):
        y, pullback = jax.vjp(lambda x: jax_nki3d.conv3d(x, one, activation_fn=name), x)
        return y, *pullback(jnp.ones_like(y))

    y, dx = (jax.jit(forward) if jit else forward)(x)
    z = terms(np.multiply, x, np.ones(x.shape))  # exact
    value, slope = oracle.ACTIVATIONS[name](z.value)
    assert_close(y, activated(z, value), dtype)
    error = 0 if name == "ReLU" else 8 * roundoff("float32") * (1 + np.abs(z.value))
    assert_close(dx, Terms(slope, z.count, np.zeros(x.shape), error), dtype)


# ---- identities and derivatives in float64 ---------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@settings(max_examples=25)
@given(convolutions(symmetric=True))
def test_conv3d_transpose_is_the_adjoint_of_conv3d(case):
    """<conv3d(x), y> = <x, conv3d_transpose(y)> with flipped filters and the output_padding that restores the size."""
    y, x, filters, _ = convolution_operands(case, "float64")
    stride, dilation, padding = case["stride"], case["dilation"], case["padding"][::2]
    window = [(k - 1) * d + 1 for k, d in zip(case["kernel"], dilation, strict=True)]
    extra = [(n + 2 * p - k) % s for n, p, k, s in zip(case["size"], padding, window, stride, strict=True)]
    there = jax_nki3d.conv3d(x, filters, stride=stride, padding=padding, dilation=dilation)
    back = jax_nki3d.conv3d_transpose(
        y,
        filters[::-1, ::-1, ::-1],
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=extra,
        filter_shape="KDHW_CO_CI",
    )
    assert back.shape == x.shape
    lhs, rhs = np.sum(np.asarray(there) * y), np.sum(x * np.asarray(back))
    size = np.sqrt(y.size * np.prod(filters.shape[:4])) * np.linalg.norm(y) * np.linalg.norm(there)
    np.testing.assert_allclose(lhs, rhs, rtol=0, atol=4 * roundoff("float64") * size)


def derivative_cases():
    """(name, function, operands, order).

    Central differences are exact, with any step, for polynomials of degree 2: the functions of all operands, once. What
    `check_grads` differentiates for the second order is the pullback of the value itself, which is linear only as long as the
    function is: in one operand, the others held.
    """
    case = {**CONVOLUTIONS["dilated"], "kernel": (2, 1, 2), "size": (5, 4, 4), "batch": 1, "c_in": 1, "c_out": 2}
    dy, x, filters, bias = convolution_operands(case, "float64")
    window = pick(case, "stride", "padding", "dilation")
    transposed = {**TRANSPOSED["distinct"], "kernel": (2, 1, 3), "padding": (1, 0, 3), "batch": 1, "c_in": 2, "c_out": 1}
    _, z, flipped, shift = transposed_operands(transposed, "float64")
    crop = pick(transposed, "stride", "padding", "dilation", "output_padding")
    pool = {"kernel_size": (2, 3, 3), "stride": (1, 2, 4), "padding": (0, 1, 1), "count_include_pad": False}
    pooled = jax.eval_shape(functools.partial(jax_nki3d.avg_pooling_3d, **pool), x).shape
    g = np.random.default_rng(0).standard_normal(pooled)

    conv = functools.partial(jax_nki3d.conv3d, **window)
    conv_t = functools.partial(jax_nki3d.conv3d_transpose, **crop)
    bwd = functools.partial(jax_nki3d.conv3d_bwd, **window)

    def unpool(g, **options):
        return jax_nki3d.avg_pooling_3d_backward(g, x, **pool, **options)

    yield "conv3d", conv, (x, filters, bias), 1
    yield "conv3d of x and bias", lambda x, b, **options: conv(x, filters, b, **options), (x, bias), 2
    yield "conv3d of filters", lambda f, **options: conv(x, f, **options), (filters,), 2
    yield "conv3d_transpose", conv_t, (z, flipped, shift), 1
    yield "conv3d_transpose of x and bias", lambda z, b, **options: conv_t(z, flipped, b, **options), (z, shift), 2
    yield "conv3d_transpose of filters", lambda f, **options: conv_t(z, f, **options), (flipped,), 2
    yield "conv3d_bwd", bwd, (dy, x, filters), 1
    yield "conv3d_bwd of dy", lambda dy, **options: bwd(dy, x, filters, **options), (dy,), 2
    yield "conv3d_bwd of x and filters", lambda x, f, **options: bwd(dy, x, f, **options), (x, filters), 2
    yield "avg_pooling_3d", functools.partial(jax_nki3d.avg_pooling_3d, **pool), (x,), 2
    yield "avg_pooling_3d_backward", unpool, (g,), 2


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("forward_mode", [False, True], ids=["rev", "fwd_and_rev"])
@pytest.mark.parametrize(("function", "operands", "order"), [pytest.param(*c[1:], id=c[0]) for c in derivative_cases()])
def test_derivatives_agree_with_differences(function, operands, order, forward_mode):
    modes = ("fwd", "rev") if forward_mode else ("rev",)
    function = functools.partial(function, forward_mode=forward_mode)
    check_grads(jax.jit(function), operands, order=order, modes=modes, eps=1.0, atol=1e-9, rtol=1e-9)


# ---- every formulation of the three maps -----------------------------------------------------------------------------

FORMULATIONS = {
    "native": (native.correlate, native.spread, native.filter_gradient),
    "planned": (plan.correlate, plan.spread, plan.filter_gradient),
    **{
        "sum " + ("".join("DHW"[a] for a in summed) or "none"): tuple(
            functools.partial(f, summed=summed) for f in (products.correlate, products.spread, products.filter_gradient)
        )
        for summed in plan.CANDIDATES
    },
}
# Beyond the grid: one phase has all its taps in the padding; sizes that are no multiple of the stride; the stem.
GEOMETRIES = {
    **CONVOLUTIONS,
    "padding alone": {
        "size": (1, 1, 2),
        "kernel": (2, 3, 1),
        "stride": (2, 4, 4),
        "dilation": (1, 2, 1),
        "padding": (2, 2, 3, 3, 4, 4),
    },
    "stem": {"size": (3, 9, 8), "kernel": (2, 7, 2), "stride": (1, 2, 2), "dilation": (1, 1, 1), "padding": (1, 0, 3, 3, 0, 1)},
    "even": {"size": (4, 4, 4), "kernel": (4, 4, 1), "stride": (2, 2, 1), "dilation": (1, 1, 1), "padding": (1, 1, 1, 1, 0, 0)},
}


def geometry_of(case) -> tuple[oracle.Window, Geometry]:
    window = oracle.Window(case["kernel"], case["stride"], case["padding"], case["dilation"])
    front = case["padding"][::2]
    out = window.out(case["size"])
    return window, Geometry(case["size"], out, case["kernel"], case["stride"], case["dilation"], front)


@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("maps", FORMULATIONS.values(), ids=FORMULATIONS)
def test_formulations_are_exact_on_small_integers(maps, case, rng):
    """Every partial sum is an integer that float32 holds, so that all formulations must agree to the last bit."""
    window, geometry = geometry_of(case)
    x, filters, dy = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((2, 3, *geometry.size), (*geometry.kernel, 3, 2), (2, 2, *geometry.out))
    )

    @jax.jit
    def all_three(x, filters, dy):
        correlate, spread, filter_gradient = maps
        return (
            correlate(x, filters, geometry=geometry),
            spread(dy, filters, geometry=geometry),
            filter_gradient(x, dy, geometry=geometry),
        )

    y, dx, dw = all_three(x, filters, dy)
    x, filters, dy = as_float64(x, filters, dy)
    assert_equal(y, oracle.correlate(x, filters, window))
    assert_equal(dx, oracle.spread(dy, filters, window, geometry.size))
    assert_equal(dw, oracle.filter_gradient(x, dy, window))


@pytest.mark.parametrize("case", POOLINGS.values(), ids=POOLINGS)
@pytest.mark.parametrize("maps", [native, pooling], ids=["native", "separable"])
def test_window_sums_are_exact_on_small_integers(maps, case, rng):
    stride = case["stride"] or case["kernel"]
    window = oracle.Window(case["kernel"], stride, oracle.six(case["padding"]))
    out = window.out(case["size"])
    geometry = Geometry(case["size"], out, case["kernel"], stride, (1, 1, 1), case["padding"])
    x, dy = (rng.integers(-3, 4, (2, 3, *shape)).astype(np.float32) for shape in (case["size"], out))
    sums, spread = jax.jit(lambda x, dy: (maps.pool_sums(x, geometry), maps.spread_sums(dy, geometry)))(x, dy)
    ones = np.ones(out)
    assert_equal(sums, oracle.avg_pooling_3d(x.astype(float), ones, **pick(case, "kernel", "stride", "padding")))
    expected = oracle.avg_pooling_3d_backward(dy.astype(float), ones, case["size"], **pick(case, "kernel", "stride", "padding"))
    assert_equal(spread, expected)


# ---- slabs -----------------------------------------------------------------------------------------------------------

PLANS = (plan.plan_correlate, plan.plan_spread, plan.plan_filter_gradient)
SLABBED = {
    "along D": {
        "size": (13, 6, 5),
        "kernel": (3, 3, 3),
        "stride": (1, 1, 1),
        "dilation": (1, 1, 1),
        "padding": (1, 1, 1, 1, 1, 1),
    },
    "along H": {
        "size": (4, 15, 6),
        "kernel": (2, 4, 3),
        "stride": (1, 2, 2),
        "dilation": (1, 1, 2),
        "padding": (0, 1, 3, 2, 2, 1),
    },
    "along W": {
        "size": (5, 4, 17),
        "kernel": (2, 1, 3),
        "stride": (2, 1, 2),
        "dilation": (1, 1, 3),
        "padding": (1, 0, 0, 0, 5, 7),
    },
    "far": {"size": (11, 3, 3), "kernel": (2, 3, 2), "stride": (1, 2, 1), "dilation": (3, 1, 1), "padding": (6, 5, 1, 1, 0, 0)},
    "holes": {
        "size": (14, 5, 4),
        "kernel": (1, 2, 2),
        "stride": (3, 2, 2),
        "dilation": (1, 1, 1),
        "padding": (1, 0, 0, 0, 0, 0),
    },
}


@pytest.fixture(params=[256, 4096], ids=["many_slabs", "few_slabs"])
def small_slabs(request, monkeypatch):
    """Even small volumes run in slabs; nothing planned or compiled outlives the test."""

    def forget():
        jax.clear_caches()
        for cached in PLANS:
            cached.cache_clear()

    monkeypatch.setattr(plan, "SLAB_BYTES", request.param)
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("name", SLABBED)
def test_slabs_are_exact_on_small_integers(name, rng):
    window, geometry = geometry_of(SLABBED[name])
    x, filters, dy = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((2, 3, *geometry.size), (*geometry.kernel, 3, 2), (2, 2, *geometry.out))
    )
    slabs = [choose(geometry, 2, 3, 2, 4).slabs for choose in PLANS]
    assert max(slabs) > 1, "the case does not test what it is for"
    assert min(slabs) > 1 or plan.SLAB_BYTES > 256, slabs
    arguments = {"stride": window.stride, "padding": window.padding, "dilation": window.dilation}
    y = jax.jit(functools.partial(jax_nki3d.conv3d, **arguments))(x, filters)
    dx, dw, db = jax.jit(functools.partial(jax_nki3d.conv3d_bwd, **arguments))(dy, x, filters)
    expected = oracle.conv3d_bwd(*as_float64(dy, x, filters), **arguments)
    assert_equal(y, oracle.conv3d(*as_float64(x, filters), **arguments))
    for gradient, value in zip((dx, dw, db), expected, strict=True):
        assert_equal(gradient, value)


@pytest.mark.usefixtures("small_slabs")
def test_slabs_of_conv3d_transpose_and_under_grad_and_vmap():
    transposed = {**TRANSPOSED["overlapping"], "size": (9, 3, 2)}
    check_conv3d_transpose(transposed, "float32")
    check_conv3d({**CONVOLUTIONS["strided"], "size": (6, 7, 16)}, "bfloat16")
    _, x, filters, _ = convolution_operands({**CONVOLUTIONS["dense"], "size": (9, 4, 4)}, "float32")
    arguments = pick(CONVOLUTIONS["dense"], "stride", "padding", "dilation")
    each = jax.vmap(lambda x: jax_nki3d.conv3d(x[None], filters, **arguments)[0])(x)
    assert_close(each, terms(functools.partial(oracle.conv3d, **arguments), x, filters), "float32")


# ---- the tolerances catch mistakes -----------------------------------------------------------------------------------


def dilated_terms(dtype):
    case = CONVOLUTIONS["dilated"]
    dy, x, filters, bias = convolution_operands(case, dtype)
    return dy, x, filters, bias, pick(case, "stride", "padding", "dilation")


def drop_a_tap(dtype):
    _, x, filters, bias, window = dilated_terms(dtype)
    spoilt = filters.copy()
    spoilt[1, 2, 1] = 0
    return oracle.conv3d(*as_float64(x, spoilt, bias), **window), terms(
        functools.partial(oracle.conv3d, **window), x, filters, bias
    )


def drop_one_product(dtype):
    """A single tap of a single channel pair at the smallest filter value: the least that can be missing."""
    _, x, filters, bias, window = dilated_terms(dtype)
    spoilt = filters.copy()
    spoilt[np.unravel_index(np.argsort(np.abs(spoilt.astype(float)), axis=None)[spoilt.size // 4], spoilt.shape)] = 0
    return oracle.conv3d(*as_float64(x, spoilt, bias), **window), terms(
        functools.partial(oracle.conv3d, **window), x, filters, bias
    )


def flip_the_kernel(dtype):
    _, x, filters, bias, window = dilated_terms(dtype)
    flipped = np.flip(filters, (0, 1, 2))
    return oracle.conv3d(*as_float64(x, flipped, bias), **window), terms(
        functools.partial(oracle.conv3d, **window), x, filters, bias
    )


def shift_the_padding(dtype):
    _, x, filters, bias, window = dilated_terms(dtype)
    front, back, *rest = window["padding"]
    shifted = {**window, "padding": (front - 1, back + 1, *rest)}
    return oracle.conv3d(*as_float64(x, filters, bias), **shifted), terms(
        functools.partial(oracle.conv3d, **window), x, filters, bias
    )


def swap_the_axes_of_the_padding(dtype):
    _, x, filters, bias, _ = dilated_terms(dtype)
    window = {"stride": 1, "dilation": 1, "padding": (1, 1, 0, 0, 1, 1)}
    swapped = {"stride": 1, "dilation": 1, "padding": (1, 1, 1, 1, 0, 0)}
    x = x[:, :, :6, :6, :6]
    filters = filters[:, :2]
    right = terms(functools.partial(oracle.conv3d, **window), x, filters, bias)
    y = oracle.conv3d(*as_float64(x, filters, bias), **swapped)
    return np.resize(y, right.value.shape), right


def forget_the_bias(dtype):
    _, x, filters, bias, window = dilated_terms(dtype)
    return oracle.conv3d(*as_float64(x, filters), **window), terms(functools.partial(oracle.conv3d, **window), x, filters, bias)


def swap_stride_and_dilation_in_dw(dtype):
    """Legal sizes and a plausible result, where stride and dilation change places on the axis D."""
    case = {"size": (9, 4, 4), "kernel": (2, 2, 2), "stride": (2, 1, 1), "dilation": (3, 1, 1), "padding": (0,) * 6}
    dy, x, filters, _ = convolution_operands({**CONVOLUTIONS["dense"], **case}, dtype)
    right = {"stride": (2, 1, 1), "dilation": (3, 1, 1)}
    wrong = oracle.Window(case["kernel"], (3, 1, 1), case["padding"], (2, 1, 1))
    return oracle.filter_gradient(*as_float64(x, dy), wrong), convolution_gradients({**right, "padding": 0}, dy, x, filters)[1]


def transposed_terms(dtype):
    case = TRANSPOSED["distinct"]
    _, x, filters, _ = transposed_operands(case, dtype)
    window = pick(case, "stride", "padding", "dilation", "output_padding")
    return x, filters, window, terms(functools.partial(oracle.conv3d_transpose, **window), x, filters)


def unflip_the_transposed_kernel(dtype):
    x, filters, window, right = transposed_terms(dtype)
    return oracle.conv3d_transpose(*as_float64(x, np.flip(filters, (0, 1, 2))), **window), right


def swap_the_channels_of_the_transposed_kernel(dtype):
    """Hidden wherever C_in = C_out."""
    case = {**TRANSPOSED["distinct"], "c_out": 3}
    _, x, filters, _ = transposed_operands(case, dtype)
    window = pick(case, "stride", "padding", "dilation", "output_padding")
    right = terms(functools.partial(oracle.conv3d_transpose, **window), x, filters)
    return oracle.conv3d_transpose(*as_float64(x, filters), **window, filter_shape="KDHW_CO_CI"), right


def put_the_output_padding_in_front(dtype):
    x, filters, window, right = transposed_terms(dtype)
    return np.roll(oracle.conv3d_transpose(*as_float64(x, filters), **window), 1, axis=2), right


def pooling_terms(dtype):
    case = POOLINGS["overlapping"]
    x = normal(np.random.default_rng(0), (2, 3, *case["size"]), dtype)
    window = pick(case, "kernel", "stride", "padding")
    share = oracle.shares(case["size"], *window.values(), False)
    return case["size"], x, window, share, terms(functools.partial(oracle.avg_pooling_3d, **window), x, share)


def divide_by_the_whole_window(dtype):
    size, x, window, _, right = pooling_terms(dtype)
    return oracle.avg_pooling_3d(*as_float64(x), oracle.shares(size, *window.values(), True), **window), right


def leave_out_the_divisor_in_the_pooling_gradient(dtype):
    size, _, window, share, _ = pooling_terms(dtype)
    dy = normal(np.random.default_rng(1), (2, 3, *share.shape), dtype)
    right = terms(lambda dy, share: oracle.avg_pooling_3d_backward(dy, share, size, **window), dy, share)
    whole = oracle.shares(size, *window.values(), True)
    return oracle.avg_pooling_3d_backward(*as_float64(dy), whole, size, **window), right


def sum_in(narrow, dtype):
    """Right in everything but the type of the running sum, one product after the other."""
    _, x, filters, bias, window = dilated_terms(dtype)
    total = None
    for index in np.ndindex(*filters.shape[:4]):
        one = np.zeros(filters.shape)
        one[index] = filters[index]
        term = oracle.conv3d(*as_float64(x, one), **window)
        total = term if total is None else (total + term).astype(narrow).astype(np.float64)
    y = oracle.plus_bias(total, bias.astype(np.float64))
    return y, terms(functools.partial(oracle.conv3d, **window), x, filters, bias)


def round_the_operands(narrow, dtype):
    """What a matrix unit does that reads float32 as bfloat16, or float64 as float32."""
    _, x, filters, bias, window = dilated_terms(dtype)
    x_, filters_ = (a.astype(narrow) for a in (x, filters))
    return oracle.conv3d(*as_float64(x_, filters_, bias), **window), terms(
        functools.partial(oracle.conv3d, **window), x, filters, bias
    )


def round_before_the_bias(dtype):
    """Two roundings instead of one."""
    _, x, filters, bias, window = dilated_terms(dtype)
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    y = oracle.conv3d(*as_float64(x, filters), **window).astype(narrow).astype(np.float64)
    return oracle.plus_bias(y, bias.astype(np.float64)), terms(functools.partial(oracle.conv3d, **window), x, filters, bias)


def use_the_other_gelu(dtype):
    _, x, filters, bias, window = dilated_terms(dtype)
    z = terms(functools.partial(oracle.conv3d, **window), x, filters, bias)
    return oracle.ACTIVATIONS["GELU_Tanh_Approx"](z.value)[0], activated(z, oracle.ACTIVATIONS["GELU"](z.value)[0])


def mutations():
    everywhere = [
        drop_a_tap,
        drop_one_product,
        flip_the_kernel,
        shift_the_padding,
        swap_the_axes_of_the_padding,
        forget_the_bias,
        swap_stride_and_dilation_in_dw,
        unflip_the_transposed_kernel,
        swap_the_channels_of_the_transposed_kernel,
        put_the_output_padding_in_front,
        divide_by_the_whole_window,
        leave_out_the_divisor_in_the_pooling_gradient,
    ]
    for mistake, dtype in itertools.product(everywhere, ("float64", "float32", "bfloat16", "float16")):
        yield pytest.param(mistake, dtype, id=f"{mistake.__name__}-{dtype}")
    narrowings = [
        (functools.partial(sum_in, ml_dtypes.bfloat16), "bfloat16", "sum_in_bfloat16"),
        (functools.partial(sum_in, np.float16), "float16", "sum_in_float16"),
        (functools.partial(sum_in, np.float16), "float32", "sum_in_float16"),
        (functools.partial(sum_in, np.float32), "float64", "sum_in_float32"),
        (functools.partial(round_the_operands, ml_dtypes.bfloat16), "float32", "operands_in_bfloat16"),
        (functools.partial(round_the_operands, np.float16), "float32", "operands_in_float16"),
        (functools.partial(round_the_operands, np.float32), "float64", "operands_in_float32"),
        (round_before_the_bias, "bfloat16", "round_before_the_bias"),
        (round_before_the_bias, "float16", "round_before_the_bias"),
        (use_the_other_gelu, "float64", "use_the_other_gelu"),
        (use_the_other_gelu, "float32", "use_the_other_gelu"),
    ]
    for mistake, dtype, name in narrowings:
        yield pytest.param(mistake, dtype, id=f"{name}-{dtype}")


@pytest.mark.parametrize(("mistake", "dtype"), list(mutations()))
def test_the_tolerance_catches(mistake, dtype):
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    wrong, expected = mistake(dtype)
    assert_close(expected.value.astype(narrow), expected, dtype)  # what is right passes
    with pytest.raises(AssertionError, match="out of bounds"):
        assert_close(wrong.astype(narrow), expected, dtype)


def test_the_tolerance_refuses_shape_dtype_and_nan():
    expected = terms(np.multiply, np.ones((2, 3)), np.ones((2, 3)))
    right = jnp.ones((2, 3), jnp.float32)
    assert_close(right, expected, "float32")
    for wrong in (right[:1], right.T, right.astype(jnp.bfloat16), right.at[0, 0].set(jnp.nan), right + 1e-6):
        with pytest.raises(AssertionError):
            assert_close(wrong, expected, "float32")


def test_every_public_operation_is_tested_here():
    """A sixth operation must not go unnoticed."""
    operations = {name for name in jax_nki3d.__all__ if name not in ("ActFnType", "explain", "options")}
    assert operations == {"avg_pooling_3d", "avg_pooling_3d_backward", "conv3d", "conv3d_bwd", "conv3d_transpose"}
    chex.assert_equal(set(oracle.ACTIVATIONS), {member.name for member in jax_nki3d.ActFnType})
