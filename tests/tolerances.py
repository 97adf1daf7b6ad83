# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""How far a result may be from the oracle's: derived per element from the terms of its sum, and no wider.

Let u be the unit roundoff of the type in which the sum runs, and t_1 ... t_n the terms, here products of normal numbers, so of
mixed signs. A partial sum is then of the order of sqrt(sum t_j^2). Each of the n products and n additions is rounded by at most
u times a term or a partial sum, and independent roundings add up like the square root of their number, so the error is about

    u sqrt(n) sqrt(sum t_j^2)

times 1 / sqrt 3 for a standard deviation. Among the 10^5 elements that a test run looks at, some lie five deviations out: c = 4
is their room. The bound is zero where there are no terms: padding, holes and elements that no window reaches are exact. The
result is then rounded once to its own type. `test_values.py` checks that these bounds catch deliberate mistakes; sums of equal
signs, which stall first, are tested with exact numbers (H15 in `test_cases.py`).
"""

import chex
import ml_dtypes
import numpy as np
from oracle import Terms

# c of the derivation; for float64 the oracle errs just as much.
FACTOR = {"float64": 8.0, "float32": 4.0, "bfloat16": 4.0, "float16": 4.0}
# The type in which sums run.
SUMS_IN = {"float64": "float64", "float32": "float32", "bfloat16": "float32", "float16": "float32"}


def roundoff(dtype: str) -> float:
    """Largest relative error of one rounding."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def sum_bound(expected: Terms, dtype: str) -> np.ndarray:
    """Error of the sum before it is rounded to `dtype`."""
    return FACTOR[dtype] * roundoff(SUMS_IN[dtype]) * np.sqrt(expected.count * expected.squares) + expected.inherited


def bound(expected: Terms, dtype: str) -> np.ndarray:
    """Error of the result."""
    before = sum_bound(expected, dtype)
    if SUMS_IN[dtype] == dtype:
        return before
    after = roundoff(dtype) * (np.abs(expected.value) + before)
    # Below the normal numbers the distance between neighbours no longer shrinks.
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
    return before + np.where(expected.count > 0, np.maximum(after, tiny), 0)


def activated(z: Terms, value: np.ndarray) -> Terms:
    """The terms of activation(z): slopes are below 1.13, and evaluating the function costs a few roundings of z."""
    return Terms(value, np.maximum(z.count, 1), 1.13**2 * z.squares + 4 * z.value**2, z.inherited)


def assert_close(actual, expected: Terms, dtype: str) -> None:
    """`actual` has the shape of `expected`, is of `dtype`, and is within the bound everywhere."""
    chex.assert_shape(actual, expected.value.shape)
    assert actual.dtype.name == dtype, f"got {actual.dtype}, expected {dtype}"
    error = np.abs(np.asarray(actual, np.float64) - expected.value)
    allowed = np.broadcast_to(bound(expected, dtype), error.shape)
    wrong = ~(error <= allowed)  # NaN is wrong, too
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, error - allowed, -np.inf)), error.shape)
        raise AssertionError(
            f"{wrong.sum()} of {error.size} elements of {dtype} are out of bounds; the worst at {tuple(map(int, at))}: "
            f"got {np.asarray(actual, np.float64)[at]!r}, expected {expected.value[at]!r} +- {allowed[at]:.3g}"
        )


def assert_equal(actual, expected, dtype: str | None = None) -> None:
    """Exactly these numbers, in this shape."""
    expected = np.asarray(expected, np.float64)
    chex.assert_shape(actual, expected.shape)
    assert dtype is None or actual.dtype.name == dtype, f"got {actual.dtype}, expected {dtype}"
    np.testing.assert_array_equal(np.asarray(actual, np.float64), expected, strict=True)
