# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What Flax NNX and Flax linen have in common: `avg_pool3d`, and the transposed convolution in Flax's terms."""

from collections.abc import Sequence

from jax import Array

from .._activation import ActFnType
from .._arguments import check_bool
from .._geometry import Triple
from ._arguments import Pairs, as_batch, as_padding, as_steps
from ._convolution import continue_periodically, convolve_transposed
from ._pooling import average


def avg_pool3d(
    inputs: Array,
    window_shape: int | Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: str | Sequence[Sequence[int]] = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """3-D average pooling with the results of Flax's `avg_pool`.

    Args:
        inputs: [..., D, H, W, C], with any number of leading batch dimensions.
        window_shape: the window: three ints (D, H, W), or one for all three.
        strides: step of the window: one int, or three. None is a step of **1**, as in Flax; torch and
            `jax_nki3d.avg_pooling_3d` step by the window.
        padding: "VALID" for none; "SAME" for ceil(size / stride) outputs, an odd element behind; or three pairs (low, high)
            of zeros around the volume, each below the window.
        count_include_pad: whether padding counts in the divisor. Unlike Flax's, 16-bit results stay 16-bit without it.

    Returns:
        [..., D_out, H_out, W_out, C] in the dtype of `inputs`. Sums run in float32 or wider and are rounded once.

    Raises:
        ValueError: a window that does not fit, a number or string out of its domain, too few dimensions.
        TypeError: a wrong dtype, or an argument of a wrong type.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_nki3d.nn.flax_nnx import avg_pool3d  # or from jax_nki3d.nn.flax_linen
        >>> avg_pool3d(jnp.ones((2, 8, 8, 6, 3)), (2, 2, 2), strides=(2, 2, 2)).shape
        (2, 4, 4, 3, 3)
        >>> avg_pool3d(jnp.ones((8, 8, 6, 3)), (2, 2, 2)).shape
        (7, 7, 5, 3)
    """
    x, batch = as_batch("avg_pool3d", inputs, "NDHWC", None)
    window = as_steps("avg_pool3d", "window_shape", window_shape)
    if isinstance(padding, int):
        raise TypeError(
            f"avg_pool3d: `padding` must be 'SAME', 'VALID' or three pairs (low, high), got {padding!r}. "
            f"For {padding} on all sides pass [({padding}, {padding})] * 3."
        )
    pads = as_padding("avg_pool3d", padding, ("SAME", "VALID"))
    if not isinstance(pads, str) and any(n >= k for pair, k in zip(pads, window, strict=True) for n in pair):
        raise ValueError(
            f"avg_pool3d: `padding` must be smaller than `window_shape` {window} on each axis, so that no window lies in the padding "
            f"alone, got {pads}. Use less padding."
        )
    check_bool("avg_pool3d", "count_include_pad", count_include_pad)
    y = average(x, window, as_steps("avg_pool3d", "strides", strides, optional=True), pads, count_include_pad, "NDHWC")
    return y.reshape(batch + y.shape[1:])


def flax_convolve_transposed(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    strides: Triple,
    padding: str | Pairs,
    dilation: Triple,
    transpose_kernel: bool,
    activation_fn: ActFnType | str | None,
) -> Array:
    """`lax.conv_transpose` of [B, D, H, W, C_in], with Flax's "CIRCULAR" as one more padding."""
    if padding == "CIRCULAR":
        x, padding = continue_periodically(x, kernel, strides, dilation, "NDHWC", odd_in_front=not transpose_kernel)
    return convolve_transposed(
        "ConvTranspose3D",
        x,
        kernel[::-1, ::-1, ::-1] if transpose_kernel else kernel,
        bias,
        strides=strides,
        padding=padding,
        dilation=dilation,
        activation_fn=activation_fn,
        data_format="NDHWC",
        filter_shape="KDHW_CO_CI" if transpose_kernel else "KDHW_CI_CO",
    )
