# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the taps of a 3-D window land: pure arithmetic, no arrays.

Everything in this library rests on one relation, per axis, between an index `o` of the *output* of a convolution, a tap `k`
of its filter and an index `i` of its *input*:

    i = o * stride + k * dilation - front

`conv3d` sums over (o fixed, all k); `conv3d_transpose` and the input gradient sum over (i fixed, all k); the filter gradient
sums over (k fixed, all o). Indices that fall outside the volumes contribute nothing, so padding behind the volume needs no
number of its own.
"""

import dataclasses
from typing import NamedTuple

Triple = tuple[int, int, int]


class Tap(NamedTuple):
    """One tap of one axis: `k * dilation - front == shift * stride + phase`, with 0 <= phase < stride."""

    k: int
    phase: int
    shift: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The index relation of a convolution on the three axes (D, H, W).

    Attributes:
        size: extents of the convolution's input (of the *output* of a transposed convolution).
        out: extents of the convolution's output (of the *input* of a transposed convolution).
        kernel: taps per axis.
        stride: step of the window.
        dilation: distance between neighbouring taps.
        front: padding before the first element.
    """

    size: Triple
    out: Triple
    kernel: Triple
    stride: Triple
    dilation: Triple
    front: Triple

    def taps(self, axis: int) -> tuple[Tap, ...]:
        """All taps of one axis with the phase of the input that they read, and the shift inside that phase."""
        stride = self.stride[axis]
        offsets = (k * self.dilation[axis] - self.front[axis] for k in range(self.kernel[axis]))
        return tuple(Tap(k, offset % stride, offset // stride) for k, offset in enumerate(offsets))

    def taps_by_phase(self, axis: int) -> dict[int, tuple[Tap, ...]]:
        """The taps of one axis, grouped by phase; phases that no tap reaches are absent."""
        groups: dict[int, tuple[Tap, ...]] = {}
        for tap in self.taps(axis):
            groups[tap.phase] = (*groups.get(tap.phase, ()), tap)
        return dict(sorted(groups.items()))

    @property
    def extent(self) -> Triple:
        """Input elements between the first and the last that any window reads, padding included: needed length per axis."""
        return triple((self.out[a] - 1) * self.stride[a] + effective_kernel(self.kernel[a], self.dilation[a]) for a in range(3))


def triple(values) -> Triple:
    """Three ints as a tuple."""
    d, h, w = values
    return (d, h, w)


def effective_kernel(kernel: int, dilation: int) -> int:
    """Elements between the first and the last tap, both included."""
    return (kernel - 1) * dilation + 1


def convolved_size(size: int, kernel: int, stride: int, dilation: int, pad_front: int, pad_back: int) -> int:
    """Output extent of a convolution, or 0 or less where the window does not fit."""
    return (size + pad_front + pad_back - effective_kernel(kernel, dilation)) // stride + 1


def transposed_size(size: int, kernel: int, stride: int, dilation: int, padding: int, output_padding: int) -> int:
    """Output extent of a transposed convolution, or 0 or less where the crop leaves nothing."""
    return (size - 1) * stride + effective_kernel(kernel, dilation) - 2 * padding + output_padding
