# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""nki.language: data types, memories, tensors, loops and program identity."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod as _prod  # nl.prod takes the plain name
from os import PathLike
from typing import Any

import numpy as np

from . import compute as _compute
from . import isa as _isa
from .access import scalar_value
from .core import active, current
from .dtypes import canonical, fill_poison, numpy_dtype
from .errors import broken
from .machine import Machine, machine_of
from .memory import Storage
from .objects import DynamicSlice, MemoryRegion, NKIObject, VirtualRegister
from .operators import FUNCTIONS, average, bypass, prelu
from .tensor import NkiTensor

DType = str

bool_ = "bool"
int8 = "int8"
int16 = "int16"
int32 = "int32"
uint8 = "uint8"
uint16 = "uint16"
uint32 = "uint32"
float16 = "float16"
float32 = "float32"
bfloat16 = "bfloat16"
tfloat32 = "tfloat32"
float8_e4m3 = "float8_e4m3"
float8_e4m3fn = "float8_e4m3fn"
float8_e5m2 = "float8_e5m2"
float8_e8m0fnu = "float8_e8m0fnu"
float8_e5m2_x4 = "float8_e5m2_x4"
float8_e4m3fn_x4 = "float8_e4m3fn_x4"
float4_e2m1fn_x4 = "float4_e2m1fn_x4"

sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
hbm = private_hbm

# add, multiply, exp, sum and the like; some have names of Python's own functions, which this module takes from `builtins`
globals().update(FUNCTIONS)

__all__ = [
    "DType",
    "DynamicSlice",
    "MemoryRegion",
    "NKIObject",
    "NkiTensor",
    "average",
    "bypass",
    "prelu",
    "tile_size",
    *FUNCTIONS,
]


class _TileSize(NKIObject):
    """Sizes of the target: of the running kernel's, else of the default one."""

    pmax: int
    psum_fmax: int
    psum_bank_fmax: int
    psum_bank_fmax_bytes: int
    gemm_stationary_fmax: int
    gemm_moving_fmax: int
    bn_stats_fmax: int
    psum_min_align: int
    sbuf_min_align: int

    def __init__(self) -> None:
        """No fields: every size is asked for anew, since the target may differ from kernel to kernel."""

    @staticmethod
    def _machine() -> Machine:
        core = active()
        return machine_of() if core is None else core.machine

    def __getattr__(self, name: str) -> int:
        machine = self._machine()
        sizes = {
            "pmax": machine.partitions,
            "psum_fmax": machine.psum_bank_bytes // 4,
            "psum_bank_fmax": machine.psum_bank_bytes // 4,
            "psum_bank_fmax_bytes": machine.psum_bank_bytes,
            "gemm_stationary_fmax": machine.stationary_columns,
            # 512 on every generation: the trn3 limit is that of all of PSUM
            "gemm_moving_fmax": machine.psum_bank_bytes // 4,
            "bn_stats_fmax": machine.bn_stats_elements,
            "psum_min_align": machine.psum_min_align,
            "sbuf_min_align": machine.sbuf_min_align,
        }
        if name not in sizes:
            raise AttributeError(f"nl.tile_size has no {name!r}; it has {', '.join(sizes)}.")
        return sizes[name]

    @property
    def psum_num_banks(self) -> int:
        """PSUM banks per partition."""
        return self._machine().psum_banks

    @property
    def sbuf_size_bytes(self) -> int:
        """SBUF bytes of all partitions together."""
        machine = self._machine()
        return machine.partitions * machine.sbuf_physical_bytes

    @property
    def sbuf_fmax(self) -> int:
        """Usable SBUF per partition, in float32 elements."""
        return self._machine().sbuf_usable_bytes // 4

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Usable SBUF per partition, in bytes."""
        return self._machine().sbuf_usable_bytes

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable SBUF per partition, in bytes; the deprecated name of sbuf_fmax_bytes."""
        return self._machine().sbuf_usable_bytes


tile_size = _TileSize()


def is_hbm(buffer: Any) -> bool:
    """Whether a memory region is HBM."""
    return buffer in (private_hbm, shared_hbm)


def is_sbuf(buffer: Any) -> bool:
    """Whether a memory region is SBUF."""
    return buffer is sbuf


def is_psum(buffer: Any) -> bool:
    """Whether a memory region is PSUM."""
    return buffer is psum


def is_on_chip(buffer: Any) -> bool:
    """Whether a memory region is SBUF or PSUM."""
    return buffer is sbuf or buffer is psum


# Tensors


def ndarray(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None) -> NkiTensor:
    """A new tensor, full of poison: NaN for floating point, 4 for integers.

    Args:
        shape: positive sizes; on chip, two at least, of which the first counts partitions (128 at most).
        dtype: a type of nki.language, NumPy or ml_dtypes.
        buffer: nl.sbuf, nl.psum, nl.hbm (private) or nl.shared_hbm.
        name: unique in the kernel.
        address: (partition, byte offset within the partition) on chip; PSUM starts at a bank.

    Raises:
        NkiValidationError: a shape, address or name that the machine cannot have.
    """
    return _allocate("ndarray", shape, dtype, buffer, name, address)


def _allocate(function: str, shape: Any, dtype: Any, buffer: Any, name: str = "", address: Any = None) -> NkiTensor:
    core = current(f"nl.{function}")
    sizes = _sizes(function, shape)
    kind = canonical(dtype, f"{function} `dtype`")
    if not isinstance(buffer, MemoryRegion):
        raise broken(function, "buffer", repr(buffer), "is no memory region", "Use nl.sbuf, nl.psum, nl.hbm or nl.shared_hbm.")
    label = core.memory.unique_name(name, f"{buffer.value}_")
    if buffer is sbuf or buffer is psum:
        # one element may have one dimension: registers load from such cells
        if len(sizes) < 2 and sizes != (1,):
            raise broken(
                function, "shape", f"{sizes} in {buffer.name}", "needs two dimensions at least: partitions and elements"
            )
        storage = core.memory.allocate(sizes, kind, buffer.value, label, address, function)
        return NkiTensor(sizes, kind, storage, buffer)
    if address is not None:
        raise broken(function, "address", repr(address), f"is not possible in {buffer.name}")

    def make() -> Storage:
        raw = np.empty(_prod(sizes), numpy_dtype(kind))
        fill_poison(raw, kind)
        return Storage(raw, buffer.value, label)

    if buffer is shared_hbm and core.group is not None:
        index = core.shared_allocations
        core.shared_allocations += 1
        storage = core.group.shared_storage(index, (sizes, kind), make)
    else:
        storage = make()
    return NkiTensor(sizes, kind, storage, buffer)


def _sizes(function: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size.__index__()) for size in (shape if isinstance(shape, tuple | list) else (shape,)))
    except (AttributeError, TypeError):
        raise broken(function, "shape", repr(shape), "is not made of integers") from None
    if not sizes or builtins.min(sizes) < 1:
        raise broken(function, "shape", str(sizes), "must be positive")
    return sizes


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor full of 0."""
    return _filled("zeros", shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor full of 1."""
    return _filled("ones", shape, 1, dtype, buffer, name)


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """A new tensor full of one value."""
    return _filled("full", shape, fill_value, dtype, buffer, name)


def _filled(function: str, shape: Any, value: Any, dtype: Any, buffer: Any, name: str) -> NkiTensor:
    tensor = _allocate(function, shape, dtype, buffer, name)
    if tensor.on_chip and len(tensor.shape) > 1:
        _isa.memset(tensor, value)
    else:
        tensor.array[...] = numpy_dtype(tensor.dtype).type(value)
    return tensor


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """A new tensor full of 0, with the shape, and by default the type and memory, of another."""
    return _filled("zeros_like", x.shape, 0, x.dtype if dtype is None else dtype, x.buffer if buffer is None else buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """A new tensor full of poison, with the shape, and by default the type and memory, of another."""
    return _allocate("empty_like", x.shape, x.dtype if dtype is None else dtype, x.buffer if buffer is None else buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A tensor in shared HBM with the values of a NumPy array or of a `.npy` file.

    Raises:
        ValueError: a data type that NKI does not have.
    """
    current("nl.shared_constant")
    values = np.load(constant) if isinstance(constant, str | PathLike) else np.asarray(constant)
    kind = canonical(values.dtype, "shared_constant `constant`")
    raw = np.ascontiguousarray(values, numpy_dtype(kind)).reshape(-1).copy()
    storage = Storage(raw, shared_hbm.value, "shared_constant")
    return NkiTensor(values.shape or (1,), kind, storage, shared_hbm)


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """The n x n identity in SBUF, in `dst` if one is given.

    Raises:
        NkiValidationError: more than 128 rows, or a `dst` of another shape.
    """
    core = current("nl.shared_identity_matrix")
    tile = _allocate("shared_identity_matrix", (n, n), dtype, sbuf) if dst is None else dst
    if tile.shape != (n, n) or tile.buffer is not sbuf:
        raise broken("shared_identity_matrix", "dst", f"{tile.shape} in {tile.buffer.name}", f"must be ({n}, {n}) in sbuf")
    tile.array[...] = _compute.identity(n, tile.dtype)
    # it comes from a constant in HBM
    core.hbm_read_bytes += tile.size * tile.itemsize
    core.issue_dma(
        "shared_identity_matrix", (tile,), (), tile.size * tile.itemsize, n, -(-n // core.machine.dma_partitions_per_engine)
    )
    return tile


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor."""
    shape = src.shape if len(src.shape) > 1 else (1, *src.shape)
    tile = _allocate("load", shape, src.dtype if dtype is None else dtype, sbuf)
    _isa.dma_copy(tile, src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Copy an SBUF tile to an HBM tensor; a PSUM tile goes through SBUF."""
    tile = _compute.on_chip("store", "value", value)
    if tile.buffer is psum:
        moved = _allocate("store", tile.shape, dst.dtype, sbuf)
        _isa.tensor_copy(moved, tile)
        tile = moved
    _isa.dma_copy(dst, tile)


def ds(start: Any, size: int) -> DynamicSlice:
    """`size` elements from `start`, an integer or a register: `t[:, nl.ds(i, 8)]`."""
    return DynamicSlice(start, size)


# Loops and program identity


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's range; all loops are unrolled."""
    return range(start) if stop is None else range(start, stop, step)


def sequential_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's range; all loops are unrolled."""
    return range(start) if stop is None else range(start, stop, step)


def static_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """Python's range; all loops are unrolled."""
    return range(start) if stop is None else range(start, stop, step)


def _bounds(function: str, start: Any, stop: Any, step: Any) -> range:
    core = current(f"nl.{function}")
    if core.reordering_forbidden:
        raise broken(function, "body", "inside nl.no_reorder()", "is not supported", "Put nl.no_reorder() inside the loop.")
    if isinstance(step, VirtualRegister) or step < 1:
        raise broken(function, "step", repr(step), "must be a positive constant")
    for name, bound in (("lower", start), ("upper", stop)):
        if not isinstance(bound, int | np.integer | VirtualRegister | NkiTensor):
            raise broken(function, name, repr(bound), "is neither an integer nor a register")
    return range(scalar_value(start), scalar_value(stop), step)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A loop on the device with bounds in registers, as a `for`; NKI 0.7 has nl.fori_loop instead."""
    first, last = (0, start) if stop is None else (start, stop)
    for value in _bounds("dynamic_range", first, last, step):
        yield VirtualRegister(value, frozen=True)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], Any], step: int = 1) -> None:
    """A loop on the device: body_fun(i) for i from `lower` to before `upper`, integers or registers; i is a register, passed by value."""
    for value in _bounds("fori_loop", lower, upper, step):
        if body_fun(VirtualRegister(value)) is not None:
            raise broken(
                "fori_loop", "body_fun", "a result", "is returned", "Return nothing, and keep the state of the loop in tensors."
            )


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop on the device: r = body_fun(r) while r is not 0; not once if `init` is 0.

    Raises:
        NkiValidationError: `init` or a result of the body is no register.
    """
    core = current("nl.while_loop")
    if core.reordering_forbidden:
        raise broken(
            "while_loop", "body_fun", "inside nl.no_reorder()", "is not supported", "Put nl.no_reorder() inside the loop."
        )
    register: Any = init
    name = "init"
    while True:
        if not isinstance(register, VirtualRegister):
            raise broken(
                "while_loop",
                name,
                repr(register),
                "is no register",
                "Make one with nisa.register_alloc, and return it from the body.",
            )
        if register.value == 0:
            return
        register, name = body_fun(VirtualRegister(register.value)), "body_fun"


@contextmanager
def no_reorder() -> Iterator[None]:
    """Instructions inside keep their order; here they always do."""
    core = current("nl.no_reorder")
    core.reordering_forbidden += 1
    try:
        yield
    finally:
        core.reordering_forbidden -= 1


def program_id(axis: int = 0) -> int:
    """The number of this core among those that run the kernel.

    Raises:
        NkiValidationError: another axis than 0.
    """
    core = current("nl.program_id")
    if axis != 0:
        raise broken("program_id", "axis", str(axis), "must be 0: the grid has one dimension")
    return core.program_id


def num_programs(axes: Any = 0) -> int:
    """How many cores run the kernel.

    Raises:
        NkiValidationError: another axis than 0.
    """
    core = current("nl.num_programs")
    if axes is not None and axes != 0 and tuple(np.atleast_1d(axes)) != (0,):
        raise broken("num_programs", "axes", str(axes), "must be 0: the grid has one dimension")
    return core.programs


def program_ndim() -> int:
    """Dimensions of the grid: 1 with several cores, else 0."""
    return 1 if current("nl.program_ndim").programs > 1 else 0


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor's values."""
    current("nl.device_print")
    print(print_prefix, tensor.read())


# Compute functions with a shape of their own


def all(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    """A new tile: 1 where all elements over the last free dimensions `axis` are not 0."""
    return _compute.all_(x, axis, dtype)


def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """A new tile with the softmax over the last dimension of a tile of two."""
    return _compute.softmax(x, axis, dtype)


def rms_norm(
    x: NkiTensor, w: NkiTensor, axis: Any, n: int, epsilon: float = 1e-06, dtype: Any = None, compute_dtype: Any = None
) -> NkiTensor:
    """A new tile with x / sqrt(sum(x^2) / n + epsilon) * w over the last dimension of a tile of two."""
    return _compute.rms_norm(x, w, axis, n, epsilon, dtype, compute_dtype)


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """A new tile with `x` where the condition is not 0, else `y`; both may be numbers."""
    return _compute.where(condition, x, y, dtype)


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """The view with a new dimension of size 1."""
    return x.expand_dim(axis)


def broadcast_to(x: NkiTensor, shape: tuple[int, ...], dtype: Any = None) -> NkiTensor:
    """A new tile with dimensions of size 1 repeated, including the partition."""
    return _compute.broadcast_to(x, shape, dtype)


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new tile [F, P] from [P, F], through the tensor engine."""
    return _compute.transpose(x, dtype)


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """A new PSUM tile with x @ y in float32; with transpose_x, `x` is [K, M]."""
    return _compute.matmul(x, y, transpose_x)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the transpose of an HBM matrix, by DMA."""
    return _compute.load_transpose2d(src, dtype)


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """A new tile with the elements of each partition at flat indices."""
    return _compute.gather_flattened(data, indices, axis, dtype)


def __getattr__(name: str) -> Any:
    """Functions of NKI 0.6 that this simulator does not have raise when they are called."""
    from .missing import missing

    return missing("nki.language", "nl", name)
