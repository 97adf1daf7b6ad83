# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward pass of 3-D average pooling: `avg_pooling_3d_backward` and the rules of `avg_pooling_3d_backward_p`."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array

from . import _lax, _linear, _options
from ._primitive import Rules, avg_pooling_3d_backward_p, bind_avg_pooling_3d, bind_avg_pooling_3d_backward, register
from ._spec import AvgPooling3dSpec, avg_pooling_3d_backward_spec


def avg_pooling_3d_backward(
    grad_output: Array,
    input_tensor: Array | jax.ShapeDtypeStruct,
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
    """Gradient of `avg_pooling_3d` with respect to its input: each output's gradient over n, added to its whole window.

    Models need not call it: `jax.grad` of `avg_pooling_3d` does.

    Args:
        grad_output: gradient of the output, [B, C, D_out, H_out, W_out] in `output_format`.
        input_tensor: the forward pass's input or a `jax.ShapeDtypeStruct` like it, in `data_format`: only shape and dtype
            are read, since the gradient of a mean does not depend on the values.
        kernel_size: as given to `avg_pooling_3d`.
        stride: as given to `avg_pooling_3d`.
        padding: as given to `avg_pooling_3d`.
        data_format: layout of `input_tensor` and of the result.
        output_format: layout of `grad_output`; None for `data_format`.
        count_include_pad: as given to `avg_pooling_3d`.
        implementation: as for `conv3d`.
        forward_mode: as for `conv3d`.

    Returns:
        The shape, layout and dtype of `input_tensor`; summed in float32 (float64 for float64) and rounded once. Elements that
        no window reaches are zero.

    Raises:
        ValueError: shapes that do not match, a window that does not fit, a number or string out of its domain.
        TypeError: a wrong dtype, or an argument of a wrong type.
        NotImplementedError: the named implementation cannot run.

    Example:
        >>> import jax, numpy as np, jax_nki3d
        >>> dy = np.float32([2, 4]).reshape(1, 1, 1, 1, 2)
        >>> x = jax.ShapeDtypeStruct((1, 1, 1, 1, 7), np.float32)
        >>> jax_nki3d.avg_pooling_3d_backward(dy, x, (1, 1, 2), stride=(1, 1, 3)).ravel().tolist()
        [1.0, 1.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    """
    spec = avg_pooling_3d_backward_spec(
        "avg_pooling_3d_backward",
        grad_output,
        input_tensor,
        kernel_size,
        stride,
        padding,
        data_format,
        output_format,
        count_include_pad,
        implementation,
    )
    if _options.resolve_forward_mode("avg_pooling_3d_backward", forward_mode):
        return bind_avg_pooling_3d_backward(spec, jnp.asarray(grad_output))
    return _differentiable(spec)(jnp.asarray(grad_output))


@cache
def _differentiable(spec: AvgPooling3dSpec) -> Callable[[Array], Array]:
    return _linear.differentiable("avg_pooling_3d_backward", bind_avg_pooling_3d_backward, bind_avg_pooling_3d, spec)


def _body(formulations, dy, *, spec: AvgPooling3dSpec):
    return [_lax.avg_pooling_3d_backward(formulations, dy, spec)]


register(
    avg_pooling_3d_backward_p,
    Rules(
        shape=partial(_body, _lax.NATIVE),
        lax=_body,
        jvp=_linear.jvp(bind_avg_pooling_3d_backward),
        transpose=_linear.transpose(bind_avg_pooling_3d),
        batch=_linear.batch(bind_avg_pooling_3d_backward),
    ),
)
