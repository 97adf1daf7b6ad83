# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Classes for settings, enums, and helpers for a pooling kernel."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Optional

import nki
import nki.isa as nisa
import nki.language as nl

if TYPE_CHECKING:
    from collections.abc import Sequence

_WINDOW = (2, 2, 2)
_NAMES = ("depth", "height", "width")
_REDUCTIONS = (nl.add, nl.maximum)


class Reduction(enum.Enum):
    """What is done with a window."""

    MEAN = 0
    MAX = 1

    @classmethod
    def parse(cls, text):
        return {member.name.lower(): member for member in cls}[text]


@dataclass(frozen=True)
class Window(nl.NKIObject):
    """A window along one axis."""

    size: int
    stride: int
    name: str = "axis"
    taps: tuple = field(default_factory=tuple)

    def __post_init__(self):
        assert self.size >= 1 and self.stride >= 1, f"Window {self.name}: sizes begin at 1."

    def outputs(self, n: int) -> int:
        """How many windows fit."""
        return (n - self.size) // self.stride + 1

    @staticmethod
    def unit():
        return Window(1, 1)

    @classmethod
    def parse(cls, text):  # nki: host
        return [cls(*map(int, part.split(","))) for part in text.split(";")]


class Counter(nl.NKIObject):
    """Counts, with state of its own."""

    def __init__(self, start=0):
        self.value = start
        self.seen = {"start": start}

    def add(self, n):
        self.value += n
        self.seen["last"] = n
        old = self.seen.pop("start", None)
        for key in self.seen.keys():
            print(key, old)
        return self.value


class HostPlan(NamedTuple):
    """Never seen by the kernel, but for an annotation."""

    windows: list[Window]


def planned(sizes: "Sequence[int]") -> HostPlan:
    return HostPlan([Window(n, n) for n in sizes])


def reduction_of(kind):
    if kind == Reduction.MAX:
        return _REDUCTIONS[1]
    return _REDUCTIONS[0]


def pool_axis(x: nl.NkiTensor, window: Window, kind: Reduction, plan: Optional[HostPlan] = None):
    """Reduces the windows along the last axis."""
    parts, n = x.shape
    out_n = window.outputs(n)
    out = nl.ndarray((parts, out_n), dtype=nl.float32, buffer=nl.sbuf, name=f"{window.name}_{out_n}")
    op = reduction_of(kind)
    for tap in range(window.size):
        source = x[:, nl.ds(tap, out_n)] if window.stride == 1 else x[:, tap : tap + out_n * window.stride : window.stride]
        if tap == 0:
            nisa.tensor_copy(out, source)
        else:
            nisa.tensor_tensor(out, out, source, op)
    return out, out_n


@nki.jit
def pool(x: nl.NkiTensor, windows: tuple, kind=Reduction.MEAN, dtype: Optional[str] = None):
    if dtype == None:
        dtype = x.dtype
    counter = Counter(start=0)
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(tile, x)
    current = tile
    tiles = []
    i = 0
    while True:
        if i >= len(windows) or i in (7, 8):
            break
        window = windows[i] if windows[i].name in _NAMES else Window.unit()
        current, size = pool_axis(current, window, kind)
        tiles.append(current)
        counter.add(size)
        i += 1
    tiles.reverse()
    old = tiles[:1]
    tiles.extend(old)
    scale = 1.0 / max(1, _WINDOW[0] * _WINDOW[1] * _WINDOW[2])
    nisa.tensor_scalar(current, current, nl.multiply, scale)
    if nisa.get_nc_version() == nisa.nc_version.gen3 and kind != Reduction.MAX:
        print("gen3", tiles.index(current))
    sizes = {"count": counter.value}
    sizes["rows"] = x.shape[0]
    for name, value in sizes.items():
        print(name, value)
    out = nl.ndarray(current.shape, dtype=dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, current)
    return out
