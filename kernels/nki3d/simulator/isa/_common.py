# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What instructions share: checks of operands, reading them in float32, and the one rounding on store."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from ..core import Core
from ..dtypes import PACKED, from_float32
from ..errors import broken
from ..memory import start_partitions
from ..objects import MemoryRegion
from ..tensor import NkiTensor
from ._enums import engine as engines

__all__ = ["NOT_PSUM", "ON_CHIP", "PSUM", "SBUF", "check_tile", "choose", "free", "operand", "same_size", "store", "vector"]

SBUF = (MemoryRegion.sbuf,)
PSUM = (MemoryRegion.psum,)
ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)
NOT_PSUM = (MemoryRegion.sbuf, MemoryRegion.private_hbm, MemoryRegion.shared_hbm)

_ENGINE_NAMES = {member: member.name for member in engines}


def check_tile(core: Core, instruction: str, name: str, tensor: Any, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> None:
    """Check that an operand is a tensor which an engine can address in these memories.

    Raises:
        NkiValidationError: another memory, a start partition that engines cannot reach, or a pattern of too many or too large dimensions.
    """
    if not isinstance(tensor, NkiTensor):
        raise broken(instruction, name, repr(tensor), "is no tensor")
    if tensor.buffer not in regions:
        cure = "Copy it to SBUF first." if tensor.buffer not in ON_CHIP else ""
        raise broken(
            instruction, name, f"is in {tensor.buffer.name}", f"and must be in {' or '.join(r.name for r in regions)}", cure
        )
    if tensor._pattern_checked:
        return
    shape = tensor.shape
    partitions = shape[0]
    if partitions > core.machine.partitions:
        raise broken(instruction, name, f"partition dimension {partitions}", f"exceeds maximum {core.machine.partitions}")
    start = tensor.start_partition
    # the usual case first: a whole tile
    if start and start not in start_partitions(partitions):
        raise broken(
            instruction,
            name,
            f"start partition {start} for {partitions} partitions",
            f"must be one of {start_partitions(partitions)}",
            "Move the rows with a DMA, or place the tensor by `address`.",
        )
    _check_pattern(core, instruction, name, tensor)
    tensor._pattern_checked = True


def _check_pattern(core: Core, instruction: str, name: str, tensor: NkiTensor) -> None:
    """Check the free dimensions, after merging those that follow each other, against the fields of an instruction."""
    machine = core.machine
    dims: list[list[int]] = []
    for size, stride in zip(tensor.shape[1:], tensor.strides[1:], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size and dims[-1][0] * size <= machine.dim_count:
            dims[-1] = [dims[-1][0] * size, stride]
        else:
            dims.append([size, stride])
        if size > machine.dim_count:
            raise broken(instruction, name, f"a free dimension of {size} elements", f"exceeds maximum {machine.dim_count}")
    if len(dims) > machine.free_dims:
        raise broken(
            instruction,
            name,
            f"{len(dims)} free dimensions that do not merge, shape {tensor.shape}, strides {tensor.strides}",
            f"exceed maximum {machine.free_dims}",
        )
    for _, stride in dims:
        if not -machine.dim_stride - 1 <= stride <= machine.dim_stride:
            raise broken(instruction, name, f"stride {stride}", f"exceeds maximum {machine.dim_stride}", "Split the tensor.")


def check_free_size(core: Core, instruction: str, name: str, tensor: NkiTensor) -> None:
    """Check the elements per partition that Vector, Scalar and GpSimd can process in one instruction."""
    limit = core.machine.psum_elements if tensor.buffer is MemoryRegion.psum else core.machine.sbuf_elements
    if tensor.free_size > limit:
        raise broken(
            instruction, name, f"{tensor.free_size} elements per partition in {tensor.buffer.name}", f"exceed maximum {limit}"
        )


def operand(core: Core, instruction: str, name: str, tensor: Any, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> NkiTensor:
    """Check an operand of Vector, Scalar or GpSimd that is read; returns it."""
    check_tile(core, instruction, name, tensor, regions)
    check_free_size(core, instruction, name, tensor)
    if tensor.dtype in PACKED:
        raise broken(instruction, name, f"dtype {tensor.dtype}", "holds four packed values, which this instruction cannot read")
    found: NkiTensor = tensor
    return found


def destination(core: Core, instruction: str, name: str, tensor: Any, regions: tuple[MemoryRegion, ...] = ON_CHIP) -> NkiTensor:
    """Check an operand that is written; returns it."""
    found = operand(core, instruction, name, tensor, regions)
    if 0 in found.strides and found.repeats_elements():
        raise broken(instruction, name, f"shape {found.shape} with strides {found.strides}", "writes an element more than once")
    return found


def same_size(instruction: str, dst: NkiTensor, **others: NkiTensor) -> None:
    """Check that operands have the destination's partitions and elements per partition; their ranks may differ."""
    for name, other in others.items():
        if other.shape == dst.shape:
            continue
        if other.shape[0] != dst.shape[0]:
            raise broken(
                instruction, name, f"partition dimension {other.shape[0]}", f"differs from that of `dst`, {dst.shape[0]}"
            )
        if other.free_size != dst.free_size:
            raise broken(
                instruction,
                name,
                f"{other.free_size} elements per partition {other.shape}",
                f"differ from those of `dst`, {dst.free_size} {dst.shape}",
            )


def not_both_psum(instruction: str, **two: NkiTensor) -> None:
    """Check that two operands that are read together are not both in PSUM."""
    if all(tensor.buffer is MemoryRegion.psum for tensor in two.values()):
        names = "`, `".join(two)
        raise broken(
            instruction, names, "are both in psum", "and one of them must be in sbuf", "Copy one of them to SBUF first."
        )


def choose(instruction: str, given: engines, allowed: tuple[str, ...], default: str) -> str:
    """The engine that runs an instruction: the given one, or `default`.

    Raises:
        NkiValidationError: an engine that does not have the instruction.
    """
    name = _ENGINE_NAMES.get(given) if isinstance(given, engines) else None
    if name is None:
        raise broken(instruction, "engine", repr(given), "is no member of nki.isa.engine")
    if name == "unknown":
        return default
    if name not in allowed:
        raise broken(instruction, "engine", name, f"must be one of {', '.join(allowed)}")
    return name


def no_psum_on_gpsimd(instruction: str, engine: str, **operands: Any) -> None:
    """Check that GpSimd, which cannot reach PSUM, is not asked to."""
    if engine == "gpsimd":
        for name, tensor in operands.items():
            if isinstance(tensor, NkiTensor) and tensor.buffer is MemoryRegion.psum:
                raise broken(instruction, name, "is in psum", "which the gpsimd engine cannot access", "Use the vector engine.")


def vector(
    core: Core, instruction: str, name: str, value: Any, like: NkiTensor, dtypes: tuple[str, ...] | None = ("float32",)
) -> Any:
    """A scalar operand: a number, or a tensor [P, 1] as an array that broadcasts over the free dimensions of `like`.

    Raises:
        NkiValidationError: neither of both, another number of partitions, or another data type than `dtypes`.
    """
    if isinstance(value, NkiTensor):
        operand(core, instruction, name, value)
        if value.shape[0] != like.shape[0] or value.free_size != 1:
            raise broken(instruction, name, f"shape {value.shape}", f"must be ({like.shape[0]}, 1) or a number")
        if dtypes is not None and value.dtype not in dtypes:
            raise broken(
                instruction, name, f"dtype {value.dtype}", f"must be {' or '.join(dtypes)}", "Copy it to a tensor of that type."
            )
        return value.array.reshape((value.shape[0],) + (1,) * (len(like.shape) - 1))
    if isinstance(value, int | float | np.generic):
        return value
    raise broken(instruction, name, repr(value), "is neither a number nor a tensor (partitions, 1)")


def read_like(tensor: NkiTensor, dst: NkiTensor) -> np.ndarray:
    """The elements in float32, in the shape of `dst`."""
    values = tensor.float32()
    return values if values.shape == dst.shape else values.reshape(dst.shape)


def store(dst: NkiTensor, values: Any) -> None:
    """Write float32 results: one rounding to the destination's type. Clears the start bits of PSUM."""
    array = np.asarray(values, np.float32)
    if array.shape != dst.shape:
        array = array.reshape(dst.shape) if array.size == dst.size else np.broadcast_to(array, dst.shape)
    dst.write(from_float32(array, dst.dtype))
    written(dst)


def written(dst: NkiTensor) -> None:
    """Note that another engine than the tensor engine has written PSUM: the next matmul overwrites."""
    if dst.buffer is MemoryRegion.psum:
        dst.start(1)


def member(instruction: str, name: str, value: Any, enumeration: type[Enum]) -> None:
    """Check that an argument is a member of an enumeration of nki.isa, and not its name.

    Raises:
        NkiValidationError: it is not.
    """
    if not isinstance(value, enumeration):
        choices = ", ".join(f"nisa.{enumeration.__name__}.{each.name}" for each in enumeration)
        raise broken(
            instruction, name, repr(value), f"is no member of nki.isa.{enumeration.__name__}", f"Pass one of {choices}."
        )


def free(core: Core, elements: float, factor: float = 1.0) -> float:
    """Cycles for a number of elements per partition, not less than the issue interval."""
    return max(float(core.machine.issue_cycles), elements * factor)


def two_bytes(*tensors: NkiTensor) -> bool:
    """Whether all are bfloat16 or float16."""
    return all(tensor.dtype in ("bfloat16", "float16") for tensor in tensors)


def copy_cycles(core: Core, engine: str, dst: NkiTensor, src: NkiTensor) -> float:
    """Cycles of tensor_copy and tensor_scalar, with the fast modes of each generation."""
    machine = core.machine
    factor = 1.0
    if engine == "scalar" and two_bytes(dst, src):
        factor = machine.scalar_fast_factor
    elif engine == "vector" and two_bytes(dst, src):
        in_psum = (dst.buffer is MemoryRegion.psum) + (src.buffer is MemoryRegion.psum)
        packed = _innermost(dst) and _innermost(src)
        if in_psum == 0:
            factor = machine.vector_fast_factor if packed else machine.vector_medium_factor
        elif in_psum == 1 and packed:
            factor = machine.vector_medium_factor
    return free(core, src.free_size, 1 / factor)


def _innermost(tensor: NkiTensor) -> bool:
    """Whether the innermost dimension of more than one element has stride 1."""
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
        if size != 1:
            return stride == 1
    return True
