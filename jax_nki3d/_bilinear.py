# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What conv3d and conv3d_transpose share: y = activation(product(x, filters) + bias), the product linear in each factor.

An operation brings two functions:

* `bind(spec, x, filters, bias=None) -> y`, its primitive;
* `pullback(spec, wanted, ct, x, filters) -> (dx, dfilters, dbias)`, the gradients of the product and the bias, None where not
  wanted; x is needed for the second alone and the filters for the first alone. The spec has no activation.

From them follow the custom_vjp, forward mode, transposition and batching.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad

from ._activation import apply_activation
from ._autodiff import Wanted, is_symbolic_zero, split
from ._primitive import add, fold, is_zero, map_examples, unfold, zero_like

Bind = Callable[..., Array]
Pullback = Callable[..., Sequence[Array | None]]


def differentiable(name: str, bind: Bind, pullback: Pullback, spec: Any) -> Callable[..., Array]:
    """The operation of one spec, of the operands (x, filters) or (x, filters, bias), under a custom_vjp."""
    before_activation = dataclasses.replace(spec, activation=None)

    def operation(x, filters, *bias):
        return bind(spec, x, filters, *bias)

    def forward(*primals):
        (x, filters, *bias), wanted = split(primals)
        # The primitive, not the operation again: so a Hessian can push tangents through this rule.
        z = bind(before_activation, x, filters, *bias)
        y = apply_activation(spec.activation, z)
        kept_z = z if spec.activation is not None and any(wanted.flags) else None
        return y, (wanted, x if wanted.flags[1] else None, filters if wanted.flags[0] else None, kept_z)

    def backward(saved, ct):
        wanted: Wanted
        wanted, x, filters, z = saved
        if is_symbolic_zero(ct) or not any(wanted.flags):
            return wanted.zeros
        if z is not None:
            (ct,) = jax.vjp(lambda z: apply_activation(spec.activation, z), z)[1](ct)
        gradients = pullback(before_activation, three_flags(wanted.flags), ct, x, filters)
        return wanted.answer(gradients[: len(wanted.flags)])

    operation.__name__ = operation.__qualname__ = name
    with_vjp = jax.custom_vjp(operation)
    with_vjp.defvjp(forward, backward, symbolic_zeros=True)
    return with_vjp


def three_flags(flags: Sequence[bool]) -> tuple[bool, bool, bool]:
    """(x, filters, bias), where the last is False for an operation without a bias."""
    on_x, on_filters, *on_bias = flags
    return on_x, on_filters, any(on_bias)


def jvp(bind: Bind):
    """(primals, tangents) -> (outputs, tangents): the product rule, then the activation's derivative."""

    def rule(primals, tangents, *, spec):
        before_activation, linear = dataclasses.replace(spec, activation=None), spec.linear()
        (x, filters, *bias), (dx, dfilters, *dbias) = primals, tangents
        z = bind(before_activation, x, filters, *bias)
        dz = None if is_zero(dx) else bind(linear, dx, filters)
        dz = add(dz, None if is_zero(dfilters) else bind(linear, x, dfilters))
        if dbias and not is_zero(dbias[0]):
            dz = add(dz, jnp.broadcast_to(_over_volume(dbias[0].astype(z.dtype)), z.shape))
        if dz is None:
            y = apply_activation(spec.activation, z)
            return [y], [zero_like(y)]
        y, dy = jax.jvp(lambda z: apply_activation(spec.activation, z), (z,), (dz,))
        return [y], [dy]

    return rule


def transpose(pullback: Pullback):
    """Cotangents of the undefined operands. `jvp` leaves no activation behind; `jax.linear_transpose` may still meet one."""

    def rule(cts, x, filters, *bias, spec):
        if spec.activation is not None:
            raise NotImplementedError(
                f"jax_nki3d: a convolution with activation_fn {spec.activation.name} is not linear and has no transpose. "
                "Use jax.vjp, or leave `activation_fn` out."
            )
        flags = [ad.is_undefined_primal(operand) for operand in (x, filters, *bias)]
        if is_zero(cts[0]):
            return [None] * len(flags)
        gradients = pullback(spec, three_flags(flags), cts[0], x if flags[1] else None, filters if flags[0] else None)
        return list(gradients[: len(flags)])

    return rule


def batch(primitive: Primitive, bind: Bind, c_out_axis: Callable[[Any], int]):
    """Mapped x joins the batch; mapped filters over one x become further output channels; all else is a loop over examples."""

    def rule(operands, dims, *, spec):
        (x, filters, *bias), (x_dim, f_dim, *b_dim) = operands, dims
        if f_dim is None and not any(d is not None for d in b_dim):
            x, undo = fold(x, x_dim, 0)
            return [undo(bind(spec, x, filters, *bias))], [0]
        if f_dim is None or x_dim is not None or filters.shape[f_dim] == 0:
            return map_examples(lambda *some: primitive.bind(*some, spec=spec), operands, dims), [0]
        examples = filters.shape[f_dim]
        filters, _ = fold(filters, f_dim, c_out_axis(spec))
        bias = [jnp.tile(b, examples) if d is None else fold(b, d, 0)[0] for b, d in zip(bias, b_dim, strict=True)]
        wide = dataclasses.replace(spec, c_out=examples * spec.c_out)
        return [unfold(bind(wide, x, filters, *bias), 1, examples, spec.c_out)], [1]

    return rule


def _over_volume(bias: Array) -> Array:
    return bias[None, :, None, None, None]
