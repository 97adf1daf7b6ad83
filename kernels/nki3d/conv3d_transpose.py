# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D transposed convolution."""

from ._nki import nki, nl
from .activation import activation_function
from .gather import gather
from .planning.conv import ITEMSIZE, check_conv3d_transpose, conv3d_transpose_plan

__all__ = ["conv3d_transpose"]


@nki.jit
def conv3d_transpose(
    x_in,
    filters,
    bias=None,
    stride=(1, 1, 1),
    padding=(0, 0, 0),
    dilation=(1, 1, 1),
    activation_fn=None,
    lnc_shard=False,
    filter_shape="KDHW_CI_CO",
    sbm=None,
    use_auto_allocation=False,
    output_padding=(0, 0, 0),
):
    """y = activation(conv3d_transpose(x_in, filters) + bias), the adjoint of a strided convolution.

    Intended usage range: as for conv3d. No inserted zero is multiplied: outputs are computed phase by phase, and the phases of depth and height that
    fit share a matmul as columns.

    Dimensions:
        B batch; C_in, C_out channels; D, H, W input extents; K_d, K_h, K_w taps;
        D_out = (D - 1) * stride + dilation * (K_d - 1) + 1 - 2 * padding + output_padding.

    Args:
        x_in: [B, C_in, D, H, W] in HBM; float32, bfloat16 or float16.
        filters: taps already flipped in depth, height and width; [K_d, K_h, K_w, C_in, C_out], or [.., C_out, C_in] with "KDHW_CO_CI".
        bias: [C_out] in HBM, or None.
        stride: (depth, height, width).
        padding: outputs cut at both ends, (depth, height, width); may exceed dilation * (K - 1).
        dilation: (depth, height, width).
        activation_fn: a member of `ActFnType`, or None.
        lnc_shard: share the windows among the cores of the launch.
        filter_shape: "KDHW_CI_CO" or "KDHW_CO_CI".
        sbm: a `SbufManager` that places the kernel's buffers, or None.
        use_auto_allocation: must equal sbm.is_auto_alloc() if `sbm` is given.
        output_padding: outputs added at the far end, (depth, height, width); smaller than stride or dilation.

    Returns:
        [B, C_out, D_out, H_out, W_out] in shared HBM, dtype of x_in.

    Notes:
        All products of an output are summed in float32 in PSUM; bias and activation follow in float32; one rounding. Outputs that no input reaches
        are activation(bias).

    Pseudocode:
        y[b, co, o] = activation(bias[co] + sum over taps k, ci with o + padding - dilation * k = stride * i:
                                 filters[K - 1 - k, ci, co] * x[b, ci, i])
    """
    stride, padding, dilation, out = check_conv3d_transpose(
        x_in, filters, bias, stride, padding, dilation, filter_shape, output_padding
    )
    available = nl.tile_size.total_available_sbuf_size
    if sbm != None:  # noqa: E711
        assert use_auto_allocation == sbm.is_auto_alloc(), (
            f"conv3d_transpose `use_auto_allocation`: {use_auto_allocation} differs from sbm.is_auto_alloc(). Pass what it returns."
        )
        available = sbm.get_free_space()
    taps = (filters.shape[0], filters.shape[1], filters.shape[2])
    turned = filter_shape == "KDHW_CO_CI"
    channels = (filters.shape[3], filters.shape[4])
    if turned:
        channels = (filters.shape[4], filters.shape[3])
    cores = 1
    if lnc_shard:
        cores = nl.num_programs(0)
    plan = conv3d_transpose_plan(
        (x_in.shape[2], x_in.shape[3], x_in.shape[4]),
        taps,
        stride,
        padding,
        dilation,
        out,
        channels,
        ITEMSIZE[str(x_in.dtype)],
        available,
        cores,
        x_in.shape[0],
    )
    result = nl.ndarray((x_in.shape[0], channels[1], out[0], out[1], out[2]), dtype=x_in.dtype, buffer=nl.shared_hbm)
    flat = filters.reshape((taps[0] * taps[1] * taps[2], filters.shape[3], filters.shape[4]))
    gather(x_in, flat, turned, bias, result, plan, activation_function(activation_fn), sbm, lnc_shard)
    return result
