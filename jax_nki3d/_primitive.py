# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The five primitives: their names, how to bind them, and what each must answer before it may be used.

The module of each operation registers its rules; rules bind other primitives through the functions here, so that the five
are closed under every transformation and no two modules import each other.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from . import _lax, _neuron
from ._spec import AvgPooling3dSpec, Conv3dSpec, ConvTranspose3dSpec

conv3d_p = Primitive("conv3d")
conv3d_transpose_p = Primitive("conv3d_transpose")
conv3d_bwd_p = Primitive("conv3d_bwd")
avg_pooling_3d_p = Primitive("avg_pooling_3d")
avg_pooling_3d_backward_p = Primitive("avg_pooling_3d_backward")
PRIMITIVES = (conv3d_p, conv3d_transpose_p, conv3d_bwd_p, avg_pooling_3d_p, avg_pooling_3d_backward_p)

Flags = tuple[bool, bool, bool]  # dx, dw, db


# ---- binding ---------------------------------------------------------------------------------------------------------


def bind_conv3d(spec: Conv3dSpec, x: Array, filters: Array, bias: Array | None = None) -> Array:
    """[B, C_in, D, H, W] -> [B, C_out, D_out, H_out, W_out]; the spec says whether there is a bias."""
    (y,) = conv3d_p.bind(x, filters, *_present(bias), spec=_with_bias(spec, bias))
    return y


def bind_conv3d_transpose(spec: ConvTranspose3dSpec, x: Array, filters: Array, bias: Array | None = None) -> Array:
    """[B, C_in, D, H, W] -> [B, C_out, D_out, H_out, W_out]; the spec says whether there is a bias."""
    (y,) = conv3d_transpose_p.bind(x, filters, *_present(bias), spec=_with_bias(spec, bias))
    return y


def bind_conv3d_bwd(
    spec: Conv3dSpec, wanted: Flags, dy: Array, x: Array | None = None, filters: Array | None = None
) -> tuple[Array | None, Array | None, Array | None]:
    """(dx, dw, db), None where not wanted; x is needed for dw alone, the filters for dx alone."""
    operands = [dy, *([x] if wanted[1] else []), *([filters] if wanted[0] else [])]
    results = iter(conv3d_bwd_p.bind(*operands, spec=spec, wanted=wanted))
    dx, dw, db = (next(results) if flag else None for flag in wanted)
    return dx, dw, db


def bind_input_gradient(spec: Conv3dSpec, dy: Array, filters: Array) -> Array:
    """dx alone: [B, C_out, D_out, H_out, W_out] -> [B, C_in, D, H, W]."""
    (dx,) = conv3d_bwd_p.bind(dy, filters, spec=spec, wanted=(True, False, False))
    return dx


def bind_filter_gradient(spec: Conv3dSpec, dy: Array, x: Array) -> Array:
    """dw alone, [K_d, K_h, K_w, C_in, C_out]."""
    (dw,) = conv3d_bwd_p.bind(dy, x, spec=spec, wanted=(False, True, False))
    return dw


def bind_bias_gradient(spec: Conv3dSpec, dy: Array) -> Array:
    """db alone, [C_out]."""
    (db,) = conv3d_bwd_p.bind(dy, spec=spec, wanted=(False, False, True))
    return db


def bind_avg_pooling_3d(spec: AvgPooling3dSpec, x: Array) -> Array:
    """`spec.data_format` -> `spec.output_format`, pooled."""
    (y,) = avg_pooling_3d_p.bind(x, spec=spec)
    return y


def bind_avg_pooling_3d_backward(spec: AvgPooling3dSpec, dy: Array) -> Array:
    """`spec.output_format` -> `spec.data_format`, spread over the windows."""
    (dx,) = avg_pooling_3d_backward_p.bind(dy, spec=spec)
    return dx


def _present(bias: Array | None) -> tuple[Array, ...]:
    return () if bias is None else (bias,)


def _with_bias(spec, bias: Array | None):
    dtype = None if bias is None else bias.dtype.name
    return spec if spec.bias_dtype == dtype else dataclasses.replace(spec, bias_dtype=dtype)


# ---- registration ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What a primitive must answer; every field is required. All take the primitive's static parameters by name.

    Attributes:
        shape: arrays -> list of arrays, cheap to trace: its output types are the primitive's. Being traced, it passes on
            shardings and the varying axes of shard_map, which a type written by hand would lose.
        lax: (formulations, *arrays) -> list of arrays: the body wherever no kernel runs.
        jvp: (primals, tangents) -> (outputs, tangents out), lists; a tangent that is `ad.Zero` is skipped.
        transpose: (cotangents, *operands) -> a cotangent or None per operand; undefined operands are those to differentiate.
        batch: (operands, dims) -> (outputs, dims), lists; a dim is an int or None.
    """

    shape: Callable[..., Sequence[Array]]
    lax: Callable[..., Sequence[Array]]
    jvp: Callable[..., tuple]
    transpose: Callable[..., Sequence]
    batch: Callable[..., tuple]


def register(primitive: Primitive, rules: Rules) -> None:
    """Gives a primitive its rules."""
    primitive.multiple_results = True
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(partial(_types, primitive.name, rules))
    mlir.register_lowering(primitive, partial(_lower, primitive.name, rules))
    ad.primitive_jvps[primitive] = rules.jvp
    ad.primitive_transposes[primitive] = rules.transpose
    batching.primitive_batchers[primitive] = rules.batch


def _types(name: str, rules: Rules, *avals, **params):
    """The types of the results; binding a kernel that cannot run what was asked of it by name is an error here."""
    _neuron.check(name, params, avals)
    return jax.make_jaxpr(partial(rules.shape, **params))(*avals).out_avals


def _lower(name: str, rules: Rules, ctx, *operands, **params):
    """One rule for every platform, since "neuron" may be unknown to JAX when this module is imported."""
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    body = _neuron.body(name, platforms, params, ctx.avals_in)
    if body is None:
        formulations = _lax.CPU if "cpu" in platforms else _lax.NATIVE
        body = partial(rules.lax, formulations)
    return mlir.lower_fun(body, multiple_results=True)(ctx, *operands, **params)


# ---- batching --------------------------------------------------------------------------------------------------------


def fold(x: Array, dim: int, into: int) -> tuple[Array, Callable[[Array], Array]]:
    """Merges a mapped axis into axis `into` of the unmapped array; also returns the undoing for an array folded alike."""
    moved = _moveaxis(x, dim, into)
    outer, inner = moved.shape[into : into + 2]
    folded = moved.reshape(*moved.shape[:into], outer * inner, *moved.shape[into + 2 :])
    return folded, partial(unfold, axis=into, outer=outer, inner=inner)


def unfold(y: Array, axis: int, outer: int, inner: int) -> Array:
    """Splits `axis` in two."""
    return y.reshape(*y.shape[:axis], outer, inner, *y.shape[axis + 1 :])


def map_examples(bind: Callable[..., Sequence[Array]], operands: Sequence[Array], dims: Sequence[int | None]):
    """The fallback of every batching rule: one call per example, in a loop with a static number of turns.

    Returns the outputs, mapped over axis 0.
    """
    mapped = [_moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(examples):
        rest = iter(examples)
        return bind(*(x if d is None else next(rest) for x, d in zip(operands, dims, strict=True)))

    return lax.map(one, mapped)


def _moveaxis(x: Array, source: int, target: int) -> Array:
    if source == target:
        return x
    order = [d for d in range(x.ndim) if d != source]
    order.insert(target, source)
    return x.transpose(order)


# ---- differentiation -------------------------------------------------------------------------------------------------


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is symbolically zero."""
    return isinstance(tangent, ad.Zero)


def zero_like(value: Array) -> ad.Zero:
    """The tangent of a result that does not move."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def add(a: Array | None, b: Array | None) -> Array | None:
    """Sum of contributions of which either may be absent."""
    if a is None or b is None:
        return a if b is None else b
    return a + b
