# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The operands and parameters of each primitive as arguments of its kernel, and as a case for its planner."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from .. import _lax
from . import installed

Run = Callable[..., Sequence[Array]]


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel call but for the arrays.

    Attributes:
        static: keyword arguments that are no arrays.
        results: shapes of the results, whose dtype is that of the first array.
        cores: the kernel is launched as kernel[cores] if there are several.
    """

    static: dict[str, Any]
    results: tuple[tuple[int, ...], ...]
    cores: int = 1


def kernel_call(operation: str, params: dict) -> Callable[..., list[Array]]:
    """A function of the primitive's operands (and its parameters, by name) that calls the kernel."""

    def run(call: Call, *arrays):
        kernel = installed.kernel(operation)
        results = (kernel[call.cores] if call.cores > 1 else kernel)(*arrays, **call.static)
        return results if isinstance(results, tuple | list) else [results]  # one result comes bare

    return body_around(run, operation, params)


def body_around(run: Run, operation: str, params: dict) -> Callable[..., list[Array]]:
    """A function of the primitive's operands that leaves the kernel to `run(call, *arrays)`."""
    spec = params["spec"]
    match operation:
        case "conv3d" | "conv3d_transpose":
            return _convolution(run, operation, spec)
        case "conv3d_bwd":
            return _conv3d_bwd(run, spec, params["wanted"])
        case "avg_pooling_3d" | "avg_pooling_3d_backward":
            return _pooling(run, operation, spec)
    raise AssertionError(f"an operation without a kernel: {operation}")


# ---- what can run ----------------------------------------------------------------------------------------------------


def why_unsupported(operation: str, params: dict, avals: Sequence[Any], quickly: bool = False) -> str | None:
    """The planner's reason, or that of the library which is called; None if the kernel can run this (see `supports`)."""
    from nki3d.planning.supports import supports

    case = case_of(operation, params, avals)
    reason = None if case is None else supports(case, quickly=quickly)
    if reason is None and _is_vendors(params["spec"]):
        return _why_not_nkilib(operation, params["spec"])
    return reason


def case_of(operation: str, params: dict, avals: Sequence[Any]) -> Any:
    """What the kernel is to do, for `nki3d.planning.supports`; None where a sum outside of the kernel is all."""
    from nki3d.planning import supports

    spec, first = params["spec"], avals[0]
    g = spec.geometry
    if operation.startswith("avg_pooling_3d"):
        backward = operation == "avg_pooling_3d_backward"
        shape = pooled_shape(spec, first.shape, into=False) if backward else first.shape
        window = (g.kernel, g.stride, g.front, spec.data_format, spec.output_format, spec.count_include_pad)
        return supports.PoolingCase(first.dtype.name, tuple(shape), *window, backward)
    channels, cores = (spec.c_in, spec.c_out), installed.cores(spec.lnc_shard)
    shared = {
        "dtype": first.dtype.name,
        "batch": first.shape[0],
        "taps": g.kernel,
        "stride": g.stride,
        "padding": spec.padding,
        "dilation": g.dilation,
        "channels": channels,
        "cores": cores,
    }
    if operation == "conv3d":
        return supports.Conv3dCase(size=g.size, bias_dtype=spec.bias_dtype, **shared)
    if operation == "conv3d_transpose":
        return supports.ConvTranspose3dCase(size=g.out, out=g.size, bias_dtype=spec.bias_dtype, **shared)
    wanted = by_kernel(params["wanted"], spec, first.dtype)
    if not any(wanted):
        return None
    return supports.Conv3dBwdCase(size=g.size, out=g.out, wanted=wanted, **shared)


def by_kernel(wanted: Sequence[bool], spec: Any, dtype: Any) -> tuple[bool, bool, bool]:
    """The gradients that are the kernel's: it rounds db to the dtype of dy, so that a wider db is summed outside."""
    dx, dw, db = wanted
    return dx, dw, db and not _is_wider(spec.bias_dtype, dtype)


def _is_wider(bias_dtype: str | None, dtype: Any) -> bool:
    """Whether a bias has digits that `dtype` would lose."""
    return bias_dtype is not None and jnp.dtype(bias_dtype) != dtype and jnp.finfo(bias_dtype).bits >= jnp.finfo(dtype).bits


def _is_vendors(spec: Any) -> bool:
    """Whether nkilib's kernel is called; the interpreter runs ours."""
    return installed.KERNELS == "nkilib" and spec.implementation != "simulate"


def _why_not_nkilib(operation: str, spec: Any) -> str | None:
    if operation.startswith("avg_pooling_3d"):
        return None if spec.count_include_pad or not any(spec.geometry.front) else "nkilib always counts padding in the divisor"
    if spec.activation is not None and not hasattr(_activation_type(spec), spec.activation.name):
        return f"nkilib has no activation {spec.activation.name}"
    if operation == "conv3d_transpose":
        if any(spec.output_padding):
            return "nkilib has no output_padding"
        reach = [d * (k - 1) for d, k in zip(spec.geometry.dilation, spec.geometry.kernel, strict=True)]
        if any(p > r for p, r in zip(spec.padding, reach, strict=True)):
            return "nkilib takes no padding beyond dilation * (K - 1)"
    return None


# ---- one body per operation ------------------------------------------------------------------------------------------


def _convolution(run: Run, operation: str, spec: Any) -> Callable[..., list[Array]]:
    cores = installed.cores(spec.lnc_shard)
    activation = None if spec.activation is None else _activation_type(spec)[spec.activation.name]
    static = {**_window(spec), "activation_fn": activation, "lnc_shard": cores > 1}
    if operation == "conv3d_transpose":
        static["filter_shape"] = spec.filter_shape
        if not _is_vendors(spec):
            static["output_padding"] = spec.output_padding

    def body(x, filters, *bias, **_):
        return list(run(Call(static, (spec.output_shape(x.shape[0]),), cores), x, filters, *bias))

    return body


def _conv3d_bwd(run: Run, spec: Any, wanted: Sequence[bool]) -> Callable[..., list[Array]]:
    def body(dy, *operands, **_):
        rest, batch = iter(operands), dy.shape[0]
        # of what is not needed the shape is enough
        x = next(rest) if wanted[1] else spec.input_shape(batch)
        filters = next(rest) if wanted[0] else spec.filters_shape
        mine = by_kernel(wanted, spec, dy.dtype)
        static, cores = _window(spec), 1
        static |= dict(zip(("compute_dx", "compute_dw", "compute_db"), mine, strict=True))
        if _is_vendors(spec):  # it takes three arrays, whatever is asked for, and shares no work
            x, filters = (jnp.zeros(a, dy.dtype) if isinstance(a, tuple) else a for a in (x, filters))
        else:
            cores = installed.cores(spec.lnc_shard)
            static["lnc_shard"] = cores > 1
        shapes = (spec.input_shape(batch), spec.filters_shape, (spec.c_out,))
        call = Call(static, tuple(s for s, flag in zip(shapes, mine, strict=True) if flag), cores)
        results = list(run(call, dy, x, filters)) if any(mine) else []
        dtype = spec.bias_dtype or dy.dtype
        if mine[2]:
            results[-1] = results[-1].astype(dtype)
        elif wanted[2]:
            results.append(_lax.bias_gradient(dy, dtype))
        return results

    return body


def _pooling(run: Run, operation: str, spec: Any) -> Callable[..., list[Array]]:
    g = spec.geometry
    static = {"kernel_size": g.kernel, "stride": g.stride, "padding": g.front}
    static |= {"data_format": spec.data_format, "output_format": spec.output_format}
    if not _is_vendors(spec):
        static["count_include_pad"] = spec.count_include_pad

    def forward(x, **_):
        return list(run(Call(static, (pooled_shape(spec, x.shape, into=True),)), x))

    def backward(dy, **_):
        shape = pooled_shape(spec, dy.shape, into=False)
        # of its second argument the kernel reads the shape and the dtype; nkilib's takes an array nevertheless
        return list(run(Call(static, (shape,)), dy, jnp.zeros(shape, dy.dtype) if _is_vendors(spec) else shape))

    return forward if operation == "avg_pooling_3d" else backward


def pooled_shape(spec: Any, shape: Sequence[int], into: bool) -> tuple[int, ...]:
    """The shape of the pooling's output from that of its input (`into`), or the other way round."""
    source, target = spec.data_format, spec.output_format
    source, target = (source, target) if into else (target, source)
    batch, channels = shape[0], shape[1 if source == "NCDHW" else 4]
    sizes = spec.geometry.out if into else spec.geometry.size
    return (batch, channels, *sizes) if target == "NCDHW" else (batch, *sizes, channels)


def _window(spec: Any) -> dict[str, Any]:
    return {"stride": spec.geometry.stride, "padding": spec.padding, "dilation": spec.geometry.dilation}


def _activation_type(spec: Any) -> Any:
    return installed.activation_type("nkilib" if _is_vendors(spec) else "nki3d")
