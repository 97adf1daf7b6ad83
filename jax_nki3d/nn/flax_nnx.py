# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers for Flax NNX: `Conv3D` for `nnx.Conv`, `ConvTranspose3D` for `nnx.ConvTranspose`, `avg_pool3d` for `nnx.avg_pool`.

For a model that shall keep its `nnx.Conv`, `conv_general_dilated` is what its argument of that name takes.

Arguments, defaults, parameters and results are those of Flax: channels last, any number of batch dimensions or none. Which
implementation computes is chosen with `jax_nki3d.options(implementation=...)` around the call, as for every operation.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax import Array

from .._activation import ActFnType
from .._geometry import Triple
from ._arguments import as_batch, as_padding, as_steps, masked
from ._convolution import convolve
from ._flax import avg_pool3d as avg_pool3d
from ._flax import flax_convolve_transposed
from ._hook import conv_general_dilated as conv_general_dilated

__all__ = ["Conv3D", "ConvTranspose3D", "avg_pool3d", "conv_general_dilated"]


class Conv3D(nnx.Conv):
    """3-D convolution with the parameters and the results of `nnx.Conv`.

    It is an `nnx.Conv` whose arithmetic is `jax_nki3d.conv3d`, so that states move between the two with `nnx.state` and
    `nnx.update`, and the same `rngs` give the same initial values.

    Args:
        in_features: channels of the input.
        out_features: channels of the output.
        kernel_size: the window: three ints (D, H, W), or one for all three.
        strides: step of the window: one int, or three.
        padding: "SAME" for ceil(size / stride) outputs, an odd element behind; "VALID" for none; one int, three, or three
            pairs (low, high) of zeros around the volume; "CIRCULAR" or "REFLECT" to continue the volume periodically or
            mirrored, where "VALID" follows. As in Flax; torch's `padding=n` is the int n.
        kernel_dilation: distance between neighbouring taps: one int, or three.
        use_bias: whether a bias is added.
        mask: factors of the kernel, in its shape; None for none.
        dtype: the dtype of the computation; None to infer it from the input and the parameters.
        param_dtype: the dtype of the parameters.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        promote_dtype: function that casts (inputs, kernel, bias) to a common dtype.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Flax.
        rngs: random streams, as for every layer.
        kernel_metadata: what the variable `kernel` carries, such as the names of its sharded axes.
        bias_metadata: what the variable `bias` carries.

    Attributes:
        kernel: [K_d, K_h, K_w, in_features, out_features].
        bias: [out_features], or None.

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: an argument of a wrong type.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_nki3d.nn.flax_nnx import Conv3D
        >>> layer = Conv3D(3, 4, (3, 3, 3), strides=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 8, 6, 3))).shape
        (2, 4, 4, 3, 4)
        >>> flax_layer = nnx.Conv(3, 4, (3, 3, 3), strides=2, rngs=nnx.Rngs(1))
        >>> nnx.update(layer, nnx.state(flax_layer))
    """

    # narrower than in Flax: __init__ brings every form to three ints, or three pairs
    kernel_size: Triple
    strides: Triple
    kernel_dilation: Triple
    padding: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: str | int | Sequence = "SAME",
        kernel_dilation: int | Sequence[int] | None = 1,
        use_bias: bool = True,
        mask: Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        activation_fn: ActFnType | str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__(
            in_features,
            out_features,
            as_steps("Conv3D", "kernel_size", kernel_size),
            as_steps("Conv3D", "strides", strides, optional=True),
            padding=as_padding("Conv3D", padding, ("SAME", "VALID", "CIRCULAR", "REFLECT")),
            kernel_dilation=as_steps("Conv3D", "kernel_dilation", kernel_dilation, optional=True),
            use_bias=use_bias,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            rngs=rngs,
            **_metadata(kernel_metadata=kernel_metadata, bias_metadata=bias_metadata),
        )
        self.activation_fn = activation_fn

    def __call__(self, inputs: Array) -> Array:  # type: ignore[override]
        """Convolves the input.

        Args:
            inputs: [..., D, H, W, in_features], with any number of leading batch dimensions.

        Returns:
            [..., D_out, H_out, W_out, out_features].
        """
        x, batch = as_batch("Conv3D", inputs, "NDHWC", self.in_features)
        kernel = masked("Conv3D", self.kernel[...], self.mask)
        x, kernel, bias = self.promote_dtype((x, kernel, _value(self.bias)), dtype=self.dtype)
        y = convolve(
            x,
            kernel,
            bias,
            strides=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            activation_fn=self.activation_fn,
            data_format="NDHWC",
        )
        return y.reshape(batch + y.shape[1:])


class ConvTranspose3D(nnx.ConvTranspose):
    """3-D transposed convolution with the parameters and the results of `nnx.ConvTranspose`.

    It is an `nnx.ConvTranspose` whose arithmetic is `jax_nki3d.conv3d_transpose`, so that states move between the two with
    `nnx.state` and `nnx.update`. Flax slides the kernel, as it is, over the input with `strides - 1` zeros between its
    elements; such a kernel is what `conv3d_transpose` calls flipped.

    Args:
        in_features: channels of the input.
        out_features: channels of the output.
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
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        transpose_kernel: whether the kernel is that of the convolution whose transpose this is: its spatial axes are flipped,
            and it has the output's channels before the input's.
        promote_dtype: function that casts (inputs, kernel, bias) to a common dtype.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Flax.
        rngs: random streams, as for every layer.
        kernel_metadata: what the variable `kernel` carries, such as the names of its sharded axes.
        bias_metadata: what the variable `bias` carries.

    Attributes:
        kernel: [K_d, K_h, K_w, in_features, out_features]; the last two change places with `transpose_kernel=True`.
        bias: [out_features], or None.

    Raises:
        ValueError: a number or string out of its domain, or an input whose shape does not match.
        TypeError: an argument of a wrong type.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from jax_nki3d.nn.flax_nnx import ConvTranspose3D
        >>> layer = ConvTranspose3D(4, 2, (2, 2, 2), strides=(2, 2, 2), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 4, 5, 6, 4))).shape
        (3, 8, 10, 12, 2)
    """

    # narrower than in Flax: __init__ brings every form to three ints, or three pairs
    kernel_size: Triple
    strides: Triple
    kernel_dilation: Triple
    padding: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: str | int | Sequence = "SAME",
        kernel_dilation: int | Sequence[int] | None = None,
        use_bias: bool = True,
        mask: Array | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        activation_fn: ActFnType | str | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__(
            in_features,
            out_features,
            as_steps("ConvTranspose3D", "kernel_size", kernel_size),
            as_steps("ConvTranspose3D", "strides", strides, optional=True),
            padding=as_padding("ConvTranspose3D", padding, ("SAME", "VALID", "CIRCULAR"), minimum=None),
            kernel_dilation=as_steps("ConvTranspose3D", "kernel_dilation", kernel_dilation, optional=True),
            use_bias=use_bias,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            transpose_kernel=transpose_kernel,
            promote_dtype=promote_dtype,
            rngs=rngs,
            **_metadata(kernel_metadata=kernel_metadata, bias_metadata=bias_metadata),
        )
        self.activation_fn = activation_fn

    def __call__(self, inputs: Array) -> Array:
        """Applies the transposed convolution to the input.

        Args:
            inputs: [..., D, H, W, in_features], with any number of leading batch dimensions.

        Returns:
            [..., D_out, H_out, W_out, out_features].
        """
        x, batch = as_batch("ConvTranspose3D", inputs, "NDHWC", self.in_features)
        kernel = masked("ConvTranspose3D", self.kernel[...], self.mask)
        x, kernel, bias = self.promote_dtype((x, kernel, _value(self.bias)), dtype=self.dtype)
        y = flax_convolve_transposed(
            x,
            kernel,
            bias,
            strides=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel,
            activation_fn=self.activation_fn,
        )
        return y.reshape(batch + y.shape[1:])


def _metadata(**given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something: older releases of Flax have no such arguments."""
    return {name: metadata for name, metadata in given.items() if metadata}


def _value(param: Any) -> Array | None:
    return None if param is None else param[...]
