# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of the convolution kernels: checked, and turned into plans. Every error that a caller can cause is raised here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .axis import Axis, convolution_axis, transposed_axis
from .gather import GatherPlan, plan_gather

__all__ = [
    "FILTER_SHAPES",
    "ITEMSIZE",
    "check_conv3d",
    "check_conv3d_bwd",
    "check_conv3d_transpose",
    "conv3d_plan",
    "conv3d_transpose_plan",
    "dx_plan",
]

Triple = tuple[int, int, int]
Sextuple = tuple[int, int, int, int, int, int]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FILTER_SHAPES = ("KDHW_CI_CO", "KDHW_CO_CI")
_AXES = "DHW"


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of what stands for one: the shape itself."""
    return tuple(tensor) if isinstance(tensor, tuple) else tuple(tensor.shape)


def check_conv3d(
    operation: str, x: Any, filters: Any, bias: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[Triple, Sextuple, Triple, Triple]:
    """Check the arguments of a convolution; returns stride, padding, dilation and the output's extents.

    Raises:
        ValueError: a wrong rank, dtype, number of channels, or an empty output.
    """
    _check_tensors(operation, x, filters)
    steps = _triple(operation, "stride", stride, 1)
    holes = _triple(operation, "dilation", dilation, 1)
    pads = tuple(int(p) for p in padding) if isinstance(padding, tuple | list) else ()
    if len(pads) != 6 or min(pads) < 0:
        raise ValueError(
            f"{operation} `padding`: {padding!r} is no tuple of six integers >= 0. Give (front, back, top, bottom, left, right)."
        )
    x_shape, shape = shape_of(x), shape_of(filters)
    if x_shape[1] != shape[3]:
        raise ValueError(
            f"{operation} `filters`: {shape} has {shape[3]} input channels and `x_in` {x_shape} has {x_shape[1]}. "
            "Give filters as [K_d, K_h, K_w, C_in, C_out]."
        )
    _check_bias(operation, bias, shape[4])
    out = []
    for axis in range(3):
        reach = holes[axis] * (shape[axis] - 1) + 1
        padded = x_shape[2 + axis] + pads[2 * axis] + pads[2 * axis + 1]
        if padded < reach:
            raise ValueError(
                f"{operation} `padding`: the kernel reaches over {reach} in {_AXES[axis]}, and {x_shape[2 + axis]} padded by "
                f"{pads[2 * axis : 2 * axis + 2]} is {padded}. Pad by {reach - padded} more, or use smaller filters."
            )
        out.append((padded - reach) // steps[axis] + 1)
    return steps, (pads[0], pads[1], pads[2], pads[3], pads[4], pads[5]), holes, (out[0], out[1], out[2])


def check_conv3d_bwd(
    dy: Any,
    x: Any,
    filters: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    compute_dx: bool,
    compute_dw: bool,
    compute_db: bool,
) -> tuple[Triple, Sextuple, Triple, Triple]:
    """Check the arguments of a convolution's gradients; returns stride, padding, dilation and the output's extents.

    Raises:
        ValueError: as for a convolution, a dy of another shape or dtype, no gradient asked for, or a shape where the values are needed.
    """
    operation = "conv3d_bwd"
    if not (compute_dx or compute_dw or compute_db):
        raise ValueError(f"{operation} `compute_dx`, `compute_dw`, `compute_db`: all are False. Ask for one gradient at least.")
    for name, tensor, needed, gradient in (("x_in", x, compute_dw, "dw"), ("filters", filters, compute_dx, "dx")):
        if needed and isinstance(tensor, tuple):
            raise ValueError(f"{operation} `{name}`: a shape does not give {gradient}. Pass the tensor.")
    steps, pads, holes, out = check_conv3d(operation, x, filters, None, stride, padding, dilation)
    expected = (shape_of(x)[0], shape_of(filters)[4], *out)
    if tuple(dy.shape) != expected:
        raise ValueError(
            f"{operation} `dy`: shape {tuple(dy.shape)} must be {expected}. Pass the cotangent of conv3d's result."
        )
    if str(dy.dtype) not in ITEMSIZE:
        raise ValueError(f"{operation} `dy`: dtype {dy.dtype} is none of {', '.join(ITEMSIZE)}. Cast it.")
    for name, tensor in (("x_in", x), ("filters", filters)):
        if not isinstance(tensor, tuple) and str(tensor.dtype) != str(dy.dtype):
            raise ValueError(
                f"{operation} `{name}`: dtype {tensor.dtype} differs from that of `dy`, {dy.dtype}. Cast one of them."
            )
    return steps, pads, holes, out


def check_conv3d_transpose(
    x: Any, filters: Any, bias: Any, stride: Any, padding: Any, dilation: Any, filter_shape: str, output_padding: Any
) -> tuple[Triple, Triple, Triple, Triple]:
    """Check the arguments of a transposed convolution; returns stride, padding, dilation and the output's extents.

    Raises:
        ValueError: a wrong rank, dtype, number of channels, layout, or an empty output.
    """
    operation = "conv3d_transpose"
    if filter_shape not in FILTER_SHAPES:
        raise ValueError(f"{operation} `filter_shape`: {filter_shape!r} is none of {FILTER_SHAPES}. Use one of them.")
    _check_tensors(operation, x, filters)
    steps = _triple(operation, "stride", stride, 1)
    pads = _triple(operation, "padding", padding, 0)
    holes = _triple(operation, "dilation", dilation, 1)
    extra = _triple(operation, "output_padding", output_padding, 0)
    channels = filters.shape[3 if filter_shape == "KDHW_CI_CO" else 4]
    if x.shape[1] != channels:
        raise ValueError(
            f"{operation} `filters`: {tuple(filters.shape)} in {filter_shape} has {channels} input channels and `x_in` {tuple(x.shape)} has "
            f"{x.shape[1]}. Exchange the last two axes, or set `filter_shape`."
        )
    _check_bias(operation, bias, filters.shape[4 if filter_shape == "KDHW_CI_CO" else 3])
    out = []
    for axis in range(3):
        if extra[axis] >= max(steps[axis], holes[axis]):
            raise ValueError(
                f"{operation} `output_padding`: {extra[axis]} in {_AXES[axis]} must be smaller than stride {steps[axis]} or dilation {holes[axis]}. "
                "Reduce it."
            )
        size = (
            (x.shape[2 + axis] - 1) * steps[axis] + holes[axis] * (filters.shape[axis] - 1) + 1 - 2 * pads[axis] + extra[axis]
        )
        if size < 1:
            raise ValueError(f"{operation} `padding`: {pads[axis]} leaves {size} outputs in {_AXES[axis]}. Reduce it.")
        out.append(size)
    return steps, pads, holes, (out[0], out[1], out[2])


def _check_tensors(operation: str, x: Any, filters: Any) -> None:
    for name, tensor, layout in (("x_in", x, "[B, C_in, D, H, W]"), ("filters", filters, "[K_d, K_h, K_w, C, C]")):
        shape = shape_of(tensor)
        if len(shape) != 5:
            raise ValueError(f"{operation} `{name}`: {shape} has {len(shape)} dimensions. Give {layout}.")
        if not isinstance(tensor, tuple) and str(tensor.dtype) not in ITEMSIZE:
            raise ValueError(f"{operation} `{name}`: dtype {tensor.dtype} is none of {', '.join(ITEMSIZE)}. Cast it.")
    if not isinstance(x, tuple) and not isinstance(filters, tuple) and str(filters.dtype) != str(x.dtype):
        raise ValueError(
            f"{operation} `filters`: dtype {filters.dtype} differs from that of `x_in`, {x.dtype}. Cast one of them."
        )


def _check_bias(operation: str, bias: Any, channels: int) -> None:
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(
            f"{operation} `bias`: shape {tuple(bias.shape)} must be ({channels},). Give one value per output channel."
        )


def _triple(operation: str, name: str, value: Any, least: int) -> Triple:
    values = tuple(int(v) for v in value) if isinstance(value, tuple | list) else (int(value),) * 3
    if len(values) != 3 or min(values) < least:
        raise ValueError(
            f"{operation} `{name}`: {value!r} is no tuple of three integers >= {least}. Give (depth, height, width)."
        )
    return values[0], values[1], values[2]


def _axes(axis: Callable[[int, int], Axis]) -> Callable[[int, int], tuple[Axis, Axis, Axis]]:
    """The three axes for blocks of r_d planes and r_h rows, made by `axis(index, block)`; width is never blocked."""
    return lambda r_d, r_h: (axis(0, r_d), axis(1, r_h), axis(2, 1))


@functools.lru_cache(maxsize=256)
def conv3d_plan(
    size: Triple,
    taps: Triple,
    stride: Triple,
    padding: Sextuple,
    dilation: Triple,
    channels: tuple[int, int],
    itemsize: int,
    budget: int,
    cores: int = 1,
    batch: int = 1,
    packed: bool = True,
) -> GatherPlan:
    """The plan of y = conv3d(x): channels are (C_in, C_out), `budget` the SBUF bytes per partition.

    Raises:
        Unsupported: nothing fits.
    """

    def axis(i: int, r: int) -> Axis:
        return convolution_axis(size[i], taps[i], stride[i], dilation[i], (padding[2 * i], padding[2 * i + 1]), r)

    return plan_gather(_axes(axis), taps, channels[0], channels[1], itemsize, budget, cores, batch, packed)


@functools.lru_cache(maxsize=256)
def conv3d_transpose_plan(
    size: Triple,
    taps: Triple,
    stride: Triple,
    padding: Triple,
    dilation: Triple,
    out: Triple,
    channels: tuple[int, int],
    itemsize: int,
    budget: int,
    cores: int = 1,
    batch: int = 1,
    packed: bool = True,
) -> GatherPlan:
    """The plan of y = conv3d_transpose(x), whose filters are stored flipped.

    Raises:
        Unsupported: nothing fits.
    """

    def axis(i: int, r: int) -> Axis:
        return flipped(transposed_axis(size[i], taps[i], stride[i], dilation[i], padding[i], out[i], r), taps[i])

    return plan_gather(_axes(axis), taps, channels[0], channels[1], itemsize, budget, cores, batch, packed)


@functools.lru_cache(maxsize=256)
def dx_plan(
    size: Triple,
    out: Triple,
    taps: Triple,
    stride: Triple,
    padding: Sextuple,
    dilation: Triple,
    channels: tuple[int, int],
    itemsize: int,
    budget: int,
    cores: int = 1,
    batch: int = 1,
    packed: bool = True,
) -> GatherPlan:
    """The plan of dx [.., C_in, D, H, W] from dy [.., C_out, D_out, H_out, W_out]: a transposed convolution of dy; channels are (C_in, C_out).

    Raises:
        Unsupported: nothing fits.
    """

    def axis(i: int, r: int) -> Axis:
        return transposed_axis(out[i], taps[i], stride[i], dilation[i], padding[2 * i], size[i], r)

    return plan_gather(_axes(axis), taps, channels[1], channels[0], itemsize, budget, cores, batch, packed)


def flipped(axis: Axis, taps: int) -> Axis:
    """The axis with its taps counted from the other end."""
    reads = tuple(tuple((taps - 1 - tap, offset) for tap, offset in pairs) for pairs in axis.reads)
    return Axis(axis.size, axis.out, axis.block, axis.step, reads)
