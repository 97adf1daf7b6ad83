# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers for Equinox: `Conv3d`, `ConvTranspose3d` and `AvgPool3d` for those of `equinox.nn`.

Arguments, defaults, parameters and results are those of Equinox: one example at a time, channels first; map over a batch with
`jax.vmap`, which the operations fold into their own batch. Parameters and input must have one dtype.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from .._activation import ActFnType
from .._arguments import as_triple
from .._geometry import effective_kernel
from ._arguments import as_batch, as_padding, as_steps
from ._convolution import convolve, convolve_transposed, pad_volume, same_padding
from ._pooling import average

__all__ = ["AvgPool3d", "Conv3d", "ConvTranspose3d"]

_NAMES = ("SAME", "SAME_LOWER", "VALID")
_MODES = {"ZEROS": "constant", "REFLECT": "reflect", "REPLICATE": "edge", "CIRCULAR": "wrap"}


class Conv3d(eqx.nn.Conv3d):
    """3-D convolution with the parameters and the results of `equinox.nn.Conv3d`.

    It is one, whose arithmetic is `jax_nki3d.conv3d`: the same `key` gives the same initial values, and `eqx.tree_at` moves weights.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: the window: one int, or three (D, H, W).
        stride: step of the window: one int, or three.
        padding: one int, three, or three pairs (low, high); "VALID" for none; "SAME" or "SAME_LOWER" for ceil(size / stride) outputs,
            the larger part behind or in front.
        dilation: distance between neighbouring taps: one int, or three.
        groups: 1; groups are not supported.
        use_bias: whether a bias is added.
        padding_mode: what `padding` is filled with: "ZEROS", "REFLECT", "REPLICATE" or "CIRCULAR".
        dtype: the dtype of the parameters; None for JAX's default.
        key: random key of the initial values.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Equinox.

    Attributes:
        weight: [out_channels, in_channels, K_d, K_h, K_w].
        bias: [out_channels, 1, 1, 1], or None.

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: parameters and input of different dtypes, or an argument of a wrong type.
        NotImplementedError: groups.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_nki3d.nn.equinox import Conv3d
        >>> layer = Conv3d(3, 4, 3, stride=2, padding=1, key=jax.random.key(0))
        >>> layer(jnp.ones((3, 8, 8, 6))).shape
        (4, 4, 4, 3)
        >>> jax.vmap(layer)(jnp.ones((2, 3, 8, 8, 6))).shape
        (2, 4, 4, 4, 3)
    """

    activation_fn: ActFnType | str | None = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = (1, 1, 1),
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = (0, 0, 0),
        dilation: int | Sequence[int] = (1, 1, 1),
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        key: Array,
        activation_fn: ActFnType | str | None = None,
    ):
        _check_groups("Conv3d", groups)
        super().__init__(
            in_channels,
            out_channels,
            as_steps("Conv3d", "kernel_size", kernel_size),
            as_steps("Conv3d", "stride", stride),
            as_padding("Conv3d", padding, _NAMES),
            as_steps("Conv3d", "dilation", dilation),
            groups,
            use_bias,
            _mode("Conv3d", padding_mode, tuple(_MODES)),
            dtype,
            key=key,
        )
        self.activation_fn = activation_fn

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        """Convolves one example.

        Args:
            x: [in_channels, D, H, W].
            key: ignored, as in Equinox.

        Returns:
            [out_channels, D_out, H_out, W_out].
        """
        x, batch = as_batch("Conv3d", x, "NCDHW", self.in_channels, most=0)
        padding = self.padding
        if self.padding_mode != "ZEROS":
            windows = list(map(effective_kernel, self.kernel_size, self.dilation))
            if padding in ("SAME", "SAME_LOWER"):
                padding = tuple(same_padding(x.shape[2:], windows, self.stride, lower=padding == "SAME_LOWER"))
            if not isinstance(padding, str):
                x, padding = pad_volume(x, padding, "NCDHW", _MODES[self.padding_mode]), "VALID"
        y = convolve(
            x,
            jnp.transpose(self.weight, (2, 3, 4, 1, 0)),
            _bias(self),
            strides=self.stride,
            padding=padding,
            dilation=self.dilation,
            activation_fn=self.activation_fn,
            data_format="NCDHW",
        )
        return y.reshape(batch + y.shape[1:])


class ConvTranspose3d(eqx.nn.ConvTranspose3d):
    """3-D transposed convolution with the parameters and the results of `equinox.nn.ConvTranspose3d`.

    It is one, whose arithmetic is `jax_nki3d.conv3d_transpose`. `padding` and `output_padding` mean what they mean in torch; the weight
    does not: Equinox slides it, as it is, over the input with `stride - 1` zeros between its elements, where torch flips it.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: the window: one int, or three (D, H, W).
        stride: distance between the places of neighbouring inputs in the output: one int, or three.
        padding: padding of the convolution whose transpose this is, cropped from the output: one int, three, or three pairs;
            "VALID" for none; "SAME" or "SAME_LOWER" for size * stride - output_padding outputs.
        output_padding: elements added behind each axis, one int, or three, each below the stride; taken off with "SAME".
        dilation: distance between neighbouring taps: one int, or three.
        groups: 1; groups are not supported.
        use_bias: whether a bias is added.
        padding_mode: "ZEROS", or "CIRCULAR" for the transpose of a circular convolution, with "SAME" or "SAME_LOWER".
        dtype: the dtype of the parameters; None for JAX's default.
        key: random key of the initial values.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Equinox.

    Attributes:
        weight: [out_channels, in_channels, K_d, K_h, K_w], flipped.
        bias: [out_channels, 1, 1, 1], or None.

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: parameters and input of different dtypes, or an argument of a wrong type.
        NotImplementedError: groups; a `padding_mode` that Equinox has none of either.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_nki3d.nn.equinox import ConvTranspose3d
        >>> layer = ConvTranspose3d(4, 2, 3, stride=2, padding=1, output_padding=1, key=jax.random.key(0))
        >>> layer(jnp.ones((4, 4, 5, 6))).shape
        (2, 8, 10, 12)
    """

    activation_fn: ActFnType | str | None = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = (1, 1, 1),
        padding: str | int | Sequence[int] | Sequence[tuple[int, int]] = (0, 0, 0),
        output_padding: int | Sequence[int] = (0, 0, 0),
        dilation: int | Sequence[int] = (1, 1, 1),
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        key: Array,
        activation_fn: ActFnType | str | None = None,
    ):
        _check_groups("ConvTranspose3d", groups)
        strides = as_steps("ConvTranspose3d", "stride", stride)
        extra = as_triple("ConvTranspose3d", "output_padding", output_padding, 0)
        if any(a >= b for a, b in zip(extra, strides, strict=True)):
            raise ValueError(
                f"ConvTranspose3d: `output_padding` must be smaller than `stride` {strides} on each axis, got {extra}. jnp.pad adds zeros "
                "to a result."
            )
        super().__init__(
            in_channels,
            out_channels,
            as_steps("ConvTranspose3d", "kernel_size", kernel_size),
            strides,
            padding=as_padding("ConvTranspose3d", padding, _NAMES),
            output_padding=extra,
            dilation=as_steps("ConvTranspose3d", "dilation", dilation),
            groups=groups,
            use_bias=use_bias,
            padding_mode=_mode("ConvTranspose3d", padding_mode, ("ZEROS", "CIRCULAR")),
            dtype=dtype,
            key=key,
        )
        self.activation_fn = activation_fn

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        """Applies the transposed convolution to one example.

        Args:
            x: [in_channels, D, H, W].
            key: ignored, as in Equinox.

        Returns:
            [out_channels, D_out, H_out, W_out].
        """
        x, batch = as_batch("ConvTranspose3d", x, "NCDHW", self.in_channels, most=0)
        ends = self.padding if not isinstance(self.padding, str) else (self.padding,) * 3
        axes = zip(self.kernel_size, self.dilation, self.stride, self.output_padding, ends, strict=True)
        pads = tuple(_padding_around(*axis) for axis in axes)
        if self.padding_mode == "CIRCULAR":
            # whole strides of the padding continue the input periodically; what is left over stays zero
            x = pad_volume(
                x, [(low // s, high // s) for (low, high), s in zip(pads, self.stride, strict=True)], "NCDHW", "wrap"
            )
            pads = tuple((low % s, high % s) for (low, high), s in zip(pads, self.stride, strict=True))
        y = convolve_transposed(
            "ConvTranspose3d",
            x,
            jnp.transpose(self.weight, (2, 3, 4, 1, 0)),
            _bias(self),
            strides=self.stride,
            padding=pads,
            dilation=self.dilation,
            activation_fn=self.activation_fn,
            data_format="NCDHW",
        )
        return y.reshape(batch + y.shape[1:])


class AvgPool3d(eqx.nn.AvgPool3d):
    """3-D average pooling with the results of `equinox.nn.AvgPool3d`: padding always counts in the divisor.

    Args:
        kernel_size: the window: one int, or three (D, H, W).
        stride: step of the window: one int, or three. The default is **1**, as in Equinox; torch steps by the window.
        padding: zeros around the volume: one int, three, or three pairs (low, high), none above the window.
        use_ceil: whether a last window that reaches beyond the padded volume gives an output, too; zeros there count.

    Raises:
        ValueError: a window that does not fit, a number or string out of its domain, an input of a wrong rank.
        TypeError: a wrong dtype, or an argument of a wrong type.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_nki3d.nn.equinox import AvgPool3d
        >>> AvgPool3d(2, stride=2, use_ceil=True)(jnp.ones((3, 5, 6, 7))).shape
        (3, 3, 3, 4)
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
        use_ceil: bool = False,
    ):
        pads = as_padding("AvgPool3d", padding, ())
        window = as_steps("AvgPool3d", "kernel_size", kernel_size)
        if any(n > k for pair, k in zip(pads, window, strict=True) for n in pair):
            raise ValueError(
                f"AvgPool3d: `padding` must not be larger than `kernel_size` {window} on any axis, got {pads}. Use less padding."
            )
        super().__init__(window, as_steps("AvgPool3d", "stride", stride), pads, use_ceil)

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        """Pools one example.

        Args:
            x: [C, D, H, W].
            key: ignored, as in Equinox.

        Returns:
            [C, D_out, H_out, W_out] in the dtype of `x`. Sums run in float32 or wider and are rounded once.
        """
        x, batch = as_batch("AvgPool3d", x, "NCDHW", None, most=0)
        pads = self.padding
        if self.use_ceil:
            axes = zip(x.shape[2:], self.padding, self.kernel_size, self.stride, strict=True)
            pads = tuple((low, high + s if (n + low + high - k) % s else high) for n, (low, high), k, s in axes)
        y = average(x, self.kernel_size, self.stride, pads, True, "NCDHW")
        return y.reshape(batch + y.shape[1:])


def _check_groups(layer: str, groups: Any) -> None:
    if groups != 1:
        raise NotImplementedError(f"{layer}: `groups` must be 1, got {groups!r}. Use the layer of equinox.nn in this place.")


def _mode(layer: str, value: Any, known: Sequence[str]) -> str:
    name = value.upper() if isinstance(value, str) else value
    if name in known:
        return name
    error = NotImplementedError if name in _MODES else ValueError
    raise error(
        f"{layer}: `padding_mode` must be one of {', '.join(map(repr, known))}, got {value!r}. Pass one of these strings."
    )


def _bias(layer: Conv3d | ConvTranspose3d) -> Array | None:
    return None if layer.bias is None else layer.bias.reshape(layer.out_channels)


def _padding_around(kernel: int, dilation: int, stride: int, extra: int, padding: Any) -> tuple[int, int]:
    """lax's padding around the input with its zeros between, for Equinox's on one axis."""
    window = effective_kernel(kernel, dilation)
    if padding in ("SAME", "SAME_LOWER"):
        total = window - stride + extra
        extra, total = max(0, -total), max(0, total)
        front = (total + (padding == "SAME_LOWER")) // 2
        padding = (front, total - front)
    elif padding == "VALID":
        padding = (0, 0)
    return window - 1 - padding[0], window - 1 - padding[1] + extra
