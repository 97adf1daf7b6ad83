# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tensor engine: nc_matmul and nc_transpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import Core, current
from ..dtypes import from_float32, to_float32
from ..errors import broken
from ..memory import start_partitions
from ..objects import NkiInstruction
from ..tensor import NkiTensor
from ._common import ON_CHIP, PSUM, SBUF, check_tile, choose, free, member
from ._enums import engine as engines
from ._enums import matmul_perf_mode

__all__ = ["nc_matmul", "nc_transpose"]

_FP8 = ("float8_e4m3", "float8_e5m2", "float8_e4m3fn")
_WIDE = ("float32", "tfloat32")
_TYPES = (*_FP8, "bfloat16", "float16", *_WIDE)


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> NkiInstruction:
    """dst [M, N...] = stationary [K, M]^T @ moving [K, N...], products and sums in float32, in PSUM.

    With `accumulate=None` each element of `dst` is overwritten by the first matmul that reaches it and added to by later ones, until another
    engine writes it. `accumulate=True` on an element that no matmul has started is an error: it is undefined on the device.

    Args:
        dst: in PSUM; float32, on trn3 also bfloat16, in transpose mode the type of the data.
        stationary: in SBUF, K and M up to 128.
        moving: in SBUF, K partitions, up to 512 elements each (trn3: 4096 in float32, 8192 in bfloat16).
        is_stationary_onezero: a hint that costs nothing here.
        is_moving_onezero: a hint that costs nothing here.
        is_transpose: move data bit for bit through an identity matrix.
        accumulate: None, True or False, see above.
        tile_position: (first row, first column) of the array's tile.
        tile_size: (rows, columns) of the array's tile; both or none are given.
        perf_mode: double_row contracts [K, 2, M] with [K, 2, N] in fp8.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("nc_matmul")
    check_tile(core, "nc_matmul", "dst", dst, PSUM)
    check_tile(core, "nc_matmul", "stationary", stationary, SBUF)
    check_tile(core, "nc_matmul", "moving", moving, SBUF)
    member("nc_matmul", "perf_mode", perf_mode, matmul_perf_mode)
    if is_transpose and perf_mode is matmul_perf_mode.double_row:
        raise broken("nc_matmul", "perf_mode", "double_row", "cannot be combined with transpose mode")
    _check_types(core, dst, stationary, moving, is_transpose, perf_mode)

    contracted = stationary.shape[0]
    if moving.shape[0] != contracted:
        raise broken(
            "nc_matmul", "moving", f"partition dimension {moving.shape[0]}", f"differs from that of `stationary`, {contracted}"
        )
    _check_same_rows(stationary, moving)
    rows = _double_row(core, stationary, moving, tile_size) if perf_mode is matmul_perf_mode.double_row else 1
    columns, count = stationary.free_size // rows, moving.free_size // rows
    _check_sizes(core, dst, columns, count)
    _check_array_tile(core, contracted, columns, tile_position, tile_size, dst, stationary, moving)

    weights = to_float32(stationary.read(32)).reshape(contracted * rows, columns)
    data = to_float32(moving.read(32)).reshape(contracted * rows, count)
    product = _transposed(stationary, moving, weights, data) if is_transpose else weights.T @ data
    _accumulate(core, dst, product.reshape(dst.shape), accumulate, is_transpose)

    cycles = max(min(64, columns), count) * (core.machine.float32_matmul_factor if stationary.dtype == "float32" else 1)
    if not is_transpose:
        core.multiply_adds += contracted * rows * columns * count
    return core.issue("nc_matmul", "tensor", cycles, (dst,), (stationary, moving))


def _check_types(
    core: Core, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool, perf_mode: matmul_perf_mode
) -> None:
    generation = core.machine.nc_version
    for name, tensor in (("stationary", stationary), ("moving", moving)):
        if tensor.dtype not in _TYPES:
            raise broken("nc_matmul", name, f"dtype {tensor.dtype}", f"must be one of {', '.join(_TYPES)}")
        if tensor.dtype == "float8_e4m3fn" and generation < 4:
            raise broken("nc_matmul", name, "dtype float8_e4m3fn", "needs NeuronCore-v4 (trn3)")
    types = {stationary.dtype, moving.dtype}
    if any(t in _WIDE for t in types) and not all(t in _WIDE for t in types):
        raise broken(
            "nc_matmul",
            "moving",
            f"dtype {moving.dtype} with `stationary` {stationary.dtype}",
            "must both be float32 or tfloat32, or neither",
            "Cast one of them with tensor_copy.",
        )
    if types == {"float8_e4m3", "float8_e4m3fn"}:
        raise broken("nc_matmul", "moving", "dtypes float8_e4m3 and float8_e4m3fn", "cannot be mixed")
    if perf_mode is matmul_perf_mode.double_row and not all(t in _FP8 for t in types):
        raise broken("nc_matmul", "perf_mode", f"double_row with {stationary.dtype} and {moving.dtype}", "needs fp8 operands")
    allowed = ("float32", "bfloat16") if generation >= 4 else ("float32",)
    if is_transpose and generation >= 3:
        allowed = (*allowed, moving.dtype, stationary.dtype)
    if dst.dtype not in allowed:
        raise broken(
            "nc_matmul", "dst", f"dtype {dst.dtype}", f"must be {' or '.join(dict.fromkeys(allowed))} on {core.machine.name}"
        )


def _double_row(core: Core, stationary: NkiTensor, moving: NkiTensor, tile_size: tuple[int, ...]) -> int:
    if core.machine.nc_version < 3:
        raise broken("nc_matmul", "perf_mode", "double_row", "needs NeuronCore-v3 (trn2)")
    for name, tensor in (("stationary", stationary), ("moving", moving)):
        if len(tensor.shape) < 3 or tensor.shape[1] != 2:
            raise broken("nc_matmul", name, f"shape {tensor.shape}", "must be (K, 2, ...) with double_row")
    if tile_size and tile_size[1] != core.machine.stationary_columns:
        raise broken("nc_matmul", "tile_size", str(tile_size), "cannot tile columns with double_row")
    return 2


def _check_sizes(core: Core, dst: NkiTensor, columns: int, count: int) -> None:
    machine = core.machine
    if columns > machine.stationary_columns:
        raise broken("nc_matmul", "stationary", f"free size {columns}", f"exceeds maximum {machine.stationary_columns}")
    limit = machine.moving_float32 if dst.itemsize == 4 else machine.moving_bfloat16
    if count > limit:
        raise broken("nc_matmul", "moving", f"free size {count}", f"exceeds maximum {limit} of {machine.name}")
    if dst.shape[0] != columns:
        raise broken(
            "nc_matmul", "dst", f"partition dimension {dst.shape[0]}", f"differs from the free size of `stationary`, {columns}"
        )
    if dst.free_size != count:
        raise broken(
            "nc_matmul",
            "dst",
            f"{dst.free_size} elements per partition {dst.shape}",
            f"differ from the free size of `moving`, {count}",
        )
    pitch = dst.storage.partition_bytes
    if machine.nc_version < 4 and pitch > machine.psum_bank_bytes:
        # a matmul of these generations writes one bank
        first = dst.offset * dst.itemsize % pitch
        last = first + sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True)) * dst.itemsize
        if first // machine.psum_bank_bytes != last // machine.psum_bank_bytes:
            raise broken(
                "nc_matmul",
                "dst",
                f"bytes {first} to {last + dst.itemsize} of a partition",
                f"cross a PSUM bank of {machine.psum_bank_bytes} B",
                "Write each bank with a matmul of its own.",
            )


def _check_array_tile(
    core: Core,
    contracted: int,
    columns: int,
    position: Any,
    size: Any,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
) -> None:
    """Check the tile of the array, and that it meets the partitions of the operands."""
    if not position and not size:
        return
    if not position or not size:
        raise broken("nc_matmul", "tile_position, tile_size", f"{position}, {size}", "must be given both or not at all")
    smallest = core.machine.smallest_tile
    legal = tuple(tile for tile in (32, 64, 128) if tile >= smallest)
    for name, used, tile, start in (("row", contracted, size[0], position[0]), ("column", columns, size[1], position[1])):
        if tile not in legal:
            raise broken(
                "nc_matmul", "tile_size", f"{tuple(size)}: {name} size {tile}", f"must be one of {legal} on {core.machine.name}"
            )
        if start % tile or start + tile > 128:
            raise broken(
                "nc_matmul",
                "tile_position",
                f"{tuple(position)}: start {name} {start}",
                f"must be a multiple of {tile} below 128",
            )
        if used > tile:
            raise broken("nc_matmul", "stationary", f"{used} {name}s", f"exceed the tile's {tile}")
    for name, tensor, start in (
        ("dst", dst, position[1]),
        ("stationary", stationary, position[0]),
        ("moving", moving, position[0]),
    ):
        if not _can_start_at(tensor, start):
            raise broken(
                "nc_matmul",
                name,
                f"start partition {tensor.start_partition}",
                f"must be {start}, where the array's tile starts",
            )


def _check_same_rows(stationary: NkiTensor, moving: NkiTensor) -> None:
    """Check that both operands lie on the same partitions, which are the rows of the array."""
    if stationary.start_partition == moving.start_partition:
        return
    starts = [
        {base + tensor.start_partition - tensor.storage.base_partition for base in _bases(tensor)}
        for tensor in (stationary, moving)
    ]
    if not starts[0] & starts[1]:
        raise broken(
            "nc_matmul",
            "moving",
            f"start partition {moving.start_partition}",
            f"differs from that of `stationary`, {stationary.start_partition}",
            "Place both on the same partitions.",
        )


def _bases(tensor: NkiTensor) -> tuple[int, ...]:
    """The partitions where the tensor of a view may begin: its address, or all that the compiler may choose."""
    allocation = tensor.storage.allocation
    if allocation is None or allocation.address is not None:
        return (tensor.storage.base_partition,)
    return start_partitions(allocation.partitions)


def _can_start_at(tensor: NkiTensor, partition: int) -> bool:
    """Whether a view starts at a partition, or would if the compiler places its tensor well."""
    return partition - tensor.start_partition + tensor.storage.base_partition in _bases(tensor)


def _transposed(stationary: NkiTensor, moving: NkiTensor, weights: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Transpose mode moves data bit for bit: NaN and Inf in one lane stay there."""
    for permutation, values in ((data, weights), (weights, data)):
        if _is_permutation(permutation):
            if permutation is data:
                return values.T[:, np.argmax(data, axis=0)]
            return values[np.argmax(weights, axis=0), :]
    raise broken(
        "nc_matmul",
        "is_transpose",
        "with two general matrices",
        "needs a permutation matrix, such as the identity, as one operand",
    )


def _is_permutation(matrix: np.ndarray) -> bool:
    ones = matrix == 1
    return bool(((matrix == 0) | ones).all() and (ones.sum(axis=0) == 1).all())


def _accumulate(core: Core, dst: NkiTensor, product: np.ndarray, accumulate: bool | None, is_transpose: bool) -> None:
    """Overwrite or add, per element of PSUM."""
    if accumulate is not None and not isinstance(accumulate, bool | np.bool_):
        raise broken("nc_matmul", "accumulate", repr(accumulate), "must be True, False or None")
    if not dst.covers_storage and dst.repeats_elements():
        raise broken("nc_matmul", "dst", f"shape {dst.shape} with strides {dst.strides}", "writes an element more than once")
    state = dst.started()
    if accumulate is None:
        add: Any = state == 2
    elif accumulate:
        # trn3 adds to what any engine has written; before, only a matmul may start an accumulation
        least = 1 if core.machine.nc_version >= 4 else 2
        if not np.all(np.greater_equal(state, least)):
            raise broken(
                "nc_matmul",
                "accumulate",
                "True",
                "on PSUM elements that no matmul has started, which is undefined",
                "Start with accumulate=False, or leave it out.",
            )
        add = True
    else:
        add = False
    if is_transpose and np.any(add) and dst.dtype != "float32":
        raise broken("nc_matmul", "accumulate", "a transpose in 16 bits", "cannot be added to earlier results")
    if isinstance(add, np.ndarray):
        if add.all():
            add = True
        elif not add.any():
            add = False
    target = dst.array
    if add is True or (isinstance(add, np.bool_) and add):
        if dst.dtype == "float32":
            target += product
        else:
            target[...] = from_float32(to_float32(target) + product, dst.dtype)
    elif isinstance(add, np.ndarray):
        before = to_float32(target)
        target[...] = from_float32(np.where(add, before + product, product), dst.dtype)
    else:
        target[...] = from_float32(product, dst.dtype)
    dst.start(2)


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engines = engines.unknown, name: str | None = None) -> NkiInstruction:
    """dst [F, P] = data [P, F]^T, bit for bit; free dimensions of `data` count as one.

    Args:
        dst: of the type of `data`; in PSUM for the tensor engine, in SBUF or PSUM for Vector.
        data: up to [128, 128] in SBUF for the tensor engine, up to [32, 32] in SBUF or PSUM for Vector.
        engine: tensor or vector; by default tensor where `dst` is in PSUM and `data` in SBUF, else vector.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("nc_transpose")
    check_tile(core, "nc_transpose", "dst", dst, ON_CHIP)
    check_tile(core, "nc_transpose", "data", data, ON_CHIP)
    to_psum = dst.buffer in PSUM and data.buffer in SBUF
    chosen = choose("nc_transpose", engine, ("tensor", "vector"), "tensor" if to_psum else "vector")
    if chosen == "tensor":
        check_tile(core, "nc_transpose", "dst", dst, PSUM)
        check_tile(core, "nc_transpose", "data", data, SBUF)
    limit = 128 if chosen == "tensor" else 32
    rows, columns = data.shape[0], data.free_size
    for what, size in (("partition dimension", rows), ("free size", columns)):
        if size > limit:
            raise broken(
                "nc_transpose",
                "data",
                f"{what} {size}",
                f"exceeds maximum {limit} of the {chosen} engine",
                "" if chosen == "tensor" else "Transpose on the tensor engine, into PSUM.",
            )
    if dst.shape[0] != columns or dst.free_size != rows:
        raise broken("nc_transpose", "dst", f"shape {dst.shape}", f"must be ({columns}, {rows})")
    if dst.dtype != data.dtype:
        raise broken("nc_transpose", "dst", f"dtype {dst.dtype}", f"must be that of `data`, {data.dtype}")
    dst.write(data.read(32).reshape(rows, columns).T)
    if dst.buffer in PSUM:
        dst.start(2 if chosen == "tensor" else 1)
    if chosen == "tensor":
        cycles = max(rows, min(64, columns)) * (core.machine.float32_transpose_factor if data.dtype == "float32" else 1)
    else:
        cycles = free(core, columns)
    return core.issue("nc_transpose", chosen, cycles, (dst,), (data,))
