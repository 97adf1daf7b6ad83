# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""NKI's data types: strings for the kernel, NumPy and ml_dtypes for storage, and the casts that the engines make.

Engines compute in float32. What they read is converted to float32, what they write is rounded once to the destination's type: to nearest even for
floating point (ml_dtypes' casts), to nearest even and then saturated for integers, which is what NKI 0.6 says of the hardware.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["PACKED", "canonical", "fill_poison", "from_float32", "is_float", "is_integer", "numpy_dtype", "to_float32"]

_NUMPY: dict[str, np.dtype] = {
    "bool": np.dtype(np.uint8),  # a boolean is stored as a byte
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "tfloat32": np.dtype(np.float32),  # 10 bits of mantissa, stored in 32
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
    "float8_e5m2_x4": np.dtype(np.uint32),
    "float8_e4m3fn_x4": np.dtype(np.uint32),
    "float4_e2m1fn_x4": np.dtype(np.uint16),
}

# Four values in one element: storage without arithmetic.
PACKED = frozenset({"float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"})

_INTEGERS = frozenset({"int8", "int16", "int32", "uint8", "uint16", "uint32", "bool"})
_FROM_NUMPY = {dtype: name for name, dtype in _NUMPY.items() if name not in PACKED and name not in ("bool", "tfloat32")} | {
    np.dtype(np.bool_): "bool"
}


def canonical(dtype: Any, where: str = "dtype") -> str:
    """NKI's name of a data type given as a name, a NumPy or ml_dtypes type, or a JAX scalar type.

    Raises:
        ValueError: a type that NKI does not have, such as every type of 64 bits.
    """
    if isinstance(dtype, str):
        name = "bool" if dtype == "bool_" else dtype
        if name in _NUMPY:
            return name
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is not None and found in _FROM_NUMPY:
        return _FROM_NUMPY[found]
    cure = (
        "NKI has no types of 64 bits: cast to 32."
        if dtype is not None and found is not None and found.itemsize == 8 and found.kind in "iuf"
        else f"Use one of {', '.join(_NUMPY)}."
    )
    raise ValueError(f"{where}: {dtype!r} is no data type of NKI. {cure}")


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy type that stores an NKI type."""
    return _NUMPY[name]


def is_integer(name: str) -> bool:
    """Whether elements are integers (a boolean is a byte)."""
    return name in _INTEGERS


def is_float(name: str) -> bool:
    """Whether elements are floating-point numbers that engines can compute with."""
    return name not in _INTEGERS and name not in PACKED


def to_float32(values: np.ndarray) -> np.ndarray:
    """What an engine sees: the values in float32; the same array where they are float32 already."""
    return values if values.dtype == np.float32 else values.astype(np.float32)


def from_float32(values: np.ndarray, name: str) -> np.ndarray:
    """What an engine stores: float32 values rounded once to the type called `name`.

    Floating-point types round to nearest even and overflow as ml_dtypes does. Integers round to nearest even and saturate; NaN, for which no
    document gives a value, becomes 0.

    Example:
        >>> import numpy as np
        >>> from nki3d.simulator.dtypes import from_float32
        >>> from_float32(np.float32([0.5, 1.5, -1.0, 300.0]), "uint8").tolist()
        [0, 2, 0, 255]
    """
    if name == "float32":
        return values
    if name in _INTEGERS:
        if name == "bool":
            return (values != 0).astype(np.uint8)
        info = np.iinfo(_NUMPY[name])
        # float64 holds the bounds of 32-bit integers, which float32 does not
        rounded = np.rint(values).astype(np.float64)
        return np.asarray(np.nan_to_num(np.clip(rounded, info.min, info.max), nan=0.0)).astype(_NUMPY[name])
    if name == "tfloat32":
        return _round_to_tfloat32(values)
    return values.astype(_NUMPY[name])


def _round_to_tfloat32(values: np.ndarray) -> np.ndarray:
    """float32 with the mantissa rounded to nearest even at 10 bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    dropped = 13
    half = np.uint32((1 << (dropped - 1)) - 1)
    even = (bits >> np.uint32(dropped)) & np.uint32(1)
    rounded = (bits + half + even) & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    finite = np.isfinite(values)
    return np.where(finite, rounded.view(np.float32).reshape(values.shape), values)


def fill_poison(flat: np.ndarray, name: str) -> None:
    """Fill new memory with what shows a read before a write: NaN for floating point, 4 for integers."""
    flat.fill(np.nan if is_float(name) else 4)
