# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What every `jax.custom_vjp` of this library needs: which gradients are wanted, and what to return for the others.

With `symbolic_zeros=True` a forward rule is told which operands a gradient is asked for. Only those gradients are computed,
and only the operands that they need are kept.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """The static part of the residuals: a flag and a symbolic zero per operand.

    A gradient that nobody wants is answered with a symbolic zero and never with None, so that the structure of the answer
    is the same every time; the zeros are made in the forward rule, where the operands' types are whole.
    """

    flags: tuple[bool, ...]
    zeros: tuple[Any, ...]

    def answer(self, gradients: Sequence[Array | None]) -> tuple:
        """The gradients, with zeros for those that are absent."""
        return tuple(z if g is None else g for g, z in zip(gradients, self.zeros, strict=True))

    def nothing(self) -> tuple:
        """The answer to a cotangent that is zero."""
        return self.zeros


def split(primals: Sequence[Any]) -> tuple[list[Array], Wanted]:
    """The operands of a forward rule with symbolic zeros: their values, and what is wanted of them."""
    values = [p.value for p in primals]
    zeros = tuple(zero_from_primal(v, symbolic_zeros=True) for v in values)
    return values, Wanted(tuple(bool(p.perturbed) for p in primals), zeros)


def is_symbolic_zero(cotangent: Any) -> bool:
    """Whether nothing depends on the result whose cotangent this is."""
    return isinstance(cotangent, SymbolicZero)


def align_varying(*operands: Array) -> tuple[Array, ...]:
    """Makes all operands vary over the same axes of a surrounding `shard_map`.

    Without it the gradient of a replicated filter would have the type of the sharded batch. The cast's own transpose adds up
    the shards' gradients.
    """
    operands = tuple(map(jnp.asarray, operands))  # NumPy arrays get the dtype that they have inside JAX
    union = frozenset[str]().union(*map(_varying, operands))
    return tuple(_vary(x, tuple(sorted(union - _varying(x)))) for x in operands)


def _varying(x: Any) -> frozenset:
    aval = jax.typeof(x)
    varying = getattr(aval, "vma", None)  # up to JAX 0.10.0; a field of manual_axis_type after it
    if varying is None:
        varying = getattr(getattr(aval, "manual_axis_type", None), "varying", None)
    return frozenset(varying or ())


def _vary(x: Array, axes: tuple) -> Array:
    if not axes:
        return x
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return getattr(lax, "pvary")(x, axes)  # noqa: B009 -- its name up to JAX 0.7, unknown to newer stubs
