# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rows of the tests over all operations: each with small operands, its settings, and its reference."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import reference

import jax_nki3d


@dataclasses.dataclass(frozen=True)
class Row:
    """An operation on given shapes.

    `batched` says which operands bear the batch axis: those that data parallelism shards.
    """

    name: str
    function: Callable  # also takes implementation=, forward_mode=
    reference: Callable
    shapes: tuple[tuple[int, ...], ...]
    batched: tuple[int, ...]

    def operands(self, rng: np.random.Generator, dtype="float64", batch: int | None = None) -> tuple[np.ndarray, ...]:
        """Operands of small integers, exact in every dtype; `batch` replaces the size of the batch."""
        values = []
        for index, shape in enumerate(self.shapes):
            if batch is not None and index in self.batched:
                shape = (batch, *shape[1:])
            values.append(rng.integers(-3, 4, shape).astype(dtype))
        return tuple(values)


_CONV = {"stride": (2, 1, 2), "padding": (1, 0, 0, 1, 2, 1)}
_TRANSPOSE = {"stride": (1, 2, 3), "padding": (0, 1, 1), "output_padding": (0, 1, 0)}
_POOL = {"kernel_size": (2, 3, 2), "stride": (2, 2, 1), "padding": (0, 1, 1)}
_X, _W, _B = (2, 2, 3, 4, 3), (2, 3, 2, 2, 3), (3,)
_Y = (2, 3, 2, 3, 3)


def _silu(function):
    return lambda *operands, **settings: jax.nn.silu(function(*operands, **settings))


def _pool_backward(dy, **options):
    channels_last = options.get("data_format") == "NDHWC"
    like = jax.ShapeDtypeStruct((dy.shape[0], 4, 5, 3, 2) if channels_last else (dy.shape[0], 2, 4, 5, 3), dy.dtype)
    return jax_nki3d.avg_pooling_3d_backward(dy, like, **_POOL, **options)


ROWS = (
    Row("conv3d", partial(jax_nki3d.conv3d, **_CONV), partial(reference.conv3d, **_CONV), (_X, _W), (0,)),
    Row(
        "conv3d_bias_silu",
        partial(jax_nki3d.conv3d, activation_fn="SiLU", **_CONV),
        partial(_silu(reference.conv3d), **_CONV),
        (_X, _W, _B),
        (0,),
    ),
    Row(
        "conv3d_transpose",
        partial(jax_nki3d.conv3d_transpose, **_TRANSPOSE),
        partial(reference.conv3d_transpose, **_TRANSPOSE),
        (_X, _W),
        (0,),
    ),
    Row(
        "conv3d_transpose_bias",
        partial(jax_nki3d.conv3d_transpose, **_TRANSPOSE),
        partial(reference.conv3d_transpose, **_TRANSPOSE),
        (_X, _W, _B),
        (0,),
    ),
    Row(
        "conv3d_bwd",
        partial(jax_nki3d.conv3d_bwd, **_CONV),
        partial(reference.conv3d_bwd, **_CONV),
        (_Y, _X, _W),
        (0, 1),
    ),
    Row(
        "avg_pooling_3d",
        partial(jax_nki3d.avg_pooling_3d, **_POOL),
        partial(reference.avg_pooling_3d, **_POOL),
        ((2, 2, 4, 5, 3),),
        (0,),
    ),
    Row(
        "avg_pooling_3d_backward",
        _pool_backward,
        partial(reference.avg_pooling_3d_backward, size=(4, 5, 3), **_POOL),
        ((2, 2, 2, 3, 4),),
        (0,),
    ),
)
