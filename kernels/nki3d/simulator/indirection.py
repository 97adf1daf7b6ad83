# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Addresses that are known only when an instruction runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .errors import NkiValidationError

__all__ = ["Indirection", "OutOfBoundsError", "shifted"]


class OutOfBoundsError(NkiValidationError):
    """A dynamic address outside the tensor: an error, unless the DMA says oob_mode.skip."""


@dataclass(frozen=True)
class Indirection:
    """A part of an address that is known only when the instruction runs.

    Attributes:
        kind: "scalar" (one offset), "vector" (one offset per partition) or "columns" (offsets into the free dimension, trn3).
        index: the tensor or register that holds the offset.
        stride: elements per unit of the offset.
        dim: the dimension of the view that is indirect; None if it was removed.
        limit: offsets from here on are out of bounds.
    """

    kind: str
    index: Any
    stride: int
    dim: int | None
    limit: int


def shifted(indirection: Indirection | None, position: int, by: int) -> Indirection | None:
    """The indirection after `by` dimensions were inserted (or removed) at `position`."""
    if indirection is None or indirection.dim is None or indirection.dim < position:
        return indirection
    return dataclasses.replace(indirection, dim=indirection.dim + by)
