# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""One core that runs a kernel: its memory, its accumulators, and the account of what it has issued."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .machine import Machine
from .memory import Memory
from .objects import NkiInstruction

if TYPE_CHECKING:
    from .group import Group
    from .tensor import NkiTensor

__all__ = ["ENGINES", "Core", "Instruction", "active", "current", "running"]

ENGINES = ("tensor", "vector", "scalar", "gpsimd")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One issued instruction of a recording.

    Attributes:
        index: its number in the kernel.
        name: the instruction: "nc_matmul".
        engine: "tensor", "vector", "scalar", "gpsimd", "dma" or "sync".
        cycles: cycles of the engine; 0 for DMA.
        us: how long it is busy.
        start_us: when it can start: its engine (or a DMA queue) is free and what it reads has been written.
        operands: what it writes and reads, as text.
        bytes: bytes moved by a DMA.
    """

    index: int
    name: str
    engine: str
    cycles: float
    us: float
    start_us: float
    operands: str
    bytes: int = 0


class Core:
    """The state of one physical core while a kernel runs."""

    def __init__(self, machine: Machine, program_id: int = 0, group: Group | None = None, record: bool = False):
        self.machine = machine
        self.program_id = program_id
        self.group = group
        self.memory = Memory(machine)
        self.programs = 1 if group is None else group.size
        self.counts = dict.fromkeys((*ENGINES, "dma", "sync"), 0)
        self.cycles = dict.fromkeys(ENGINES, 0.0)
        self.multiply_adds = 0
        self.hbm_read_bytes = 0
        self.hbm_write_bytes = 0
        self.dma_descriptors = 0
        self.dma_engine_us = 0.0
        self.dma_queue_us = 0.0
        self.dma_serial_us = 0.0
        self.scalar_accumulator = np.zeros(machine.partitions, np.float32)
        self.vector_accumulator = np.full(machine.partitions, np.nan, np.float32)
        self.reordering_forbidden = 0
        self.shared_allocations = 0
        self.instructions: list[Instruction] | None = [] if record else None
        self._free_at = dict.fromkeys((*ENGINES, "sync"), 0.0)
        self._queues = [0.0] * machine.dma_queues
        self._dma_free_at = 0.0

    def issue(
        self, name: str, engine: str, cycles: float, writes: tuple[NkiTensor | None, ...], reads: tuple[NkiTensor | None, ...]
    ) -> NkiInstruction:
        """Account one instruction of an engine, and note what it touches."""
        self.counts[engine] += 1
        if engine != "sync":
            self.cycles[engine] += cycles
        reads = _with_indices(writes, reads)
        self._touch(writes, reads)
        if self.instructions is not None:
            us = cycles / self.machine.ghz(engine) / 1000 if engine != "sync" else 0.0
            start = max(self._free_at[engine], self._ready(writes, reads))
            self._free_at[engine] = start + us
            self._note(name, engine, cycles, us, start, writes, reads)
        return NkiInstruction(self.memory.now - 1)

    def issue_dma(
        self,
        name: str,
        writes: tuple[NkiTensor | None, ...],
        reads: tuple[NkiTensor | None, ...],
        moved: int,
        descriptors: int,
        engines: int,
    ) -> NkiInstruction:
        """Account one DMA: `moved` bytes in `descriptors` contiguous pieces over `engines` DMA engines."""
        machine = self.machine
        self.counts["dma"] += 1
        self.dma_descriptors += descriptors
        work = (descriptors * machine.dma_descriptor_ns + moved / machine.dma_engine_bytes_per_ns) / 1000
        alone = machine.dma_fixed_ns / 1000 + work / engines
        self.dma_engine_us += work / machine.dma_engines
        self.dma_queue_us += alone / machine.dma_queues
        self.dma_serial_us += alone
        reads = _with_indices(writes, reads)
        self._touch(writes, reads)
        if self.instructions is not None:
            queue = min(range(len(self._queues)), key=self._queues.__getitem__)
            start = max(self._queues[queue], self._ready(writes, reads))
            # the data of all queues share the engines: a transfer takes its turn, and its share of their time
            flowing = max(start + machine.dma_fixed_ns / 1000, self._dma_free_at)
            self._dma_free_at = flowing + work / machine.dma_engines
            us = flowing + work / engines - start
            self._queues[queue] = start + us
            self._note(name, "dma", 0.0, us, start, writes, reads, moved)
        return NkiInstruction(self.memory.now - 1)

    @property
    def dma_us(self) -> float:
        """The DMAs' time if they overlap perfectly: that of the engines, which share the work, or of the queues, each busy with its own."""
        return max(self.dma_engine_us, self.dma_queue_us)

    def _touch(self, writes: tuple[NkiTensor | None, ...], reads: tuple[NkiTensor | None, ...]) -> None:
        memory = self.memory
        now = memory.now
        memory.now = now + 1
        # reads first: what an instruction both reads and writes ends as written
        for tensor in reads:
            if tensor is not None and (allocation := tensor.storage.allocation) is not None:
                if allocation.first < 0:
                    allocation.first = now
                allocation.last = now
                allocation.read_last = True
        for tensor in writes:
            if tensor is not None and (allocation := tensor.storage.allocation) is not None:
                if allocation.first < 0:
                    allocation.first = now
                allocation.last = now
                allocation.read_last = False

    def _ready(self, writes: tuple[NkiTensor | None, ...], reads: tuple[NkiTensor | None, ...]) -> float:
        ready = 0.0
        for tensor in reads:
            if tensor is not None:
                ready = max(ready, tensor.storage.written_until)
        for tensor in writes:
            if tensor is not None:
                ready = max(ready, tensor.storage.written_until, tensor.storage.read_until)
        return ready

    def _note(
        self, name: str, engine: str, cycles: float, us: float, start: float, writes: Any, reads: Any, moved: int = 0
    ) -> None:
        for tensor in reads:
            if tensor is not None:
                tensor.storage.read_until = max(tensor.storage.read_until, start + us)
        for tensor in writes:
            if tensor is not None:
                tensor.storage.written_until = max(tensor.storage.written_until, start + us)
        assert self.instructions is not None
        operands = f"{_names(writes)} <- {_names(reads)}"
        self.instructions.append(Instruction(self.memory.now - 1, name, engine, cycles, us, start, operands, moved))


def _with_indices(writes: tuple[NkiTensor | None, ...], reads: tuple[NkiTensor | None, ...]) -> tuple[NkiTensor | None, ...]:
    """What an instruction reads, with the tensors that hold the run-time parts of its addresses."""
    for tensor in (*writes, *reads):
        if tensor is not None and tensor.indirection is not None and hasattr(tensor.indirection.index, "storage"):
            reads = (*reads, tensor.indirection.index)
    return reads


def _names(tensors: tuple[NkiTensor | None, ...]) -> str:
    return ", ".join(f"{tensor.name}{list(tensor.shape)}" for tensor in tensors if tensor is not None)


_STATE = threading.local()


def active() -> Core | None:
    """The core that runs a kernel in this thread, if any."""
    return getattr(_STATE, "core", None)


def current(function: str) -> Core:
    """The core that runs a kernel in this thread.

    Raises:
        RuntimeError: no kernel runs here.
    """
    core: Core | None = getattr(_STATE, "core", None)
    if core is None:
        raise RuntimeError(
            f"{function} was called outside a kernel. Call it in a function that runs under nki.simulate or nki.jit."
        )
    return core


@contextmanager
def running(core: Core) -> Iterator[None]:
    """Run a kernel's body on this core in this thread."""
    outer = active()
    _STATE.core = core
    try:
        # NaN is the poison of unwritten memory and Inf is a value like others: no warnings about either
        with np.errstate(all="ignore"):
            yield
    finally:
        _STATE.core = outer
