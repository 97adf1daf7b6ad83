# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a kernel allocates on chip: storage, where it lives, how long it is needed, and whether it all fits.

A compiler gives a buffer its place from the first instruction that touches it to the last one that reads it, whatever Python variables still
name it. So this module notes those two moments for every allocation, and checks capacity and overlap when the kernel has ended:

- a buffer is needed from its first access to its last read;
- one that was written after its last read, or never touched, is needed until Python forgets it: the kernel holds it for a reason;
- buffers without an `address` share what is left: the sum of those needed at one time must fit. Fragmentation is not modelled;
- buffers with an `address` must not overlap another one while both are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .dtypes import fill_poison, numpy_dtype
from .errors import NkiValidationError, broken
from .machine import Machine

__all__ = ["Allocation", "Memory", "Storage"]

_NEVER = 1 << 62


@dataclass(eq=False, slots=True)
class Allocation:
    """The life of one on-chip buffer, in instruction numbers."""

    label: str
    region: str
    partitions: int
    bytes_per_partition: int
    address: tuple[int, int] | None
    created: int
    first: int = -1
    last: int = -1
    read_last: bool = False
    forgotten: int = _NEVER

    @property
    def start(self) -> int:
        """The first instruction that needs the buffer."""
        return self.created if self.first < 0 else self.first

    @property
    def end(self) -> int:
        """The last instruction that needs the buffer."""
        if self.first < 0:
            # forgotten before any instruction: never needed, the end comes before the start
            return self.forgotten - 1
        return self.last if self.read_last else max(self.forgotten - 1, self.last)

    def overlaps(self, other: Allocation) -> bool:
        """Whether two buffers with addresses share a byte while both are needed."""
        if self.address is None or other.address is None:
            return False
        (p, f), (q, g) = self.address, other.address
        return (
            p < q + other.partitions
            and q < p + self.partitions
            and f < g + other.bytes_per_partition
            and g < f + self.bytes_per_partition
            and self.start <= other.end
            and other.start <= self.end
        )

    def __str__(self) -> str:
        place = "" if self.address is None else f" at address={self.address}"
        return f"{self.label} ({self.partitions} partitions x {self.bytes_per_partition} B{place})"


class Storage:
    """The bytes behind a tensor and its views.

    Attributes:
        raw: the elements, flat, in the type of the allocation; views of any type are cut from its buffer.
        partition_bytes: bytes from one partition to the next; 0 in HBM, which has no partitions.
        started: for PSUM, per element: 0 never written, 1 written by another engine, 2 started by a matmul. One number while all agree.
    """

    __slots__ = (
        "__weakref__",
        "allocation",
        "base_partition",
        "is_input",
        "memory",
        "name",
        "partition_bytes",
        "raw",
        "read_until",
        "region",
        "shared",
        "started",
        "written_until",
    )

    def __init__(self, raw: np.ndarray, region: str, name: str, partition_bytes: int = 0, base_partition: int = 0):
        self.raw = raw
        self.region = region
        self.name = name
        self.partition_bytes = partition_bytes
        self.base_partition = base_partition
        self.allocation: Allocation | None = None
        self.memory: Memory | None = None
        self.is_input = False
        self.shared = region == "shared_hbm"
        self.started: int | np.ndarray = 0
        # the timeline of a recording: when the last write and the last read of these bytes end, in us
        self.written_until = 0.0
        self.read_until = 0.0

    def __del__(self) -> None:
        if self.allocation is not None and self.memory is not None:
            self.allocation.forgotten = self.memory.clock()


@dataclass
class Memory:
    """The SBUF and PSUM of one core.

    Attributes:
        machine: the limits.
        now: the number of the next instruction.
        allocations: every on-chip buffer, in order of allocation.
    """

    machine: Machine
    now: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    _counter: Iterator[int] = field(default_factory=itertools.count)

    def clock(self) -> int:
        """The number of the next instruction."""
        return self.now

    def unique_name(self, name: str, prefix: str) -> str:
        """The tensor's name; made up where the kernel gives none.

        Raises:
            NkiValidationError: the kernel used this name before.
        """
        if not name:
            return f"{prefix}{next(self._counter)}"
        if name in self.names:
            raise broken("ndarray", "name", repr(name), "is used twice in this kernel", "Give every tensor a name of its own.")
        self.names.add(name)
        return name

    def allocate(self, shape: tuple[int, ...], dtype: str, region: str, name: str, address: Any, function: str) -> Storage:
        """New storage in SBUF or PSUM, full of poison.

        Raises:
            NkiValidationError: more partitions or bytes than there are, or an address that no tensor may have.
        """
        machine = self.machine
        partitions = shape[0] if len(shape) > 1 else 1
        if partitions > machine.partitions:
            raise broken(
                function,
                "shape",
                f"{shape}: partition dimension {partitions}",
                f"exceeds maximum {machine.partitions}",
                "Tile the first dimension.",
            )
        kind = numpy_dtype(dtype)
        elements = 1
        for size in shape[1:] if len(shape) > 1 else shape:
            elements *= size
        needed = elements * kind.itemsize
        if region == "psum":
            capacity, what = machine.psum_bytes, f"{machine.psum_banks} PSUM banks of {machine.psum_bank_bytes} B"
        else:
            capacity, what = machine.sbuf_usable_bytes, "the SBUF"
        if needed > capacity:
            raise broken(
                function,
                "shape",
                f"{shape} of {dtype}: {needed} B per partition",
                f"exceed {capacity} B, {what} of {machine.name}",
            )
        if address is not None:
            address = self._checked_address(address, partitions, needed, kind.itemsize, region, capacity, function)
        raw = np.empty(partitions * elements, kind)
        fill_poison(raw, dtype)
        storage = Storage(raw, region, name, needed, 0 if address is None else address[0])
        label = f"{region} tensor {name!r} {shape} {dtype}"
        storage.allocation = Allocation(label, region, partitions, needed, address, self.now)
        storage.memory = self
        self.allocations.append(storage.allocation)
        return storage

    def _checked_address(
        self, address: Any, partitions: int, needed: int, itemsize: int, region: str, capacity: int, function: str
    ) -> tuple[int, int]:
        try:
            partition, offset = (int(part) for part in address)
        except (TypeError, ValueError):
            raise broken(function, "address", repr(address), "is no pair (partition, byte offset)") from None
        machine = self.machine
        legal = start_partitions(partitions)
        if partition not in legal:
            raise broken(
                function,
                "address",
                f"{address}: start partition {partition} for {partitions} partitions",
                f"must be one of {legal}",
            )
        if offset < 0 or offset + needed > capacity:
            raise broken(
                function, "address", f"{address}: bytes {offset} to {offset + needed}", f"exceed the {capacity} B per partition"
            )
        if region == "psum" and offset % machine.psum_bank_bytes:
            raise broken(
                function,
                "address",
                f"{address}: byte offset {offset}",
                f"is no multiple of a PSUM bank, {machine.psum_bank_bytes} B",
            )
        if region == "sbuf" and offset % itemsize:
            raise broken(
                function, "address", f"{address}: byte offset {offset}", f"is no multiple of the element's {itemsize} B"
            )
        return partition, offset

    def banks(self, allocation: Allocation) -> int:
        """PSUM banks of one buffer: it has whole banks to itself."""
        return -(-allocation.bytes_per_partition // self.machine.psum_bank_bytes)

    def _live(self, region: str) -> list[Allocation]:
        return [a for a in self.allocations if a.region == region and a.end >= a.start]

    def check(self) -> None:
        """Check that what the kernel needed at one time fits.

        Raises:
            NkiValidationError: two live buffers at one address, or more live bytes than the memory has.
        """
        for region in ("sbuf", "psum"):
            here = self._live(region)
            for one, other in _pairs(allocation for allocation in here if allocation.address is not None):
                if one.overlaps(other):
                    raise NkiValidationError(
                        f"ndarray `address`: {one} is needed from instruction {one.start} to {one.end} and overlaps {other}, needed from "
                        f"{other.start} to {other.end}. Give them different addresses, or read the first before the second is written."
                    )
            size, unit, capacity = (
                (lambda a: a.bytes_per_partition, "B per partition", self.machine.sbuf_usable_bytes)
                if region == "sbuf"
                else (self.banks, "banks", self.machine.psum_banks)
            )
            moment, peak, live = _peak(here, size, self.machine.psum_bank_bytes if region == "psum" else 1)
            if peak > capacity:
                largest = sorted(live, key=size, reverse=True)[:6]
                raise NkiValidationError(
                    f"{region.upper()} of {self.machine.name}: at instruction {moment} the live tensors need {peak} {unit}, which exceeds "
                    f"{capacity}. The largest of {len(live)}: {'; '.join(map(str, largest))}. Use smaller tiles, or fewer at a time."
                )

    def peak(self, region: str) -> int:
        """The most that was live at one time: bytes per partition of SBUF, or banks of PSUM."""
        here = self._live(region)
        if region == "psum":
            return _peak(here, self.banks, self.machine.psum_bank_bytes)[1]
        return _peak(here, lambda a: a.bytes_per_partition, 1)[1]

    def lives(self, region: str) -> list[tuple[int, int, int]]:
        """(first instruction, last instruction, bytes per partition or banks) of each buffer, for a plot."""
        here = self._live(region)
        return [
            (a.start, min(a.end, self.now - 1), self.banks(a) if region == "psum" else a.bytes_per_partition)
            for a in here
            if a.start < self.now
        ]


def start_partitions(count: int) -> tuple[int, ...]:
    """Where an access of `count` partitions may start (architecture guide of v2)."""
    if count > 64:
        return (0,)
    if count > 32:
        return (0, 64)
    return (0, 32, 64, 96)


_PAGE = 2048


def _pairs(allocations: Iterable[Allocation]) -> Iterator[tuple[Allocation, Allocation]]:
    """Pairs of buffers that share a page of addresses and are needed at one time: a sweep over time, page by page."""
    pages: dict[int, list[Allocation]] = {}
    for allocation in sorted(allocations, key=lambda a: a.start):
        assert allocation.address is not None
        first, size = allocation.address[1], allocation.bytes_per_partition
        for page in range(first // _PAGE, (first + size - 1) // _PAGE + 1):
            active = [other for other in pages.get(page, ()) if other.end >= allocation.start]
            for other in active:
                yield other, allocation
            active.append(allocation)
            pages[page] = active


def _peak(allocations: list[Allocation], size: Any, unit: int) -> tuple[int, int, list[Allocation]]:
    """When the most was live, how much, and what.

    Buffers with addresses count once per byte (or bank) that they cover, however many partition groups share it.
    """
    events: list[tuple[int, int, Allocation]] = []
    for allocation in allocations:
        events.append((allocation.start, 1, allocation))
        events.append((allocation.end + 1, 0, allocation))
    events.sort(key=lambda event: (event[0], event[1]))
    free, best, moment = 0, 0, 0
    placed: list[Allocation] = []
    covered = 0
    for when, starts, allocation in events:
        if allocation.address is None:
            free += size(allocation) if starts else -size(allocation)
        else:
            if starts:
                placed.append(allocation)
            else:
                placed.remove(allocation)
            covered = _covered(placed, unit)
        if free + covered > best:
            best, moment = free + covered, when
    return moment, best, [a for a in allocations if a.start <= moment <= a.end]


def _covered(placed: list[Allocation], unit: int) -> int:
    """How many units (bytes or banks) buffers with addresses cover together."""
    spans = sorted((a.address[1] // unit, -(-(a.address[1] + a.bytes_per_partition) // unit)) for a in placed if a.address)
    total, reached = 0, 0
    for begin, end in spans:
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
