# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What two cores do together (LNC 2), and the sequencer's registers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import Core, active, current
from ..dtypes import is_integer, numpy_dtype
from ..errors import broken
from ..machine import machine_of
from ..objects import MemoryRegion, NkiInstruction, VirtualRegister
from ..tensor import NkiTensor
from ._common import SBUF, check_tile
from ._dma import pieces
from ._enums import dma_engine as dma_engines
from ._enums import engine as engines
from ._enums import nc_version

__all__ = [
    "core_barrier",
    "get_nc_sub_version",
    "get_nc_version",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "sendrecv",
]


def get_nc_version() -> nc_version:
    """The generation of the target: of the running kernel's, else of the default one."""
    core = active()
    return nc_version((machine_of() if core is None else core.machine).nc_version)


def get_nc_sub_version() -> int:
    """The silicon revision within the generation: 0, the first."""
    return 0


def _two_cores(instruction: str) -> Core:
    core = current(instruction)
    if core.machine.nc_version < 3:
        raise broken(instruction, "data", core.machine.name, "needs NeuronCore-v3 (trn2)")
    if core.programs != 2:
        raise broken(
            instruction, "cores", f"{core.programs} core", "is not enough", "Launch the kernel on two cores: kernel[2](...)."
        )
    return core


def core_barrier(data: NkiTensor, cores: Any, engine: engines = engines.gpsimd, name: str | None = None) -> NkiInstruction:
    """Wait until both cores have come here.

    Args:
        data: the tensor in shared HBM that they exchange.
        cores: (0, 1).
        engine: the engine that waits.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: one core only, other cores than (0, 1), a tensor elsewhere, or a core that never comes.
    """
    core = _two_cores("core_barrier")
    if tuple(cores) != (0, 1):
        raise broken("core_barrier", "cores", str(cores), "must be (0, 1)")
    if not isinstance(data, NkiTensor) or data.buffer is not MemoryRegion.shared_hbm:
        raise broken("core_barrier", "data", repr(data), "must be a tensor in shared_hbm")
    waiting = "gpsimd" if engine is engines.unknown else getattr(engine, "name", "")
    if waiting not in ("tensor", "vector", "scalar", "gpsimd", "sync"):
        raise broken("core_barrier", "engine", repr(engine), "is no engine that can wait")
    assert core.group is not None
    core.group.meet(core.program_id, "core_barrier")
    return core.issue("core_barrier", waiting, core.machine.barrier_cycles, (), ())


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engines = dma_engines.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Send `src` to the other core's `dst` and receive its `src` here.

    Args:
        src: in SBUF.
        dst: in SBUF, of the shape and type of `src`.
        send_to_rank: 0 or 1.
        recv_from_rank: 0 or 1.
        pipe_id: calls with one id meet in order.
        dma_engine: dma, or gpsimd_dma, which moves 1024, 512 or 256 B per partition for types of 4, 2 or 1 B.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: one core only, another rank, memory, shape or size, or a core that never comes.
    """
    core = _two_cores("sendrecv")
    check_tile(core, "sendrecv", "src", src, SBUF)
    check_tile(core, "sendrecv", "dst", dst, SBUF)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise broken("sendrecv", "dst", f"{dst.shape} {dst.dtype}", f"must be that of `src`, {src.shape} {src.dtype}")
    for label, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if rank not in (0, 1):
            raise broken("sendrecv", label, str(rank), "must be 0 or 1")
    if dma_engine is dma_engines.gpsimd_dma:
        limit = {4: 1024, 2: 512, 1: 256}[src.itemsize]
        if src.free_size * src.itemsize > limit:
            raise broken(
                "sendrecv",
                "src",
                f"{src.free_size * src.itemsize} B per partition",
                f"exceed {limit} B of the gpsimd DMA engine for {src.dtype}",
            )
    assert core.group is not None
    offers = core.group.meet(core.program_id, ("sendrecv", pipe_id), (send_to_rank, src.array.copy()))
    to, values = offers[recv_from_rank]
    if to != core.program_id:
        raise broken("sendrecv", "recv_from_rank", str(recv_from_rank), f"sends to rank {to}, not to {core.program_id}")
    if values.shape != dst.shape or values.dtype != numpy_dtype(dst.dtype):
        raise broken("sendrecv", "dst", f"{dst.shape} {dst.dtype}", f"differs from what arrives, {values.shape} {values.dtype}")
    dst.array[...] = values
    used = min(core.machine.dma_engines, -(-dst.shape[0] // core.machine.dma_partitions_per_engine))
    return core.issue_dma("sendrecv", (dst,), (src,), values.nbytes, pieces(dst), used)


def _register(instruction: str, name: str, value: Any) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        raise broken(instruction, name, repr(value), "is no register", "Make one with register_alloc.")
    return value


def _word(instruction: str, name: str, value: int) -> int:
    """Check that an integer fits the 32 bits of a register, signed or not."""
    if not -(2**31) <= value < 2**32:
        raise broken(instruction, name, str(value), "does not fit in 32 bits")
    return value


def _scalar_cell(instruction: str, name: str, tensor: Any) -> NkiTensor:
    if not isinstance(tensor, NkiTensor) or tensor.size != 1:
        raise broken(instruction, name, repr(tensor), "must be a tensor of one element")
    if tensor.buffer is MemoryRegion.psum:
        raise broken(instruction, name, "is in psum", "and must be in HBM or SBUF")
    return tensor


def register_alloc(x: Any = None) -> VirtualRegister:
    """A new register, with an integer in it if `x` is one.

    Raises:
        NkiValidationError: `x` is neither None nor an integer.
    """
    if x is not None and not isinstance(x, int | np.integer):
        if isinstance(x, NkiTensor):
            register = VirtualRegister()
            register_load(register, x)
            return register
        raise broken("register_alloc", "x", repr(x), "must be None or an integer")
    return VirtualRegister(None if x is None else _word("register_alloc", "x", int(x)))


def register_move(dst: VirtualRegister, src: Any) -> NkiInstruction:
    """dst = an integer, or the value of another register.

    Raises:
        NkiValidationError: `dst` is no register, or `src` neither a register nor an integer.
    """
    core = current("register_move")
    target = _register("register_move", "dst", dst)
    if not isinstance(src, VirtualRegister | int | np.integer):
        raise broken("register_move", "src", repr(src), "must be a register or an integer")
    target.assign(src.value if isinstance(src, VirtualRegister) else _word("register_move", "src", int(src)))
    return core.issue("register_move", "sync", 0, (), ())


def register_load(dst: VirtualRegister, src: NkiTensor) -> NkiInstruction:
    """dst = the one element of a tensor in HBM or SBUF.

    Raises:
        NkiValidationError: no register, or a tensor of another size or in PSUM.
    """
    core = current("register_load")
    target = _register("register_load", "dst", dst)
    cell = _scalar_cell("register_load", "src", src)
    if not is_integer(cell.dtype):
        raise broken("register_load", "src", f"dtype {cell.dtype}", "must be an integer type: registers address and count")
    target.assign(int(cell.array.reshape(-1)[0]))
    return core.issue("register_load", "sync", 0, (), (cell,))


def register_store(dst: NkiTensor, src: VirtualRegister) -> NkiInstruction:
    """The one element of `dst` = the value of a register.

    Raises:
        NkiValidationError: no register, or a tensor of another size or in PSUM.
    """
    core = current("register_store")
    source = _register("register_store", "src", src)
    cell = _scalar_cell("register_store", "dst", dst)
    kind = numpy_dtype(cell.dtype)
    if is_integer(cell.dtype) and not np.iinfo(kind).min <= source.value <= np.iinfo(kind).max:
        raise broken("register_store", "dst", f"dtype {cell.dtype}", f"cannot hold {source.value}")
    cell.array[...] = kind.type(source.value)
    return core.issue("register_store", "sync", 0, (cell,), ())
