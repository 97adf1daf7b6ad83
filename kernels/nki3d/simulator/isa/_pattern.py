# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Index patterns, selection by them, and searches: iota, affine_select, shuffles, gathers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..alu import operator_of
from ..core import Core, current
from ..dtypes import from_float32, is_integer, numpy_dtype
from ..errors import broken
from ..memory import start_partitions
from ..objects import NkiInstruction
from ..operators import equal
from ..tensor import NkiTensor
from ._common import ON_CHIP, SBUF, check_tile, destination, free, operand, same_size, store, written

__all__ = [
    "affine_select",
    "iota",
    "max8",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nonzero_with_count",
]


def _affine(
    instruction: str, dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int
) -> np.ndarray:
    """offset + channel * multiplier + sum of index * step, in 32-bit integers, as [P, n]."""
    pairs = [(int(step), int(number)) for step, number in pattern]
    if not 1 <= len(pairs) <= 4:
        raise broken(instruction, "pattern", f"{len(pairs)} dimensions", "must be 1 to 4")
    count = int(np.prod([number for _, number in pairs]))
    if count != dst.free_size:
        raise broken(instruction, "pattern", f"{count} elements", f"differ from those of `dst`, {dst.free_size}")
    values = np.zeros((), np.int64)
    for step, number in pairs:
        values = np.add.outer(values, step * np.arange(number, dtype=np.int64))
    channels = channel_multiplier * np.arange(dst.shape[0], dtype=np.int64)
    return (offset + channels[:, None] + values.reshape(1, -1)).astype(np.int32)


def _pattern_cycles(core: Core, tensor: NkiTensor) -> float:
    return core.machine.gpsimd_pattern_cycles + float(tensor.free_size)


def iota(
    dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int = 0, channel_multiplier: int = 0, name: str | None = None
) -> NkiInstruction:
    """Fill `dst` with offset + partition * channel_multiplier + the affine pattern [[step, number], ...], on GpSimd.

    Args:
        dst: in SBUF.
        pattern: up to 4 pairs; the numbers multiply to the elements per partition.
        offset: added to all.
        channel_multiplier: per partition.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another memory, or a pattern of another size.
    """
    core = current("iota")
    destination(core, "iota", "dst", dst, SBUF)
    values = _affine("iota", dst, pattern, offset, channel_multiplier)
    if dst.dtype in ("int32", "uint32"):
        dst.write(values.astype(numpy_dtype(dst.dtype)))
    else:
        dst.write(from_float32(values.astype(np.float32), dst.dtype))
    return core.issue("iota", "gpsimd", _pattern_cycles(core, dst), (dst,), ())


def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Any = equal,
    offset: int = 0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true_tile where cmp_op(affine value, 0) holds, else on_false_value, on GpSimd.

    Args:
        dst: in SBUF.
        pattern: as for `iota`.
        channel_multiplier: as for `iota`.
        on_true_tile: in SBUF.
        on_false_value: a number.
        cmp_op: a comparison; nl.equal by default.
        offset: as for `iota`.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another memory, size or operator.
    """
    core = current("affine_select")
    destination(core, "affine_select", "dst", dst, SBUF)
    operand(core, "affine_select", "on_true_tile", on_true_tile, SBUF)
    same_size("affine_select", dst, on_true_tile=on_true_tile)
    operator = operator_of(cmp_op, "affine_select", "cmp_op", core.machine.nc_version)
    if operator.name not in ("equal", "not_equal", "greater_equal", "greater", "less_equal", "less"):
        raise broken("affine_select", "cmp_op", f"nl.{operator.name}", "must be a comparison")
    if isinstance(on_false_value, NkiTensor) or not isinstance(on_false_value, int | float | np.generic):
        raise broken("affine_select", "on_false_value", repr(on_false_value), "must be a number")
    affine = _affine("affine_select", dst, pattern, offset, channel_multiplier)
    chosen = operator.function(affine, np.int32(0)).reshape(dst.shape) != 0
    if on_true_tile.dtype == dst.dtype:
        otherwise = from_float32(np.asarray(on_false_value, np.float32), dst.dtype)
        dst.write(np.where(chosen, on_true_tile.read().reshape(dst.shape), otherwise).astype(numpy_dtype(dst.dtype)))
    else:
        store(dst, np.where(chosen, on_true_tile.float32().reshape(dst.shape), np.float32(on_false_value)))
    return core.issue("affine_select", "gpsimd", _pattern_cycles(core, dst), (dst,), (on_true_tile,))


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None) -> NkiInstruction:
    """Within each quadrant of 32 partitions, partition i of `dst` takes partition shuffle_mask[i] of `src`; 255 leaves it. On Vector.

    Args:
        dst: in SBUF or PSUM; may be `src`.
        src: of the type and size of `dst`.
        shuffle_mask: 32 integers from 0 to 31, or 255.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another type, size, start partition or mask.
    """
    core = current("nc_stream_shuffle")
    where = "nc_stream_shuffle"
    check_tile(core, where, "dst", dst, ON_CHIP)
    check_tile(core, where, "src", src, ON_CHIP)
    if src.dtype != dst.dtype:
        raise broken(where, "src", f"dtype {src.dtype}", f"must be that of `dst`, {dst.dtype}")
    if src.free_size != dst.free_size:
        raise broken(where, "src", f"{src.free_size} elements per partition", f"differ from those of `dst`, {dst.free_size}")
    mask = [int(entry) for entry in shuffle_mask]
    if len(mask) != 32 or any(not 0 <= entry < 32 and entry != 255 for entry in mask):
        raise broken(where, "shuffle_mask", str(mask), "must be 32 integers from 0 to 31, or 255")
    rounded = -(-max(src.shape[0], dst.shape[0]) // 32) * 32
    for label, tensor in (("src", src), ("dst", dst)):
        if tensor.start_partition not in start_partitions(rounded):
            raise broken(
                where,
                label,
                f"start partition {tensor.start_partition} for {rounded} partitions",
                f"must be one of {start_partitions(rounded)}",
            )
    before = src.read().reshape(src.shape[0], -1).copy()
    after = dst.read().reshape(dst.shape[0], -1).copy()
    for quadrant in range(0, dst.shape[0], 32):
        for i in range(min(32, dst.shape[0] - quadrant)):
            if mask[i] == 255:
                continue
            if quadrant + mask[i] >= src.shape[0]:
                raise broken(
                    where, "shuffle_mask", f"entry {i} reads partition {quadrant + mask[i]}", f"of {src.shape[0]} in `src`"
                )
            after[quadrant + i] = before[quadrant + mask[i]]
    dst.write(after)
    written(dst)
    return core.issue(where, "vector", free(core, dst.free_size), (dst,), (src,))


def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst[p, i] = data[p, indices[p, i]], free dimensions counted as one, on GpSimd.

    Args:
        dst: in SBUF, of the type of `data` and the size of `indices`.
        data: in SBUF.
        indices: uint32 in SBUF, within the elements per partition of `data`.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another type or size, or an index out of bounds.
    """
    core = current("nc_n_gather")
    destination(core, "nc_n_gather", "dst", dst, SBUF)
    operand(core, "nc_n_gather", "data", data, SBUF)
    operand(core, "nc_n_gather", "indices", indices, SBUF)
    same_size("nc_n_gather", dst, indices=indices)
    if data.shape[0] != dst.shape[0]:
        raise broken(
            "nc_n_gather", "data", f"partition dimension {data.shape[0]}", f"differs from that of `dst`, {dst.shape[0]}"
        )
    if data.dtype != dst.dtype:
        raise broken("nc_n_gather", "data", f"dtype {data.dtype}", f"must be that of `dst`, {dst.dtype}")
    if indices.dtype != "uint32":
        raise broken("nc_n_gather", "indices", f"dtype {indices.dtype}", "must be uint32")
    index = indices.read().reshape(dst.shape[0], -1).astype(np.int64)
    if index.max() >= data.free_size:
        raise broken("nc_n_gather", "indices", f"index {index.max()}", f"is outside [0, {data.free_size})")
    dst.write(np.take_along_axis(data.read().reshape(dst.shape[0], -1), index, axis=1))
    return core.issue("nc_n_gather", "gpsimd", free(core, dst.free_size, core.machine.gather_factor), (dst,), (data, indices))


def _search_size(instruction: str, name: str, tensor: NkiTensor) -> None:
    if not 8 <= tensor.free_size <= 16384:
        raise broken(instruction, name, f"{tensor.free_size} elements per partition", "must be 8 to 16384")


def _eight(instruction: str, name: str, tensor: NkiTensor, like: NkiTensor) -> None:
    if tensor.shape[0] != like.shape[0] or tensor.free_size != 8:
        raise broken(instruction, name, f"shape {tensor.shape}", f"must be ({like.shape[0]}, 8)")


def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> NkiInstruction:
    """The 8 largest values per partition, in descending order, on Vector.

    Args:
        dst: 8 elements per partition.
        src: 8 to 16384 elements per partition.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another size.
    """
    core = current("max8")
    destination(core, "max8", "dst", dst)
    operand(core, "max8", "src", src)
    _search_size("max8", "src", src)
    _eight("max8", "dst", dst, src)
    store(dst, -np.sort(-src.float32().reshape(src.shape[0], -1), axis=1)[:, :8])
    return core.issue("max8", "vector", free(core, src.free_size, core.machine.search_factor), (dst,), (src,))


def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> NkiInstruction:
    """The index of each of 8 values per partition; equal values find following occurrences, an absent one all bits set. On Vector.

    Args:
        dst: uint16 or uint32, 8 elements per partition.
        data: 8 to 16384 elements per partition.
        vals: 8 elements per partition.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another size or type.
    """
    core = current("nc_find_index8")
    destination(core, "nc_find_index8", "dst", dst)
    operand(core, "nc_find_index8", "data", data)
    operand(core, "nc_find_index8", "vals", vals)
    _search_size("nc_find_index8", "data", data)
    _eight("nc_find_index8", "vals", vals, data)
    _eight("nc_find_index8", "dst", dst, data)
    if dst.dtype not in ("uint16", "uint32"):
        raise broken("nc_find_index8", "dst", f"dtype {dst.dtype}", "must be uint16 or uint32")
    found, _ = _match(data, vals, range(8))
    dst.write(np.where(found < 0, np.iinfo(numpy_dtype(dst.dtype)).max, found).astype(numpy_dtype(dst.dtype)))
    return core.issue("nc_find_index8", "vector", free(core, data.free_size, core.machine.search_factor), (dst,), (data, vals))


def _match(data: NkiTensor, vals: NkiTensor, order: Any) -> tuple[np.ndarray, np.ndarray]:
    """Per partition, the positions of the values, taken in `order`, each position once; and which positions were taken."""
    table = data.float32().reshape(data.shape[0], -1)
    wanted = vals.float32().reshape(data.shape[0], -1)
    found = np.full((data.shape[0], 8), -1, np.int64)
    taken = np.zeros(table.shape, bool)
    for partition in range(data.shape[0]):
        for column in order:
            hits = np.flatnonzero((table[partition] == wanted[partition, column]) & ~taken[partition])
            if hits.size:
                found[partition, column] = hits[0]
                taken[partition, hits[0]] = True
    return found, taken


def nc_match_replace8(
    dst: NkiTensor, data: NkiTensor, vals: NkiTensor, imm: float, dst_idx: NkiTensor | None = None, name: str | None = None
) -> NkiInstruction:
    """`data` with the first occurrence of each of 8 values replaced by `imm`; values are taken from the last to the first. On Vector.

    Args:
        dst: of the size of `data`.
        data: 8 to 16384 elements per partition.
        vals: 8 elements per partition.
        imm: a number.
        dst_idx: takes the positions, all bits set for a value that is absent.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another size or type.
    """
    core = current("nc_match_replace8")
    destination(core, "nc_match_replace8", "dst", dst)
    operand(core, "nc_match_replace8", "data", data)
    operand(core, "nc_match_replace8", "vals", vals)
    same_size("nc_match_replace8", dst, data=data)
    _search_size("nc_match_replace8", "data", data)
    _eight("nc_match_replace8", "vals", vals, data)
    found, taken = _match(data, vals, range(7, -1, -1))
    store(dst, np.where(taken.reshape(data.shape), np.float32(imm), data.float32()))
    if dst_idx is not None:
        destination(core, "nc_match_replace8", "dst_idx", dst_idx)
        _eight("nc_match_replace8", "dst_idx", dst_idx, data)
        if not is_integer(dst_idx.dtype):
            raise broken("nc_match_replace8", "dst_idx", f"dtype {dst_idx.dtype}", "must be an integer type")
        dst_idx.write(np.where(found < 0, np.iinfo(numpy_dtype(dst_idx.dtype)).max, found).astype(numpy_dtype(dst_idx.dtype)))
    cycles = free(core, data.free_size, core.machine.search_factor)
    return core.issue("nc_match_replace8", "vector", cycles, (dst, dst_idx), (data, vals))


def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> NkiInstruction:
    """Indices of the non-zero elements, padding, and their count last; on partitions 0, 16, 32, ... only. On GpSimd.

    Args:
        dst: int32 in SBUF, one element more per partition than `src`.
        src: float32 or int32 in SBUF.
        index_offset: added to the indices.
        padding_val: fills what is left.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another type, size or generation.
    """
    core = current("nonzero_with_count")
    where = "nonzero_with_count"
    if core.machine.nc_version < 3:
        raise broken(where, "dst", core.machine.name, "needs NeuronCore-v3 (trn2)")
    destination(core, where, "dst", dst, SBUF)
    operand(core, where, "src", src, SBUF)
    if src.dtype not in ("float32", "int32"):
        raise broken(where, "src", f"dtype {src.dtype}", "must be float32 or int32")
    if dst.dtype != "int32":
        raise broken(where, "dst", f"dtype {dst.dtype}", "must be int32")
    if dst.shape[0] != src.shape[0] or dst.free_size != src.free_size + 1:
        raise broken(where, "dst", f"shape {dst.shape}", f"must be ({src.shape[0]}, {src.free_size + 1})")
    values = src.read().reshape(src.shape[0], -1)
    result = dst.read().reshape(dst.shape[0], -1).copy()
    for partition in range(0, src.shape[0], 16):
        hits = np.flatnonzero(values[partition])
        result[partition] = padding_val
        result[partition, : hits.size] = hits + index_offset
        result[partition, -1] = hits.size
    dst.write(result)
    return core.issue(where, "gpsimd", free(core, src.free_size, core.machine.search_factor), (dst,), (src,))
