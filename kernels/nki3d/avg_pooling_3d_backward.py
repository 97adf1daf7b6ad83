# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward pass of 3-D average pooling."""

from ._nki import nki, nl
from .planning.conv import shape_of
from .planning.pooling import plan_pooling, pooling
from .pooling import pool

__all__ = ["avg_pooling_3d_backward"]


@nki.jit
def avg_pooling_3d_backward(
    grad_output,
    input_tensor,
    kernel_size,
    stride=None,
    padding=0,
    data_format="NCDHW",
    output_format=None,
    count_include_pad=True,
    lnc_shard=False,
):
    """Gradient of `avg_pooling_3d` with respect to its input.

    Dimensions: as in `avg_pooling_3d`.

    Args:
        grad_output: gradient of the output, [B, C, D_out, H_out, W_out] in `output_format`, in HBM.
        input_tensor: the forward pass's input, in `data_format`, in HBM, of which only shape and dtype are read.
            Its shape alone, a tuple, is enough: the gradient then has the dtype of `grad_output`.
        kernel_size: as given to `avg_pooling_3d`.
        stride: as given to `avg_pooling_3d`.
        padding: as given to `avg_pooling_3d`.
        data_format: layout of `input_tensor` and of the result.
        output_format: layout of `grad_output`; None for `data_format`.
        count_include_pad: as given to `avg_pooling_3d`.
        lnc_shard: whether the cores share the planes; the result is the same.

    Returns:
        The shape, layout and dtype of `input_tensor`, in HBM. Elements that no window reaches are zero.

    Numerics: the gradient times one over the window's elements, in float32; sums in float32, over the windows that cover an element in depth,
    then width, then height; rounded once. If no two windows overlap, the scaled gradient is rounded and copied.

    Layout: as in `avg_pooling_3d`, with a tile of the result's cells (`stride` elements per axis) on each partition. Planes of a cell that
    are equal are computed once and stored several times.

    Pseudocode:
        for each wave of 128 tiles:
            dy = load(windows of the tiles) / (K_d * K_h * K_w)
            for some planes of the result that differ:
                dx = sum(dy over the planes that cover it); dx = sum(dx over columns); dx = sum(dx over rows)
                store(round(dx)), once for each plane that equals it
    """
    dtype = (grad_output if isinstance(input_tensor, tuple) else input_tensor).dtype
    given = pooling(
        "avg_pooling_3d_backward",
        shape_of(input_tensor),
        dtype,
        kernel_size,
        stride,
        padding,
        data_format,
        output_format,
        count_include_pad,
        grad_output.shape,
        grad_output.dtype,
    )
    plan = plan_pooling(given, True, nl.tile_size.total_available_sbuf_size)
    result = nl.ndarray(given.shape(True), dtype=grad_output.dtype, buffer=nl.shared_hbm)
    pool(grad_output, result, plan, lnc_shard)
    return result
