# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A strided view of storage, and the access of instructions to its elements."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .dtypes import numpy_dtype, to_float32
from .errors import NkiValidationError, broken
from .indirection import Indirection, OutOfBoundsError
from .memory import Storage
from .objects import MemoryRegion, NKIObject, VirtualRegister
from .strides import addresses_repeat, covers, is_row_major

__all__ = ["Access", "scalar_value"]


class Access(NKIObject):
    """Shape, strides and offset over storage; `NkiTensor` adds the methods that make views."""

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
        return is_row_major(self.shape[first:], self.strides[first:])

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] per dimension, in elements."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether a part of the address is known only when the instruction runs."""
        return self._indirection is not None

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
            elements = self.storage.raw.nbytes // self.itemsize
            self._covers = self._indirection is None and covers(self.shape, self.strides, elements)
        return self._covers

    def repeats_elements(self) -> bool:
        """Whether two indices of the view address one element."""
        return addresses_repeat(self.shape, self.strides)

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

    def __repr__(self) -> str:
        return f"NkiTensor({self.name!r}, {self.shape}, {self.dtype}, {self.buffer.name})"


def scalar_value(index: Any) -> int:
    """The integer in a register or in a tensor of one element."""
    if isinstance(index, Access):
        return int(index.array.reshape(-1)[0])
    if isinstance(index, VirtualRegister):
        return index.value
    return int(index)
