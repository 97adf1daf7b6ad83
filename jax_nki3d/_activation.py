# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The activations that a convolution can fuse."""

import enum
import math

import jax
import jax.numpy as jnp
from jax import Array

from ._precision import widen


class ActFnType(enum.Enum):
    """Activation functions that `conv3d` and `conv3d_transpose` apply to their result.

    The first four members bear the names and the numbers of the NKI library's enumeration of the same name.

    Members:
        SiLU: x * sigmoid(x).
        GELU: the exact form, x * (1 + erf(x / sqrt 2)) / 2. It is torch's default; `jax.nn.gelu` defaults to the tanh form.
        GELU_Tanh_Approx: the tanh form, x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2, `jax.nn.gelu`'s default.
        Swish: x * sigmoid(1.702 x), which is what the device's instruction for this member computes. Elsewhere "swish"
            often means SiLU: ask for `SiLU` if you want `jax.nn.swish` or torch's `SiLU`.
        ReLU: max(x, 0), with derivative 0 at 0.

    Example:
        >>> import numpy as np, jax_nki3d
        >>> x, w = np.full((1, 1, 1, 1, 1), -1, np.float32), np.ones((1, 1, 1, 1, 1), np.float32)
        >>> y = jax_nki3d.conv3d(x, w, activation_fn=jax_nki3d.ActFnType.GELU)
        >>> print(f"{float(y.sum()):.4f}")
        -0.1587
    """

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3
    ReLU = 4


def apply_activation(activation: ActFnType | None, x: Array) -> Array:
    """The activation, differentiable; evaluated in float32 or wider and rounded once to the dtype of x."""
    if activation is None:
        return x
    wide = widen(x)
    if activation is not ActFnType.ReLU:
        # All of them vanish long before; where a 16-bit x has overflowed to -inf, they would give -inf * 0.
        wide = jnp.maximum(wide, -1e4)
    return _formula(activation, wide).astype(x.dtype)


def _formula(activation: ActFnType, x: Array) -> Array:
    match activation:
        case ActFnType.SiLU:
            return jax.nn.silu(x)
        case ActFnType.GELU:
            return jax.nn.gelu(x, approximate=False)
        case ActFnType.GELU_Tanh_Approx:
            # (1 + tanh u) / 2 is sigmoid(2 u), which keeps its digits where 1 + tanh u cancels.
            return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))
        case ActFnType.Swish:
            return x * jax.nn.sigmoid(1.702 * x)
        case ActFnType.ReLU:
            return jax.nn.relu(x)
    raise AssertionError(f"an activation without a formula: {activation}")
