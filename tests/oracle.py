# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the operations mean, in float64 NumPy: slow, and too simple to be wrong in the ways that the library could be.

On each axis, `reads[k, o, i]` is 1 where tap k of the window at output o reads element i of the input, else 0. Padding,
elements that no window reaches and holes between taps need no thought here: they are rows and columns of zeros. Every
operation contracts three such tensors with its operands; nothing is sliced, padded or flipped.

All arrays are channels first, [B, C, D, H, W]. Filters of a convolution are [K_d, K_h, K_w, C_in, C_out].
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Ints = int | tuple[int, ...]


def three(value: Ints) -> tuple[int, int, int]:
    """One number for all axes, or three."""
    d, h, w = (value,) * 3 if isinstance(value, int) else value
    return d, h, w


def six(value: Ints) -> tuple[int, ...]:
    """Padding (D front, D back, H top, H bottom, W left, W right) from one number, three or six."""
    if isinstance(value, int):
        return (value,) * 6
    return tuple(value) if len(value) == 6 else tuple(n for n in value for _ in range(2))


def reads(size: int, out: int, kernel: int, stride: int, dilation: int, front: int) -> np.ndarray:
    """[kernel, out, size]: which element each tap of each window reads."""
    k, o, i = np.ogrid[:kernel, :out, :size]
    return (o * stride + k * dilation - front == i).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Window:
    """A convolution's window: the arguments that all operations share, padding as six numbers."""

    kernel: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    padding: tuple[int, ...] = (0,) * 6
    dilation: tuple[int, int, int] = (1, 1, 1)

    def out(self, size) -> tuple[int, ...]:
        """Places of the window in a volume: counted, one after the other."""
        counts = []
        for axis in range(3):
            padded = size[axis] + self.padding[2 * axis] + self.padding[2 * axis + 1]
            last_tap = (self.kernel[axis] - 1) * self.dilation[axis]
            counts.append(len([start for start in range(0, padded, self.stride[axis]) if start + last_tap < padded]))
        return tuple(counts)

    def reads(self, size, out) -> list[np.ndarray]:
        return [reads(size[a], out[a], self.kernel[a], self.stride[a], self.dilation[a], self.padding[2 * a]) for a in range(3)]


# Orders of contraction, as NumPy takes them; its own choice is sometimes a thousand times slower. Either the input is laid out tap by tap,
# axis after axis, and multiplied at last, or the product comes first and is added up axis after axis.
_READ_FIRST = ["einsum_path", (0, 1), (0, 3), (0, 2), (0, 1)]
_TAPS_FIRST = ["einsum_path", (0, 4), (0, 3), (0, 2), (0, 1)]

# Letters: b batch, i C_in, c C_out; dhw the input's positions, opq the output's, xyz taps.


def correlate(x, filters, window: Window, out=None) -> np.ndarray:
    """y[o] = sum over taps of x[read by the tap at o] . filters[tap]."""
    d, h, w = window.reads(x.shape[2:], window.out(x.shape[2:]) if out is None else out)
    return np.einsum("bidhw,xod,yph,zqw,xyzic->bcopq", x, d, h, w, filters, optimize=_READ_FIRST)


def spread(dy, filters, window: Window, size) -> np.ndarray:
    """dx[i] = sum over the windows and taps that read i of dy[window] . filters[tap]."""
    d, h, w = window.reads(size, dy.shape[2:])
    return np.einsum("bcopq,xod,yph,zqw,xyzic->bidhw", dy, d, h, w, filters, optimize=_TAPS_FIRST)


def filter_gradient(x, dy, window: Window) -> np.ndarray:
    """dw[tap] = sum over batch and windows of x[read by the tap] (outer) dy[window]."""
    d, h, w = window.reads(x.shape[2:], dy.shape[2:])
    return np.einsum("bidhw,xod,yph,zqw,bcopq->xyzic", x, d, h, w, dy, optimize=_READ_FIRST)


def bias_gradient(dy) -> np.ndarray:
    return np.einsum("bcopq->c", dy)


def plus_bias(y, bias) -> np.ndarray:
    return y if bias is None else y + bias.reshape(1, -1, 1, 1, 1)


# ---- the public operations -------------------------------------------------------------------------------------------


def conv3d(x, filters, bias=None, *, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1) -> np.ndarray:
    return plus_bias(correlate(x, filters, _window(filters, stride, padding, dilation)), bias)


def conv3d_bwd(dy, x, filters, *, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1):
    """(dx, dw, db)."""
    window = _window(filters, stride, padding, dilation)
    return spread(dy, filters, window, x.shape[2:]), filter_gradient(x, dy, window), bias_gradient(dy)


def transposed_size(size, kernel, stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints) -> tuple[int, ...]:
    """Last place that a tap of the last element lands on, cropped at both ends, plus output_padding."""
    axes = zip(size, kernel, three(stride), three(padding), three(dilation), three(output_padding), strict=True)
    return tuple((n - 1) * s + (k - 1) * d + 1 - 2 * p + extra for n, k, s, p, d, extra in axes)


def conv3d_transpose(
    x,
    filters,
    bias=None,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    output_padding: Ints = 0,
    filter_shape: str = "KDHW_CI_CO",
) -> np.ndarray:
    """`filters` flipped, as the library takes them."""
    adjoint, size = _unflip(filters, filter_shape), _size(x, filters, stride, padding, dilation, output_padding)
    return plus_bias(spread(x, adjoint, _window(filters, stride, padding, dilation), size), bias)


def conv3d_transpose_bwd(
    dy,
    x,
    filters,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    output_padding: Ints = 0,
    filter_shape: str = "KDHW_CI_CO",
):
    """(dx, dw, db), where dw is flipped like the filters."""
    del output_padding  # dy has the shape that it led to
    window = _window(filters, stride, padding, dilation)
    dx = correlate(dy, _unflip(filters, filter_shape), window, out=x.shape[2:])
    return dx, _flip(filter_gradient(dy, x, window), filter_shape), bias_gradient(dy)


def shares(size, kernel: Ints, stride: Ints, padding: Ints, count_include_pad: bool) -> np.ndarray:
    """One over the number of elements that count in each window, [D_out, H_out, W_out]."""
    window = _pool_window(kernel, stride, padding)
    out = window.out(size)
    if count_include_pad:
        return np.full(out, 1 / math.prod(window.kernel))
    d, h, w = (r.sum(axis=(0, 2)) for r in window.reads(size, out))
    return 1 / np.einsum("o,p,q->opq", d, h, w)


def avg_pooling_3d(x, share, *, kernel: Ints, stride: Ints | None = None, padding: Ints = 0) -> np.ndarray:
    """Window sums times `share`, which is an operand so that the terms of the sum can be told (see `tolerances`)."""
    d, h, w = _pool_window(kernel, stride, padding).reads(x.shape[2:], share.shape)
    return np.einsum("bcdhw,xod,yph,zqw,opq->bcopq", x, d, h, w, share, optimize=True)


def avg_pooling_3d_backward(dy, share, size, *, kernel: Ints, stride: Ints | None = None, padding: Ints = 0) -> np.ndarray:
    d, h, w = _pool_window(kernel, stride, padding).reads(size, share.shape)
    return np.einsum("bcopq,xod,yph,zqw,opq->bcdhw", dy, d, h, w, share, optimize=True)


def _window(filters, stride: Ints, padding: Ints, dilation: Ints) -> Window:
    return Window(three(filters.shape[:3]), three(stride), six(padding), three(dilation))


def _pool_window(kernel: Ints, stride: Ints | None, padding: Ints) -> Window:
    return Window(three(kernel), three(kernel if stride is None else stride), six(padding))


def _size(x, filters, stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints) -> tuple[int, ...]:
    return transposed_size(x.shape[2:], filters.shape[:3], stride, padding, dilation, output_padding)


def _unflip(filters, filter_shape: str) -> np.ndarray:
    """Flipped filters of a transposed convolution -> the filters of the convolution that it transposes."""
    turned = np.flip(filters, (0, 1, 2))
    return np.einsum("xyzic->xyzci", turned) if filter_shape == "KDHW_CI_CO" else turned


def _flip(filters, filter_shape: str) -> np.ndarray:
    """The inverse of `_unflip`."""
    return _unflip(filters, filter_shape)


# ---- activations -----------------------------------------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[float])


def _sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


def _tanh_gelu(z):
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
    return z / 2 * (1 + np.tanh(inner)), (1 + np.tanh(inner)) / 2 + z / 2 * (1 - np.tanh(inner) ** 2) * slope


def _gelu(z):
    normal = (1 + _erf(z / math.sqrt(2))) / 2
    return z * normal, normal + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _scaled_sigmoid(scale: float):
    def value_and_slope(z):
        s = _sigmoid(scale * z)
        return z * s, s + scale * z * s * (1 - s)

    return value_and_slope


ACTIVATIONS: dict[str, Callable] = {
    "SiLU": _scaled_sigmoid(1.0),
    "GELU": _gelu,
    "GELU_Tanh_Approx": _tanh_gelu,
    "Swish": _scaled_sigmoid(1.702),
    "ReLU": lambda z: (np.maximum(z, 0), (z > 0).astype(np.float64)),
}
"""Name -> function of z that returns (value, derivative)."""


# ---- sums and what they are made of ----------------------------------------------------------------------------------


class Terms(NamedTuple):
    """A sum, and what bounds the rounding error of computing it: see `tolerances.bound`.

    Attributes:
        value: the sum.
        count: how many terms it has; 0 where nothing contributes and the result must be exactly zero.
        squares: the sum of the squares of the terms.
        inherited: error that is already in the terms.
    """

    value: np.ndarray
    count: np.ndarray
    squares: np.ndarray
    inherited: np.ndarray | float = 0.0


def terms(operation: Callable[..., np.ndarray], *operands) -> Terms:
    """The result of an operation that sums products of its operands, with its terms.

    Such an operation tells its own number of terms when all operands are one, and the sum of the terms' squares when all
    operands are squared.
    """
    given = [np.asarray(a, np.float64) for a in operands]
    return Terms(operation(*given), operation(*map(np.ones_like, given)), operation(*map(np.square, given)))
