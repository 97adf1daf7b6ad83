# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules for Haiku: `Conv3D` for `hk.Conv3D`, `Conv3DTranspose` for `hk.Conv3DTranspose`, `AvgPool3D` for `hk.AvgPool`.

Arguments, defaults, parameters and results are those of Haiku: either layout, a batch dimension or none, parameters in the dtype
of the input, no promotion. The classes of the same name get the same module names, so that parameters move without renaming.
"""

from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._activation import ActFnType
from .._geometry import Triple
from ._arguments import as_batch, as_padding, as_steps, masked
from ._convolution import convolve, convolve_transposed, volume
from ._pooling import average

__all__ = ["AvgPool3D", "Conv3D", "Conv3DTranspose"]


class Conv3D(hk.Conv3D):
    """3-D convolution with the parameters and the results of `hk.Conv3D`.

    Args:
        output_channels: channels of the output.
        kernel_shape: the window: one int, or three (D, H, W).
        stride: step of the window: one int, or three.
        rate: distance between neighbouring taps: one int, or three.
        padding: "SAME" for ceil(size / stride) outputs, an odd element behind; "VALID" for none; one pair (low, high) of zeros for
            all axes, or three; a function of `hk.pad`, or three. Also one int, for all sides.
        with_bias: whether a bias is added.
        w_init: initializer of `w`; None for a truncated normal of deviation 1 / sqrt(K_d * K_h * K_w * C_in).
        b_init: initializer of `b`; None for zeros.
        data_format: "NDHWC" or "NCDHW", or any other name that Haiku has for them.
        mask: factors of `w`, in its shape; None for none.
        feature_group_count: 1; groups are not supported.
        name: name of the module.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Haiku.

    The parameters are `w` [K_d, K_h, K_w, C_in, output_channels] and `b` [output_channels] ([output_channels, 1, 1, 1] with channels
    first), in the dtype of the input.

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: parameters and input of different dtypes, or an argument of a wrong type.
        NotImplementedError: groups.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp
        >>> from jax_nki3d.nn.haiku import Conv3D
        >>> network = hk.without_apply_rng(hk.transform(lambda x: Conv3D(4, 3, stride=2)(x)))
        >>> x = jnp.ones((2, 8, 8, 6, 3))
        >>> parameters = network.init(jax.random.key(0), x)
        >>> network.apply(parameters, x).shape
        (2, 4, 4, 3, 4)
        >>> jax.tree.map(jnp.shape, parameters)
        {'conv3_d': {'b': (4,), 'w': (3, 3, 3, 3, 4)}}
    """

    def __init__(
        self,
        output_channels: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        rate: int | Sequence[int] = 1,
        padding: Any = "SAME",
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        data_format: str = "NDHWC",
        mask: Array | None = None,
        feature_group_count: int = 1,
        name: str | None = None,
        *,
        activation_fn: ActFnType | str | None = None,
    ):
        if feature_group_count != 1:
            raise NotImplementedError(
                f"Conv3D: `feature_group_count` must be 1, got {feature_group_count!r}. Use hk.Conv3D in this place."
            )
        if isinstance(padding, str | int | np.integer) or padding is None:
            padding = as_padding("Conv3D", padding, ("SAME", "VALID"))
        super().__init__(
            output_channels,
            as_steps("Conv3D", "kernel_shape", kernel_shape),
            as_steps("Conv3D", "stride", stride),
            as_steps("Conv3D", "rate", rate),
            padding,
            with_bias,
            w_init,
            b_init,
            data_format,
            mask,
            feature_group_count,
            name,
        )
        # a function of hk.pad, or one pair, is three pairs by now
        self.padding = as_padding("Conv3D", self.padding, ("SAME", "VALID"))
        self.activation_fn = activation_fn

    def __call__(self, inputs: Array, *, precision: Any = None) -> Array:
        """Convolves the input.

        Args:
            inputs: [B, D, H, W, C_in] or [D, H, W, C_in]; with channels first [B, C_in, D, H, W] or [C_in, D, H, W].
            precision: anything; products are summed in float32 or wider whatever it says.

        Returns:
            The result in the layout and the dtype of the input.
        """
        layout = _layout(self.channel_index)
        x, batch = as_batch("Conv3D", inputs, layout, None, most=1)
        c_in = x.shape[self.channel_index]
        w = _kernel("Conv3D", self, (*self.kernel_shape, c_in, self.output_channels), c_in, x.dtype)
        y = convolve(
            x,
            w,
            _bias(self, x.dtype),
            strides=self.stride,
            padding=self.padding,
            dilation=self.kernel_dilation,
            activation_fn=self.activation_fn,
            data_format=layout,
        )
        return y.reshape(batch + y.shape[1:])


class Conv3DTranspose(hk.Conv3DTranspose):
    """3-D transposed convolution with the parameters and the results of `hk.Conv3DTranspose`.

    Haiku slides the kernel, as it is, over the input with `stride - 1` zeros between its elements; such a kernel is what
    `jax_nki3d.conv3d_transpose` calls flipped. Its channels stand as in the convolution that it transposes.

    Args:
        output_channels: channels of the output.
        kernel_shape: the window: one int, or three (D, H, W).
        stride: distance between the places of neighbouring inputs in the output: one int, or three.
        output_shape: (D, H, W) of the output, for one of the sizes that a convolution of this `stride` and `padding` maps to the
            input's; None for the smallest with "VALID" and the largest, size * stride, with "SAME". One int for all three.
        padding: "SAME", "VALID", or three pairs (low, high) of zeros around the input with its zeros between. The last are
            **not** torch's: torch's `padding=p, output_padding=q` is (K - 1 - p, K - 1 - p + q) here.
        with_bias: whether a bias is added.
        w_init: initializer of `w`; None for a truncated normal of deviation 1 / sqrt(K_d * K_h * K_w * C_in).
        b_init: initializer of `b`; None for zeros.
        data_format: "NDHWC" or "NCDHW", or any other name that Haiku has for them.
        mask: factors of `w`, in its shape; None for none.
        name: name of the module.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Haiku.

    The parameters are `w` [K_d, K_h, K_w, output_channels, C_in] and `b` as in `Conv3D`, in the dtype of the input.

    Raises:
        ValueError: a number or string out of its domain, an `output_shape` that no convolution maps to the input's, or an input
            whose shape does not match.
        TypeError: parameters and input of different dtypes, or an argument of a wrong type.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp
        >>> from jax_nki3d.nn.haiku import Conv3DTranspose
        >>> network = hk.without_apply_rng(hk.transform(lambda x: Conv3DTranspose(2, 3, stride=2, output_shape=(7, 9, 11))(x)))
        >>> x = jnp.ones((4, 5, 6, 3))
        >>> network.apply(network.init(jax.random.key(0), x), x).shape
        (7, 9, 11, 2)
    """

    def __init__(
        self,
        output_channels: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        output_shape: int | Sequence[int] | None = None,
        padding: str | Sequence[tuple[int, int]] = "SAME",
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        data_format: str = "NDHWC",
        mask: Array | None = None,
        name: str | None = None,
        *,
        activation_fn: ActFnType | str | None = None,
    ):
        padding = as_padding("Conv3DTranspose", padding, ("SAME", "VALID"), minimum=None)
        if output_shape is not None:
            output_shape = as_steps("Conv3DTranspose", "output_shape", output_shape)
            if not isinstance(padding, str):
                raise ValueError(
                    f"Conv3DTranspose: with an `output_shape`, `padding` must be 'SAME' or 'VALID', got {padding}. Leave one of them out."
                )
        super().__init__(
            output_channels,
            as_steps("Conv3DTranspose", "kernel_shape", kernel_shape),
            as_steps("Conv3DTranspose", "stride", stride),
            output_shape,
            padding,
            with_bias,
            w_init,
            b_init,
            data_format,
            mask,
            name,
        )
        self.activation_fn = activation_fn

    def __call__(self, inputs: Array, *, precision: Any = None) -> Array:
        """Applies the transposed convolution to the input.

        Args:
            inputs: [B, D, H, W, C_in] or [D, H, W, C_in]; with channels first [B, C_in, D, H, W] or [C_in, D, H, W].
            precision: anything; products are summed in float32 or wider whatever it says.

        Returns:
            The result in the layout and the dtype of the input.
        """
        layout = _layout(self.channel_index)
        x, batch = as_batch("Conv3DTranspose", inputs, layout, None, most=1)
        c_in = x.shape[self.channel_index]
        w = _kernel("Conv3DTranspose", self, (*self.kernel_shape, self.output_channels, c_in), c_in, x.dtype)
        padding = self.padding
        if self.output_shape is not None:
            sizes = zip(volume(x, layout), as_steps("Conv3DTranspose", "output_shape", self.output_shape), strict=True)
            axes = zip("DHW", sizes, self.kernel_shape, self.stride, strict=True)
            padding = [_padding_for(*axis, str(padding)) for axis in axes]
        y = convolve_transposed(
            "Conv3DTranspose",
            x,
            w,
            _bias(self, x.dtype),
            strides=self.stride,
            padding=padding,
            dilation=(1, 1, 1),
            activation_fn=self.activation_fn,
            data_format=layout,
            filter_shape="KDHW_CO_CI",
        )
        return y.reshape(batch + y.shape[1:])


class AvgPool3D(hk.Module):
    """3-D average pooling with the results of `hk.AvgPool`: padding never counts in the divisor.

    Args:
        window_shape: the window: one int for the three spatial axes (in Haiku, of an input without a batch, D is taken for one), three ints (D, H, W), or one int for each axis of the input,
            with or without the batch, 1 for batch and channels, as in Haiku. Three ints are the last three axes in Haiku, which
            knows nothing of volumes: **not** the same.
        strides: step of the window, in the same forms.
        padding: "VALID" for none; "SAME" for ceil(size / stride) outputs, an odd element behind.
        channel_axis: axis of the channels: -1 or, with channels first, 1 with a batch and 0 without, or -4.
        name: name of the module.

    Raises:
        ValueError: a window that does not fit, or moves over batch or channels; a number or string out of its domain.
        TypeError: a wrong dtype, or an argument of a wrong type.

    Example:
        >>> import haiku as hk, jax.numpy as jnp
        >>> from jax_nki3d.nn.haiku import AvgPool3D
        >>> pool = hk.testing.transform_and_run(lambda x: AvgPool3D(2, 2, "SAME")(x))
        >>> pool(jnp.ones((3, 5, 6, 7, 2))).shape
        (3, 3, 3, 4, 2)
    """

    def __init__(
        self,
        window_shape: int | Sequence[int],
        strides: int | Sequence[int],
        padding: str,
        channel_axis: int = -1,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.window_shape = window_shape
        self.strides = strides
        self.padding = as_padding("AvgPool3D", padding, ("SAME", "VALID"))
        self.channel_axis = channel_axis
        if not isinstance(self.padding, str):
            raise ValueError(f"AvgPool3D: `padding` must be 'SAME' or 'VALID', got {padding!r}. Pass one of these strings.")

    def __call__(self, value: Array) -> Array:
        """Pools the input.

        Args:
            value: [B, D, H, W, C] or [D, H, W, C]; with channels first [B, C, D, H, W] or [C, D, H, W].

        Returns:
            The means, in the layout and the dtype of the input.
        """
        rank = jnp.ndim(value)
        axis = self.channel_axis - rank if self.channel_axis >= 0 else self.channel_axis
        if axis not in (-1, -4):
            raise ValueError(
                f"AvgPool3D: `channel_axis` must be the last axis, or the fourth from behind, of an input of shape {jnp.shape(value)}, got "
                f"{self.channel_axis!r}. Pass -1 or -4."
            )
        layout = _layout(-1 if axis == -1 else 1)
        x, batch = as_batch("AvgPool3D", value, layout, None, most=1)
        window, strides = (_spatial(name, getattr(self, name), layout) for name in ("window_shape", "strides"))
        y = average(x, window, strides, self.padding, False, layout)
        return y.reshape(batch + y.shape[1:])


def _layout(channel_index: int) -> str:
    return "NDHWC" if channel_index == -1 else "NCDHW"


def _kernel(layer: str, module: Conv3D | Conv3DTranspose, shape: tuple[int, ...], c_in: int, dtype: Any) -> Array:
    """The parameter `w`, masked."""
    deviation = 1 / np.sqrt(np.prod(module.kernel_shape) * c_in)
    init = module.w_init or hk.initializers.TruncatedNormal(stddev=deviation)
    return masked(layer, hk.get_parameter("w", shape, dtype, init=init), module.mask)


def _bias(module: Conv3D | Conv3DTranspose, dtype: Any) -> Array | None:
    """The parameter `b`, as [C_out]."""
    if not module.with_bias:
        return None
    channels = module.output_channels
    shape = (channels,) if module.channel_index == -1 else (channels, 1, 1, 1)
    return hk.get_parameter("b", shape, dtype, init=module.b_init).reshape(channels)


def _padding_for(axis: str, sizes: tuple[int, int], kernel: int, stride: int, padding: str) -> tuple[int, int]:
    """lax's padding for (input, output) elements: that of the convolution with the same `padding` whose transpose it is."""
    size, output = sizes
    expected = -(-output // stride) if padding == "SAME" else (output - kernel + stride) // stride
    if size != expected:
        raise ValueError(
            f"Conv3DTranspose: `output_shape` {output} on axis {axis} belongs to an input of {expected} elements with a stride of {stride}, "
            f"a kernel of {kernel} and padding {padding!r}, but the input has {size}. Pass a size that such a convolution maps to {size}."
        )
    front = max(0, (size - 1) * stride + kernel - output) // 2 if padding == "SAME" else 0
    low = kernel - 1 - front
    return low, output + kernel - 1 - ((size - 1) * stride + 1) - low


def _spatial(name: str, value: Any, layout: str) -> Triple:
    """The part for (D, H, W) of an argument of the pooling."""
    if isinstance(value, Sequence) and len(value) in (4, 5):
        inner = tuple(value)[-4:]
        others = (inner[-1] if layout == "NDHWC" else inner[0], *tuple(value)[:-4])
        if any(n != 1 for n in others):
            raise ValueError(
                f"AvgPool3D: `{name}` must be 1 for batch and channels, got {value!r} for a {layout} input. Pass three ints (D, H, W)."
            )
        value = inner[:-1] if layout == "NDHWC" else inner[1:]
    return as_steps("AvgPool3D", name, value)
