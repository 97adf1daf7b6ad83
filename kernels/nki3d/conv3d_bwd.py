# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradients of a 3-D convolution."""

from ._nki import nki, nl
from .filter_gradient import bias_gradient, filter_gradient
from .gather import gather
from .planning.conv import ITEMSIZE, check_conv3d_bwd, dx_plan, shape_of
from .planning.filter_gradient import filter_gradient_plan

__all__ = ["conv3d_bwd"]


@nki.jit
def conv3d_bwd(
    dy,
    x_in,
    filters,
    stride=(1, 1, 1),
    padding=(0, 0, 0, 0, 0, 0),
    dilation=(1, 1, 1),
    compute_dx=True,
    compute_dw=True,
    compute_db=True,
    lnc_shard=False,
):
    """Any subset of dx, dw and db of y = conv3d(x_in, filters) + bias, from dy.

    Intended usage range: as for conv3d; dw needs one row of outputs and its neighbours in SBUF.

    Dimensions:
        B batch; C_in, C_out channels; D, H, W input extents; D_out, H_out, W_out output extents; K_d, K_h, K_w taps.

    Args:
        dy: [B, C_out, D_out, H_out, W_out] in HBM; float32, bfloat16 or float16.
        x_in: [B, C_in, D, H, W] in HBM, dtype of dy; its shape, a tuple, is enough if dw is not wanted.
        filters: [K_d, K_h, K_w, C_in, C_out] in HBM, not flipped, dtype of dy; its shape, a tuple, is enough if dx is not wanted.
        stride: of the forward pass, (depth, height, width).
        padding: of the forward pass, (front, back, top, bottom, left, right).
        dilation: of the forward pass, (depth, height, width).
        compute_dx: whether dx is wanted.
        compute_dw: whether dw is wanted.
        compute_db: whether db is wanted.
        lnc_shard: share the work among the cores of the launch: the windows of dx, the output channels of dw and db.

    Returns:
        What was asked for, in the order dx [B, C_in, D, H, W], dw [K_d, K_h, K_w, C_in, C_out], db [C_out], dtype of dy; a tuple if more than one.

    Notes:
        Every sum runs in float32 and is rounded once. Inputs that no window reaches get exact zeros in dx.

    Pseudocode:
        dx[b, ci, i] = sum over o, k, co with i = stride * o + dilation * k - padding: filters[k, ci, co] * dy[b, co, o]
        dw[k, ci, co] = sum over b, o: x[b, ci, stride * o + dilation * k - padding] * dy[b, co, o]
        db[co] = sum over b, o: dy[b, co, o]
    """
    stride, padding, dilation, out = check_conv3d_bwd(
        dy, x_in, filters, stride, padding, dilation, compute_dx, compute_dw, compute_db
    )
    x_shape, filters_shape = shape_of(x_in), shape_of(filters)
    taps = (filters_shape[0], filters_shape[1], filters_shape[2])
    channels = (filters_shape[3], filters_shape[4])
    size = (x_shape[2], x_shape[3], x_shape[4])
    itemsize = ITEMSIZE[str(dy.dtype)]
    budget = nl.tile_size.total_available_sbuf_size
    every_tap = taps[0] * taps[1] * taps[2]
    cores, core = 1, 0
    if lnc_shard:
        cores, core = nl.num_programs(0), nl.program_id(0)
    share = (channels[1] + cores - 1) // cores
    mine = (core * share, min(channels[1], core * share + share))
    results = []
    if compute_dx:
        plan = dx_plan(size, out, taps, stride, padding, dilation, channels, itemsize, budget, cores, dy.shape[0])
        dx = nl.ndarray(x_shape, dtype=dy.dtype, buffer=nl.shared_hbm)
        flat = filters.reshape((every_tap, channels[0], channels[1]))
        gather(dy, flat, True, None, dx, plan, None, None, lnc_shard)
        results.append(dx)
    db = None
    if compute_db:
        db = nl.ndarray((channels[1],), dtype=dy.dtype, buffer=nl.shared_hbm)
    if compute_dw:
        dw_plan = filter_gradient_plan(size, out, taps, stride, padding, dilation, channels, itemsize, budget)
        dw = nl.ndarray(filters_shape, dtype=dy.dtype, buffer=nl.shared_hbm)
        filter_gradient(dy, x_in, dw.reshape((every_tap, channels[0], channels[1])), dw_plan, db, mine)
        results.append(dw)
    if compute_db:
        if not compute_dw:
            bias_gradient(dy, db, budget, mine)
        results.append(db)
    if len(results) == 1:
        return results[0]
    return tuple(results)
