# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D transposed convolution: the function `conv3d_transpose`, its gradients and the rules of `conv3d_transpose_p`."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from jax import Array, lax

from . import _bilinear, _lax, _options
from ._activation import ActFnType
from ._autodiff import align_varying
from ._primitive import (
    Flags,
    Rules,
    bind_conv3d,
    bind_conv3d_transpose,
    bind_filter_gradient,
    conv3d_transpose_p,
    register,
)
from ._spec import ConvTranspose3dSpec, conv3d_transpose_spec, from_canonical, to_canonical


def conv3d_transpose(
    x_in: Array,
    filters: Array,
    bias: Array | None = None,
    stride: int | Sequence[int] = (1, 1, 1),
    padding: int | Sequence[int] = (0, 0, 0),
    dilation: int | Sequence[int] = (1, 1, 1),
    activation_fn: ActFnType | str | None = None,
    lnc_shard: bool = False,
    filter_shape: str = "KDHW_CI_CO",
    *,
    output_padding: int | Sequence[int] = 0,
    data_format: str = "NCDHW",
    implementation: str | None = None,
    forward_mode: bool | None = None,
) -> Array:
    """3-D transposed convolution (torch's ConvTranspose3d), with filters that are **already flipped** on D, H and W.

    Element z of the input adds its channels times the un-flipped tap k to element z * stride + k * dilation - padding of the
    output:

        y[b, c, j] = activation(bias[c] + sum over i and all z, k with z * stride + k * dilation - padding = j
                                of x[b, i, z] * filters[K - 1 - k, i, c])

    `padding` crops the output, as in torch; it does not pad the input. To get from torch's weight [C_in, C_out, K_d, K_h, K_w]:
    `weight.transpose(2, 3, 4, 0, 1)[::-1, ::-1, ::-1]`.

    Args:
        x_in: [B, C_in, D, H, W] ([B, D, H, W, C_in] with `data_format="NDHWC"`); float32, bfloat16, float16 or float64.
        filters: [K_d, K_h, K_w, C_in, C_out], flipped, in the dtype of `x_in`; other layouts by `filter_shape`.
        bias: [C_out] or None, in any of those dtypes.
        stride: distance between the places of neighbouring inputs in the output: one int, or three (D, H, W).
        padding: elements cropped from both ends of each axis: one int, or three. May exceed dilation * (K - 1).
        dilation: distance between neighbouring taps: one int, or three.
        activation_fn: an `ActFnType` or its name, or None.
        lnc_shard: on Neuron, split the work over the two cores of a logical core. No effect unless
            NEURON_LOGICAL_NC_CONFIG is 2.
        filter_shape: "KDHW_CI_CO", or "KDHW_CO_CI" for filters [K_d, K_h, K_w, C_out, C_in] (flipped, too).
        output_padding: elements added behind each axis: one int, or three, each below the stride or the dilation. It picks
            among the sizes that a strided convolution maps to one. Elements that no tap reaches hold the bias.
        data_format: "NCDHW" or "NDHWC", for `x_in` and the result.
        implementation: as for `conv3d`.
        forward_mode: as for `conv3d`.

    Returns:
        [B, C_out, D_out, H_out, W_out] in the dtype of `x_in`, where
        D_out = (D - 1) * stride + dilation * (K_d - 1) - 2 * padding + 1 + output_padding, and likewise H_out and W_out.

    Numerics: as for `conv3d`: sums in float32 or wider, rounded once.

    Raises:
        ValueError: shapes that do not match, an output of no size, a number or string out of its domain.
        TypeError: a wrong dtype, or an argument of a wrong type.
        NotImplementedError: the named implementation cannot run.

    Example:
        >>> import numpy as np, jax_nki3d
        >>> x = np.float32([1, 2, 3]).reshape(1, 1, 1, 1, 3)
        >>> w = np.float32([1, 10, 100]).reshape(1, 1, 3, 1, 1)
        >>> y = jax_nki3d.conv3d_transpose(x, w[::-1, ::-1, ::-1], stride=(1, 1, 2), padding=(0, 0, 1))
        >>> y.ravel().tolist()
        [10.0, 102.0, 20.0, 203.0, 30.0]
    """
    spec = conv3d_transpose_spec(
        "conv3d_transpose",
        x_in,
        filters,
        bias,
        stride,
        padding,
        dilation,
        activation_fn,
        lnc_shard,
        filter_shape,
        output_padding,
        data_format,
        implementation,
    )
    forward_mode = _options.resolve_forward_mode("conv3d_transpose", forward_mode)
    operands = align_varying(to_canonical(x_in, data_format), filters, *([] if bias is None else [bias]))
    y = bind_conv3d_transpose(spec, *operands) if forward_mode else _differentiable(spec)(*operands)
    return from_canonical(y, data_format)


def _pullback(spec: ConvTranspose3dSpec, wanted: Flags, ct: Array, x: Any, filters: Any):
    """The transposed convolution is the adjoint of a convolution: dx is that convolution of ct, and the filters' gradient is
    that convolution's, with x in the role of its output's gradient and ct in that of its input."""
    adjoint = spec.adjoint()
    on_x, on_filters, on_bias = wanted
    reached = ct if spec.reached() == spec.geometry.size else lax.slice(ct, (0,) * 5, adjoint.input_shape(ct.shape[0]))
    dx = dfilters = dbias = None
    if on_x:
        dx = bind_conv3d(adjoint, reached, _lax.adjoint_filters(filters, spec.filter_shape))
    if on_filters:
        dw = bind_filter_gradient(adjoint, x, reached)
        dfilters = _lax.adjoint_filters(dw, spec.filter_shape)
    if on_bias:
        dbias = _lax.bias_gradient(ct, spec.bias_dtype)
    return dx, dfilters, dbias


@cache
def _differentiable(spec: ConvTranspose3dSpec) -> Callable[..., Array]:
    return _bilinear.differentiable("conv3d_transpose", bind_conv3d_transpose, _pullback, spec)


def _body(formulations, x, filters, bias=None, *, spec: ConvTranspose3dSpec):
    return [_lax.conv3d_transpose(formulations, x, filters, bias, spec)]


register(
    conv3d_transpose_p,
    Rules(
        shape=partial(_body, _lax.NATIVE),
        lax=_body,
        jvp=_bilinear.jvp(bind_conv3d_transpose),
        transpose=_bilinear.transpose(_pullback),
        batch=_bilinear.batch(
            conv3d_transpose_p,
            bind_conv3d_transpose,
            c_out_axis=lambda spec: 4 if spec.filter_shape == "KDHW_CI_CO" else 3,
        ),
    ),
)
