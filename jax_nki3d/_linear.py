# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the two pooling operations share: each is linear in its one operand, and each is the other's transpose."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from ._autodiff import is_symbolic_zero, split
from ._primitive import fold, is_zero, zero_like

Bind = Callable[[Any, Array], Array]


def differentiable(name: str, bind: Bind, bind_transpose: Bind, spec: Any) -> Callable[[Array], Array]:
    """The operation of one spec under a custom_vjp; nothing of the operand is kept."""

    def operation(x):
        return bind(spec, x)

    def forward(primal):
        (x,), wanted = split([primal])
        return bind(spec, x), wanted

    def backward(wanted, ct):
        if is_symbolic_zero(ct) or not wanted.flags[0]:
            return wanted.zeros
        return (bind_transpose(spec, ct),)

    operation.__name__ = operation.__qualname__ = name
    with_vjp = jax.custom_vjp(operation)
    with_vjp.defvjp(forward, backward, symbolic_zeros=True)
    return with_vjp


def jvp(bind: Bind):
    """The tangent goes the way of the value."""

    def rule(primals, tangents, *, spec):
        y = bind(spec, primals[0])
        (dx,) = tangents
        return [y], [zero_like(y) if is_zero(dx) else bind(spec, dx)]

    return rule


def transpose(bind_transpose: Bind):
    """The cotangent goes through the other operation."""

    def rule(cts, x, *, spec):
        return [None if is_zero(cts[0]) else bind_transpose(spec, cts[0])]

    return rule


def batch(bind: Bind):
    """The mapped axis joins the batch."""

    def rule(operands, dims, *, spec):
        x, undo = fold(operands[0], dims[0], 0)
        return [undo(bind(spec, x))], [0]

    return rule
