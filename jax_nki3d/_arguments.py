# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""One argument in, its checked form out. The operation's spec, and the layers, are built of these.

ValueError: a value that no implementation can compute with. TypeError: a value of the wrong type or dtype. Each text names
the operation, the argument in backticks, what was given, and the cure.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._activation import ActFnType
from ._geometry import Triple, effective_kernel, triple

DTYPES = ("bfloat16", "float16", "float32", "float64")

Sextuple = tuple[int, int, int, int, int, int]
Shape = tuple[int, ...]

# ---- arrays ----------------------------------------------------------------------------------------------------------


def shape_text(shape: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def layout_hint(data_format: str) -> str:
    return "[B, C, D, H, W]" if data_format == "NCDHW" else "[B, D, H, W, C]"


def dtype_name(array: Any) -> str:
    """The name of the dtype that the array has inside JAX: NumPy's float64 is float32 there, unless x64 is enabled."""
    name = getattr(array.dtype, "name", str(array.dtype))  # keys have dtypes that are not NumPy's
    return jax.dtypes.canonicalize_dtype(name).name if name in DTYPES else name


def check_array(operation: str, name: str, value, rank: int, layout: str) -> Shape:
    """The shape of an array argument, which must be floating and of the given rank."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(
            f"{operation}: `{name}` must be an array {layout}, got {type(value).__name__}. Convert it with jnp.asarray."
        )
    if dtype_name(value) not in DTYPES:
        raise TypeError(
            f"{operation}: `{name}` must have one of the dtypes {', '.join(DTYPES)}, got {value.dtype}. Cast it with .astype first."
        )
    if len(value.shape) != rank:
        raise ValueError(
            f"{operation}: `{name}` must have {rank} dimensions {layout}, got shape {shape_text(value.shape)} with {len(value.shape)}. "
            "Add missing axes with jnp.expand_dims, or map over further ones with jax.vmap."
        )
    return tuple(value.shape)


def check_sizes(operation: str, name: str, sizes: Sequence[int]) -> None:
    """Every size but the batch must be a positive int; the batch may also be a symbol of `jax.export`."""
    if not all(isinstance(n, int) for n in sizes):
        raise NotImplementedError(
            f"{operation}: every size of `{name}` except the batch must be known, got {shape_text(sizes)} (batch left out). "
            "Leave only the batch symbolic, and export once for each size of the volume."
        )
    if any(n < 1 for n in sizes):
        raise ValueError(
            f"{operation}: every size of `{name}` except the batch must be at least 1, got {shape_text(sizes)} (batch left out). "
            "Drop the empty axis, or leave the call out: only the batch may be empty."
        )


def check_same_dtype(operation: str, name: str, value, other_name: str, other) -> None:
    if dtype_name(value) != dtype_name(other):
        raise TypeError(
            f"{operation}: `{name}` has dtype {value.dtype}, but `{other_name}` has {other.dtype}. Cast one of them, for example "
            f"{name}.astype({other_name}.dtype); the layers for Flax in jax_nki3d.nn promote by themselves."
        )


def check_bias(operation: str, bias, c_out: int) -> None:
    if bias is not None and check_array(operation, "bias", bias, 1, "[C_out]") != (c_out,):
        raise ValueError(
            f"{operation}: `bias` must have shape (C_out,) = ({c_out},), got {shape_text(bias.shape)}. Pass one value for each filter."
        )


def check_choice(operation: str, name: str, value, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(
            f"{operation}: `{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}. Pass one of these strings."
        )


def check_bool(operation: str, name: str, value) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operation}: `{name}` must be True or False, got {value!r}. Pass a Python bool.")
    return bool(value)


# ---- numbers and names -----------------------------------------------------------------------------------------------


def as_int(operation: str, name: str, value, whole, minimum: int | None) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operation}: `{name}` must hold ints, got {whole!r}. Pass one int, or three (D, H, W).")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{operation}: `{name}` must hold ints known when the function is traced, got {whole!r}. "
            "Pass Python or NumPy ints; under jax.jit mark such arguments as static."
        ) from error
    if minimum is not None and number < minimum:
        raise ValueError(
            f"{operation}: `{name}` must be at least {minimum} on each axis, got {whole!r}. Pass {minimum} or more."
        )
    return number


_TRIPLE_FORMS = "one int or three (D, H, W)"


def is_single(value) -> bool:
    """One number, as far as can be told: no sequence, and no array but a 0-d one."""
    return getattr(value, "ndim", None) == 0 or not hasattr(value, "__iter__")


def as_triple(operation: str, name: str, value, minimum: int) -> Triple:
    """An int, or three, as a tuple (D, H, W)."""
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{operation}: `{name}` must be {_TRIPLE_FORMS}, got {value!r}. Pass Python or NumPy ints.")
    if is_single(value):
        return (as_int(operation, name, value, value, minimum),) * 3
    if not isinstance(value, (Sequence, np.ndarray, jax.Array)) or getattr(value, "ndim", 1) != 1:
        raise TypeError(f"{operation}: `{name}` must be {_TRIPLE_FORMS}, got {value!r}. Pass a flat tuple or list.")
    if len(value) != 3:
        raise ValueError(
            f"{operation}: `{name}` must be {_TRIPLE_FORMS}, got {len(value)} values: {value!r}. "
            "Pass one value for each axis; batch and channels have none."
        )
    return triple(as_int(operation, name, v, value, minimum) for v in value)


_PADDING_FORMS = (
    "one int, three (D, H, W), six (D front, D back, H top, H bottom, W left, W right), three pairs, 'SAME' or 'VALID'"
)


def as_padding(operation: str, value, size: Triple, kernel: Triple, stride: Triple, dilation: Triple) -> Sextuple:
    """Any accepted form of a convolution's padding as six ints."""
    if isinstance(value, str):
        return named_padding(operation, value, size, kernel, stride, dilation)
    if value is None:
        raise TypeError(f"{operation}: `padding` must be {_PADDING_FORMS}, got None. Pass 0 for no padding.")
    if is_single(value):
        return (as_int(operation, "padding", value, value, 0),) * 6
    if not isinstance(value, (Sequence, np.ndarray, jax.Array)) or isinstance(value, bytes):
        raise TypeError(f"{operation}: `padding` must be {_PADDING_FORMS}, got {value!r}. Pass a tuple or list.")
    pairs = [not is_single(v) for v in value]
    if len(value) == 3 and all(pairs) and all(len(v) == 2 for v in value):
        flat = [v for pair in value for v in pair]
    elif any(pairs) or len(value) not in (3, 6):
        raise ValueError(f"{operation}: `padding` must be {_PADDING_FORMS}, got {value!r}. Pass one of these forms.")
    else:
        flat = list(value) if len(value) == 6 else [v for v in value for _ in range(2)]
    a, b, c, d, e, f = (as_int(operation, "padding", v, value, 0) for v in flat)
    return (a, b, c, d, e, f)


def named_padding(operation: str, name: str, size: Triple, kernel: Triple, stride: Triple, dilation: Triple) -> Sextuple:
    """'VALID': none. 'SAME' as in lax: ceil(size / stride) outputs, the odd element of padding behind."""
    if name == "VALID":
        return (0,) * 6
    if name != "SAME":
        raise ValueError(f"{operation}: `padding` must be {_PADDING_FORMS}, got {name!r}. Pass one of these forms.")
    flat: list[int] = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        total = max(0, (-(-n // s) - 1) * s + effective_kernel(k, d) - n)
        flat += [total // 2, total - total // 2]
    a, b, c, d, e, f = flat
    return (a, b, c, d, e, f)


def as_activation(operation: str, value) -> ActFnType | None:
    """An activation by member or by name, whose case does not matter."""
    if value is None or isinstance(value, ActFnType):
        return value
    names = {member.name.lower(): member for member in ActFnType}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    error = ValueError if isinstance(value, str) else TypeError
    raise error(
        f"{operation}: `activation_fn` must be None, an ActFnType or one of {', '.join(m.name for m in ActFnType)}, got {value!r}. "
        "Apply other functions to the result."
    )
