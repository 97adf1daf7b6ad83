# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments and inputs that the layers of several libraries share, in one form each."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .._arguments import as_int, as_triple
from .._geometry import Triple

Pairs = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def as_steps(layer: str, name: str, value: Any, optional: bool = False) -> Triple:
    """One int of at least 1, or three, as (D, H, W); None is 1 where it is `optional`, as Flax's steps are."""
    return as_triple(layer, name, 1 if value is None and optional else value, 1)


def as_padding(layer: str, value: Any, names: Sequence[str], minimum: int | None = 0) -> Any:
    """A padding as one of `names`, or as three pairs of ints of at least `minimum`."""
    forms = ", ".join([*map(repr, names), "one int, three (D, H, W) or three pairs (low, high)"])
    if isinstance(value, str):
        if value.upper() in names:
            return value.upper()
        raise ValueError(
            f"{layer}: `padding` must be {forms}, got {value!r}. Pad the input with jnp.pad for other continuations, with 'VALID' here."
        )
    if not isinstance(value, Sequence | np.ndarray):
        n = as_int(layer, "padding", value, value, minimum)
        return ((n, n),) * 3
    ends = [tuple(v) if isinstance(v, Sequence | np.ndarray) and not isinstance(v, str) else (v, v) for v in value]
    if len(ends) != 3 or any(len(pair) != 2 for pair in ends):
        raise ValueError(f"{layer}: `padding` must be {forms}, got {value!r}. Pass one of these forms.")
    return tuple(tuple(as_int(layer, "padding", n, value, minimum) for n in pair) for pair in ends)


def as_batch(
    layer: str, inputs: Any, data_format: str, channels: int | None, most: int | None = None
) -> tuple[Array, tuple[int, ...]]:
    """The input with one batch axis in front of its four others, and the batch dimensions that the result gets back.

    `channels` is the number that the layer was made for, if it was; `most` the largest number of batch dimensions.
    """
    x = jnp.asarray(inputs)
    axis = -1 if data_format == "NDHWC" else -4
    batch = x.shape[:-4]
    if x.ndim < 4 or (channels is not None and x.shape[axis] != channels) or (most is not None and len(batch) > most):
        c = "C" if channels is None else f"{channels} channels"
        lead = {None: "[..., ", 0: "["}.get(most, "[B, ")
        layout = f"{lead}D, H, W, {c}]" if data_format == "NDHWC" else f"{lead}{c}, D, H, W]"
        optional = " or without B" if most == 1 else ""
        raise ValueError(
            f"{layer}: the input must be {layout}{optional}, got shape {x.shape}. Move its axes with jnp.moveaxis, and map over further "
            "ones with jax.vmap."
        )
    return x.reshape((math.prod(batch), *x.shape[-4:])), batch


def masked(layer: str, kernel: Array, mask: Any) -> Array:
    """The kernel with its masked taps at zero."""
    if mask is None:
        return kernel
    mask = jnp.asarray(mask)
    if mask.shape != kernel.shape:
        raise ValueError(f"{layer}: `mask` must have the shape of the kernel, {kernel.shape}, got {mask.shape}. Broadcast it.")
    # as in the libraries, a mask of a wider floating type widens the kernel
    return kernel * (mask if jnp.issubdtype(mask.dtype, jnp.floating) else mask.astype(kernel.dtype))
