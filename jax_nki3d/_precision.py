# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The precision of sums: float32 for the 16-bit types, otherwise the type itself. Every map returns its sums unrounded."""

import jax.numpy as jnp
from jax import Array


def sum_dtype(dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def widen(x: Array) -> Array:
    """x in the dtype of its sums."""
    return x.astype(sum_dtype(x.dtype))
