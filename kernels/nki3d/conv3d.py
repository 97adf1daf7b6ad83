# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D convolution (cross-correlation)."""

from ._nki import nki, nl
from .activation import activation_function
from .gather import gather
from .planning.conv import ITEMSIZE, check_conv3d, conv3d_plan

__all__ = ["conv3d"]


@nki.jit
def conv3d(
    x_in,
    filters,
    bias=None,
    stride=(1, 1, 1),
    padding=(0, 0, 0, 0, 0, 0),
    dilation=(1, 1, 1),
    activation_fn=None,
    lnc_shard=False,
):
    """y = activation(conv3d(x_in, filters) + bias).

    Intended usage range: any batch, C_in, C_out, extents, kernel, stride, dilation and padding for which one window of the input and the weights
    of 128 output channels fit in SBUF; `planning.conv.conv3d_plan` says why if not.

    Dimensions:
        B batch; C_in, C_out channels; D, H, W input extents; K_d, K_h, K_w taps; D_out = (D + front + back - dilation (K_d - 1) - 1) // stride + 1.

    Args:
        x_in: [B, C_in, D, H, W] in HBM; float32, bfloat16 or float16.
        filters: [K_d, K_h, K_w, C_in, C_out] in HBM, not flipped, dtype of x_in.
        bias: [C_out] in HBM, or None.
        stride: (depth, height, width).
        padding: zeros (front, back, top, bottom, left, right).
        dilation: (depth, height, width).
        activation_fn: a member of `ActFnType`, or None.
        lnc_shard: share the windows among the cores of the launch.

    Returns:
        [B, C_out, D_out, H_out, W_out] in shared HBM, dtype of x_in.

    Notes:
        All products of an output are summed in float32 in PSUM; bias and activation follow in float32; one rounding. Packed plans multiply zeros with
        neighbours: an Inf or NaN of the input can reach outputs of its block that do not read it.

    Pseudocode:
        y[b, co, o] = activation(bias[co] + sum over taps k, ci: filters[k, ci, co] * x[b, ci, stride * o + dilation * k - padding])
    """
    stride, padding, dilation, out = check_conv3d("conv3d", x_in, filters, bias, stride, padding, dilation)
    taps = (filters.shape[0], filters.shape[1], filters.shape[2])
    channels = (filters.shape[3], filters.shape[4])
    cores = 1
    if lnc_shard:
        cores = nl.num_programs(0)
    plan = conv3d_plan(
        (x_in.shape[2], x_in.shape[3], x_in.shape[4]),
        taps,
        stride,
        padding,
        dilation,
        channels,
        ITEMSIZE[str(x_in.dtype)],
        nl.tile_size.total_available_sbuf_size,
        cores,
        x_in.shape[0],
    )
    result = nl.ndarray((x_in.shape[0], channels[1], out[0], out[1], out[2]), dtype=x_in.dtype, buffer=nl.shared_hbm)
    flat = filters.reshape((taps[0] * taps[1] * taps[2], channels[0], channels[1]))
    gather(x_in, flat, False, bias, result, plan, activation_function(activation_fn), None, lnc_shard)
    return result
