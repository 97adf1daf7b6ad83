# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on shapes and strides, in elements: what a view may look like without a copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import numpy as np

from .errors import broken

__all__ = ["addresses_repeat", "covers", "infer_shape", "is_row_major", "merged_stride", "reshaped_strides", "row_major"]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def infer_shape(function: str, shape: tuple[int, ...], total: int) -> tuple[int, ...]:
    """`shape` with its -1 replaced so that it holds `total` elements."""
    unknown = [i for i, size in enumerate(shape) if size == -1]
    known = prod(size for size in shape if size != -1)
    if len(unknown) > 1 or any(size < 1 and size != -1 for size in shape):
        raise broken(function, "shape", str(shape), "must be positive, with at most one -1")
    if unknown and known and total % known == 0:
        shape = (*shape[: unknown[0]], total // known, *shape[unknown[0] + 1 :])
    if prod(shape) != total:
        raise broken(function, "shape", str(shape), f"does not hold {total} elements")
    return shape


def merged_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of the merged dimension, or None if the dimensions do not follow each other."""
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    if not dims:
        return strides[-1] if strides else 1
    for (_, outer), (inner_size, inner) in itertools.pairwise(dims):
        if outer != inner * inner_size:
            return None
    return dims[-1][1]


def reshaped_strides(shape: Sequence[int], strides: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Strides that read the elements in the same order with other sizes, or None if there are none."""
    old = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    position = 0
    i = 0
    while i < len(sizes):
        if sizes[i] == 1:
            result.append(1)
            i += 1
            continue
        # the smallest groups of old and new dimensions with the same number of elements
        j, k = position, i
        have = want = 1
        while j < len(old) and k <= len(sizes):
            if have <= want or have == 1:
                have *= old[j][0]
                j += 1
            while want < have and k < len(sizes):
                want *= sizes[k]
                k += 1
            if have == want:
                break
        stride = merged_stride([size for size, _ in old[position:j]], [step for _, step in old[position:j]])
        if have != want or stride is None:
            return None
        result += [stride * factor for factor in row_major(sizes[i:k])]
        position, i = j, k
    return tuple(result)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements follow each other."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def covers(shape: Sequence[int], strides: Sequence[int], elements: int) -> bool:
    """Whether a view addresses each of `elements` consecutive elements once, in any order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return expected == elements


def addresses_repeat(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices of a view address one element."""
    dims = sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n != 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    addresses = np.zeros((), np.int64)
    for stride, size in dims:
        addresses = np.add.outer(addresses, stride * np.arange(size))
    return np.unique(addresses).size != addresses.size
