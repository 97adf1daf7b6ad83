# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel can run a case, and with which plans: asked before anything is compiled. Every answer is cached.

A case describes one call of a kernel.

Example:
    >>> from nki3d.planning.supports import Conv3dCase, supports
    >>> case = Conv3dCase("float64", 1, (4, 4, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1, 1, 1, 1), (1, 1, 1), (8, 8))
    >>> supports(case)
    'dtype float64 is none of float32, bfloat16, float16'
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from .conv import ITEMSIZE, conv3d_plan, conv3d_transpose_plan, dx_plan
from .filter_gradient import FilterGradientPlan, filter_gradient_plan
from .gather import GatherPlan, Unsupported
from .pooling import PoolPlan, plan_pooling, pooling

__all__ = [
    "Case",
    "Conv3dBwdCase",
    "Conv3dCase",
    "ConvTranspose3dCase",
    "PoolingCase",
    "default_budget",
    "describe",
    "plans",
    "sbuf_bytes",
    "supports",
]

Triple = tuple[int, int, int]
Sextuple = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Conv3dCase:
    """One call of `conv3d`.

    Attributes:
        dtype: of x and the filters.
        batch: examples.
        size: extents of x.
        taps: extents of the filters.
        stride: per axis.
        padding: (front, back, top, bottom, left, right).
        dilation: per axis.
        channels: (C_in, C_out).
        bias_dtype: None without a bias.
        cores: physical cores that share the work.
    """

    dtype: str
    batch: int
    size: Triple
    taps: Triple
    stride: Triple
    padding: Sextuple
    dilation: Triple
    channels: tuple[int, int]
    bias_dtype: str | None = None
    cores: int = 1


@dataclass(frozen=True)
class ConvTranspose3dCase:
    """One call of `conv3d_transpose`: as `Conv3dCase`, with three paddings and the extents `out` of the result."""

    dtype: str
    batch: int
    size: Triple
    taps: Triple
    stride: Triple
    padding: Triple
    dilation: Triple
    out: Triple
    channels: tuple[int, int]
    bias_dtype: str | None = None
    cores: int = 1


@dataclass(frozen=True)
class Conv3dBwdCase:
    """One call of `conv3d_bwd`: as the `Conv3dCase` whose gradients are asked for, with the extents `out` of dy.

    Attributes:
        wanted: (dx, dw, db).
    """

    dtype: str
    batch: int
    size: Triple
    out: Triple
    taps: Triple
    stride: Triple
    padding: Sextuple
    dilation: Triple
    channels: tuple[int, int]
    wanted: tuple[bool, bool, bool] = (True, True, True)
    cores: int = 1


@dataclass(frozen=True)
class PoolingCase:
    """One call of `avg_pooling_3d`, or of its backward pass.

    Attributes:
        dtype: of the arrays.
        shape: of the pooling's input, in `data_format`.
        kernel: the window.
        stride: its step.
        padding: per axis.
        data_format: layout of the pooling's input.
        output_format: layout of its output.
        count_include_pad: whether padding counts in the divisor.
        backward: the direction.
    """

    dtype: str
    shape: tuple[int, ...]
    kernel: Triple
    stride: Triple
    padding: Triple
    data_format: str = "NCDHW"
    output_format: str = "NCDHW"
    count_include_pad: bool = True
    backward: bool = False


Case = Conv3dCase | ConvTranspose3dCase | Conv3dBwdCase | PoolingCase
Plan = GatherPlan | FilterGradientPlan | PoolPlan


def supports(case: Case, budget: int | None = None, quickly: bool = False) -> str | None:
    """Why the kernel cannot run a case; None if it can.

    Args:
        case: the call.
        budget: bytes of SBUF per partition; None for those of the target that the environment names, else trn2.
        quickly: look for a plan without packing first, which takes milliseconds where the kernel's own plan may take seconds. A
            reason is final; None may turn out to be wrong when the kernel's plan is made.
    """
    budget = default_budget() if budget is None else budget
    if quickly and _reason(case, budget, packed=False) is None:
        return None
    return _reason(case, budget, packed=True)


def plans(case: Case, budget: int | None = None) -> dict[str, Plan]:
    """The plan of each result that has one (db is a plain sum).

    Raises:
        Unsupported: what `supports` says.
    """
    budget = default_budget() if budget is None else budget
    reason = _reason(case, budget, packed=True)
    if reason is not None:
        raise Unsupported(reason)
    return dict(_plans(case, budget, packed=True))


def default_budget() -> int:
    """Bytes of SBUF per partition of `NEURON_PLATFORM_TARGET_OVERRIDE`, else of trn2."""
    from ..simulator.machine import machine_of

    return machine_of().sbuf_usable_bytes


@functools.lru_cache(maxsize=1024)
def _reason(case: Case, budget: int, packed: bool) -> str | None:
    try:
        _check(case)
        for _ in _plans(case, budget, packed):
            pass
    except Unsupported as unsupported:
        return str(unsupported)
    return None


def _check(case: Case) -> None:
    if case.dtype not in ITEMSIZE:
        raise Unsupported(f"dtype {case.dtype} is none of {', '.join(ITEMSIZE)}")
    bias = getattr(case, "bias_dtype", None)
    if bias is not None and bias not in ITEMSIZE:
        raise Unsupported(f"dtype {bias} of the bias is none of {', '.join(ITEMSIZE)}")
    batch = case.shape[0] if isinstance(case, PoolingCase) else case.batch
    if not isinstance(batch, int):
        raise Unsupported(f"the batch {batch} is no number yet")
    if batch < 1:
        raise Unsupported("the batch is empty")


def _plans(case: Case, budget: int, packed: bool) -> Iterator[tuple[str, Plan]]:
    match case:
        case Conv3dCase():
            yield (
                "y",
                conv3d_plan(
                    case.size,
                    case.taps,
                    case.stride,
                    case.padding,
                    case.dilation,
                    case.channels,
                    ITEMSIZE[case.dtype],
                    budget,
                    case.cores,
                    case.batch,
                    packed,
                ),
            )
        case ConvTranspose3dCase():
            yield (
                "y",
                conv3d_transpose_plan(
                    case.size,
                    case.taps,
                    case.stride,
                    case.padding,
                    case.dilation,
                    case.out,
                    case.channels,
                    ITEMSIZE[case.dtype],
                    budget,
                    case.cores,
                    case.batch,
                    packed,
                ),
            )
        case Conv3dBwdCase():
            shared = (case.size, case.out, case.taps, case.stride, case.padding, case.dilation, case.channels)
            if case.wanted[0]:
                yield "dx", dx_plan(*shared, ITEMSIZE[case.dtype], budget, case.cores, case.batch, packed)
            if case.wanted[1]:
                yield "dw", filter_gradient_plan(*shared, ITEMSIZE[case.dtype], budget)
        case PoolingCase():
            given = pooling(
                "avg_pooling_3d",
                case.shape,
                case.dtype,
                case.kernel,
                case.stride,
                case.padding,
                case.data_format,
                case.output_format,
                case.count_include_pad,
            )
            yield "dx" if case.backward else "y", plan_pooling(given, case.backward, budget)


# ---- for people ------------------------------------------------------------------------------------------------------


def describe(plan: Plan, budget: int | None = None) -> str:
    """A plan in one line: how outputs and neighbours fill the array, what is in memory at a time."""
    budget = default_budget() if budget is None else budget
    match plan:
        case GatherPlan():
            text = _describe_gather(plan)
        case FilterGradientPlan():
            text = _describe_filter_gradient(plan)
        case PoolPlan():
            text = _describe_pooling(plan)
    return f"{text}; SBUF about {sbuf_bytes(plan) / 1024:.0f} of {budget / 1024:.0f} KiB per partition"


def sbuf_bytes(plan: Plan) -> int:
    """About how many bytes per partition of SBUF a plan fills: weights, one window and the results that wait to be stored."""
    match plan:
        case GatherPlan():
            return _gather_bytes(plan)
        case FilterGradientPlan():
            planes, rows = plan.window((0, plan.chunk[0]), (0, plan.chunk[1]))
            outputs = plan.chunk[0] * plan.chunk[1] * plan.rows
            wide = plan.axes[2].size
            loaded = planes * rows * wide + outputs * plan.axes[2].out
            turned = plan.taps[2] * planes * rows * plan.row_tile + outputs * plan.column_tile
            sums = len(plan.pieces) * plan.rows * plan.column_tile * 4
            return (loaded + turned) * plan.itemsize + sums
        case PoolPlan():
            depth, height, width = plan.axes
            planes = plan.planes_at_once or depth.length
            window = planes * height.length * width.length * plan.channels * plan.given.itemsize
            result = plan.step * depth.up * height.size * width.size * plan.channels * (plan.given.itemsize + 4)
            return window + result
    raise AssertionError(f"a plan of an unknown kind: {plan}")


def _gather_bytes(plan: GatherPlan) -> int:
    chunk = next(plan.chunks())
    window = prod(max(1, high - low) for low, high in plan.window(chunk)) * plan.row_tiles
    if plan.stacked > 1:
        window *= 2
    matrices = sum(len(column.groups) * len(column.elements) for column in plan.columns if column.copies)
    weights = (min(plan.part, prod(plan.taps)) + matrices) * plan.column_tile * plan.row_tiles
    if plan.weights_stay:
        weights *= plan.column_tiles
    staged = 2 * prod(plan.chunk) * plan.axes[2].block
    return (window + weights + staged) * plan.itemsize


def _times(sizes: Any) -> str:
    return "x".join(map(str, sizes))


def _describe_gather(plan: GatherPlan) -> str:
    elements = max(len(column.elements) for column in plan.columns)
    columns = min(plan.columns_out, plan.column_tile) * elements
    rows = min(plan.rows_in, plan.row_tile) * plan.stacked
    phases = plan.axes[2].block
    matmuls = sum(len(column.groups) for column in plan.columns) * plan.row_tiles * plan.column_tiles
    parts = [
        f"blocks {_times((plan.axes[0].block, plan.axes[1].block, phases))}",
        f"stack {_times(plan.stack)}",
        f"array {rows}x{columns}",
        f"column tiles {plan.column_tiles} of {plan.column_tile} channels x {elements} elements",
        f"row tiles {plan.row_tiles}",
        f"matmuls per tile of blocks {matmuls}",
        f"chunk {_times(plan.chunk)} of {_times(plan.blocks)} blocks",
        f"tile {_times(plan.tile)} (PSUM {prod(plan.tile) * 4} of 2048 B in each bank)",
        "weights stay" if plan.weights_stay else "weights per column tile",
    ]
    return ", ".join(parts)


def _describe_filter_gradient(plan: FilterGradientPlan) -> str:
    box = plan.pieces[0].count
    banks = -(-len(plan.pieces) // plan.per_bank)
    parts = [
        f"{plan.groups} groups of {'planes' if plan.group_axis == 0 else 'rows'} on the partitions, {plan.pitch} apart",
        f"boxes of {_times(box)} neighbours x {plan.row_tile} channels: {len(plan.pieces)} pieces in {len(plan.passes)} passes",
        f"{plan.rows} rows x {plan.column_tile} output channels as columns",
        f"chunk {_times(plan.chunk)} of {_times(plan.extent)} planes x row blocks",
        f"PSUM {min(8, banks)} of 8 banks",
    ]
    return ", ".join(parts)


def _describe_pooling(plan: PoolPlan) -> str:
    lanes = "planes" if not plan.channel_tile else f"{plan.channel_tile} channels"
    waves = sum(1 for _ in plan.waves())
    parts = [
        f"lanes {plan.lanes} in {waves} waves of 128 partitions, each of {lanes}",
        f"tile {_times(axis.tile for axis in plan.axes)} of {_times(axis.cells for axis in plan.axes)} cells",
        f"step {plan.step}",
    ]
    return ", ".join(parts)
