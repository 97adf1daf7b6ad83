# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""NkiTensor: a strided view of storage in SBUF, PSUM or HBM. No method copies data.

On chip, dimension 0 is the partition: it cannot be split, moved, removed or strided, because every partition is a memory of its own and an
instruction reads the same pattern from consecutive partitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .dtypes import canonical, numpy_dtype, to_float32
from .errors import NkiValidationError, broken
from .memory import Storage
from .objects import DynamicSlice, MemoryRegion, NKIObject, VirtualRegister

__all__ = ["Indirection", "NkiTensor", "OutOfBoundsError", "scalar_value"]

# NkiTensor has a method of this name
_slice = slice


@dataclass(frozen=True)
class Indirection:
    """A part of an address that is known only when the instruction runs.

    Attributes:
        kind: "scalar" (one offset), "vector" (one offset per partition) or "columns" (offsets into the free dimension, trn3).
        index: the tensor or register that holds the offset.
        stride: elements per unit of the offset.
        dim: the dimension of the view that is indirect; None if it was removed.
        limit: offsets from here on are out of bounds.
    """

    kind: str
    index: Any
    stride: int
    dim: int | None
    limit: int


class NkiTensor(NKIObject):
    """A multi-dimensional array in SBUF, PSUM or HBM, or a view of one.

    Kernels make tensors with `nl.ndarray` and its relatives. All methods return views of the same storage.

    Attributes:
        shape: sizes; on chip, shape[0] counts partitions.
        strides: in elements; on chip, strides[0] is the pitch from one partition to the next.
        offset: of the first element, in elements from the start of the storage.
        dtype: the name of NKI's data type, such as "bfloat16".
        buffer: the `MemoryRegion`.
        name: of the storage.

    Example:
        >>> import nki3d.simulator as nki
        >>> nl = nki.language
        >>> @nki.jit
        ... def shapes(x):
        ...     tile = nl.ndarray((128, 24), dtype=nl.float32, buffer=nl.sbuf)
        ...     print(tile[:, 8:24:2].shape, tile.reshape_dim(1, (4, -1)).permute((0, 2, 1)).get_pattern())
        >>> shapes(np.zeros((1, 1), np.float32))
        (128, 8) [[24, 128], [1, 6], [6, 4]]
    """

    __slots__ = (
        "_array",
        "_covers",
        "_indirection",
        "_pattern_checked",
        "buffer",
        "dtype",
        "offset",
        "shape",
        "storage",
        "strides",
    )

    def __init__(
        self, shape: tuple[int, ...], dtype: str, storage: Storage, buffer: MemoryRegion = MemoryRegion.sbuf, name: str = ""
    ):
        """Bind a tensor to storage: all of it, in row-major order."""
        self._set(tuple(shape), _row_major(shape), 0, canonical(dtype), storage, buffer)
        if name:
            storage.name = name

    def _set(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: str,
        storage: Storage,
        buffer: MemoryRegion,
        indirection: Indirection | None = None,
    ) -> None:
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.dtype = dtype
        self.storage = storage
        self.buffer = buffer
        self._indirection = indirection
        self._array: np.ndarray | None = None
        self._covers: bool | None = None
        self._pattern_checked = False

    def _view(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        dtype: str | None = None,
        indirection: Indirection | str | None = "same",
    ) -> NkiTensor:
        new = NkiTensor.__new__(NkiTensor)
        kept = self._indirection if isinstance(indirection, str) else indirection
        new._set(tuple(shape), tuple(strides), offset, dtype or self.dtype, self.storage, self.buffer, kept)
        return new

    # What a kernel may ask while it is built

    @property
    def name(self) -> str:
        """The name of the storage."""
        return self.storage.name

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def on_chip(self) -> bool:
        """Whether the tensor is in SBUF or PSUM."""
        return self.buffer is MemoryRegion.sbuf or self.buffer is MemoryRegion.psum

    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in storage; on chip, within each partition."""
        first = 1 if self.on_chip else 0
        expected = 1
        for size, stride in zip(reversed(self.shape[first:]), reversed(self.strides[first:]), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] per dimension, in elements."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether a part of the address is known only when the instruction runs."""
        return self._indirection is not None

    # Views

    def __getitem__(self, key: Any) -> NkiTensor:
        """NumPy-style indexing with integers, slices, `...`, `nl.ds(start, size)`, registers and (1, 1) tensors.

        On chip, an integer keeps dimension 0 as size 1, and the result has two dimensions at least; in HBM, one.

        Raises:
            NkiValidationError: an index out of bounds, or a step on the partition dimension.
        """
        keys = list(key) if isinstance(key, tuple) else [key]
        ellipses = [i for i, entry in enumerate(keys) if entry is Ellipsis]
        if len(ellipses) > 1:
            raise broken("NkiTensor", "key", repr(key), "has more than one `...`")
        missing = len(self.shape) - (len(keys) - len(ellipses))
        if missing < 0:
            raise broken(
                "NkiTensor", "key", f"{len(keys)} indices", f"for {len(self.shape)} dimensions of {self.name!r} {self.shape}"
            )
        if ellipses:
            keys[ellipses[0] : ellipses[0] + 1] = [_slice(None)] * missing
        else:
            keys += [_slice(None)] * missing

        on_chip = self.on_chip
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        indirection = self._indirection
        dropped: list[int] = []
        for dim, (entry, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            fixed = indirection is not None and indirection.dim == dim
            if isinstance(entry, _slice):
                if entry.start is None and entry.stop is None and entry.step is None:
                    start, count, step = 0, size, 1
                else:
                    start, count, step = self._slice_bounds(entry, dim, size)
            elif isinstance(entry, DynamicSlice):
                if isinstance(entry.start, VirtualRegister | NkiTensor):
                    indirection = self._dynamic(entry.start, dim, stride, size - entry.size + 1, indirection)
                    start, count, step, fixed = 0, entry.size, 1, False
                else:
                    start, count, step = self._slice_bounds(_slice(entry.start, entry.start + entry.size), dim, size)
            elif isinstance(entry, VirtualRegister | NkiTensor):
                indirection = self._dynamic(entry, dim, stride, size, indirection)
                start, count, step, fixed = 0, 0, 1, False
            else:
                start, count, step = self._integer(entry, dim, size), 0, 1
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
                    f"step {step} on the partition dimension of {self.name!r}",
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
            indirection = Indirection(indirection.kind, indirection.index, indirection.stride, moved, indirection.limit)
        return self._view([shape[i] for i in live], [strides[i] for i in live], offset, indirection=indirection)

    def _slice_bounds(self, entry: Any, dim: int, size: int) -> tuple[int, int, int]:
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
                f"{entry.start}:{entry.stop}:{step} in dimension {dim} of {self.name!r} {self.shape}",
                f"needs 0 <= start < stop <= {size} and step >= 1",
                "Clip the slice to the tensor.",
            )
        return start, -(-(stop - start) // step), step

    def _integer(self, entry: Any, dim: int, size: int) -> int:
        try:
            position: int = entry.__index__()
        except (AttributeError, TypeError):
            raise broken(
                "NkiTensor", "key", f"{entry!r} in dimension {dim}", "is no integer, slice, `...`, nl.ds or register"
            ) from None
        if not -size <= position < size:
            raise broken(
                "NkiTensor",
                "key",
                f"index {position} in dimension {dim} of {self.name!r} {self.shape}",
                f"is outside [0, {size})",
            )
        return position + size if position < 0 else position

    def _dynamic(self, index: Any, dim: int, stride: int, limit: int, already: Indirection | None) -> Indirection:
        if already is not None:
            raise broken(
                "NkiTensor", "index", f"dimension {dim}", "is a second dynamic index", "Use one per view; is_indirect() tells."
            )
        if self.on_chip and dim == 0:
            raise broken("NkiTensor", "index", "the partition dimension", "cannot be selected dynamically")
        if isinstance(index, NkiTensor) and (index.size != 1 or index.buffer is not MemoryRegion.sbuf):
            raise broken("NkiTensor", "index", f"{index.shape} in {index.buffer.name}", "must be one element in SBUF")
        return Indirection("scalar", index, stride, None, limit)

    def _dim(self, function: str, dim: int, free: bool = True) -> int:
        """A dimension given by a caller, counted from the front."""
        position = dim + len(self.shape) if dim < 0 else dim
        if not 0 <= position < len(self.shape):
            raise broken(
                f"NkiTensor.{function}", "dim", str(dim), f"is outside the {len(self.shape)} dimensions of {self.shape}"
            )
        if free and position == 0 and self._partition_first():
            raise broken(
                f"NkiTensor.{function}", "dim", "0", f"is the partition dimension of {self.name!r} and must stay as it is"
            )
        return position

    def _partition_first(self) -> bool:
        return self.on_chip or (self._indirection is not None and self._indirection.kind == "vector")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start, start + step, ... before end of one dimension; 0 <= start < end <= size, step >= 1."""
        dim = self._dim("slice", dim, free=False)
        if not (0 <= start < end <= self.shape[dim] and step >= 1):
            raise broken(
                "NkiTensor.slice",
                "start, end, step",
                f"({start}, {end}, {step}) in dimension {dim} of {self.shape}",
                f"needs 0 <= start < end <= {self.shape[dim]} and step >= 1",
            )
        key: list[Any] = [_slice(None)] * len(self.shape)
        key[dim] = _slice(start, end, step)
        return self[tuple(key)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """One element of a dimension, which is removed; `index` is an integer, or a tensor or register read at run time."""
        dim = self._dim("select", dim, free=True)
        if isinstance(index, VirtualRegister | NkiTensor):
            indirection: Indirection | None = self._dynamic(index, dim, self.strides[dim], self.shape[dim], self._indirection)
            offset = self.offset
        else:
            if self._indirection is not None and self._indirection.dim == dim:
                raise broken("NkiTensor.select", "dim", str(dim), "is indirect and cannot be selected")
            if not 0 <= index < self.shape[dim]:
                raise broken(
                    "NkiTensor.select",
                    "index",
                    f"{index} in dimension {dim} of {self.shape}",
                    f"is outside [0, {self.shape[dim]})",
                )
            offset = self.offset + int(index) * self.strides[dim]
            indirection = self._indirection
        shape, strides = list(self.shape), list(self.strides)
        del shape[dim], strides[dim]
        return self._view(shape, strides, offset, indirection=_shifted(indirection, dim, -1))

    def permute(self, dims: tuple[int, ...]) -> NkiTensor:
        """The dimensions in another order; on chip dims[0] is 0."""
        if sorted(dims) != list(range(len(self.shape))):
            raise broken("NkiTensor.permute", "dims", str(dims), f"is no permutation of the {len(self.shape)} dimensions")
        if self._partition_first() and dims[0] != 0:
            raise broken("NkiTensor.permute", "dims", str(dims), "must start with 0, the partition dimension")
        indirection = self._indirection
        if indirection is not None and indirection.dim is not None:
            indirection = Indirection(
                indirection.kind, indirection.index, indirection.stride, list(dims).index(indirection.dim), indirection.limit
            )
        return self._view([self.shape[d] for d in dims], [self.strides[d] for d in dims], self.offset, indirection=indirection)

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """A dimension of size 1 repeated `size` times (stride 0)."""
        dim = self._dim("broadcast", dim)
        if self.shape[dim] != 1:
            raise broken("NkiTensor.broadcast", "dim", f"{dim} of size {self.shape[dim]}", "must have size 1")
        if size < 1:
            raise broken("NkiTensor.broadcast", "size", str(size), "must be positive")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(shape, strides, self.offset)

    def expand_dim(self, dim: int) -> NkiTensor:
        """A new dimension of size 1 at `dim`."""
        position = dim + len(self.shape) + 1 if dim < 0 else dim
        if not 0 <= position <= len(self.shape):
            raise broken(
                "NkiTensor.expand_dim", "dim", str(dim), f"is outside the {len(self.shape)} dimensions of {self.shape}"
            )
        if position == 0 and self._partition_first():
            raise broken("NkiTensor.expand_dim", "dim", "0", "would come before the partition dimension")
        stride = self.strides[position] * self.shape[position] if position < len(self.shape) else 1
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(position, 1)
        strides.insert(position, stride)
        return self._view(shape, strides, self.offset, indirection=_shifted(self._indirection, position, 1))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of size 1."""
        dim = self._dim("squeeze_dim", dim)
        if self.shape[dim] != 1:
            raise broken("NkiTensor.squeeze_dim", "dim", f"{dim} of size {self.shape[dim]}", "must have size 1")
        shape, strides = list(self.shape), list(self.strides)
        del shape[dim], strides[dim]
        return self._view(shape, strides, self.offset, indirection=_shifted(self._indirection, dim, -1))

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        """Split one dimension; one entry of `shape` may be -1."""
        trivial = len(shape) == 1
        dim = self._dim("reshape_dim", dim, free=not trivial)
        sizes = _infer("NkiTensor.reshape_dim", tuple(shape), self.shape[dim])
        strides = [self.strides[dim] * factor for factor in _row_major(sizes)]
        indirection = self._indirection
        if indirection is not None and indirection.dim == dim and not trivial:
            raise broken("NkiTensor.reshape_dim", "dim", str(dim), "is indirect and cannot be split")
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
            self.offset,
            indirection=_shifted(indirection, dim + 1, len(sizes) - 1),
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge the dimensions start_dim to end_dim (inclusive), which must follow each other in storage."""
        start, end = self._dim("flatten_dims", start_dim, free=False), self._dim("flatten_dims", end_dim, free=False)
        if start > end:
            raise broken("NkiTensor.flatten_dims", "start_dim, end_dim", f"({start_dim}, {end_dim})", "are in the wrong order")
        if start == 0 and end > 0 and self._partition_first():
            raise broken("NkiTensor.flatten_dims", "start_dim", "0", "is the partition dimension and cannot be merged")
        merged = _merge(self.shape[start : end + 1], self.strides[start : end + 1])
        if merged is None:
            raise broken(
                "NkiTensor.flatten_dims",
                "start_dim, end_dim",
                f"({start_dim}, {end_dim}) with shape {self.shape} and strides {self.strides}",
                "do not follow each other in storage",
            )
        return self._view(
            (*self.shape[:start], prod(self.shape[start : end + 1]), *self.shape[end + 1 :]),
            (*self.strides[:start], merged, *self.strides[end + 1 :]),
            self.offset,
            indirection=_shifted(self._indirection, end + 1, start - end),
        )

    def reshape(self, shape: tuple[int, ...]) -> NkiTensor:
        """Another shape of the same number of elements, if the layout allows it without a copy; on chip, shape[0] stays."""
        sizes = _infer("NkiTensor.reshape", tuple(shape), self.size)
        if self._partition_first():
            if sizes[0] != self.shape[0]:
                raise broken(
                    "NkiTensor.reshape", "shape", f"{shape}: partition dimension {sizes[0]}", f"must stay {self.shape[0]}"
                )
            strides = _reshaped(self.shape[1:], self.strides[1:], sizes[1:])
            strides = None if strides is None else (self.strides[0], *strides)
        else:
            strides = _reshaped(self.shape, self.strides, sizes)
        if strides is None:
            raise broken(
                "NkiTensor.reshape",
                "shape",
                f"{shape} of shape {self.shape} with strides {self.strides}",
                "needs a copy",
                "Copy to a new tensor first.",
            )
        return self._view(sizes, strides, self.offset)

    def rearrange(
        self, src_pattern: tuple[Any, ...], dst_pattern: tuple[Any, ...], fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """Split, reorder and merge dimensions by name, as in einops: `t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})`."""
        where = "NkiTensor.rearrange"
        if len(src_pattern) != len(self.shape):
            raise broken(where, "src_pattern", str(src_pattern), f"names {len(src_pattern)} dimensions of {len(self.shape)}")
        fixed = dict(fixed_sizes or {})
        names: list[str] = []
        view = self
        for group in src_pattern:
            members = (group,) if isinstance(group, str) else tuple(group)
            sizes = tuple(fixed.get(name, -1) for name in members)
            if len(members) == 1:
                size = view.shape[len(names)]
                if fixed.get(members[0], size) != size:
                    raise broken(
                        where, "fixed_sizes", f"{members[0]}={fixed[members[0]]}", f"differs from the dimension's size {size}"
                    )
            elif members:
                view = view.reshape_dim(len(names), sizes)
            else:
                view = view.squeeze_dim(len(names))
            names += members
        flat = [name for group in dst_pattern for name in ((group,) if isinstance(group, str) else group)]
        if sorted(flat) != sorted(names) or len(set(names)) != len(names):
            raise broken(where, "dst_pattern", str(dst_pattern), f"must name each of {names} once")
        view = view.permute(tuple(names.index(name) for name in flat))
        position = 0
        for group in dst_pattern:
            if isinstance(group, str):
                position += 1
            elif len(group) == 0:
                view = view.expand_dim(position)
                position += 1
            else:
                view = view.flatten_dims(position, position + len(group) - 1)
                position += 1
        return view

    def view(self, dtype: Any) -> NkiTensor:
        """The same bytes as another type; the last dimension, which must be contiguous, grows or shrinks."""
        name = canonical(dtype, "NkiTensor.view")
        if self._indirection is not None:
            raise broken("NkiTensor.view", "dtype", name, "is not possible for an indirect view")
        old, new = numpy_dtype(self.dtype).itemsize, numpy_dtype(name).itemsize
        if old == new:
            return self._view(self.shape, self.strides, self.offset, name)
        if self.shape[-1] != 1 and self.strides[-1] != 1:
            raise broken(
                "NkiTensor.view", "dtype", name, f"needs a contiguous last dimension, which has stride {self.strides[-1]}"
            )
        scaled = [*(stride * old for stride in self.strides[:-1]), self.offset * old, self.shape[-1] * old]
        if any(value % new for value in scaled):
            raise broken(
                "NkiTensor.view",
                "dtype",
                f"{name} of shape {self.shape}, strides {self.strides}, offset {self.offset}",
                f"does not divide by {new} B",
            )
        return self._view(
            (*self.shape[:-1], scaled[-1] // new), (*(value // new for value in scaled[:-2]), 1), scaled[-2] // new, name
        )

    reinterpret_cast = view

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """A raw access pattern [[stride, count], ...] over the flat storage, in elements of `dtype`.

        On chip the first pair is the partition: its stride is the elements of one partition. Without `offset`, the view's own offset holds; the
        documents disagree about an explicit `offset` on a view that has one, so that is an error here. `scalar_offset` (a register or a (1, 1)
        tensor) and `vector_offset` (one index per partition; HBM only) add index x the stride of dimension `indirect_dim`.

        Raises:
            NkiValidationError: addresses outside the storage or across partitions, a partition stride, two indirections.
        """
        where = "NkiTensor.ap"
        name = self.dtype if dtype is None else canonical(dtype, where)
        old, new = numpy_dtype(self.dtype).itemsize, numpy_dtype(name).itemsize
        try:
            strides = tuple(int(pair[0]) for pair in pattern)
            shape = tuple(int(pair[1]) for pair in pattern)
        except (TypeError, IndexError):
            raise broken(where, "pattern", repr(pattern), "is no list of [stride, count] pairs") from None
        if not shape or min(shape) < 1:
            raise broken(where, "pattern", str(pattern), "has a count below 1")
        if offset is None:
            if self.offset * old % new:
                raise broken(where, "dtype", f"{name} at offset {self.offset} of {self.dtype}", f"does not divide by {new} B")
            start = self.offset * old // new
        elif self.offset != 0:
            raise broken(
                where,
                "offset",
                f"{offset} on a view with offset {self.offset}",
                "is ambiguous: the documents disagree on whether they add",
                "Call .ap on the whole tensor, or leave `offset` out.",
            )
        else:
            start = int(offset)
        if start < 0:
            raise broken(where, "offset", str(offset), "is negative")
        indirection = self._ap_indirection(scalar_offset, vector_offset, indirect_dim, old, new)
        view = self._view(shape, strides, start, name, indirection)
        elements = self.storage.raw.nbytes // new
        vector = indirection is not None and indirection.kind == "vector"
        low = start + sum(min(0, (n - 1) * s) for n, s in zip(shape[vector:], strides[vector:], strict=True))
        high = start + sum(max(0, (n - 1) * s) for n, s in zip(shape[vector:], strides[vector:], strict=True))
        if low < 0 or high >= elements:
            raise broken(
                where,
                "pattern",
                f"{pattern} with offset {start} reaches elements {low} to {high}",
                f"outside the {elements} of {self.name!r}",
            )
        if self.on_chip:
            self._check_partitions(pattern, shape, strides, start, new)
        return view

    def _ap_indirection(self, scalar: Any, vector: NkiTensor | None, dim: int, old: int, new: int) -> Indirection | None:
        where = "NkiTensor.ap"
        if scalar is None and vector is None:
            return self._indirection
        if scalar is not None and vector is not None:
            raise broken(where, "scalar_offset, vector_offset", "both", "are given", "Use one of them.")
        if not 0 <= dim < len(self.shape):
            raise broken(where, "indirect_dim", str(dim), f"is outside the {len(self.shape)} dimensions of {self.shape}")
        stride = self.strides[dim] * old // new
        if scalar is not None:
            made = self._dynamic(scalar, -1 if self.on_chip and dim else dim, stride, _unlimited(self), self._indirection)
            return made
        assert vector is not None
        if self.on_chip:
            raise broken(where, "vector_offset", f"on a tensor in {self.buffer.name}", "needs a tensor in HBM")
        if dim != 0:
            raise broken(where, "indirect_dim", str(dim), "must be 0 with `vector_offset`")
        return self._vector(where, vector, stride)

    def _vector(self, where: str, index: NkiTensor, stride: int) -> Indirection:
        if self._indirection is not None:
            raise broken(where, "vector_offset", "on an indirect view", "is a second dynamic index")
        if (
            not isinstance(index, NkiTensor)
            or index.buffer is not MemoryRegion.sbuf
            or not index.dtype.startswith(("int", "uint"))
        ):
            raise broken(where, "vector_offset", repr(index), "must be an integer tensor in SBUF, shape (partitions, 1)")
        return Indirection("vector", index, stride, 0, self.shape[0])

    def _check_partitions(
        self, pattern: Any, shape: tuple[int, ...], strides: tuple[int, ...], start: int, itemsize: int
    ) -> None:
        pitch = self.storage.partition_bytes // itemsize
        if shape[0] > 1 and strides[0] != pitch:
            raise broken(
                "NkiTensor.ap",
                "pattern",
                f"{pattern}: partition stride {strides[0]}",
                f"must be {pitch}, the elements of one partition",
            )
        within = start % pitch if pitch else 0
        low = within + sum(min(0, (n - 1) * s) for n, s in zip(shape[1:], strides[1:], strict=True))
        high = within + sum(max(0, (n - 1) * s) for n, s in zip(shape[1:], strides[1:], strict=True))
        if low < 0 or high >= pitch:
            raise broken(
                "NkiTensor.ap",
                "pattern",
                f"{pattern} reaches elements {low} to {high} of a partition",
                f"outside its {pitch} elements",
            )

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """One row of an HBM tensor per partition: dimension 0 becomes the partitions of `vector_offset` [P, 1]."""
        where = "NkiTensor.vector_select"
        if dim != 0:
            raise broken(where, "dim", str(dim), "must be 0")
        if self.on_chip:
            raise broken(where, "vector_offset", f"on a tensor in {self.buffer.name}", "needs a tensor in HBM")
        indirection = self._vector(where, vector_offset, self.strides[0])
        return self._view((vector_offset.shape[0], *self.shape[1:]), self.strides, self.offset, indirection=indirection)

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Columns of the free dimension at offsets that `index` [P, K] holds in groups of partitions (trn3 only).

        Offset i of a group is index[i % G, i // G]: G is 16 partitions for Vector, Scalar and GpSimd, 32 for the tensor engine. The result has
        shape (P, num_elem).
        """
        from .core import current

        where = "NkiTensor.indirect"
        if current(where).machine.nc_version < 4:
            raise broken(where, "self", self.name, "needs NeuronCore-v4 (trn3)")
        if len(self.shape) != 2 or not self.on_chip:
            raise broken(where, "self", f"{self.shape} in {self.buffer.name}", "must have two dimensions on chip")
        if not isinstance(index, NkiTensor) or index.buffer is not MemoryRegion.sbuf or index.shape[0] != self.shape[0]:
            raise broken(where, "index", repr(index), f"must be in SBUF with {self.shape[0]} partitions")
        if self._indirection is not None:
            raise broken(where, "index", "on an indirect view", "is a second dynamic index")
        count = index.size if num_elem is None else num_elem
        indirection = Indirection("columns", index, self.strides[1], 1, self.shape[1])
        return self._view((self.shape[0], count), self.strides, self.offset, indirection=indirection)

    # What instructions use

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        return prod(self.shape[1:])

    @property
    def start_partition(self) -> int:
        """The first partition of an on-chip view."""
        pitch = self.storage.partition_bytes
        return self.storage.base_partition + (self.offset * self.itemsize // pitch if pitch else 0)

    @property
    def array(self) -> np.ndarray:
        """The elements as a NumPy array that shares the storage. Not for vector and column indirection, whose addresses form no pattern."""
        if self._indirection is not None:
            if self._indirection.kind != "scalar":
                raise NkiValidationError(
                    f"{self.name!r} is a {self._indirection.kind}-indirect view, which this instruction cannot address."
                )
            return self._at(self.offset + self._scalar() * self._indirection.stride)
        if self._array is None:
            self._array = self._at(self.offset)
        return self._array

    def _at(self, offset: int, shape: tuple[int, ...] | None = None, strides: tuple[int, ...] | None = None) -> np.ndarray:
        itemsize = numpy_dtype(self.dtype).itemsize
        return np.ndarray(
            self.shape if shape is None else shape,
            numpy_dtype(self.dtype),
            self.storage.raw,
            offset * itemsize,
            [stride * itemsize for stride in (self.strides if strides is None else strides)],
        )

    def _scalar(self) -> int:
        assert self._indirection is not None
        value = scalar_value(self._indirection.index)
        span = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        first = self.offset + value * self._indirection.stride
        elements = self.storage.raw.nbytes // self.itemsize
        outside = first + sum(min(0, s) for s in span) < 0 or first + sum(max(0, s) for s in span) >= elements
        if self.on_chip and not outside:
            pitch = self.storage.partition_bytes // self.itemsize
            outside = first % pitch + sum(max(0, s) for s in span[1:]) >= pitch
        if outside or not 0 <= value < self._indirection.limit:
            raise OutOfBoundsError(f"{self.name!r} {self.shape}: dynamic offset {value} is out of bounds")
        return value

    def rows(self) -> np.ndarray:
        """The offsets of a vector-indirect view, one per row."""
        assert self._indirection is not None
        # the hardware reads a matrix of indices column by column
        return self._indirection.index.array.T.reshape(-1)[: self.shape[0]].astype(np.int64)

    def row_in_bounds(self, row: int) -> bool:
        """Whether a row of a vector-indirect view lies in the tensor."""
        assert self._indirection is not None
        return 0 <= row < self._indirection.limit

    def row(self, index: int) -> np.ndarray:
        """The elements of a vector-indirect view at one row of the base."""
        assert self._indirection is not None
        return self._at(self.offset + index * self._indirection.stride, self.shape[1:], self.strides[1:])

    @property
    def indirection(self) -> Indirection | None:
        """The dynamic part of the address."""
        return self._indirection

    def columns(self, group: int) -> np.ndarray:
        """For a column-indirect view: the column of each element, (P, num_elem)."""
        assert self._indirection is not None
        index, count = self._indirection.index.array.astype(np.int64), self.shape[1]
        partitions = np.arange(self.shape[0]) // group * group
        position = np.arange(count)
        rows = partitions[:, None] + position % group
        if rows.max() >= index.shape[0] or position.max() // group >= index.shape[1]:
            raise broken(
                "NkiTensor.indirect",
                "num_elem",
                str(count),
                f"needs more offsets than `index` {index.shape} holds in groups of {group}",
            )
        found = index[rows, position // group]
        if found.min() < 0 or found.max() >= self._indirection.limit:
            raise OutOfBoundsError(
                f"{self.name!r}: indirect column {found.min()} to {found.max()} is outside [0, {self._indirection.limit})"
            )
        return found

    def read(self, group: int = 16) -> np.ndarray:
        """The elements, as an engine that gathers columns in groups of `group` partitions sees them."""
        if self._indirection is not None and self._indirection.kind == "columns":
            whole = self._at(self.offset, (self.shape[0], self._indirection.limit))
            return np.take_along_axis(whole, self.columns(group), axis=1)
        return self.array

    def write(self, values: np.ndarray, group: int = 16) -> None:
        """Store values of this type, whose shape may differ from the view's."""
        if self._indirection is not None and self._indirection.kind == "columns":
            whole = self._at(self.offset, (self.shape[0], self._indirection.limit))
            np.put_along_axis(whole, self.columns(group), values.reshape(self.shape), axis=1)
            return
        self.array[...] = values if values.shape == self.shape else values.reshape(self.shape)

    def float32(self) -> np.ndarray:
        """The elements in float32, as an engine reads them."""
        return to_float32(self.read())

    @property
    def covers_storage(self) -> bool:
        """Whether the view is all of the storage, each element once, in any order."""
        if self._covers is None:
            expected = 1
            for stride, size in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n != 1):
                if stride != expected:
                    self._covers = False
                    break
                expected *= size
            else:
                self._covers = self._indirection is None and expected * self.itemsize == self.storage.raw.nbytes
        return self._covers

    def repeats_elements(self) -> bool:
        """Whether two indices of the view address one element."""
        dims = sorted((abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n != 1)
        reach = 0
        for stride, size in dims:
            if stride <= reach:
                break
            reach += stride * (size - 1)
        else:
            return False
        addresses = np.zeros((), np.int64)
        for stride, size in dims:
            addresses = np.add.outer(addresses, stride * np.arange(size))
        return np.unique(addresses).size != addresses.size

    def started(self) -> Any:
        """The start bits of a PSUM view: one number while all of the storage agrees, else an array that shares them."""
        storage = self.storage
        if not isinstance(storage.started, np.ndarray):
            return storage.started
        return self._bits(storage.started)

    def start(self, state: int) -> None:
        """Set the start bits of a PSUM view."""
        storage = self.storage
        if not isinstance(storage.started, np.ndarray):
            if storage.started == state:
                return
            if self.covers_storage:
                storage.started = state
                return
            # one entry per byte, of which an element uses its first: views of other types find their own
            storage.started = np.full(storage.raw.nbytes, storage.started, np.uint8)
        if self.covers_storage:
            storage.started = state
        else:
            self._bits(storage.started)[...] = state

    def _bits(self, flat: np.ndarray) -> np.ndarray:
        per = self.itemsize
        indirection = self._indirection
        offset = self.offset if indirection is None else self.offset + self._scalar() * indirection.stride
        return np.ndarray(self.shape, np.uint8, flat, offset * per, [stride * per for stride in self.strides])

    # What a kernel may not do

    def __setitem__(self, key: Any, value: Any) -> None:
        """Copy a tile into a part of this tensor, as `nisa.tensor_copy` (on chip) or `nisa.dma_copy` (HBM) does."""
        from .isa import dma_copy, tensor_copy

        target = self[key]
        if not isinstance(value, NkiTensor):
            raise TypeError(f"NkiTensor `value`: {value!r} is no tensor. Use nisa.memset for a constant.")
        (tensor_copy if target.on_chip and value.on_chip else dma_copy)(target, value)

    def __bool__(self) -> bool:
        raise TypeError(
            f"tensor {self.name!r} has no truth value while a kernel is built. Load it into a register, or use nl.fori_loop."
        )

    def __iter__(self) -> Any:
        raise TypeError(f"tensor {self.name!r} cannot be iterated. Index it with nl.ds or slices.")

    def __repr__(self) -> str:
        return f"NkiTensor({self.name!r}, {self.shape}, {self.dtype}, {self.buffer.name})"


class OutOfBoundsError(NkiValidationError):
    """A dynamic address outside the tensor: an error, unless the DMA says oob_mode.skip."""


def scalar_value(index: Any) -> int:
    """The integer in a register or in a tensor of one element."""
    if isinstance(index, NkiTensor):
        return int(index.array.reshape(-1)[0])
    if isinstance(index, VirtualRegister):
        return index.value
    return int(index)


def _unlimited(tensor: NkiTensor) -> int:
    return tensor.storage.raw.nbytes + 1


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _shifted(indirection: Indirection | None, position: int, by: int) -> Indirection | None:
    """The indirection after `by` dimensions were inserted (or removed) at `position`."""
    if indirection is None or indirection.dim is None or indirection.dim < position:
        return indirection
    return Indirection(indirection.kind, indirection.index, indirection.stride, indirection.dim + by, indirection.limit)


def _infer(function: str, shape: tuple[int, ...], total: int) -> tuple[int, ...]:
    """`shape` with its -1 replaced so that it holds `total` elements."""
    unknown = [i for i, size in enumerate(shape) if size == -1]
    known = prod(size for size in shape if size != -1)
    if len(unknown) > 1 or any(size < 1 and size != -1 for size in shape):
        raise broken(function, "shape", str(shape), "must be positive, with at most one -1")
    if unknown and known and total % known == 0:
        shape = (*shape[: unknown[0]], total // known, *shape[unknown[0] + 1 :])
    if prod(shape) != total:
        raise broken(function, "shape", str(shape), f"does not hold {total} elements")
    return shape


def _merge(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of the merged dimension, or None if the dimensions do not follow each other."""
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if not dims:
        return strides[-1] if strides else 1
    for (_, outer), (inner_size, inner) in itertools.pairwise(dims):
        if outer != inner * inner_size:
            return None
    return dims[-1][1]


def _reshaped(shape: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Strides that read the elements in the same order with other sizes, or None if there are none."""
    old = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    position = 0
    i = 0
    while i < len(sizes):
        if sizes[i] == 1:
            result.append(1)
            i += 1
            continue
        # the smallest groups of old and new dimensions with the same number of elements
        j, k = position, i
        have = want = 1
        while j < len(old) and k <= len(sizes):
            if have <= want or have == 1:
                have *= old[j][0]
                j += 1
            while want < have and k < len(sizes):
                want *= sizes[k]
                k += 1
            if have == want:
                break
        stride = _merge([size for size, _ in old[position:j]], [step for _, step in old[position:j]])
        if have != want or stride is None:
            return None
        result += [stride * factor for factor in _row_major(sizes[i:k])]
        position, i = j, k
    return tuple(result)
