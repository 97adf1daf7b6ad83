# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The fused backward pass of conv3d: the function `conv3d_bwd`, its own gradients and the rules of `conv3d_bwd_p`.

Operands of the primitive: dy, then x if dw is wanted, then the filters if dx is wanted. Each result is linear in dy and in
one other operand: dx(dy, filters), dw(dy, x), db(dy).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from . import _lax, _options
from ._autodiff import align_varying, is_symbolic_zero, split
from ._primitive import (
    Flags,
    Rules,
    add,
    bind_bias_gradient,
    bind_conv3d,
    bind_conv3d_bwd,
    bind_filter_gradient,
    bind_input_gradient,
    conv3d_bwd_p,
    fold,
    is_zero,
    map_examples,
    register,
    unfold,
    zero_like,
)
from ._spec import Conv3dSpec, conv3d_bwd_spec, from_canonical, to_canonical


def conv3d_bwd(
    dy: Array,
    x_in: Array,
    filters: Array,
    stride: int | Sequence[int] = (1, 1, 1),
    padding: int | str | Sequence = (0, 0, 0, 0, 0, 0),
    dilation: int | Sequence[int] = (1, 1, 1),
    compute_dx: bool = True,
    compute_dw: bool = True,
    compute_db: bool = True,
    *,
    data_format: str = "NCDHW",
    implementation: str | None = None,
    forward_mode: bool | None = None,
) -> tuple[Array, ...]:
    """Gradients of `conv3d` with respect to its input, filters and bias: any subset, in one call.

    Models need not call it: `jax.grad` of `conv3d` does. It serves those who write their own backward passes.

        dx[b, i, p] = sum over c and all o, k with o * stride + k * dilation - pad_front = p of dy[b, c, o] * filters[k, i, c]
        dw[k, i, c] = sum over b, o of x[b, i, o * stride + k * dilation - pad_front] * dy[b, c, o]
        db[c]       = sum over b, o of dy[b, c, o]

    Args:
        dy: gradient of the output, [B, C_out, D_out, H_out, W_out].
        x_in: input of the forward pass, [B, C_in, D, H, W]. Its values are read for dw alone.
        filters: filters of the forward pass, [K_d, K_h, K_w, C_in, C_out]. Their values are read for dx alone.
        stride: as given to `conv3d`.
        padding: as given to `conv3d`.
        dilation: as given to `conv3d`.
        compute_dx: whether to compute dx.
        compute_dw: whether to compute dw.
        compute_db: whether to compute db.
        data_format: "NCDHW" or "NDHWC", for `dy`, `x_in` and dx.
        implementation: as for `conv3d`.
        forward_mode: as for `conv3d`.

    Returns:
        Always a tuple, of what was asked for, in the order dx (shape of `x_in`), dw (shape of `filters`), db ([C_out]); all in
        the dtype of the arguments, summed in float32 or wider and rounded once. Elements of dx that no window reaches are zero.

    Raises:
        ValueError: no gradient asked for, shapes that do not match, a number or string out of its domain.
        TypeError: a wrong dtype, or an argument of a wrong type.
        NotImplementedError: the named implementation cannot run.

    Example:
        >>> import numpy as np, jax_nki3d
        >>> x, w = np.ones((1, 2, 4, 4, 4), np.float32), np.ones((3, 3, 3, 2, 5), np.float32)
        >>> dy = np.ones((1, 5, 2, 2, 2), np.float32)
        >>> dw, db = jax_nki3d.conv3d_bwd(dy, x, w, compute_dx=False)
        >>> dw.shape, db.tolist()
        ((3, 3, 3, 2, 5), [8.0, 8.0, 8.0, 8.0, 8.0])
    """
    spec, wanted = conv3d_bwd_spec(
        "conv3d_bwd",
        dy,
        x_in,
        filters,
        stride,
        padding,
        dilation,
        compute_dx,
        compute_dw,
        compute_db,
        data_format,
        implementation,
    )
    forward_mode = _options.resolve_forward_mode("conv3d_bwd", forward_mode)
    operands = [to_canonical(dy, data_format)]
    operands += [to_canonical(x_in, data_format)] if wanted[1] else []
    operands += [filters] if wanted[0] else []
    aligned = align_varying(*operands)
    results = conv3d_bwd_p.bind(*aligned, spec=spec, wanted=wanted) if forward_mode else _differentiable(spec, wanted)(*aligned)
    dx = [from_canonical(results[0], data_format)] if wanted[0] else []
    return (*dx, *results[len(dx) :])


@cache
def _differentiable(spec: Conv3dSpec, wanted: Flags) -> Callable[..., tuple[Array, ...]]:
    def conv3d_bwd(*operands):
        return tuple(conv3d_bwd_p.bind(*operands, spec=spec, wanted=wanted))

    def forward(*primals):
        operands, asked = split(primals)
        needs = _by_role(wanted, asked.flags, absent=False)
        dy, x, filters = _by_role(wanted, operands)
        kept = (dy if needs[1] or needs[2] else None, x if needs[0] else None, filters if needs[0] else None)
        return conv3d_bwd(*operands), (asked, *kept)

    def backward(saved, cts):
        asked, *operands = saved
        cts = [None if is_symbolic_zero(ct) else ct for ct in cts]
        needs = _by_role(wanted, asked.flags, absent=False)
        gradients = _pullback(spec, needs, _by_flag(wanted, cts), asked.zeros[0], *operands)
        return asked.answer(_of_operands(wanted, gradients))

    with_vjp = jax.custom_vjp(conv3d_bwd)
    with_vjp.defvjp(forward, backward, symbolic_zeros=True)
    return with_vjp


def _by_role(wanted: Flags, values: Sequence, absent: Any = None) -> tuple:
    """Values in the order of the operands -> (of dy, of x, of filters), `absent` for an operand that is not there."""
    rest = iter(values)
    return next(rest), next(rest) if wanted[1] else absent, next(rest) if wanted[0] else absent


def _of_operands(wanted: Flags, values: Sequence) -> list:
    """The inverse of `_by_role`."""
    return [values[0], *([values[1]] if wanted[1] else []), *([values[2]] if wanted[0] else [])]


def _by_flag(wanted: Flags, values: Sequence) -> list:
    """Values in the order of the results -> (of dx, of dw, of db), None for a result that is not there."""
    rest = iter(values)
    return [next(rest) if flag else None for flag in wanted]


def _pullback(spec: Conv3dSpec, needs: Sequence[bool], cts: Sequence[Array | None], dy_type, dy, x, filters) -> list:
    """Gradients of (dx, dw, db) with respect to (dy, x, filters), None where not needed or zero.

    `dy_type` bears the shape and dtype of dy, whose values are read for the gradients of x and the filters alone.
    """
    ct_dx, ct_dw, ct_db = cts
    linear = spec.linear()
    on_dy = on_x = on_filters = None
    if needs[0]:
        on_dy = None if ct_dx is None else bind_conv3d(linear, ct_dx, filters)
        on_dy = add(on_dy, None if ct_dw is None else bind_conv3d(linear, x, ct_dw))
        if ct_db is not None:
            everywhere = ct_db.astype(dy_type.dtype)[None, :, None, None, None]
            on_dy = add(on_dy, jnp.broadcast_to(everywhere, dy_type.shape))
    if needs[1] and ct_dw is not None:
        on_x = bind_input_gradient(linear, dy, ct_dw)
    if needs[2] and ct_dx is not None:
        on_filters = bind_filter_gradient(linear, dy, ct_dx)
    return [on_dy, on_x, on_filters]


# ---- rules of conv3d_bwd_p -------------------------------------------------------------------------------------------


def _body(formulations, *operands, spec: Conv3dSpec, wanted: Flags):
    dy, x, filters = _by_role(wanted, operands)
    results = []
    if wanted[0]:
        results.append(_lax.input_gradient(formulations, dy, filters, spec))
    if wanted[1]:
        results.append(_lax.filter_gradient(formulations, x, dy, spec))
    if wanted[2]:
        results.append(_lax.bias_gradient(dy, spec.bias_dtype or dy.dtype))
    return results


def _jvp(primals, tangents, *, spec: Conv3dSpec, wanted: Flags):
    results = conv3d_bwd_p.bind(*primals, spec=spec, wanted=wanted)
    dy, x, filters = _by_role(wanted, primals)
    d_dy, d_x, d_filters = _by_role(wanted, [None if is_zero(t) else t for t in tangents])
    moved: list[Array | None] = [None, None, None]
    if d_dy is not None:
        moved = list(bind_conv3d_bwd(spec, wanted, d_dy, x, filters))
    through_others = (d_filters is not None, d_x is not None, False)  # dx moves with the filters, dw with x
    if any(through_others):
        others = bind_conv3d_bwd(spec, through_others, dy, d_x, d_filters)
        moved = [add(a, b) for a, b in zip(moved, others, strict=True)]
    present = [m for m, flag in zip(moved, wanted, strict=True) if flag]
    return results, [zero_like(r) if m is None else m for r, m in zip(results, present, strict=True)]


def _transpose(cts, *operands, spec: Conv3dSpec, wanted: Flags):
    dy, x, filters = _by_role(wanted, operands)
    needs = [ad.is_undefined_primal(operand) for operand in (dy, x, filters)]
    dy_type = dy.aval if needs[0] else dy
    given = [None if is_zero(ct) else ct for ct in cts]
    return _of_operands(wanted, _pullback(spec, needs, _by_flag(wanted, given), dy_type, dy, x, filters))


def _batch(operands, dims, *, spec: Conv3dSpec, wanted: Flags):
    """Each gradient takes its own way: folded where it can be, together in one loop over examples where not.

    A gradient of unmapped operands is computed once, yet returned as mapped: JAX 0.10.2 counts the cotangent of an unmapped
    result of a custom_vjp once per example, if another of its results is mapped.
    """
    dy, x, filters = _by_role(wanted, operands)
    dy_dim, x_dim, f_dim = _by_role(wanted, dims)
    results: list[tuple[Array, int | None] | None] = [None, None, None]
    looped = [False, False, False]
    if wanted[0]:
        if dy_dim is None and f_dim is None:
            results[0] = bind_input_gradient(spec, dy, filters), None
        elif f_dim is None:
            folded, undo = fold(dy, dy_dim, 0)
            results[0] = undo(bind_input_gradient(spec, folded, filters)), 0
        else:
            looped[0] = True
    if wanted[1]:
        if dy_dim is None and x_dim is None:
            results[1] = bind_filter_gradient(spec, dy, x), None
        elif dy_dim is None and x.shape[x_dim]:
            results[1] = _fold_into_filters(spec, dy, x, x_dim, axis=3)
        elif x_dim is None and dy.shape[dy_dim]:
            results[1] = _fold_into_filters(spec, dy, x, dy_dim, axis=4)
        else:
            looped[1] = True
    if wanted[2]:
        if dy_dim is None:
            results[2] = bind_bias_gradient(spec, dy), None
        else:
            looped[2] = True
    if any(looped):
        flags = (looped[0], looped[1], looped[2])
        chosen = [(dy, dy_dim), *([(x, x_dim)] if looped[1] else []), *([(filters, f_dim)] if looped[0] else [])]
        some = map_examples(lambda *args: conv3d_bwd_p.bind(*args, spec=spec, wanted=flags), *zip(*chosen, strict=True))
        for index, value in zip([i for i in range(3) if flags[i]], some, strict=True):
            results[index] = value, 0
    size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    mapped = [(jnp.broadcast_to(r[0], (size, *r[0].shape)), 0) if r[1] is None else r for r in results if r is not None]
    return [value for value, _ in mapped], [dim for _, dim in mapped]


def _fold_into_filters(spec: Conv3dSpec, dy: Array, x: Array, dim: int, axis: int) -> tuple[Array, int]:
    """dw where one side is mapped: its examples become channels of dw along `axis` (3: C_in, 4: C_out)."""
    if axis == 3:
        examples = x.shape[dim]
        x, _ = fold(x, dim, 1)
        wide = dataclasses.replace(spec.linear(), c_in=examples * spec.c_in)
    else:
        examples = dy.shape[dim]
        dy, _ = fold(dy, dim, 1)
        wide = dataclasses.replace(spec.linear(), c_out=examples * spec.c_out)
    dw = bind_filter_gradient(wide, dy, x)
    return unfold(dw, axis, examples, spec.c_in if axis == 3 else spec.c_out), axis


register(conv3d_bwd_p, Rules(shape=partial(_body, _lax.NATIVE), lax=_body, jvp=_jvp, transpose=_transpose, batch=_batch))
