# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""One spatial axis of a convolution or of a transposed one, as both look to a matmul.

Outputs are taken in blocks of `block` neighbours: output o is element e of block j, o = block * j + e. It reads input positions
step * j + offset, where the offset depends on e and the tap only:

- convolution: block = r, step = stride * r, offset = stride * e + dilation * tap - padding;
- transposed convolution: block = stride * r, step = r, offset = (e + padding - dilation * tap) / stride, for the taps that divide. A block is
  a set of whole phases, so that no inserted zero is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

__all__ = ["Axis", "convolution_axis", "transposed_axis"]


@dataclass(frozen=True)
class Axis:
    """How the outputs of one axis read its inputs.

    Attributes:
        size: input positions.
        out: output positions.
        block: outputs of one block.
        step: input positions from one block to the next.
        reads: per element of a block, the (tap, offset) pairs that it reads, offsets ascending.
    """

    size: int
    out: int
    block: int
    step: int
    reads: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def blocks(self) -> int:
        """How many blocks cover the outputs; the last may be partial."""
        return -(-self.out // self.block)

    def offsets(self, elements: tuple[int, ...]) -> tuple[int, ...]:
        """The offsets that some of `elements` read, ascending."""
        return tuple(sorted({offset for e in elements for _, offset in self.reads[e]}))

    def valid_blocks(self, offset: int) -> tuple[int, int]:
        """The blocks [first, end) for which `offset` lies in the input."""
        first = max(0, -(offset // self.step)) if offset < 0 else 0
        end = min(self.blocks, (self.size - 1 - offset) // self.step + 1)
        return first, max(first, end)


def _spaced(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def convolution_axis(size: int, taps: int, stride: int, dilation: int, padding: tuple[int, int], r: int = 1) -> Axis:
    """The axis of a convolution, with blocks of `r` outputs.

    Example:
        >>> convolution_axis(size=8, taps=3, stride=2, dilation=1, padding=(1, 1), r=2)
        Axis(size=8, out=4, block=2, step=4, reads=(((0, -1), (1, 0), (2, 1)), ((0, 1), (1, 2), (2, 3))))
    """
    out = (size + sum(padding) - dilation * (taps - 1) - 1) // stride + 1
    reads = tuple(_spaced([(k, stride * e + dilation * k - padding[0]) for k in range(taps)]) for e in range(r))
    return Axis(size, out, r, stride * r, reads)


def transposed_axis(size: int, taps: int, stride: int, dilation: int, padding: int, out: int, r: int = 1) -> Axis:
    """The axis of a transposed convolution with `out` outputs, with blocks of `r` outputs of each of the `stride` phases.

    Output o gathers from input i through tap k where o = stride * i + dilation * k - padding.

    Example:
        >>> transposed_axis(size=4, taps=4, stride=2, dilation=1, padding=1, out=8)
        Axis(size=4, out=8, block=2, step=1, reads=(((3, -1), (1, 0)), ((2, 0), (0, 1))))
    """
    reads = []
    for e in range(stride * r):
        hits = [(k, (e + padding - dilation * k) // stride) for k in range(taps) if (e + padding - dilation * k) % stride == 0]
        reads.append(_spaced(hits))
    return Axis(size, out, stride * r, r, tuple(reads))


def lattice(offsets: tuple[int, ...]) -> tuple[int, int, int]:
    """(first, unit, count) of the smallest arithmetic progression that holds the offsets.

    Example:
        >>> lattice((-2, 0, 4))
        (-2, 2, 4)
    """
    unit = 0
    for offset in offsets:
        unit = gcd(unit, offset - offsets[0])
    unit = unit or 1
    return offsets[0], unit, (offsets[-1] - offsets[0]) // unit + 1
