# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers for Flax NNX: `Conv3D` for `nnx.Conv`, `ConvTranspose3D` for `nnx.ConvTranspose`, `avg_pool3d` for `nnx.avg_pool`.

Arguments, defaults, parameters and results are those of Flax: channels last, any number of batch dimensions or none. Which
implementation computes is chosen with `jax_nki3d.options(implementation=...)` around the call, as for every operation.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax import Array

from .._activation import ActFnType
from .._geometry import Triple, effective_kernel, triple
from ..avg_pooling_3d import avg_pooling_3d
from ..conv3d import conv3d
from ..conv3d_transpose import conv3d_transpose

__all__ = ["Conv3D", "ConvTranspose3D", "avg_pool3d"]

Pairs = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


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
        dtype: the dtype of the computation; None to infer it from the input and the parameters.
        param_dtype: the dtype of the parameters.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        promote_dtype: function that casts (inputs, kernel, bias) to a common dtype.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Flax.
        rngs: random streams, as for every layer.

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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        activation_fn: ActFnType | str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            _triple("Conv3D", "kernel_size", kernel_size),
            _triple("Conv3D", "strides", strides),
            padding=_padding("Conv3D", padding, ("SAME", "VALID", "CIRCULAR", "REFLECT")),
            kernel_dilation=_triple("Conv3D", "kernel_dilation", kernel_dilation),
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            rngs=rngs,
        )
        self.activation_fn = activation_fn

    def __call__(self, inputs: Array) -> Array:  # type: ignore[override]
        """Convolves the input.

        Args:
            inputs: [..., D, H, W, in_features], with any number of leading batch dimensions.

        Returns:
            [..., D_out, H_out, W_out, out_features].
        """
        x, batch = _one_batch_axis("Conv3D", inputs, self.in_features)
        padding = self.padding
        if padding in ("CIRCULAR", "REFLECT"):
            windows = map(effective_kernel, self.kernel_size, self.kernel_dilation)
            around = [(0, 0), *(((k - 1) // 2, k // 2) for k in windows), (0, 0)]
            x = jnp.pad(x, around, mode="wrap" if padding == "CIRCULAR" else "reflect")
            padding = "VALID"
        x, kernel, bias = self.promote_dtype((x, self.kernel[...], _value(self.bias)), dtype=self.dtype)
        y = conv3d(
            x,
            kernel,
            bias,
            stride=self.strides,
            padding=padding,
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
            (window - 1 - p, window - 1 - p + q) here.
        kernel_dilation: distance between neighbouring taps: one int, or three; None for 1.
        use_bias: whether a bias is added.
        dtype: the dtype of the computation; None to infer it from the input and the parameters.
        param_dtype: the dtype of the parameters.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        transpose_kernel: whether the kernel is that of the convolution whose transpose this is: its spatial axes are flipped,
            and it has the output's channels before the input's.
        promote_dtype: function that casts (inputs, kernel, bias) to a common dtype.
        activation_fn: an `ActFnType` or its name, applied to the result within the same operation; or None. Not in Flax.
        rngs: random streams, as for every layer.

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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        activation_fn: ActFnType | str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            _triple("ConvTranspose3D", "kernel_size", kernel_size),
            _triple("ConvTranspose3D", "strides", strides),
            padding=_padding("ConvTranspose3D", padding, ("SAME", "VALID"), minimum=None),
            kernel_dilation=_triple("ConvTranspose3D", "kernel_dilation", kernel_dilation),
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            transpose_kernel=transpose_kernel,
            promote_dtype=promote_dtype,
            rngs=rngs,
        )
        self.activation_fn = activation_fn

    def __call__(self, inputs: Array) -> Array:
        """Applies the transposed convolution to the input.

        Args:
            inputs: [..., D, H, W, in_features], with any number of leading batch dimensions.

        Returns:
            [..., D_out, H_out, W_out, out_features].
        """
        x, batch = _one_batch_axis("ConvTranspose3D", inputs, self.in_features)
        paddings = (self.padding,) * 3 if isinstance(self.padding, str) else self.padding
        fits = [
            _fit(*axis)
            for axis in zip("DHW", x.shape[1:4], self.kernel_size, self.strides, self.kernel_dilation, paddings, strict=True)
        ]
        x, kernel, bias = self.promote_dtype((x, self.kernel[...], _value(self.bias)), dtype=self.dtype)
        if any(f.zeros != (0, 0) for f in fits):
            x = jnp.pad(x, [(0, 0), *(f.zeros for f in fits), (0, 0)])
        y = conv3d_transpose(
            x,
            kernel[::-1, ::-1, ::-1] if self.transpose_kernel else kernel,
            bias,
            stride=self.strides,
            padding=[f.padding for f in fits],
            dilation=self.kernel_dilation,
            activation_fn=self.activation_fn,
            filter_shape="KDHW_CO_CI" if self.transpose_kernel else "KDHW_CI_CO",
            output_padding=[f.output_padding for f in fits],
            data_format="NDHWC",
        )
        if any(f.cut != (0, 0) for f in fits):
            y = y[(slice(None), *(slice(f.cut[0], n - f.cut[1]) for f, n in zip(fits, y.shape[1:4], strict=True)))]
        return y.reshape(batch + y.shape[1:])


def avg_pool3d(
    inputs: Array,
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: str | Sequence[Sequence[int]] = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """3-D average pooling with the results of `nnx.avg_pool`.

    Args:
        inputs: [..., D, H, W, C], with any number of leading batch dimensions.
        window_shape: the window: three ints (D, H, W), or one for all three.
        strides: step of the window: one int, or three. None is a step of **1**, as in Flax; torch and
            `jax_nki3d.avg_pooling_3d` step by the window.
        padding: "VALID" for none; "SAME" for ceil(size / stride) outputs, an odd element behind; or three pairs (low, high)
            of zeros around the volume, each below the window.
        count_include_pad: whether padding counts in the divisor. Unlike Flax's, 16-bit results stay 16-bit without it.

    Returns:
        [..., D_out, H_out, W_out, C] in the dtype of `inputs`.

    Raises:
        ValueError: a window that does not fit, a number or string out of its domain, too few dimensions.
        TypeError: a wrong dtype, or an argument of a wrong type.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_nki3d.nn.flax_nnx import avg_pool3d
        >>> avg_pool3d(jnp.ones((2, 8, 8, 6, 3)), (2, 2, 2), strides=(2, 2, 2)).shape
        (2, 4, 4, 3, 3)
        >>> avg_pool3d(jnp.ones((8, 8, 6, 3)), (2, 2, 2)).shape
        (7, 7, 5, 3)
    """
    x, batch = _one_batch_axis("avg_pool3d", inputs, None)
    window = _triple("avg_pool3d", "window_shape", window_shape)
    steps = _triple("avg_pool3d", "strides", strides)
    pads = _pooling_padding(padding, x.shape[1:4], window, steps)
    if all(low == high for low, high in pads):
        y = avg_pooling_3d(x, window, steps, [low for low, _ in pads], data_format="NDHWC", count_include_pad=count_include_pad)
        return y.reshape(batch + y.shape[1:])
    # The operation pads both ends alike, so the zeros become a part of the volume here.
    # A division follows where they do not count: round after it, once.
    wide = jnp.float32 if x.dtype.itemsize < 4 and not count_include_pad else x.dtype
    y = avg_pooling_3d(jnp.pad(x.astype(wide), [(0, 0), *pads, (0, 0)]), window, steps, data_format="NDHWC")
    if not count_include_pad:
        y = (y / _shares_inside(x.shape[1:4], window, steps, pads).astype(wide)).astype(x.dtype)
    return y.reshape(batch + y.shape[1:])


# ---- transposed convolution: Flax's padding in terms of ours -------------------------------------------------------------


class _Fit(NamedTuple):
    """How one axis of `conv3d_transpose` is called to give what Flax gives.

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


def _fit(axis: str, size: int, kernel: int, stride: int, dilation: int, padding: str | tuple[int, int]) -> _Fit:
    window = effective_kernel(kernel, dilation)
    low, high = _transposed_padding(window, stride, padding) if isinstance(padding, str) else padding
    # The whole result, with every place that a tap reaches, comes from window - 1 zeros on both sides. What is asked for lacks
    # `front` and `back` elements of it; where negative, it has that many more, which hold the bias.
    front, back = window - 1 - low, window - 1 - high
    out = (size - 1) * stride + window - front - back
    if out < 1:
        raise ValueError(
            f"ConvTranspose3D: nothing is left on axis {axis}: `inputs` has {size} elements there, which with `strides` {stride}, an "
            f"effective kernel of {window} and `padding` {(low, high)} give {out}. Use more padding: in Flax's sense it adds outputs."
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


def _transposed_padding(window: int, stride: int, name: str) -> tuple[int, int]:
    """The zeros that `lax.conv_transpose` puts around the dilated input for "SAME" and "VALID"."""
    if name == "VALID":
        return window - 1, max(stride, window) - 1
    total = window + stride - 2
    low = window - 1 if stride > window - 1 else -(-total // 2)
    return low, total - low


# ---- pooling -------------------------------------------------------------------------------------------------------------


def _pooling_padding(padding: Any, size: Sequence[int], window: Triple, stride: Triple) -> Pairs:
    if padding == "SAME":
        totals = (max(0, (-(-n // s) - 1) * s + k - n) for n, k, s in zip(size, window, stride, strict=True))
        a, b, c = ((total // 2, total - total // 2) for total in totals)
        return a, b, c
    if isinstance(padding, int):
        raise TypeError(
            f"avg_pool3d: `padding` must be 'SAME', 'VALID' or three pairs (low, high), got {padding!r}. "
            f"For {padding} on all sides pass [({padding}, {padding})] * 3."
        )
    pads = _padding("avg_pool3d", padding, ("SAME", "VALID"))
    if isinstance(pads, str):
        return (0, 0), (0, 0), (0, 0)
    if any(n >= k for pair, k in zip(pads, window, strict=True) for n in pair):
        raise ValueError(
            f"avg_pool3d: `padding` must be smaller than `window_shape` {window} on each axis, so that no window lies in the padding "
            f"alone, got {pads}. Use less padding."
        )
    return pads


def _shares_inside(size: Sequence[int], window: Triple, stride: Triple, pads: Pairs) -> np.ndarray:
    """[1, D_out, H_out, W_out, 1]: the share of each window that lies inside the volume."""
    shares = []
    for n, k, s, (low, high) in zip(size, window, stride, pads, strict=True):
        starts = np.arange((n + low + high - k) // s + 1) * s - low
        shares.append((np.minimum(starts + k, n) - np.maximum(starts, 0)) / k)
    d, h, w = shares
    return np.asarray(d[None, :, None, None, None] * h[:, None, None] * w[:, None])


# ---- arguments -----------------------------------------------------------------------------------------------------------


def _value(param: Any) -> Array | None:
    return None if param is None else param[...]


def _one_batch_axis(layer: str, inputs: Any, features: int | None) -> tuple[Array, tuple[int, ...]]:
    """The input as [B, D, H, W, C], and the batch dimensions that the result gets back."""
    x = jnp.asarray(inputs)
    if x.ndim < 4 or (features is not None and x.shape[-1] != features):
        channels = "C" if features is None else f"in_features = {features}"
        raise ValueError(
            f"{layer}: `inputs` must be [..., D, H, W, {channels}], got shape {x.shape}. Channels come last; move them with "
            "jnp.moveaxis."
        )
    batch = x.shape[:-4]
    return x.reshape((math.prod(batch), *x.shape[-4:])), batch


def _int(layer: str, name: str, value: Any, whole: Any, minimum: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{layer}: `{name}` must hold ints, got {whole!r}. Pass one int, or one for each of D, H, W."
        ) from error
    if minimum is not None and number < minimum:
        raise ValueError(f"{layer}: `{name}` must be at least {minimum}, got {whole!r}.")
    return number


def _triple(layer: str, name: str, value: Any) -> Triple:
    """An int, or three, as a tuple (D, H, W); None is 1, as in Flax."""
    if value is None:
        value = 1
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        return (_int(layer, name, value, value, 1),) * 3
    if len(value) != 3:
        raise ValueError(f"{layer}: `{name}` must be one int or three (D, H, W), got {len(value)} values: {value!r}.")
    return triple(_int(layer, name, v, value, 1) for v in value)


def _padding(layer: str, value: Any, names: Sequence[str], minimum: int | None = 0) -> Any:
    """A padding as one of `names` or as three pairs of ints."""
    forms = f"{', '.join(map(repr, names))}, one int, three (D, H, W) or three pairs (low, high)"
    if isinstance(value, str):
        if value in names:
            return value
        raise ValueError(
            f"{layer}: `padding` must be {forms}, got {value!r}. Pad `inputs` with jnp.pad for other continuations, with 'VALID' here."
        )
    if not isinstance(value, Sequence | np.ndarray):
        n = _int(layer, "padding", value, value, minimum)
        return ((n, n),) * 3
    if len(value) != 3:
        raise ValueError(f"{layer}: `padding` must be {forms}, got {value!r}.")
    pairs = []
    for v in value:
        ends = tuple(v) if isinstance(v, Sequence | np.ndarray) and not isinstance(v, str) else (v, v)
        if len(ends) != 2:
            raise ValueError(f"{layer}: `padding` must be {forms}, got {value!r}.")
        low, high = (_int(layer, "padding", n, value, minimum) for n in ends)
        pairs.append((low, high))
    return tuple(pairs)
