# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""NkiTensor: a strided view of storage in SBUF, PSUM or HBM. No method copies data.

On chip, dimension 0 is the partition: it cannot be split, moved, removed or strided, because every partition is a memory of its own and an
instruction reads the same pattern from consecutive partitions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .access import Access
from .dtypes import canonical, numpy_dtype
from .errors import broken
from .indexing import dynamic, indexed
from .indirection import Indirection, shifted
from .memory import Storage
from .objects import MemoryRegion, VirtualRegister
from .strides import infer_shape, merged_stride, reshaped_strides, row_major

__all__ = ["NkiTensor"]

# NkiTensor has a method of this name
_slice = slice


class NkiTensor(Access):
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
        >>> import numpy as np
        >>> import nki3d.simulator as nki
        >>> nl = nki.language
        >>> @nki.jit
        ... def shapes(x):
        ...     tile = nl.ndarray((128, 24), dtype=nl.float32, buffer=nl.sbuf)
        ...     print(tile[:, 8:24:2].shape, tile.reshape_dim(1, (4, -1)).permute((0, 2, 1)).get_pattern())
        >>> shapes(np.zeros((1, 1), np.float32))
        (128, 8) [[24, 128], [1, 6], [6, 4]]
    """

    __slots__ = ()

    def __init__(
        self, shape: tuple[int, ...], dtype: str, storage: Storage, buffer: MemoryRegion = MemoryRegion.sbuf, name: str = ""
    ):
        """Bind a tensor to storage: all of it, in row-major order."""
        self._set(tuple(shape), row_major(shape), 0, canonical(dtype), storage, buffer)
        if name:
            storage.name = name

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

    def __getitem__(self, key: Any) -> NkiTensor:
        """NumPy-style indexing with integers, slices, `...`, `nl.ds(start, size)`, registers and (1, 1) tensors.

        On chip, an integer keeps dimension 0 as size 1, and the result has two dimensions at least; in HBM, one.

        Raises:
            NkiValidationError: an index out of bounds, or a step on the partition dimension.
        """
        shape, strides, offset, indirection = indexed(self, key)
        return self._view(shape, strides, offset, indirection=indirection)

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
            indirection: Indirection | None = dynamic(self, index, dim, self.strides[dim], self.shape[dim], self._indirection)
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
        return self._view(shape, strides, offset, indirection=shifted(indirection, dim, -1))

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
        return self._view(shape, strides, self.offset, indirection=shifted(self._indirection, position, 1))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Remove a dimension of size 1."""
        dim = self._dim("squeeze_dim", dim)
        if self.shape[dim] != 1:
            raise broken("NkiTensor.squeeze_dim", "dim", f"{dim} of size {self.shape[dim]}", "must have size 1")
        shape, strides = list(self.shape), list(self.strides)
        del shape[dim], strides[dim]
        return self._view(shape, strides, self.offset, indirection=shifted(self._indirection, dim, -1))

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        """Split one dimension; one entry of `shape` may be -1."""
        trivial = len(shape) == 1
        dim = self._dim("reshape_dim", dim, free=not trivial)
        sizes = infer_shape("NkiTensor.reshape_dim", tuple(shape), self.shape[dim])
        strides = [self.strides[dim] * factor for factor in row_major(sizes)]
        indirection = self._indirection
        if indirection is not None and indirection.dim == dim and not trivial:
            raise broken("NkiTensor.reshape_dim", "dim", str(dim), "is indirect and cannot be split")
        return self._view(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *strides, *self.strides[dim + 1 :]),
            self.offset,
            indirection=shifted(indirection, dim + 1, len(sizes) - 1),
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge the dimensions start_dim to end_dim (inclusive), which must follow each other in storage."""
        start, end = self._dim("flatten_dims", start_dim, free=False), self._dim("flatten_dims", end_dim, free=False)
        if start > end:
            raise broken("NkiTensor.flatten_dims", "start_dim, end_dim", f"({start_dim}, {end_dim})", "are in the wrong order")
        if start == 0 and end > 0 and self._partition_first():
            raise broken("NkiTensor.flatten_dims", "start_dim", "0", "is the partition dimension and cannot be merged")
        merged = merged_stride(self.shape[start : end + 1], self.strides[start : end + 1])
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
            indirection=shifted(self._indirection, end + 1, start - end),
        )

    def reshape(self, shape: tuple[int, ...]) -> NkiTensor:
        """Another shape of the same number of elements, if the layout allows it without a copy; on chip, shape[0] stays."""
        sizes = infer_shape("NkiTensor.reshape", tuple(shape), self.size)
        if self._partition_first():
            if sizes[0] != self.shape[0]:
                raise broken(
                    "NkiTensor.reshape", "shape", f"{shape}: partition dimension {sizes[0]}", f"must stay {self.shape[0]}"
                )
            strides = reshaped_strides(self.shape[1:], self.strides[1:], sizes[1:])
            strides = None if strides is None else (self.strides[0], *strides)
        else:
            strides = reshaped_strides(self.shape, self.strides, sizes)
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
        named = {name for group in src_pattern for name in ((group,) if isinstance(group, str) else group)}
        if not named >= fixed.keys():
            raise broken(where, "fixed_sizes", str(sorted(fixed.keys() - named)), f"are none of the names {sorted(named)}")
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
            pairs = [(operator.index(stride), operator.index(count)) for stride, count in pattern]
            strides, shape = tuple(stride for stride, _ in pairs), tuple(count for _, count in pairs)
        except (TypeError, ValueError):
            raise broken(where, "pattern", repr(pattern), "is no list of [stride, count] pairs of integers") from None
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
            made = dynamic(
                self, scalar, -1 if self.on_chip and dim else dim, stride, self.storage.raw.nbytes + 1, self._indirection
            )
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

    # What a kernel may not do

    def __setitem__(self, key: Any, value: Any) -> None:
        """Copy a tile into a part of this tensor, as `nisa.tensor_copy` (on chip) or `nisa.dma_copy` (HBM) does."""
        from .isa import dma_copy, tensor_copy

        target = self[key]
        if not isinstance(value, NkiTensor):
            raise TypeError(f"NkiTensor `value`: {value!r} is no tensor. Use nisa.memset for a constant.")
        (tensor_copy if target.on_chip and value.on_chip else dma_copy)(target, value)

    def __bool__(self) -> bool:
        """Whether all elements are not 0: the documents write `assert nl.equal(a, b)`. On a device, a kernel cannot ask."""
        return bool(np.all(self.read() != 0))

    def __iter__(self) -> Any:
        raise TypeError(f"tensor {self.name!r} cannot be iterated. Index it with nl.ds or slices.")
