# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The mathematical functions of nki.language.

Each is two things, as in NKI: what an instruction takes as `op` (`op=nl.add`), and a function of tiles that allocates its result (`nl.add(a, b)`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["average", "bypass", "prelu"]


class _Marker:
    """An operator that is only ever passed as `op`."""

    def __init__(self, name: str):
        self.nki_operator = name

    def __repr__(self) -> str:
        return f"nl.{self.nki_operator}"


average = _Marker("average")
prelu = _Marker("prelu")
bypass = _Marker("bypass")


def _binary(name: str, what: str) -> Any:
    def function(x: Any, y: Any, dtype: Any = None) -> Any:
        from . import compute

        return compute.binary(name, x, y, dtype)

    return _named(
        function, name, f"{what}, element by element; `y` may be a number or, for a tile [P, n], a float32 tile [P, 1]."
    )


def _unary(name: str, what: str) -> Any:
    def function(x: Any, dtype: Any = None) -> Any:
        from . import compute

        return compute.unary(name, x, dtype)

    return _named(function, name, f"{what}, element by element.")


def _reduction(name: str, what: str) -> Any:
    def function(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> Any:
        from . import compute

        return compute.reduction(name, x, axis, dtype, keepdims)

    return _named(function, name, f"{what} over the last free dimensions `axis`, in float32.")


def _named(function: Any, name: str, what: str) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "nki3d.simulator.language"
    function.__doc__ = f"{what} Or pass the function itself as `op`."
    function.nki_operator = name
    return function


_BINARY = {
    "add": "x + y",
    "subtract": "x - y",
    "multiply": "x * y",
    "divide": "x / y",
    "maximum": "The larger of x and y",
    "minimum": "The smaller of x and y",
    "abs_max": "The larger of |x| and |y|",
    "abs_min": "The smaller of |x| and |y|",
    "power": "x to the power of y",
    "equal": "1 where x == y, else 0",
    "not_equal": "1 where x != y, else 0",
    "less": "1 where x < y, else 0",
    "less_equal": "1 where x <= y, else 0",
    "greater": "1 where x > y, else 0",
    "greater_equal": "1 where x >= y, else 0",
    "bitwise_and": "The bits of both",
    "bitwise_or": "The bits of either",
    "bitwise_xor": "The bits of exactly one",
    "left_shift": "x shifted left by y bits",
    "right_shift": "x shifted right by y bits, zeros from the left",
    "logical_and": "1 where both are not 0, else 0",
    "logical_or": "1 where either is not 0, else 0",
    "logical_xor": "1 where exactly one is not 0, else 0",
    "fmod": "The remainder of x / y with the sign of x",
    "mod": "The remainder of x / y with the sign of y",
}

_UNARY = {
    "abs": "|x|",
    "square": "x * x",
    "invert": "The bits of x inverted",
    "logical_not": "1 where x is 0, else 0",
    "exp": "e to the power of x",
    "log": "The natural logarithm",
    "sqrt": "The square root",
    "rsqrt": "1 / sqrt(x)",
    "tanh": "The hyperbolic tangent",
    "sigmoid": "1 / (1 + exp(-x))",
    "relu": "max(x, 0)",
    "gelu": "x times the normal distribution function of x",
    "gelu_apprx_sigmoid": "x * sigmoid(1.702 x)",
    "gelu_apprx_tanh": "GELU with its approximation by tanh",
    "gelu_dx": "The derivative of GELU",
    "gelu_apprx_sigmoid_dx": "The derivative of gelu_apprx_sigmoid",
    "silu": "x * sigmoid(x)",
    "silu_dx": "The derivative of SiLU",
    "softplus": "log(1 + exp(x))",
    "mish": "x * tanh(softplus(x))",
    "erf": "The error function",
    "erf_dx": "The derivative of the error function",
    "reciprocal": "1 / x",
    "copy": "x",
    "sin": "The sine",
    "cos": "The cosine",
    "tan": "The tangent",
    "arctan": "The inverse tangent",
    "ceil": "The next integer above",
    "floor": "The next integer below",
    "trunc": "The integer part",
    "negative": "-x",
    "sign": "-1, 0 or 1",
}

_REDUCTIONS = {
    "sum": "The sum",
    "max": "The maximum",
    "min": "The minimum",
    "mean": "The mean",
    "prod": "The product",
    "var": "The variance",
}

FUNCTIONS: dict[str, Any] = {
    **{name: _binary(name, what) for name, what in _BINARY.items()},
    **{name: _unary(name, what) for name, what in _UNARY.items()},
    **{name: _reduction(name, what) for name, what in _REDUCTIONS.items()},
}

equal = FUNCTIONS["equal"]
maximum = FUNCTIONS["maximum"]
