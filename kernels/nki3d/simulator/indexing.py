# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`tensor[...]`: what an index expression selects."""

from __future__ import annotations

import dataclasses
from typing import Any

from .access import Access
from .errors import broken
from .indirection import Indirection
from .objects import DynamicSlice, MemoryRegion, VirtualRegister

__all__ = ["dynamic", "indexed"]


def indexed(tensor: Access, key: Any) -> tuple[list[int], list[int], int, Indirection | None]:
    """Shape, strides, offset and indirection of `tensor[key]`."""
    keys = list(key) if isinstance(key, tuple) else [key]
    ellipses = [i for i, entry in enumerate(keys) if entry is Ellipsis]
    if len(ellipses) > 1:
        raise broken("NkiTensor", "key", repr(key), "has more than one `...`")
    missing = len(tensor.shape) - (len(keys) - len(ellipses))
    if missing < 0:
        raise broken(
            "NkiTensor", "key", f"{len(keys)} indices", f"for {len(tensor.shape)} dimensions of {tensor.name!r} {tensor.shape}"
        )
    if ellipses:
        keys[ellipses[0] : ellipses[0] + 1] = [slice(None)] * missing
    else:
        keys += [slice(None)] * missing

    on_chip = tensor.on_chip
    shape: list[int] = []
    strides: list[int] = []
    offset = tensor.offset
    indirection = tensor.indirection
    dropped: list[int] = []
    for dim, (entry, size, stride) in enumerate(zip(keys, tensor.shape, tensor.strides, strict=True)):
        fixed = indirection is not None and indirection.dim == dim
        if isinstance(entry, slice):
            if entry.start is None and entry.stop is None and entry.step is None:
                start, count, step = 0, size, 1
            else:
                start, count, step = _slice_bounds(tensor, entry, dim, size)
        elif isinstance(entry, DynamicSlice):
            if isinstance(entry.start, VirtualRegister | Access):
                indirection = dynamic(tensor, entry.start, dim, stride, size - entry.size + 1, indirection)
                # its extent is fixed by the address: it cannot be sliced again
                indirection = dataclasses.replace(indirection, dim=dim)
                start, count, step, fixed = 0, entry.size, 1, False
            else:
                start, count, step = _slice_bounds(tensor, slice(entry.start, entry.start + entry.size), dim, size)
        elif isinstance(entry, VirtualRegister | Access):
            indirection = dynamic(tensor, entry, dim, stride, size, indirection)
            start, count, step, fixed = 0, 0, 1, False
        else:
            start, count, step = _integer(tensor, entry, dim, size), 0, 1
        if fixed and (start, count, step) != (0, size, 1):
            raise broken("NkiTensor", "key", f"dimension {dim}", "is indirect and cannot be sliced or selected")
        offset += start * stride
        if count == 0 and not (on_chip and dim == 0):
            dropped.append(len(shape))
            count = -1
        if on_chip and dim == 0 and step != 1 and count > 1:
            raise broken(
                "NkiTensor",
                "key",
                f"step {step} on the partition dimension of {tensor.name!r}",
                "must be 1",
                "Partitions are consecutive: copy the rows that are wanted.",
            )
        shape.append(max(count, 1) if count >= 0 else -1)
        strides.append(stride * step)
    least = 2 if on_chip else 1
    # the last dimensions that integers dropped stay with size 1 where the result would have too few
    kept = sum(1 for size in shape if size >= 0)
    for position in reversed(dropped):
        if kept >= min(least, len(shape)):
            break
        shape[position] = 1
        kept += 1
    live = [i for i, size in enumerate(shape) if size >= 0]
    if indirection is not None and indirection.dim is not None and dropped:
        position = indirection.dim
        moved = live.index(position) if position in live else None
        indirection = dataclasses.replace(indirection, dim=moved)
    return [shape[i] for i in live], [strides[i] for i in live], offset, indirection


def _slice_bounds(tensor: Access, entry: Any, dim: int, size: int) -> tuple[int, int, int]:
    step = 1 if entry.step is None else entry.step
    start = 0 if entry.start is None else entry.start
    stop = size if entry.stop is None else entry.stop
    try:
        start, stop, step = start.__index__(), stop.__index__(), step.__index__()
    except AttributeError:
        raise broken(
            "NkiTensor", "key", f"{entry} in dimension {dim}", "is not made of integers", "Use nl.ds(register, size)."
        ) from None
    start = start + size if start < 0 else start
    stop = stop + size if stop < 0 else stop
    if step < 1 or not 0 <= start < stop <= size:
        raise broken(
            "NkiTensor",
            "key",
            f"{entry.start}:{entry.stop}:{step} in dimension {dim} of {tensor.name!r} {tensor.shape}",
            f"needs 0 <= start < stop <= {size} and step >= 1",
            "Clip the slice to the tensor." if step > 0 else "Read forwards: no step is negative.",
        )
    return start, -(-(stop - start) // step), step


def _integer(tensor: Access, entry: Any, dim: int, size: int) -> int:
    try:
        if isinstance(entry, bool):
            raise TypeError
        position: int = entry.__index__()
    except (AttributeError, TypeError):
        raise broken(
            "NkiTensor", "key", f"{entry!r} in dimension {dim}", "is no integer, slice, `...`, nl.ds or register"
        ) from None
    if not -size <= position < size:
        raise broken(
            "NkiTensor",
            "key",
            f"index {position} in dimension {dim} of {tensor.name!r} {tensor.shape}",
            f"is outside [0, {size})",
        )
    return position + size if position < 0 else position


def dynamic(tensor: Access, index: Any, dim: int, stride: int, limit: int, already: Indirection | None) -> Indirection:
    """The indirection by a register or by a tensor of one element in SBUF, in units of `stride`."""
    if already is not None:
        raise broken(
            "NkiTensor", "index", f"dimension {dim}", "is a second dynamic index", "Use one per view; is_indirect() tells."
        )
    if tensor.on_chip and dim == 0:
        raise broken("NkiTensor", "index", "the partition dimension", "cannot be selected dynamically")
    if isinstance(index, Access) and (index.size != 1 or index.buffer is not MemoryRegion.sbuf):
        raise broken("NkiTensor", "index", f"{index.shape} in {index.buffer.name}", "must be one element in SBUF")
    return Indirection("scalar", index, stride, None, limit)
