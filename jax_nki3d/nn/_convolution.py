# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the libraries' convolutions, in their own terms, by the operations of this library.

Flax, Haiku and Equinox all describe a transposed convolution as lax does: the kernel, as it is, slides over the input that has
`stride - 1` zeros between its elements and `padding` zeros around it. Our operation crops the whole result instead, and takes
what lax slides as filters that are already flipped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .._activation import ActFnType
from .._geometry import Triple, effective_kernel
from ..conv3d import conv3d
from ..conv3d_transpose import conv3d_transpose
from ._arguments import Pairs

# what jnp.pad calls the ways to continue a volume
MODES = {"CIRCULAR": "wrap", "REFLECT": "reflect", "REPLICATE": "edge"}


def pad_volume(x: Array, pads: Sequence[tuple[int, int]], data_format: str, mode: str = "constant") -> Array:
    """Pads the three spatial axes of [B, ...]."""
    if not any(n for pair in pads for n in pair):
        return x
    around = [(0, 0), *pads, (0, 0)] if data_format == "NDHWC" else [(0, 0), (0, 0), *pads]
    return jnp.pad(x, around, mode=mode)


def volume(x: Array, data_format: str) -> Triple:
    """(D, H, W) of an array [B, ...]."""
    d, h, w = x.shape[1:4] if data_format == "NDHWC" else x.shape[2:]
    return d, h, w


def same_padding(
    size: Sequence[int], windows: Sequence[int], strides: Sequence[int], lower: bool = False
) -> list[tuple[int, int]]:
    """Pairs for ceil(size / stride) outputs; of an odd number of zeros the larger part is behind, or in front with `lower`."""
    totals = (max(0, (-(-n // s) - 1) * s + k - n) for n, k, s in zip(size, windows, strides, strict=True))
    pairs = ((total // 2, total - total // 2) for total in totals)
    return [pair[::-1] if lower else pair for pair in pairs]


def convolve(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    dilation: Sequence[int],
    activation_fn: ActFnType | str | None,
    data_format: str,
) -> Array:
    """A convolution of [B, ...] by a kernel [K_d, K_h, K_w, C_in, C_out]; `padding` as in lax, or a way to continue the volume."""
    windows = [effective_kernel(k, d) for k, d in zip(kernel.shape[:3], dilation, strict=True)]
    if padding in MODES:
        x = pad_volume(x, [((k - 1) // 2, k // 2) for k in windows], data_format, MODES[str(padding)])
        padding = "VALID"
    elif padding == "SAME_LOWER":
        padding = same_padding(volume(x, data_format), windows, strides, lower=True)
    return conv3d(
        x,
        kernel,
        bias,
        stride=strides,
        padding=padding,
        dilation=dilation,
        activation_fn=activation_fn,
        data_format=data_format,
    )


def convolve_transposed(
    layer: str,
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    dilation: Sequence[int],
    activation_fn: ActFnType | str | None,
    data_format: str,
    filter_shape: str = "KDHW_CI_CO",
) -> Array:
    """A transposed convolution of [B, ...] in the sense of `lax.conv_transpose`, by a kernel as it slides."""
    windows = [effective_kernel(k, d) for k, d in zip(kernel.shape[:3], dilation, strict=True)]
    pads = (
        [transposed_padding(k, s, padding) for k, s in zip(windows, strides, strict=True)]
        if isinstance(padding, str)
        else padding
    )
    axes = zip("DHW", volume(x, data_format), windows, strides, dilation, pads, strict=True)
    fits = [_fit(layer, *axis) for axis in axes]
    y = conv3d_transpose(
        pad_volume(x, [f.zeros for f in fits], data_format),
        kernel,
        bias,
        stride=strides,
        padding=[f.padding for f in fits],
        dilation=dilation,
        activation_fn=activation_fn,
        filter_shape=filter_shape,
        output_padding=[f.output_padding for f in fits],
        data_format=data_format,
    )
    if all(f.cut == (0, 0) for f in fits):
        return y
    kept = [slice(f.cut[0], n - f.cut[1]) for f, n in zip(fits, volume(y, data_format), strict=True)]
    whole = slice(None)
    return y[(whole, *kept, whole) if data_format == "NDHWC" else (whole, whole, *kept)]


def transposed_padding(window: int, stride: int, name: str) -> tuple[int, int]:
    """The zeros that `lax.conv_transpose` puts around the dilated input for "SAME" and "VALID"."""
    if name == "VALID":
        return window - 1, max(stride, window) - 1
    total = window + stride - 2
    low = window - 1 if stride > window - 1 else -(-total // 2)
    return low, total - low


def continue_periodically(
    x: Array, kernel: Array, strides: Sequence[int], dilation: Sequence[int], data_format: str, odd_in_front: bool
) -> tuple[Array, Pairs]:
    """An input and a padding whose transposed convolution is one period, size * stride, of that of the periodic volume.

    The whole result of the input alone, wrapped around and added up, is the same; there it would be rounded before the sum.
    Of an odd number of elements that the window reaches beyond the period, the larger part lies in front, or behind.
    """
    axes = zip(volume(x, data_format), kernel.shape[:3], strides, dilation, strict=True)
    wraps, (d, h, w) = zip(*(_period(*axis, odd_in_front) for axis in axes), strict=True)
    return pad_volume(x, wraps, data_format, "wrap"), (d, h, w)


def _period(size: int, kernel: int, stride: int, dilation: int, odd_in_front: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """For one axis: the elements that continue the input on both ends, and lax's padding around it."""
    window, period = effective_kernel(kernel, dilation), size * stride
    missing = -(max(stride, window) - stride) % (2 * period)  # what the result for "VALID" lacks of two periods
    first = (
        -(-(-missing // 2) if odd_in_front else missing // 2) % period
    )  # the element of the result that the period starts with
    front = max(0, (window - 1 - first) // stride)
    back = max(0, (first + period - 1) // stride - size + 1)
    crop = first + front * stride
    extent = (size + front + back - 1) * stride + 1
    return (front, back), (window - 1 - crop, crop + period - extent)


class _Fit(NamedTuple):
    """How one axis of `conv3d_transpose` is called to give what lax gives.

    Attributes:
        zeros: elements put around the input.
        padding: argument of the operation.
        output_padding: argument of the operation.
        cut: elements taken off the output.
    """

    zeros: tuple[int, int]
    padding: int
    output_padding: int
    cut: tuple[int, int]


def _fit(layer: str, axis: str, size: int, window: int, stride: int, dilation: int, padding: tuple[int, int]) -> _Fit:
    low, high = padding
    # The whole result, with every place that a tap reaches, comes from window - 1 zeros on both sides. What is asked for lacks
    # `front` and `back` elements of it; where negative, it has that many more, which hold the bias.
    front, back = window - 1 - low, window - 1 - high
    out = (size - 1) * stride + window - front - back
    if out < 1:
        raise ValueError(
            f"{layer}: nothing is left on axis {axis}: the input has {size} elements there, which with a stride of {stride}, an "
            f"effective kernel of {window} and {(low, high)} zeros around the input with its zeros between give {out}. "
            "In Flax and Haiku `padding` adds outputs: use more. In Equinox it crops them: use less."
        )
    # A zero more around the input moves that end of the whole result out by one stride. All outputs then come from one
    # operation, bias and activation included, those that no tap reaches, too.
    zeros_front = max(0, -(front // stride))
    front += zeros_front * stride
    if 0 <= front - back < max(stride, dilation):
        return _Fit((zeros_front, 0), front, front - back, (0, 0))
    zeros_back = max(0, -(back // stride))
    back += zeros_back * stride
    both = min(front, back)
    return _Fit((zeros_front, zeros_back), both, 0, (front - both, back - both))
