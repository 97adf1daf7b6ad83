# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Average pooling with the paddings of Flax, Haiku and Equinox: pairs that may differ at the two ends."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..avg_pooling_3d import avg_pooling_3d
from ._convolution import pad_volume, same_padding, volume


def average(
    x: Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    count_include_pad: bool,
    data_format: str,
) -> Array:
    """The means of the windows of [B, ...], in the dtype of `x`."""
    size = volume(x, data_format)
    pads = (
        {"VALID": [(0, 0)] * 3, "SAME": same_padding(size, window, strides)}[padding] if isinstance(padding, str) else padding
    )
    if all(low == high < k for (low, high), k in zip(pads, window, strict=True)):
        own = [low for low, _ in pads]
        return avg_pooling_3d(x, window, strides, own, data_format=data_format, count_include_pad=count_include_pad)
    # The operation pads both ends alike, so the zeros become a part of the volume here.
    # A division follows where they do not count: round after it, once.
    wide = jnp.float32 if x.dtype.itemsize < 4 and not count_include_pad else x.dtype
    y = avg_pooling_3d(pad_volume(x.astype(wide), pads, data_format), window, strides, data_format=data_format)
    if count_include_pad:
        return y
    d, h, w = (_shares_inside(*axis) for axis in zip(size, window, strides, pads, strict=True))
    shares = np.asarray(d[:, None, None] * h[:, None] * w)
    shares = shares[None, ..., None] if data_format == "NDHWC" else shares[None, None]
    return (y / shares.astype(wide)).astype(x.dtype)


def _shares_inside(size: int, window: int, stride: int, pads: tuple[int, int]) -> np.ndarray:
    """[outputs of an axis]: the share of each window that lies inside the volume."""
    low, high = pads
    starts = np.arange((size + low + high - window) // stride + 1) * stride - low
    return (np.minimum(starts + window, size) - np.maximum(starts, 0)) / window
