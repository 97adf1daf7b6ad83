# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers for Flax linen: `Conv3D` for `linen.Conv`, `ConvTranspose3D` for `linen.ConvTranspose`, `avg_pool3d` for `linen.avg_pool`.

Arguments, defaults, parameters and results are those of Flax: channels last, any number of batch dimensions or none. Which
implementation computes is chosen with `jax_nki3d.options(implementation=...)` around the call, as for every operation.

Flax names a submodule without a name after its class: `Conv_0` becomes `Conv3D_0`. To load parameters of `linen.Conv`, give
names, or keep `linen.Conv` with `conv_general_dilated=conv_general_dilated`.
"""

from flax import linen as nn
from jax import Array

from .._activation import ActFnType
from ._arguments import as_batch, as_padding, as_steps, masked
from ._convolution import convolve
from ._flax import avg_pool3d as avg_pool3d
from ._flax import flax_convolve_transposed
from ._hook import conv_general_dilated as conv_general_dilated

__all__ = ["Conv3D", "ConvTranspose3D", "avg_pool3d", "conv_general_dilated"]


class Conv3D(nn.Conv):
    """3-D convolution with the parameters and the results of `linen.Conv`.

    It is a `linen.Conv` whose arithmetic is `jax_nki3d.conv3d`, so that variables of the one are variables of the other.

    Attributes:
        features: channels of the output.
        kernel_size: the window: three ints (D, H, W), or one for all three.
        strides: step of the window: one int, or three.
        padding: "SAME" for ceil(size / stride) outputs, an odd element behind; "VALID" for none; one int, three, or three
            pairs (low, high) of zeros around the volume; "CIRCULAR" or "REFLECT" to continue the volume periodically or
            mirrored, where "VALID" follows. As in Flax; torch's `padding=n` is the int n.
        input_dilation: must be 1. For a transposed convolution use `ConvTranspose3D`.
        kernel_dilation: distance between neighbouring taps: one int, or three.
        feature_group_count: must be 1; groups are not supported.
        use_bias: whether a bias is added.
        mask: factors of the kernel, in its shape; None for none.
        dtype: the dtype of the computation; None to infer it from the input and the parameters.
        param_dtype: the dtype of the parameters.
        precision: anything; products are summed in float32 or wider whatever it says.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        promote_dtype: function that casts inputs, kernel and bias to a common dtype.
        conv_general_dilated: None; it would replace the arithmetic of this class.
        conv_general_dilated_cls: None, likewise.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Flax.

    The parameters are `kernel` [K_d, K_h, K_w, C_in, features] and `bias` [features].

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: an argument of a wrong type.
        NotImplementedError: groups, `input_dilation`, or another arithmetic.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_nki3d.nn.flax_linen import Conv3D
        >>> layer = Conv3D(4, (3, 3, 3), strides=2)
        >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 6, 3)))
        >>> y.shape
        (2, 4, 4, 3, 4)
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'bias': (4,), 'kernel': (3, 3, 3, 3, 4)}}
    """

    activation_fn: ActFnType | str | None = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Convolves the input.

        Args:
            inputs: [..., D, H, W, C_in], with any number of leading batch dimensions.

        Returns:
            [..., D_out, H_out, W_out, features].
        """
        for name, plain in (
            ("feature_group_count", (1,)),
            ("input_dilation", (None, 1, (1, 1, 1))),
            ("conv_general_dilated", (None,)),
            ("conv_general_dilated_cls", (None,)),
        ):
            value = getattr(self, name)
            if (tuple(value) if isinstance(value, list) else value) not in plain:
                raise NotImplementedError(f"Conv3D: `{name}` must be {plain[-1]}, got {value!r}. Use linen.Conv in this place.")
        x, batch = as_batch("Conv3D", inputs, "NDHWC", None)
        shape = (*as_steps("Conv3D", "kernel_size", self.kernel_size), x.shape[-1], self.features)
        kernel = masked("Conv3D", self.param("kernel", self.kernel_init, shape, self.param_dtype), self.mask)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = self.promote_dtype(x, kernel, bias, dtype=self.dtype)  # type: ignore[assignment]
        y = convolve(
            x,
            kernel,
            bias,
            strides=as_steps("Conv3D", "strides", self.strides, optional=True),
            padding=as_padding("Conv3D", self.padding, ("SAME", "VALID", "CIRCULAR", "REFLECT")),
            dilation=as_steps("Conv3D", "kernel_dilation", self.kernel_dilation, optional=True),
            activation_fn=self.activation_fn,
            data_format="NDHWC",
        )
        return y.reshape(batch + y.shape[1:])


class ConvTranspose3D(nn.ConvTranspose):
    """3-D transposed convolution with the parameters and the results of `linen.ConvTranspose`.

    It is a `linen.ConvTranspose` whose arithmetic is `jax_nki3d.conv3d_transpose`, so that variables of the one are variables
    of the other. Flax slides the kernel, as it is, over the input with `strides - 1` zeros between its elements; such a kernel
    is what `conv3d_transpose` calls flipped.

    Attributes:
        features: channels of the output.
        kernel_size: the window: three ints (D, H, W), or one for all three.
        strides: distance between the places of neighbouring inputs in the output: one int, or three; None for 1.
        padding: "SAME" for size * stride outputs; "VALID" for (size - 1) * stride + max(stride, window) outputs, where
            window = kernel_dilation * (kernel_size - 1) + 1; or one int, three, or three pairs (low, high) of zeros around
            the input with its zeros between. The last are **not** torch's: torch's `padding=p, output_padding=q` is
            (window - 1 - p, window - 1 - p + q) here. "CIRCULAR" gives size * stride outputs of the periodic volume.
        kernel_dilation: distance between neighbouring taps: one int, or three; None for 1.
        use_bias: whether a bias is added.
        mask: factors of the kernel, in its shape; None for none.
        dtype: the dtype of the computation; None to infer it from the input and the parameters.
        param_dtype: the dtype of the parameters.
        precision: anything; products are summed in float32 or wider whatever it says.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        transpose_kernel: whether the kernel is that of the convolution whose transpose this is: its spatial axes are flipped,
            and it has the output's channels before the input's.
        promote_dtype: function that casts inputs, kernel and bias to a common dtype.
        preferred_element_type: None; the result has the dtype of the computation.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Flax.

    The parameters are `kernel` [K_d, K_h, K_w, C_in, features] (the last two change places with `transpose_kernel=True`) and
    `bias` [features].

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: an argument of a wrong type.
        NotImplementedError: a `preferred_element_type`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_nki3d.nn.flax_linen import ConvTranspose3D
        >>> layer = ConvTranspose3D(2, (2, 2, 2), strides=(2, 2, 2))
        >>> layer.init_with_output(jax.random.key(0), jnp.ones((3, 4, 5, 6, 4)))[0].shape
        (3, 8, 10, 12, 2)
    """

    activation_fn: ActFnType | str | None = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Applies the transposed convolution to the input.

        Args:
            inputs: [..., D, H, W, C_in], with any number of leading batch dimensions.

        Returns:
            [..., D_out, H_out, W_out, features].
        """
        if getattr(self, "preferred_element_type", None) is not None:
            raise NotImplementedError(
                f"ConvTranspose3D: `preferred_element_type` must be None, got {self.preferred_element_type!r}. Sums run in float32 or "
                "wider in any case; set `dtype` for a wider result."
            )
        x, batch = as_batch("ConvTranspose3D", inputs, "NDHWC", None)
        channels = (self.features, x.shape[-1]) if self.transpose_kernel else (x.shape[-1], self.features)
        shape = (*as_steps("ConvTranspose3D", "kernel_size", self.kernel_size), *channels)
        kernel = masked("ConvTranspose3D", self.param("kernel", self.kernel_init, shape, self.param_dtype), self.mask)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel, bias = self.promote_dtype(x, kernel, bias, dtype=self.dtype)  # type: ignore[assignment]
        y = flax_convolve_transposed(
            x,
            kernel,
            bias,
            strides=as_steps("ConvTranspose3D", "strides", self.strides, optional=True),
            padding=as_padding("ConvTranspose3D", self.padding, ("SAME", "VALID", "CIRCULAR"), minimum=None),
            dilation=as_steps("ConvTranspose3D", "kernel_dilation", self.kernel_dilation, optional=True),
            transpose_kernel=self.transpose_kernel,
            activation_fn=self.activation_fn,
        )
        return y.reshape(batch + y.shape[1:])
