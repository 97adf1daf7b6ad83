# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The operators and activation functions that instructions take as `op`, in float32.

Sources: the operator and activation tables of the public API (valid ranges are given there). Hardware evaluates activations by piecewise
polynomials; here they are exact in float32, but for `sin` outside [-pi, pi], whose cubic extrapolation is documented.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import broken

__all__ = ["ACTIVATIONS", "OPERATORS", "Operator", "activation_of", "name_of", "operator_of", "shown"]

Array = np.ndarray


@dataclass(frozen=True)
class Operator:
    """An operator of the Vector, Scalar or GpSimd engine.

    Attributes:
        name: as in nki.language.
        function: on float32 arrays (arithmetic) or integers (bitvec).
        kind: "arithmetic", "unary" (arithmetic of one operand) or "bitvec".
        reduces: whether tensor_reduce takes it.
        identity: what an accumulator starts from.
        generation: the first nki.isa.nc_version that has it.
    """

    name: str
    function: Callable[..., Any]
    kind: str = "arithmetic"
    reduces: bool = False
    identity: float | None = None
    generation: int = 2


def _compare(function: Any) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(x, y).astype(np.float32)


def _logical(function: Any) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(np.not_equal(x, 0), np.not_equal(y, 0)).astype(np.float32)


def _shift(function: Any) -> Callable[[Any, Any], Any]:
    """Logical shifts: the sign bit is a bit like the others, and a shift by the width or more gives 0."""

    def shift(x: Array, y: Array) -> Array:
        unsigned = np.dtype(f"uint{x.dtype.itemsize * 8}")
        bits, by = x.view(unsigned), np.asarray(y).astype(unsigned)
        width = unsigned.type(unsigned.itemsize * 8)
        return (
            np.where(by < width, function(bits, np.minimum(by, width - unsigned.type(1))), unsigned.type(0))
            .astype(unsigned)
            .view(x.dtype)
        )

    return shift


_one = np.float32(1)

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("add", np.add, reduces=True, identity=0.0),
        Operator("subtract", np.subtract, reduces=True, identity=0.0),
        Operator("multiply", np.multiply, reduces=True, identity=1.0),
        Operator("maximum", np.maximum, reduces=True, identity=-math.inf),
        Operator("minimum", np.minimum, reduces=True, identity=math.inf),
        Operator("equal", _compare(np.equal)),
        Operator("not_equal", _compare(np.not_equal)),
        Operator("greater_equal", _compare(np.greater_equal)),
        Operator("greater", _compare(np.greater)),
        Operator("less_equal", _compare(np.less_equal)),
        Operator("less", _compare(np.less)),
        Operator("logical_and", _logical(np.logical_and), reduces=True, identity=1.0),
        Operator("logical_or", _logical(np.logical_or), reduces=True, identity=0.0),
        Operator("logical_xor", _logical(np.logical_xor), reduces=True, identity=0.0),
        Operator("power", np.power),
        Operator("abs_max", lambda x, y: np.where(np.abs(x) > np.abs(y), x, y), identity=0.0, generation=4),
        Operator("abs_min", lambda x, y: np.where(np.abs(x) < np.abs(y), x, y), identity=math.inf, generation=4),
        Operator("abs", np.abs, "unary"),
        Operator("square", np.square, "unary", generation=4),
        Operator("relu", lambda x: np.maximum(x, np.float32(0)), "unary", generation=4),
        Operator("rsqrt", lambda x: _one / np.sqrt(x), "unary"),
        Operator("reciprocal", lambda x: _one / x, "unary"),
        Operator("invert", np.invert, "bitvec"),
        Operator("bitwise_and", np.bitwise_and, "bitvec", reduces=True),
        Operator("bitwise_or", np.bitwise_or, "bitvec", reduces=True),
        Operator("bitwise_xor", np.bitwise_xor, "bitvec", reduces=True),
        Operator("left_shift", _shift(np.left_shift), "bitvec"),
        Operator("right_shift", _shift(np.right_shift), "bitvec"),
    )
}


def _sigmoid(x: Array) -> Array:
    # the branch that does not overflow, for either sign
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, _one, small) / (_one + small)


def _erf(x: Array) -> Array:
    flat = np.fromiter(map(math.erf, np.ravel(x).tolist()), np.float32, count=np.size(x))
    return flat.reshape(np.shape(x))


def _softplus(x: Array) -> Array:
    return np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))


def _normal_density(x: Array) -> Array:
    return np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))


def _normal_distribution(x: Array) -> Array:
    return np.float32(0.5) * (_one + _erf(x * np.float32(math.sqrt(0.5))))


def _gelu_tanh(x: Array) -> Array:
    # 0.5 (1 + tanh(z)) is sigmoid(2 z), which does not cancel for negative x
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return x * _sigmoid(np.float32(2) * inner)


_GELU_SIGMOID = np.float32(1.702)


def _gelu_sigmoid(x: Array) -> Array:
    return x * _sigmoid(_GELU_SIGMOID * x)


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = _sigmoid(_GELU_SIGMOID * x)
    return s + _GELU_SIGMOID * x * s * (_one - s)


def _silu_dx(x: Array) -> Array:
    s = _sigmoid(x)
    return s + x * s * (_one - s)


def _sin(x: Array) -> Array:
    """sin on [-pi, pi]; outside, the cubic about +-pi that the engine extrapolates: sin(9) is 27.65."""
    beyond = np.abs(x) - np.float32(math.pi)
    cubic = np.sign(x) * (beyond * beyond * beyond / np.float32(6) - beyond)
    return np.where(beyond > 0, cubic, np.sin(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "gelu": lambda x: x * _normal_distribution(x),
    "gelu_dx": lambda x: _normal_distribution(x) + x * _normal_density(x),
    "gelu_apprx_tanh": _gelu_tanh,
    "gelu_apprx_sigmoid": _gelu_sigmoid,
    "gelu_apprx_sigmoid_dx": _gelu_sigmoid_dx,
    "silu": lambda x: x * _sigmoid(x),
    "silu_dx": _silu_dx,
    "tanh": np.tanh,
    "softplus": _softplus,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "erf": _erf,
    "erf_dx": lambda x: np.float32(2 / math.sqrt(math.pi)) * np.exp(-x * x),
    "exp": np.exp,
    "log": np.log,
    "sin": _sin,
    "arctan": np.arctan,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: _one / np.sqrt(x),
    "reciprocal": lambda x: _one / x,
    "sign": np.sign,
    "abs": np.abs,
}

# Spellings that kernels in the field use for the operators of the tables.
_SYNONYMS = {"max": "maximum", "min": "minimum"}


def name_of(op: Any) -> str | None:
    """The name of an operator given as a function of nki.language; None for anything else."""
    name = getattr(op, "nki_operator", None)
    return _SYNONYMS.get(name, name) if isinstance(name, str) else None


def shown(op: Any) -> str:
    """An operator for a message: nl.add, or what was given instead."""
    name = name_of(op)
    return repr(op) if name is None else f"nl.{name}"


def operator_of(op: Any, instruction: str, operand: str, generation: int) -> Operator:
    """The operator behind `nl.add` and its like.

    Raises:
        NkiValidationError: a string, a NumPy function, or a function that is no operator of this generation.
    """
    name = name_of(op)
    operator = None if name is None else OPERATORS.get(name)
    if operator is None:
        raise broken(
            instruction,
            operand,
            repr(op if name is None else name),
            "is no operator of this instruction",
            f"Pass a function of nki.language: {', '.join('nl.' + known for known in OPERATORS)}.",
        )
    if generation < operator.generation:
        raise broken(instruction, operand, f"nl.{operator.name}", f"needs NeuronCore-v{operator.generation}")
    return operator


def activation_of(op: Any, instruction: str, operand: str) -> tuple[str, Callable[[Array], Array]]:
    """The name and the function of an activation.

    Raises:
        NkiValidationError: something that the Scalar Engine does not evaluate.
    """
    name = name_of(op)
    if name is None or name not in ACTIVATIONS:
        raise broken(
            instruction,
            operand,
            repr(op if name is None else name),
            "is no activation function of the Scalar Engine",
            f"Pass a function of nki.language: {', '.join('nl.' + known for known in ACTIVATIONS)}.",
        )
    return name, ACTIVATIONS[name]
