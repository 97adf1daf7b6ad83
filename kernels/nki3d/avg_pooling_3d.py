# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""3-D average pooling."""

from ._nki import nki, nl
from .planning.pooling import plan_pooling, pooling
from .pooling import pool

__all__ = ["avg_pooling_3d"]


@nki.jit
def avg_pooling_3d(
    src_tensor,
    kernel_size,
    stride=None,
    padding=0,
    data_format="NCDHW",
    output_format=None,
    count_include_pad=True,
    lnc_shard=False,
):
    """3-D average pooling in floor mode.

    Dimensions:
        B: examples; C: channels; D, H, W: sizes of the input; K_d, K_h, K_w: the window;
        D_out = (D + 2 * padding - K_d) // stride + 1, and likewise H_out, W_out.

    Args:
        src_tensor: [B, C, D, H, W], or [B, D, H, W, C] with data_format="NDHWC", in HBM; float32, bfloat16 or float16.
        kernel_size: the window: one int, or three (D, H, W).
        stride: its step: one int, or three; None for `kernel_size`.
        padding: zeros on both sides of each axis: one int, or three, each below the window.
        data_format: layout of `src_tensor`, "NCDHW" or "NDHWC".
        output_format: layout of the result; None for `data_format`.
        count_include_pad: whether padding counts in the divisor.
        lnc_shard: whether the cores share the planes; the result is the same.

    Returns:
        [B, C, D_out, H_out, W_out] in `output_format` and the dtype of `src_tensor`, in HBM.

    Numerics: window sums, with padding as zeros, in float32: over depth, then height, then width, each axis added once per element of the
    shorter result. They are multiplied by one over the window's elements and rounded once.

    Layout: a partition computes a tile of the result for one plane (channels last or mixed layouts: for some channels of one example). Few
    planes share the 128 partitions with blocks of depth, height and width; see `pooling.pool` for memory and pseudocode, and
    `planning.pooling` for the choice of tiles and for what is refused.

    Pseudocode:
        for each wave of 128 tiles:
            x = load(windows of the tiles)
            for some planes of the result:
                y = sum(x over K_d planes); y = sum(y over K_h rows); y = sum(y over K_w columns)
                store(round(y / (K_d * K_h * K_w)))
    """
    given = pooling(
        "avg_pooling_3d",
        src_tensor.shape,
        src_tensor.dtype,
        kernel_size,
        stride,
        padding,
        data_format,
        output_format,
        count_include_pad,
    )
    plan = plan_pooling(given, False, nl.tile_size.total_available_sbuf_size)
    result = nl.ndarray(given.shape(False), dtype=src_tensor.dtype, buffer=nl.shared_hbm)
    pool(src_tensor, result, plan, lnc_shard)
    return result
