# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every argument that a user can get wrong: the error's type, and a text that says where, what and how to mend it.

A row replaces one argument of a good call. The error must come before any arithmetic: it is the same for arrays, for tracers,
and for objects that have no values at all.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_nki3d
from jax_nki3d import _options


def f32(*shape):
    return np.ones(shape, np.float32)


GOOD: dict[str, dict[str, Any]] = {
    "conv3d": {"x_in": f32(2, 3, 5, 6, 7), "filters": f32(3, 2, 3, 3, 4), "bias": f32(4)},
    "conv3d_transpose": {"x_in": f32(2, 3, 2, 3, 4), "filters": f32(3, 2, 3, 3, 4), "bias": f32(4)},
    "conv3d_bwd": {"dy": f32(2, 4, 3, 5, 5), "x_in": f32(2, 3, 5, 6, 7), "filters": f32(3, 2, 3, 3, 4)},
    "avg_pooling_3d": {"src_tensor": f32(2, 3, 4, 6, 8), "kernel_size": 2},
    "avg_pooling_3d_backward": {"grad_output": f32(2, 3, 2, 3, 4), "input_tensor": f32(2, 3, 4, 6, 8), "kernel_size": 2},
}
ARRAYS = ("x_in", "filters", "bias", "dy", "src_tensor", "grad_output", "input_tensor")
CONVOLUTIONS = ("conv3d", "conv3d_bwd", "conv3d_transpose")
POOLINGS = ("avg_pooling_3d", "avg_pooling_3d_backward")


class Bad(NamedTuple):
    """One row: `arguments` replace those of the good call, and `argument` is the one to blame.

    Attributes:
        said: what the text must hold besides the operation and the argument: the values, and a word of the cure.
    """

    operation: str
    argument: str
    arguments: dict[str, Any]
    error: type[Exception]
    said: tuple[str, ...]

    def __str__(self) -> str:
        def brief(value):
            if callable(value):  # its repr holds an address, and names of tests must not change from process to process
                return value.__name__
            return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)

        return f"{self.operation}-" + "-".join(f"{k}={brief(v)}" for k, v in self.arguments.items())


# A cure is a sentence that begins with a verb.
CURE = re.compile(
    r"[.;] (Add|Apply|Cast|Choose|Convert|Drop|Give|Install|Leave|Make|Pad|Pass|Reshape|Set|Swap|Take|Transpose|Use|Write)\b"
)


def rows():
    yield from arrays()
    yield from integers()
    yield from choices()
    yield from windows()


def arrays():
    """Ranks, dtypes, sizes, and what is no array."""
    for operation, good in GOOD.items():
        for name in (n for n in good if n in ARRAYS):
            array = good[name]
            short = array[..., 0]
            yield Bad(operation, name, {name: short}, ValueError, (str(short.shape), f"{array.ndim} dimensions", "Add"))
            long = array[None]
            yield Bad(operation, name, {name: long}, ValueError, (str(long.shape), f"{array.ndim} dimensions", "jax.vmap"))
            for dtype in ("int32", "int8", "uint8", "bool", "complex64"):
                yield Bad(
                    operation, name, {name: array.astype(dtype)}, TypeError, (dtype, "float32, float64", "Cast it with .astype")
                )
            for value in (array.tolist(), 1.0, "array"):
                yield Bad(operation, name, {name: value}, TypeError, (type(value).__name__, "Convert it with jnp.asarray"))
            if name != "bias":
                yield Bad(operation, name, {name: None}, TypeError, ("NoneType", "Convert it with jnp.asarray"))
            else:
                for size in (1, 3, 5):
                    yield Bad(operation, name, {name: f32(size)}, ValueError, ("(4,)", f"({size})"))
    # One array in another dtype than x_in.
    half = GOOD["conv3d"]["filters"].astype(np.float16)
    for operation in CONVOLUTIONS:
        yield Bad(operation, "filters", {"filters": half}, TypeError, ("float16", "`x_in` has float32", "Cast one of them"))
    half = GOOD["conv3d_bwd"]["dy"].astype(np.float16)
    yield Bad("conv3d_bwd", "dy", {"dy": half}, TypeError, ("float16", "`x_in` has float32", "Cast one of them"))
    half = GOOD["avg_pooling_3d_backward"]["grad_output"].astype(np.float16)
    yield Bad(
        "avg_pooling_3d_backward", "grad_output", {"grad_output": half}, TypeError, ("float16", "float32", "Cast one of them")
    )
    # Channels, and axes without elements.
    for operation in CONVOLUTIONS:
        wrong = f32(3, 2, 3, 5, 4)
        yield Bad(operation, "filters", {"filters": wrong}, ValueError, ("C_in = 5", "(3, 2, 3, 5, 4)", "3 channels"))
        yield Bad(operation, "filters", {"filters": f32(3, 0, 3, 3, 4)}, ValueError, ("(3, 0, 3, 3, 4)", "at least 1"))
        yield Bad(operation, "filters", {"filters": f32(3, 2, 3, 3, 0)}, ValueError, ("(3, 2, 3, 3, 0)", "at least 1"))
        yield Bad(operation, "x_in", {"x_in": f32(2, 3, 0, 6, 7)}, ValueError, ("(3, 0, 6, 7)", "at least 1"))
        yield Bad(operation, "x_in", {"x_in": f32(2, 0, 5, 6, 7)}, ValueError, ("(0, 5, 6, 7)", "at least 1"))
        # The layout was forgotten.
        yield Bad(operation, "filters", {"data_format": "NDHWC"}, ValueError, ("C_in = 3", "data_format='NDHWC'"))
    other = {"filter_shape": "KDHW_CO_CI"}
    yield Bad("conv3d_transpose", "filters", other, ValueError, ("C_in = 4", "KDHW_CO_CI", "3 channels", "`filter_shape`"))
    for operation in POOLINGS:
        name = next(n for n in GOOD[operation] if n in ("src_tensor", "input_tensor"))
        yield Bad(operation, name, {name: f32(2, 3, 4, 0, 8)}, ValueError, ("(3, 4, 0, 8)", "at least 1"))
    # Gradients of another forward pass.
    for shape in ((2, 4, 3, 5, 6), (1, 4, 3, 5, 5), (2, 3, 3, 5, 5)):
        said = (str(shape), "(2, 4, 3, 5, 5)", "Pass the arguments of the forward pass")
        yield Bad("conv3d_bwd", "dy", {"dy": f32(*shape)}, ValueError, said)
    said = ("(2, 4, 3, 5, 5)", "(2, 4, 2, 3, 3)", "stride=(2, 2, 2)", "Pass the arguments")
    yield Bad("conv3d_bwd", "dy", {"stride": 2}, ValueError, said)
    for shape in ((2, 3, 2, 3, 5), (1, 3, 2, 3, 4), (2, 2, 2, 3, 4)):
        said = (str(shape), "(2, 3, 2, 3, 4)", "Pass the arguments of the forward pass")
        yield Bad("avg_pooling_3d_backward", "grad_output", {"grad_output": f32(*shape)}, ValueError, said)
    said = ("NDHWC", "(2, 4, 3, 2, 3)", "(2, 3, 2, 3, 4)", "Pass the arguments")
    yield Bad("avg_pooling_3d_backward", "grad_output", {"output_format": "NDHWC"}, ValueError, said)


def integers():
    """Numbers out of their domain, of the wrong type, or not as many as axes."""
    numbers = {operation: ["stride", "padding", "dilation"] for operation in CONVOLUTIONS}
    numbers["conv3d_transpose"].append("output_padding")
    numbers.update({operation: ["kernel_size", "stride", "padding"] for operation in POOLINGS})
    for operation, names in numbers.items():
        for name in names:
            from_zero = name in ("padding", "output_padding")
            six = name == "padding" and operation in ("conv3d", "conv3d_bwd")
            least = 0 if from_zero else 1
            for value in (-1, (1, 1, -2), [1, -1, 1], np.int64(-3), *([] if from_zero else [0, (1, 0, 1)])):
                yield Bad(operation, name, {name: value}, ValueError, (f"at least {least}", repr(value)))
            lengths: tuple = ((1,), (1, 1), (1, 1, 1, 1), ())
            if not six:
                lengths = (*lengths, (1,) * 6)
            for value in lengths:
                yield Bad(operation, name, {name: value}, ValueError, ("three", repr(value)))
            for value in (1.0, (1, 1.0, 1), np.float32(2), True, (1, True, 1), 1j, {"D": 1}):
                yield Bad(operation, name, {name: value}, TypeError, (repr(value), "int"))
            yield Bad(operation, name, {name: np.ones(3)}, TypeError, ("int",))
            for value in ("1", "same", "valid", "CIRCULAR"):
                yield Bad(operation, name, {name: value}, ValueError if six else TypeError, (repr(value), "three"))
            if not (name == "stride" and operation in POOLINGS):
                yield Bad(operation, name, {name: None}, TypeError, ("None",))
            if not six:
                yield Bad(operation, name, {name: "SAME"}, TypeError, ("'SAME'", "three"))
    for operation in ("conv3d", "conv3d_bwd"):
        for value in (((1, 1), (1, 1)), ((1, 1), (1, 1), (1,)), ((1, 1), 1, 1), ((1, 1, 1),) * 3, (1,) * 5, (1,) * 7):
            yield Bad(operation, "padding", {"padding": value}, ValueError, ("six", "three pairs", repr(value)))


def choices():
    """Strings, flags and activations."""
    formats = dict.fromkeys(CONVOLUTIONS, ("data_format",)) | dict.fromkeys(POOLINGS, ("data_format", "output_format"))
    for operation, names in formats.items():
        for name in names:
            for value in ("NCHW", "ndhwc", "", "NDHWC "):
                yield Bad(operation, name, {name: value}, ValueError, ("'NCDHW', 'NDHWC'", repr(value)))
            for value in (1, True, ("NCDHW",), *([None] if name == "data_format" else [])):
                yield Bad(operation, name, {name: value}, TypeError, ("'NCDHW', 'NDHWC'", repr(value)))
    for value, error in (("DHWIO", ValueError), ("kdhw_ci_co", ValueError), (None, TypeError), (0, TypeError)):
        said = ("'KDHW_CI_CO', 'KDHW_CO_CI'", repr(value))
        yield Bad("conv3d_transpose", "filter_shape", {"filter_shape": value}, error, said)
    for operation in ("conv3d", "conv3d_transpose"):
        for value, error in (
            ("softplus", ValueError),
            ("", ValueError),
            (0, TypeError),
            (jax.nn.relu, TypeError),
            (True, TypeError),
        ):
            said = ("SiLU, GELU, GELU_Tanh_Approx, Swish, ReLU", repr(value), "Apply other functions to the result")
            yield Bad(operation, "activation_fn", {"activation_fn": value}, error, said)
        for value in (None, 0, 1, "True"):
            yield Bad(operation, "lnc_shard", {"lnc_shard": value}, TypeError, (repr(value), "Pass a Python bool"))
    for operation in POOLINGS:
        for value in (None, 0, 1, "True"):
            yield Bad(
                operation, "count_include_pad", {"count_include_pad": value}, TypeError, (repr(value), "Pass a Python bool")
            )
    for name in ("compute_dx", "compute_dw", "compute_db"):
        for value in (None, 0, 1, "True"):
            yield Bad("conv3d_bwd", name, {name: value}, TypeError, (repr(value), "Pass a Python bool"))
    nothing = {"compute_dx": False, "compute_dw": False, "compute_db": False}
    yield Bad("conv3d_bwd", "compute_db", nothing, ValueError, ("`compute_dx`", "`compute_dw`", "False", "Set at least one"))
    for operation in GOOD:
        for value in ("jax", "LAX", "", 1, True, ("lax",)):
            yield Bad(
                operation, "implementation", {"implementation": value}, ValueError, ("'lax', 'nki', 'simulate'", repr(value))
            )
        said = ("'nki'", "nki is not installed", "Install", "or 'lax'")
        yield Bad(operation, "implementation", {"implementation": "nki"}, NotImplementedError, said)
        for value in (0, 1, "True"):
            yield Bad(operation, "forward_mode", {"forward_mode": value}, TypeError, (repr(value), "Pass a Python bool"))
            if operation in CONVOLUTIONS:
                # Moving the channels is arithmetic, too, and must wait until all arguments are known to be good.
                swapped = {n: np.moveaxis(GOOD[operation][n], 1, 4) for n in ("x_in", "dy") if n in GOOD[operation]}
                arguments = {**swapped, "data_format": "NDHWC", "forward_mode": value}
                yield Bad(operation, "forward_mode", arguments, TypeError, (repr(value), "Pass a Python bool"))


def windows():
    """Windows that do not fit, and crops that leave nothing."""
    for operation in ("conv3d", "conv3d_bwd"):
        said = (
            "axis D",
            "`x_in` has 5 elements",
            "0 + 0",
            "effective kernel is 7",
            "kernel 3",
            "`dilation` 3",
            "`stride` 2",
            "Use a smaller",
        )
        yield Bad(operation, "padding", {"dilation": (3, 1, 1), "stride": 2}, ValueError, said)
        said = ("axis W", "`x_in` has 7 elements", "1 + 0", "effective kernel is 9", "`dilation` 4", "Use a smaller")
        yield Bad(operation, "dilation", {"dilation": (1, 1, 4), "padding": (0, 0, 0, 0, 1, 0)}, ValueError, said)
    said = ("axis H", "`x_in` has 6 elements", "effective kernel is 7", "Use a smaller")
    yield Bad("conv3d", "padding", {"filters": f32(3, 7, 3, 3, 4)}, ValueError, said)
    for padding, axis in (((2, 0, 0), "D"), ((0, 3, 0), "H"), ((0, 0, 3), "W"), ((0, 0, 50), "W")):
        number = max(padding)
        said = (f"axis {axis}", f"`padding` {number}", "effective kernel", "Use less padding")
        yield Bad("conv3d_transpose", "padding", {"padding": padding}, ValueError, said)
    # Output padding alone is no output.
    arguments = {
        "padding": (2, 0, 0),
        "stride": 3,
        "x_in": f32(2, 3, 1, 3, 4),
        "output_padding": (2, 0, 0),
        "filters": f32(2, 2, 3, 3, 4),
    }
    yield Bad("conv3d_transpose", "padding", arguments, ValueError, ("axis D", "`padding` 2", "Use less padding"))
    for extra, arguments in (
        (1, {}),
        (2, {"stride": 2}),
        (3, {"stride": 2, "dilation": 3}),
        ((0, 0, 2), {"stride": (3, 3, 2)}),
    ):
        axis = "W" if isinstance(extra, tuple) else "D"
        said = (f"axis {axis}", str(max(np.ravel(extra))), "`stride`", "`dilation`", "jnp.pad")
        yield Bad("conv3d_transpose", "output_padding", {"output_padding": extra, **arguments}, ValueError, said)
    for operation in POOLINGS:
        array = "src_tensor" if operation == "avg_pooling_3d" else "input_tensor"
        said = ("axis D", f"`{array}` has 4 elements", "adds 0", "`kernel_size` is 5", "`stride` 1", "Use a smaller window")
        yield Bad(operation, "kernel_size", {"kernel_size": 5, "stride": 1}, ValueError, said)
        said = ("axis W", "is 3", "kernel of 3", "Use less padding")
        yield Bad(operation, "padding", {"kernel_size": 3, "stride": 1, "padding": (1, 2, 3)}, ValueError, said)


def call(row: Bad, convert):
    arguments = {**GOOD[row.operation], **row.arguments}
    return getattr(jax_nki3d, row.operation)(**{n: convert(n, v) for n, v in arguments.items()})


def traced(row: Bad, transform):
    """The call inside `transform`, which turns its arrays into tracers."""
    arguments = {**GOOD[row.operation], **row.arguments}
    dynamic = {n: v for n, v in arguments.items() if n in ARRAYS and isinstance(v, np.ndarray)}
    static = {n: v for n, v in arguments.items() if n not in dynamic}
    return transform(lambda arrays: getattr(jax_nki3d, row.operation)(**static, **arrays))(dynamic)


def shape_alone(name, value):
    """An array without values: whoever computes with it gets another error."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if name in ARRAYS and isinstance(value, np.ndarray) else value


ROWS = list(rows())


@pytest.mark.parametrize("operation", GOOD)
def test_the_good_call_is_good(operation):
    getattr(jax_nki3d, operation)(**GOOD[operation])


def message(row: Bad, run) -> str:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        run()
    assert type(caught.value) is row.error, f"{type(caught.value).__name__}: {caught.value}"
    return str(caught.value)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_error_says_where_and_what(row):
    text = message(row, lambda: call(row, lambda name, value: value))
    assert text.startswith(f"{row.operation}: ")
    assert f"`{row.argument}`" in text
    for fragment in row.said:
        assert fragment in text, text


def test_the_error_says_how_to_mend_it():
    """Every text ends with what to do: a sentence that begins with a verb. One list, since a text serves many rows."""
    without = {}
    for row in ROWS:
        text = message(row, lambda row=row: call(row, lambda name, value: value))
        if not CURE.search(text):
            without.setdefault((row.argument, row.error.__name__), text)
    assert not without, "no cure in:\n" + "\n".join(f"{name} ({error}): {text}" for (name, error), text in without.items())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_error_comes_before_any_arithmetic(row):
    text = message(row, lambda: call(row, lambda name, value: value))
    assert message(row, lambda: call(row, shape_alone)) == text
    for transform in (jax.jit, lambda f: lambda arrays: jax.eval_shape(f, arrays)):
        assert message(row, lambda t=transform: traced(row, t)) == text


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "kernel_size", "output_padding"])
def test_numbers_that_are_traced_are_refused(name):
    """Sizes follow from them, so that they cannot be the argument of a jitted function."""
    for operation, good in GOOD.items():
        names = {
            **dict.fromkeys(("conv3d", "conv3d_bwd"), ("stride", "padding", "dilation")),
            "conv3d_transpose": ("stride", "padding", "dilation", "output_padding"),
            **dict.fromkeys(POOLINGS, ("kernel_size", "stride", "padding")),
        }[operation]
        if name in names:
            for value in (1, np.array([1, 1, 1])):
                with pytest.raises(TypeError, match=rf"{operation}: `{name}` must .*static"):
                    jax.jit(lambda n, f=operation, g=good: getattr(jax_nki3d, f)(**{**g, name: n}))(value)


def test_a_mismatch_of_dtypes_is_found_with_jax_arrays_too():
    x, w = jnp.ones((1, 1, 2, 2, 2)), jnp.ones((1, 1, 1, 1, 1), jnp.bfloat16)
    for operation in (jax_nki3d.conv3d, jax_nki3d.conv3d_transpose):
        with pytest.raises(TypeError, match=r"`filters` has dtype bfloat16, but `x_in` has float32\. Cast"):
            operation(x, w)


# ---- options and the environment -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"implementation": "jax"},
            ValueError,
            "options: `implementation` must be None or one of 'lax', 'nki', 'simulate', got 'jax'",
        ),
        ({"implementation": 1}, ValueError, "options: `implementation` must be None or one of 'lax', 'nki', 'simulate', got 1"),
        (
            {"implementation": ""},
            ValueError,
            "options: `implementation` must be None or one of 'lax', 'nki', 'simulate', got ''",
        ),
        ({"forward_mode": 1}, TypeError, "options: `forward_mode` must be True, False or None, got 1. Pass a Python bool"),
        (
            {"forward_mode": "True"},
            TypeError,
            "options: `forward_mode` must be True, False or None, got 'True'. Pass a Python bool",
        ),
    ],
)
def test_options_refuse(arguments, error, said):
    with pytest.raises(error) as caught, jax_nki3d.options(**arguments):
        pytest.fail("the block ran")
    assert str(caught.value).startswith(said)


def test_options_take_names_alone():
    with pytest.raises(TypeError, match="positional"):
        jax_nki3d.options("lax")


def test_options_end_with_their_block():
    x, w = jnp.ones((1, 1, 1, 1, 1)), jnp.ones((1, 1, 1, 1, 1))
    with pytest.raises(NotImplementedError, match="nki"), jax_nki3d.options(implementation="nki"):
        jax_nki3d.conv3d(x, w)
    jax_nki3d.conv3d(x, w)
    with jax_nki3d.options(implementation="nki"), jax_nki3d.options(implementation="lax"):
        jax_nki3d.conv3d(x, w)
    with jax_nki3d.options(implementation="nki"):
        jax_nki3d.conv3d(x, w, implementation="lax")


@pytest.mark.parametrize("operation", GOOD)
def test_wrong_environment(operation, monkeypatch):
    monkeypatch.setattr(_options, "_ENVIRONMENT", "Lax")
    with pytest.raises(ValueError, match="JAX_NKI3D_IMPLEMENTATION") as caught:
        getattr(jax_nki3d, operation)(**GOOD[operation])
    text = str(caught.value)
    assert text.startswith(f"{operation}: the environment variable JAX_NKI3D_IMPLEMENTATION ")
    assert "'lax', 'nki', 'simulate'" in text
    assert "'Lax'" in text
    # What is given by hand does not look at the environment.
    getattr(jax_nki3d, operation)(**GOOD[operation], implementation="lax")
    with jax_nki3d.options(implementation="lax"):
        getattr(jax_nki3d, operation)(**GOOD[operation])


def test_environment_that_names_a_kernel(monkeypatch):
    monkeypatch.setattr(_options, "_ENVIRONMENT", "nki")
    with pytest.raises(NotImplementedError, match="conv3d: `implementation` is 'nki'"):
        jax_nki3d.conv3d(**GOOD["conv3d"])
