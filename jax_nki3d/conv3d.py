# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D convolution: the function `conv3d`, its custom_vjp and the rules of `conv3d_p`."""

from collections.abc import Callable, Sequence
from functools import cache, partial

from jax import Array

from . import _bilinear, _lax, _options
from ._activation import ActFnType
from ._autodiff import align_varying
from ._primitive import Rules, bind_conv3d, bind_conv3d_bwd, conv3d_p, register
from ._spec import Conv3dSpec, conv3d_spec, from_canonical, to_canonical


def conv3d(
    x_in: Array,
    filters: Array,
    bias: Array | None = None,
    stride: int | Sequence[int] = (1, 1, 1),
    padding: int | str | Sequence = (0, 0, 0, 0, 0, 0),
    dilation: int | Sequence[int] = (1, 1, 1),
    activation_fn: ActFnType | str | None = None,
    lnc_shard: bool = False,
    *,
    data_format: str = "NCDHW",
    implementation: str | None = None,
    forward_mode: bool | None = None,
) -> Array:
    """3-D convolution (cross-correlation: the filters are not flipped), as in torch and `lax.conv_general_dilated`.

    With x zero outside the volume, for every batch b, output channel c and position o on the three axes:

        y[b, c, o] = activation(bias[c] + sum over k, i of x[b, i, o * stride + k * dilation - pad_front] * filters[k, i, c])

    Args:
        x_in: [B, C_in, D, H, W] ([B, D, H, W, C_in] with `data_format="NDHWC"`); float32, bfloat16, float16 or float64.
        filters: [K_d, K_h, K_w, C_in, C_out], in the dtype of `x_in`.
        bias: [C_out] or None, in any of those dtypes.
        stride: step of the window: one int, or three (D, H, W).
        padding: zeros around the volume: one int, three (D, H, W), six (D front, D back, H top, H bottom, W left, W right),
            three pairs, "VALID" for none, or "SAME" as in lax: ceil(size / stride) outputs, an odd element behind. "SAME" is
            not torch's symmetric padding where the stride exceeds 1.
        dilation: distance between neighbouring taps: one int, or three.
        activation_fn: an `ActFnType` or its name, or None.
        lnc_shard: on Neuron, split the work over the two cores of a logical core. No effect unless
            NEURON_LOGICAL_NC_CONFIG is 2.
        data_format: "NCDHW" or "NDHWC", for `x_in` and the result.
        implementation: None for the NKI kernel on platform neuron, where it applies, and lax elsewhere; or one by
            name: "lax"; "nki", an error where the kernel cannot run; "simulate", the kernel in the NKI interpreter, on a CPU
            and slowly. The last two know float32, bfloat16 and float16. None also takes the
            value of `jax_nki3d.options(...)`, else that of the environment variable JAX_NKI3D_IMPLEMENTATION.
        forward_mode: True makes `jax.jvp`, `jax.jacfwd` and `jax.linearize` work, at the price of one more backward call when
            both gradients are wanted. Reverse mode, its repetitions and `jax.hessian` need no switch.

    Returns:
        [B, C_out, D_out, H_out, W_out] in the dtype of `x_in`, where
        D_out = (D + pad_front + pad_back - dilation * (K_d - 1) - 1) // stride + 1, and likewise H_out and W_out.

    Numerics: products are summed in float32 (float64 for float64), then bias and activation follow, and the result is rounded
    once. When a gradient is taken through a fused activation, the value before the activation is kept in the dtype of `x_in`:
    for 16-bit types that is a second rounding. Each gradient has the dtype of its operand. Only wanted gradients are computed.

    Raises:
        ValueError: shapes that do not match, a window that does not fit, a number or string out of its domain.
        TypeError: a wrong dtype, or an argument of a wrong type.
        NotImplementedError: the named implementation cannot run.

    Example:
        >>> import jax, numpy as np, jax_nki3d
        >>> x = np.arange(8, dtype=np.float32).reshape(1, 1, 2, 2, 2)
        >>> w = np.ones((2, 2, 2, 1, 3), np.float32)
        >>> jax_nki3d.conv3d(x, w, padding=1, stride=2).shape
        (1, 3, 2, 2, 2)
        >>> dw = jax.grad(lambda w: jax_nki3d.conv3d(x, w).sum())(w)
        >>> dw[0, 0, :, 0, 0].tolist()
        [0.0, 1.0]
    """
    spec = conv3d_spec(
        "conv3d", x_in, filters, bias, stride, padding, dilation, activation_fn, lnc_shard, data_format, implementation
    )
    forward_mode = _options.resolve_forward_mode("conv3d", forward_mode)
    operands = align_varying(to_canonical(x_in, data_format), filters, *([] if bias is None else [bias]))
    y = bind_conv3d(spec, *operands) if forward_mode else _differentiable(spec)(*operands)
    return from_canonical(y, data_format)


@cache
def _differentiable(spec: Conv3dSpec) -> Callable[..., Array]:
    return _bilinear.differentiable("conv3d", bind_conv3d, bind_conv3d_bwd, spec)


def _body(formulations, x, filters, bias=None, *, spec: Conv3dSpec):
    return [_lax.conv3d(formulations, x, filters, bias, spec)]


register(
    conv3d_p,
    Rules(
        shape=partial(_body, _lax.NATIVE),
        lax=_body,
        jvp=_bilinear.jvp(bind_conv3d),
        transpose=_bilinear.transpose(bind_conv3d_bwd),
        batch=_bilinear.batch(conv3d_p, bind_conv3d, c_out_axis=lambda spec: 4),
    ),
)
