# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The DMA engines: dma_copy, dma_transpose, dma_compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..alu import name_of
from ..core import Core, current
from ..dtypes import PACKED, from_float32, numpy_dtype, to_float32
from ..errors import broken
from ..indirection import OutOfBoundsError
from ..objects import MemoryRegion, NkiInstruction
from ..tensor import NkiTensor
from ._common import NOT_PSUM, ON_CHIP, SBUF, member
from ._enums import dge_mode as dge_modes
from ._enums import engine as engines
from ._enums import oob_mode as oob_modes

__all__ = ["dma_compute", "dma_copy", "dma_transpose"]


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: oob_modes = oob_modes.error,
    dge_mode: dge_modes = dge_modes.unknown,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src between HBM and SBUF, any shapes of equal element count; a change of type goes through float32.

    Either side may have a run-time address (`.ap` with an offset tensor, `select`, `vector_select`).

    Args:
        dst: in HBM or SBUF.
        src: in HBM or SBUF.
        priority: 0 to 3, trn3 only.
        oob_mode: whether a run-time address outside the tensor is an error or is skipped.
        dge_mode: who makes the descriptors; checked, no effect on the result.
        engine: sync or scalar, with hwdge only.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: PSUM, different counts, an illegal mode, or an address out of bounds.
    """
    core = current("dma_copy")
    member("dma_copy", "oob_mode", oob_mode, oob_modes)
    _check_side("dma_copy", "dst", dst)
    _check_side("dma_copy", "src", src)
    _check_modes(core, "dma_copy", priority, dge_mode, engine, dst, src)
    if dst.size != src.size:
        raise broken(
            "dma_copy", "src", f"{src.size} elements {src.shape}", f"differ from those of `dst`, {dst.size} {dst.shape}"
        )
    if dst.repeats_elements():
        raise broken("dma_copy", "dst", f"shape {dst.shape} with strides {dst.strides}", "writes an element more than once")
    _move(dst, src, oob_mode)
    return _account(core, "dma_copy", dst, (src,))


def _check_side(instruction: str, name: str, tensor: Any) -> None:
    if not isinstance(tensor, NkiTensor):
        raise broken(instruction, name, repr(tensor), "is no tensor")
    if tensor.buffer not in NOT_PSUM:
        raise broken(instruction, name, "is in psum", "and must be in HBM or SBUF", "Copy it to SBUF with tensor_copy first.")
    if tensor.buffer in SBUF and tensor.shape[0] > 128:
        raise broken(instruction, name, f"partition dimension {tensor.shape[0]}", "exceeds maximum 128")


def _check_modes(
    core: Core, instruction: str, priority: int | None, mode: dge_modes, engine: engines, dst: NkiTensor, src: NkiTensor
) -> None:
    member(instruction, "dge_mode", mode, dge_modes)
    member(instruction, "engine", engine, engines)
    if priority is not None:
        if core.machine.nc_version < 4:
            raise broken(instruction, "priority", str(priority), "needs NeuronCore-v4 (trn3)")
        if not 0 <= priority <= 3:
            raise broken(instruction, "priority", str(priority), "must be 0 to 3")
    if mode is dge_modes.hwdge:
        if core.machine.nc_version < 3:
            raise broken(instruction, "dge_mode", "hwdge", "needs NeuronCore-v3 (trn2)")
        if dst.dtype != src.dtype:
            raise broken(
                instruction,
                "dge_mode",
                f"hwdge from {src.dtype} to {dst.dtype}",
                "cannot change the data type",
                "Use dge_mode.unknown.",
            )
    if engine not in (engines.unknown, engines.sync, engines.scalar):
        raise broken(instruction, "engine", getattr(engine, "name", repr(engine)), "must be sync or scalar")
    if engine is not engines.unknown and mode is not dge_modes.hwdge:
        raise broken(instruction, "engine", engine.name, "is allowed with dge_mode.hwdge only")
    gathers = any(t.indirection is not None and t.indirection.kind == "vector" for t in (dst, src))
    if gathers and mode in (dge_modes.hwdge, dge_modes.none):
        raise broken(instruction, "dge_mode", mode.name, "cannot gather or scatter", "Use dge_mode.swdge or unknown.")
    if mode is dge_modes.none and (dst.is_indirect() or src.is_indirect()):
        raise broken(instruction, "dge_mode", "none", "needs addresses that are known before the kernel runs")


def _converted(values: np.ndarray, src: NkiTensor, dst: NkiTensor) -> np.ndarray:
    if src.dtype == dst.dtype:
        return values
    for tensor in (src, dst):
        if tensor.dtype in PACKED:
            raise broken("dma_copy", "src", f"{src.dtype} to {dst.dtype}", "cannot convert packed values")
    return from_float32(to_float32(values), dst.dtype)


def _move(dst: NkiTensor, src: NkiTensor, mode: oob_modes) -> None:
    kinds = [None if t.indirection is None else t.indirection.kind for t in (dst, src)]
    if "vector" in kinds:
        _move_rows(dst, src, kinds, mode)
        return
    try:
        values, target = src.read(), dst.array
    except OutOfBoundsError as error:
        if mode is oob_modes.skip:
            return
        raise OutOfBoundsError(f"dma_copy: {error}. Bound it, or pass oob_mode.skip.") from None
    values = _converted(values, src, dst)
    target[...] = values if values.shape == dst.shape else values.reshape(dst.shape)


def _move_rows(dst: NkiTensor, src: NkiTensor, kinds: list[str | None], mode: oob_modes) -> None:
    """Gather rows of `src` or scatter to rows of `dst`."""
    if kinds == ["vector", "vector"]:
        raise broken("dma_copy", "dst, src", "both", "have a vector offset", "Copy through a tensor in SBUF.")
    side = dst if kinds[0] == "vector" else src
    other = src if side is dst else dst
    count = side.shape[0]
    rows = side.rows()
    if rows.size < count:
        raise broken("dma_copy", "vector_offset", f"{rows.size} indices", f"are fewer than the {count} rows")
    if other.size % count:
        raise broken("dma_copy", "dst" if side is src else "src", f"shape {other.shape}", f"cannot be read as {count} rows")
    plain = other.array if other.shape[0] == count else other.array.reshape(count, -1)
    for position, row in enumerate(rows):
        if not side.row_in_bounds(int(row)):
            if mode is oob_modes.skip:
                continue
            raise OutOfBoundsError(
                f"dma_copy `vector_offset`: row {row} of {side.name!r} is outside [0, {side.indirection.limit if side.indirection else 0})."
            )
        there = side.row(int(row))
        if side is src:
            plain[position] = _converted(there, src, dst).reshape(plain[position].shape)
        else:
            there[...] = _converted(plain[position], src, dst).reshape(there.shape)
    if side is src and not np.shares_memory(plain, other.array):
        other.array[...] = plain.reshape(other.shape)


_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: dge_modes = dge_modes.unknown,
    oob_mode: oob_modes = oob_modes.error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = src with its first and last axes exchanged: (1, 0), (2, 1, 0) or (3, 1, 2, 0).

    Args:
        dst: in SBUF, of exactly the transposed shape and of the type of `src`.
        src: in HBM or SBUF; in HBM it may gather rows with `.ap(..., vector_offset=...)`.
        axes: the permutation; the one above by default.
        priority: 0 to 3, trn3 only.
        dge_mode: unknown or hwdge, which has limits of its own; unknown or swdge when rows are gathered.
        oob_mode: what to do with gathered rows outside the tensor.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another shape, type, memory or mode.
    """
    core = current("dma_transpose")
    member("dma_transpose", "oob_mode", oob_mode, oob_modes)
    _check_side("dma_transpose", "dst", dst)
    _check_side("dma_transpose", "src", src)
    if dst.buffer not in SBUF:
        raise broken("dma_transpose", "dst", f"is in {dst.buffer.name}", "and must be in sbuf")
    permutation = _AXES.get(len(src.shape))
    if permutation is None or (axes is not None and tuple(axes) != permutation):
        raise broken(
            "dma_transpose", "axes", f"{axes} of shape {src.shape}", f"must be one of {', '.join(map(str, _AXES.values()))}"
        )
    expected = tuple(src.shape[axis] for axis in permutation)
    if dst.shape != expected:
        raise broken("dma_transpose", "dst", f"shape {dst.shape}", f"must be {expected}")
    if dst.dtype != src.dtype:
        raise broken("dma_transpose", "dst", f"dtype {dst.dtype}", f"must be that of `src`, {src.dtype}")
    gathers = src.indirection is not None and src.indirection.kind == "vector"
    _check_modes(core, "dma_transpose", priority, dge_mode, engines.unknown, dst, src)
    if dge_mode is dge_modes.none or (dge_mode is dge_modes.swdge and not gathers):
        raise broken("dma_transpose", "dge_mode", dge_mode.name, "must be unknown or hwdge")
    if oob_mode is oob_modes.skip and not gathers:
        raise broken("dma_transpose", "oob_mode", "skip", "is allowed with gathered rows only")
    if dge_mode is dge_modes.hwdge:
        _check_hardware_transpose(src)
    if gathers:
        _check_gather_transpose(core, src)
        for index, row in enumerate(src.rows()):
            if src.row_in_bounds(int(row)):
                # the gathered axis is first in src and last in dst, in every permutation
                dst.array[..., index] = np.transpose(src.row(int(row))[None], permutation)[..., 0]
            elif oob_mode is oob_modes.error:
                raise OutOfBoundsError(f"dma_transpose `vector_offset`: row {row} of {src.name!r} is outside the tensor.")
    else:
        dst.array[...] = np.transpose(src.array, permutation)
    return _account(core, "dma_transpose", dst, (src,))


def _check_hardware_transpose(src: NkiTensor) -> None:
    where = ("dma_transpose", "src")
    if src.itemsize != 2:
        raise broken(*where, f"dtype {src.dtype}", "must have 2 bytes with hwdge")
    if src.shape[-1] > 128:
        raise broken(*where, f"last dimension {src.shape[-1]}", "exceeds maximum 128 with hwdge")
    if len(src.shape) == 2 and src.shape[0] != 16:
        raise broken(*where, f"first dimension {src.shape[0]}", "must be 16 with hwdge")
    if len(src.shape) > 2 and (src.shape[0] not in (1, 2, 4, 8, 16) or src.shape[0] * src.shape[-2] % 16):
        raise broken(
            *where,
            f"shape {src.shape}",
            "needs a first dimension of 1, 2, 4, 8 or 16 and shape[0] * shape[-2] divisible by 16 with hwdge",
        )


def _check_gather_transpose(core: Core, src: NkiTensor) -> None:
    where = ("dma_transpose", "src")
    assert src.indirection is not None
    index = src.indirection.index
    if core.machine.nc_version < 3:
        raise broken(*where, "a gathering transpose", "needs NeuronCore-v3 (trn2)")
    if src.itemsize != 2:
        raise broken(*where, f"dtype {src.dtype}", "must have 2 bytes when rows are gathered")
    if src.shape[-1] > 128:
        raise broken(*where, f"last dimension {src.shape[-1]}", "exceeds maximum 128 when rows are gathered")
    if len(src.shape) == 4 and 1 not in src.shape[1:3]:
        raise broken(*where, f"shape {src.shape}", "needs a second or third dimension of 1 when rows are gathered")
    if src.shape[0] % 16:
        raise broken(*where, f"first dimension {src.shape[0]}", "must be a multiple of 16 when rows are gathered")
    if index.dtype != "uint32":
        raise broken("dma_transpose", "vector_offset", f"dtype {index.dtype}", "must be uint32")
    if not 16 <= index.shape[0] <= 128 or index.shape[0] % 16 or (index.free_size > 1 and index.shape[0] != 128):
        raise broken(
            "dma_transpose",
            "vector_offset",
            f"shape {index.shape}",
            "needs 16 to 128 partitions in steps of 16, and 128 with several columns",
        )
    if index.size < src.shape[0]:
        raise broken("dma_transpose", "vector_offset", f"{index.size} indices", f"are fewer than the {src.shape[0]} rows")


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: oob_modes = oob_modes.error,
    name: str | None = None,
) -> NkiInstruction:
    """dst = the sum of up to 16 sources, in float32, rounded once.

    With a vector offset on one of exactly two sources it reads, modifies and writes: `dst[rows] += src` (scatter, `dst` in HBM) or
    `dst += src[rows]` (gather, `dst` in SBUF).

    Args:
        dst: in HBM or SBUF.
        srcs: in HBM or SBUF, of equal element counts.
        reduce_op: nl.add.
        scales: None or all 1.0.
        unique_indices: True.
        oob_mode: what to do with rows outside the tensor.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another operator, scale, count or memory.
    """
    core = current("dma_compute")
    srcs = tuple(srcs)
    member("dma_compute", "oob_mode", oob_mode, oob_modes)
    _check_side("dma_compute", "dst", dst)
    if not 1 <= len(srcs) <= 16:
        raise broken("dma_compute", "srcs", f"{len(srcs)} tensors", "must be 1 to 16")
    for position, src in enumerate(srcs):
        _check_side("dma_compute", f"srcs[{position}]", src)
        if src.size != dst.size:
            raise broken(
                "dma_compute",
                f"srcs[{position}]",
                f"{src.size} elements {src.shape}",
                f"differ from those of `dst`, {dst.size}",
            )
    if name_of(reduce_op) != "add":
        raise broken("dma_compute", "reduce_op", repr(reduce_op), "must be nl.add")
    if scales is not None and (len(scales) != len(srcs) or any(scale != 1.0 for scale in scales)):
        raise broken(
            "dma_compute", "scales", str(list(scales)), "must be None or 1.0 for each source", "Scale with tensor_scalar first."
        )
    if not unique_indices:
        raise broken("dma_compute", "unique_indices", "False", "is not supported")
    rows = [t for t in (dst, *srcs) if t.indirection is not None and t.indirection.kind == "vector"]
    if rows and len(srcs) != 2:
        raise broken("dma_compute", "srcs", f"{len(srcs)} tensors with a vector offset", "must be exactly 2")
    if rows:
        _add_rows(dst, srcs, oob_mode)
    else:
        total = np.zeros(dst.shape, np.float32)
        for src in srcs:
            total += to_float32(src.array).reshape(dst.shape)
        dst.array[...] = from_float32(total, dst.dtype)
    return _account(core, "dma_compute", dst, srcs)


def _add_rows(dst: NkiTensor, srcs: tuple[NkiTensor, ...], mode: oob_modes) -> None:
    scatters = dst.indirection is not None
    indirect = [src for src in srcs if src.indirection is not None]
    plain = [src for src in srcs if src.indirection is None]
    if len(indirect) != 1 or len(plain) != 1 or (not scatters and dst.storage is not plain[0].storage):
        raise broken("dma_compute", "srcs", "with a vector offset", "must be `dst` itself and one other tensor")
    table, data = indirect[0], plain[0]
    if scatters and dst.storage is not table.storage:
        raise broken("dma_compute", "srcs", "the source with a vector offset", "must be `dst` for a scatter")
    values = to_float32(data.array).reshape(table.shape[0], -1)
    for position, row in enumerate(table.rows()):
        if not table.row_in_bounds(int(row)):
            if mode is oob_modes.skip:
                continue
            raise OutOfBoundsError(f"dma_compute `vector_offset`: row {row} of {table.name!r} is outside the tensor.")
        there = table.row(int(row))
        total = to_float32(there).reshape(-1) + values[position]
        if scatters:
            there[...] = from_float32(total, dst.dtype).reshape(there.shape)
        else:
            target = dst.array[position]
            target[...] = from_float32(total, dst.dtype).reshape(target.shape)


def _account(core: Core, instruction: str, dst: NkiTensor, srcs: tuple[NkiTensor, ...]) -> NkiInstruction:
    """The bytes, descriptors and DMA engines of a transfer."""
    machine = core.machine
    moved = descriptors = 0
    for tensor in (dst, *srcs):
        size = tensor.size * numpy_dtype(tensor.dtype).itemsize
        if tensor.buffer not in ON_CHIP:
            if tensor is dst:
                core.hbm_write_bytes += size
            else:
                core.hbm_read_bytes += size
        moved = max(moved, size)
        if instruction != "dma_transpose" or tensor is not dst:
            # a transposing DMA cuts its source only: its engine turns the elements round
            descriptors = max(descriptors, pieces(tensor))
    work = moved * len(srcs)
    if instruction == "dma_transpose":
        from_hbm = srcs[0].buffer not in ON_CHIP
        work = round(work / (machine.dma_transpose_hbm_rate if from_hbm else machine.dma_transpose_sbuf_rate))
    partitions = [tensor.shape[0] for tensor in (dst, *srcs) if tensor.buffer is MemoryRegion.sbuf]
    used = machine.dma_engines
    if partitions:
        used = min(used, -(-max(partitions) // machine.dma_partitions_per_engine))
    return core.issue_dma(instruction, (dst,), srcs, work, descriptors * len(srcs), used)


def pieces(tensor: NkiTensor) -> int:
    """The contiguous runs of a view: descriptors at least; in SBUF a run ends with its partition."""
    first = (
        1
        if tensor.buffer is MemoryRegion.sbuf or (tensor.indirection is not None and tensor.indirection.kind == "vector")
        else 0
    )
    run = 1
    for size, stride in zip(reversed(tensor.shape[first:]), reversed(tensor.strides[first:]), strict=True):
        if size != 1:
            if stride != run:
                break
            run *= size
    return tensor.size // run
