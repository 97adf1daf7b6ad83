# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D average pooling: the function `avg_pooling_3d` and the rules of `avg_pooling_3d_p`."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import jax.numpy as jnp
from jax import Array

from . import _lax, _linear, _options
from ._primitive import Rules, avg_pooling_3d_p, bind_avg_pooling_3d, bind_avg_pooling_3d_backward, register
from ._spec import AvgPooling3dSpec, avg_pooling_3d_spec


def avg_pooling_3d(
    src_tensor: Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    data_format: str = "NCDHW",
    output_format: str | None = None,
    *,
    count_include_pad: bool = True,
    implementation: str | None = None,
    forward_mode: bool | None = None,
) -> Array:
    """3-D average pooling, as torch's AvgPool3d in floor mode.

        y[b, c, o] = sum over k of x[b, c, o * stride + k - padding] / n,  with x zero outside the volume

    where n is the number of elements of the window, K_d * K_h * K_w, padding included, or, with `count_include_pad=False`, the
    number of those that lie inside the volume.

    Args:
        src_tensor: [B, C, D, H, W], or [B, D, H, W, C] with `data_format="NDHWC"`; float32, bfloat16, float16 or float64.
        kernel_size: the window: one int, or three (D, H, W).
        stride: step of the window: one int, or three; None for `kernel_size`.
        padding: zeros on both sides of each axis: one int, or three, each below the kernel.
        data_format: layout of `src_tensor`, "NCDHW" or "NDHWC".
        output_format: layout of the result; None for `data_format`.
        count_include_pad: whether padding counts in the divisor.
        implementation: as for `conv3d`.
        forward_mode: as for `conv3d`.

    Returns:
        [B, C, D_out, H_out, W_out] in `output_format` and the dtype of `src_tensor`, where
        D_out = (D + 2 * padding - K_d) // stride + 1, and likewise H_out and W_out.

    Numerics: summed in float32 (float64 for float64), divided, rounded once: the mean of 16-bit ones is exactly 1.

    Raises:
        ValueError: a window that does not fit, a wrong rank, a number or string out of its domain.
        TypeError: a wrong dtype, or an argument of a wrong type.
        NotImplementedError: the named implementation cannot run.

    Example:
        >>> import numpy as np, jax_nki3d
        >>> x = np.float32([2, 4, 6, 8]).reshape(1, 1, 1, 1, 4)
        >>> window = dict(kernel_size=(1, 1, 3), stride=(1, 1, 2), padding=(0, 0, 1))
        >>> jax_nki3d.avg_pooling_3d(x, **window).ravel().tolist()
        [2.0, 6.0]
        >>> jax_nki3d.avg_pooling_3d(x, **window, count_include_pad=False).ravel().tolist()
        [3.0, 6.0]
    """
    spec = avg_pooling_3d_spec(
        "avg_pooling_3d",
        src_tensor,
        kernel_size,
        stride,
        padding,
        data_format,
        output_format,
        count_include_pad,
        implementation,
    )
    if _options.resolve_forward_mode("avg_pooling_3d", forward_mode):
        return bind_avg_pooling_3d(spec, jnp.asarray(src_tensor))
    return _differentiable(spec)(jnp.asarray(src_tensor))


@cache
def _differentiable(spec: AvgPooling3dSpec) -> Callable[[Array], Array]:
    return _linear.differentiable("avg_pooling_3d", bind_avg_pooling_3d, bind_avg_pooling_3d_backward, spec)


def _body(formulations, x, *, spec: AvgPooling3dSpec):
    return [_lax.avg_pooling_3d(formulations, x, spec)]


register(
    avg_pooling_3d_p,
    Rules(
        shape=partial(_body, _lax.NATIVE),
        lax=_body,
        jvp=_linear.jvp(bind_avg_pooling_3d),
        transpose=_linear.transpose(bind_avg_pooling_3d_backward),
        batch=_linear.batch(bind_avg_pooling_3d),
    ),
)
