# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What an operation costs at least, computed from its geometry: nothing runs, and nothing was measured."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ._geometry import Geometry
from ._spec import AvgPooling3dSpec


class Cost(NamedTuple):
    """The least that an operation can cost.

    Attributes:
        multiply_adds: those that touch an element of the volume, not padding or an inserted zero; 0 for a pooling.
        bytes: operands and results, each moved once.
        microseconds: on one NeuronCore of a trn2, from the larger of both; None where a size is not known.
    """

    multiply_adds: int | None
    bytes: int | None
    microseconds: float | None


def cost(operation: str, params: dict, operands: Sequence[Any], results: Sequence[Any]) -> Cost:
    """The cost of a primitive with these types."""
    spec, first = params["spec"], operands[0]
    if not all(isinstance(n, int) for aval in (*operands, *results) for n in aval.shape):
        return Cost(None, None, None)
    total = sum(aval.size * aval.dtype.itemsize for aval in (*operands, *results))
    if isinstance(spec, AvgPooling3dSpec):
        return Cost(0, total, _microseconds(0, total, first.dtype.itemsize))
    products = 1 if operation != "conv3d_bwd" else sum(params["wanted"][:2])
    multiply_adds = products * first.shape[0] * spec.c_in * spec.c_out * touched(spec.geometry)
    return Cost(multiply_adds, total, _microseconds(multiply_adds, total, first.dtype.itemsize))


def touched(geometry: Geometry) -> int:
    """Pairs of an output and a tap that reads an element of the volume."""
    return prod(_touched_on(geometry, axis) for axis in range(3))


def _touched_on(geometry: Geometry, axis: int) -> int:
    """Per tap, the outputs from the first to the last whose window has that tap inside."""
    size, out, stride = geometry.size[axis], geometry.out[axis], geometry.stride[axis]
    total = 0
    for tap in geometry.taps(axis):
        offset = tap.shift * stride + tap.phase
        first, end = max(0, -(offset // stride)), min(out, (size - 1 - offset) // stride + 1)
        total += max(0, end - first)
    return total


def _microseconds(multiply_adds: int, moved: int, itemsize: int) -> float:
    from nki3d.simulator.machine import MACHINES

    machine = MACHINES["trn2"]
    per_cycle = machine.partitions * machine.stationary_columns
    factor = machine.float32_matmul_factor if itemsize >= 4 else 1
    busy = multiply_adds * factor / per_cycle / machine.tensor_ghz
    transfer = moved / (machine.dma_engines * machine.dma_engine_bytes_per_ns)
    return max(busy, transfer) / 1000
