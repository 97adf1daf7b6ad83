# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a kernel would cost: instructions, cycles, bytes and memory, by the figures of the machine table.

Everything here is computed from the instructions that were issued; nothing was measured on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .core import ENGINES, Core, Instruction
from .kernel import Kernel, run, simulate
from .machine import Machine, machine_of

__all__ = ["EngineCost", "Profile", "profile"]


@dataclass(frozen=True)
class EngineCost:
    """The work of one engine.

    Attributes:
        instructions: how many it issues.
        cycles: of its own clock.
        us: microseconds of them.
    """

    instructions: int
    cycles: float
    us: float


@dataclass(frozen=True)
class Profile:
    """The cost of one call of a kernel. Label: simulated; `print` shows it as a table.

    With two cores, counts and bytes are of both together, times, cycles and memory of the slower one; `cores` has each.

    Attributes:
        target: the machine's name.
        lnc: physical cores.
        engines: "tensor", "vector", "scalar", "gpsimd" to `EngineCost`.
        dma_instructions: DMAs.
        dma_descriptors: contiguous pieces that they move.
        dma_us: time of the DMAs if they overlap perfectly: of their 16 engines or of their 16 queues, whichever is busier.
        hbm_read_bytes: bytes read from HBM.
        hbm_write_bytes: bytes written to HBM.
        sbuf_peak_bytes: SBUF bytes per partition that are live at one time, at most.
        psum_banks: PSUM banks that are live at one time, at most, in the order of the program; `plot` shows those of the schedule.
        multiply_adds: of all matmuls but transposes, K x M x N each.
        tensor_utilization: multiply_adds over 128 x 128 x busy cycles of the tensor engine.
        instructions: all instructions, DMAs and register moves included.
        overlapped_us: if all engines overlap perfectly: the busiest of them, or the DMA.
        serial_us: if nothing overlaps.
        scheduled_us: of a recording: each instruction as soon as its engine is free and its operands are written; else None.
        recording: of a recording: the instructions of core 0.
        cores: with two cores, the profile of each.
    """

    target: str
    lnc: int
    engines: dict[str, EngineCost]
    dma_instructions: int
    dma_descriptors: int
    dma_us: float
    hbm_read_bytes: int
    hbm_write_bytes: int
    sbuf_peak_bytes: int
    psum_banks: int
    multiply_adds: int
    tensor_utilization: float
    instructions: int
    overlapped_us: float
    serial_us: float
    scheduled_us: float | None = None
    recording: tuple[Instruction, ...] = ()
    cores: tuple[Profile, ...] = ()
    memory_steps: dict[str, list[tuple[float, int]]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        lines = [f"{self.target}, {self.lnc} core{'s' * (self.lnc > 1)} (simulated, not measured)"]
        lines.append(f"{'engine':<10}{'instructions':>14}{'cycles':>16}{'us':>12}")
        for name, cost in self.engines.items():
            lines.append(f"{name:<10}{cost.instructions:>14,}{cost.cycles:>16,.0f}{cost.us:>12,.2f}")
        lines.append(f"{'dma':<10}{self.dma_instructions:>14,}{'-':>16}{self.dma_us:>12,.2f}")
        lines.append(f"{'all':<10}{self.instructions:>14,}{'overlapped':>16}{self.overlapped_us:>12,.2f}")
        lines.append(f"{'':<24}{'one by one':>16}{self.serial_us:>12,.2f}")
        if self.scheduled_us is not None:
            lines.append(f"{'':<24}{'scheduled':>16}{self.scheduled_us:>12,.2f}")
        lines.append(
            f"tensor engine: {self.multiply_adds:,} multiply-adds, {self.tensor_utilization:.1%} of its busy cycles' capacity"
        )
        lines.append(
            f"HBM: {self.hbm_read_bytes:,} B read, {self.hbm_write_bytes:,} B written in {self.dma_descriptors:,} pieces"
        )
        lines.append(f"memory: {self.sbuf_peak_bytes:,} B of SBUF per partition, {self.psum_banks} PSUM banks")
        return "\n".join(lines)

    def plot(self, path: Any = None) -> Any:
        """Draw what each engine does when, and the memory in use (matplotlib, from the extra `plot`).

        Args:
            path: where to save the picture; without it the figure is only returned.

        Returns:
            The matplotlib figure.

        Raises:
            RuntimeError: the profile was made without record=True.
            ImportError: matplotlib is not installed.
        """
        from .plot import timeline

        return timeline(self, path)


def profile(
    kernel: Any, target: str | Machine | None = None, lnc: int | None = None, record: bool = False
) -> Callable[..., tuple[Any, Profile]]:
    """A function that runs a kernel in the simulator and returns its outputs and its cost.

    Args:
        kernel: a function or a kernel of nki.jit.
        target: "trn2" (the default, unless NEURON_PLATFORM_TARGET_OVERRIDE says otherwise), "trn3", or a `Machine`.
        lnc: physical cores, 1 or 2; by default the kernel's own.
        record: keep every instruction, for `Profile.recording` and `Profile.plot()`.

    Returns:
        A function of the kernel's arguments that returns (outputs, Profile).

    Raises:
        ValueError: an unknown target, or another number of cores.

    Example:
        >>> import numpy as np
        >>> import nki3d.simulator as nki
        >>> nl, nisa = nki.language, nki.isa
        >>> def copy(x):
        ...     out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ...     nl.store(out, nl.load(x))
        ...     return out
        >>> outputs, p = nki.profile(copy)(np.ones((128, 512), np.float32))
        >>> p.hbm_read_bytes, p.sbuf_peak_bytes, p.instructions
        (262144, 2048, 2)
    """
    machine = machine_of(target)
    wrapped: Kernel = simulate(kernel)
    if lnc is not None:
        wrapped = wrapped[lnc]

    def profiled(*args: Any, **kwargs: Any) -> tuple[Any, Profile]:
        outputs, cores = run(wrapped.function, wrapped.lnc, machine, args, kwargs, record)
        return outputs, _together([_of_core(core, machine) for core in cores], machine)

    return profiled


def _of_core(core: Core, machine: Machine) -> Profile:
    engines = {
        name: EngineCost(core.counts[name], core.cycles[name], core.cycles[name] / machine.ghz(name) / 1000) for name in ENGINES
    }
    busy = core.cycles["tensor"]
    recording = tuple(core.instructions or ())
    return Profile(
        target=machine.name,
        lnc=1,
        engines=engines,
        dma_instructions=core.counts["dma"],
        dma_descriptors=core.dma_descriptors,
        dma_us=core.dma_us,
        hbm_read_bytes=core.hbm_read_bytes,
        hbm_write_bytes=core.hbm_write_bytes,
        sbuf_peak_bytes=core.memory.peak("sbuf"),
        psum_banks=core.memory.peak("psum"),
        multiply_adds=core.multiply_adds,
        tensor_utilization=core.multiply_adds / (128 * 128 * busy) if busy else 0.0,
        instructions=sum(core.counts.values()),
        overlapped_us=max(*(cost.us for cost in engines.values()), core.dma_us),
        serial_us=sum(cost.us for cost in engines.values()) + core.dma_serial_us,
        scheduled_us=max((i.start_us + i.us for i in recording), default=0.0) if core.instructions is not None else None,
        recording=recording,
        memory_steps=_memory_steps(core) if core.instructions is not None else {},
    )


def _memory_steps(core: Core) -> dict[str, list[tuple[float, int]]]:
    """Live memory over the time of the recording: (us, bytes per partition or banks from then on)."""
    instructions = core.instructions or []
    steps: dict[str, list[tuple[float, int]]] = {}
    for region in ("sbuf", "psum"):
        changes: dict[float, int] = {}
        for first, last, size in core.memory.lives(region):
            begin, end = instructions[first].start_us, instructions[last].start_us + instructions[last].us
            changes[begin] = changes.get(begin, 0) + size
            changes[end] = changes.get(end, 0) - size
        level, steps[region] = 0, []
        for moment in sorted(changes):
            level += changes[moment]
            steps[region].append((moment, level))
    return steps


def _together(parts: list[Profile], machine: Machine) -> Profile:
    if len(parts) == 1:
        return parts[0]
    slowest = max(parts, key=lambda part: part.overlapped_us)
    busy = sum(part.engines["tensor"].cycles for part in parts)
    total = sum(part.multiply_adds for part in parts)
    scheduled = [part.scheduled_us for part in parts if part.scheduled_us is not None]
    return Profile(
        target=machine.name,
        lnc=len(parts),
        engines={
            name: EngineCost(
                sum(part.engines[name].instructions for part in parts),
                max(part.engines[name].cycles for part in parts),
                max(part.engines[name].us for part in parts),
            )
            for name in ENGINES
        },
        dma_instructions=sum(part.dma_instructions for part in parts),
        dma_descriptors=sum(part.dma_descriptors for part in parts),
        dma_us=max(part.dma_us for part in parts),
        hbm_read_bytes=sum(part.hbm_read_bytes for part in parts),
        hbm_write_bytes=sum(part.hbm_write_bytes for part in parts),
        sbuf_peak_bytes=max(part.sbuf_peak_bytes for part in parts),
        psum_banks=max(part.psum_banks for part in parts),
        multiply_adds=total,
        tensor_utilization=total / (128 * 128 * busy) if busy else 0.0,
        instructions=sum(part.instructions for part in parts),
        overlapped_us=slowest.overlapped_us,
        serial_us=max(part.serial_us for part in parts),
        scheduled_us=max(scheduled) if scheduled else None,
        recording=parts[0].recording,
        cores=tuple(parts),
        memory_steps=parts[0].memory_steps,
    )
