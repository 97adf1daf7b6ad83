# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The compute functions of nki.language on tiles: each allocates its result and issues instructions of nki.isa."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import isa
from .alu import ACTIVATIONS, OPERATORS
from .core import current
from .dtypes import canonical, is_float
from .errors import broken
from .objects import MemoryRegion
from .operators import FUNCTIONS
from .tensor import NkiTensor

_RANK = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "tfloat32",
    "float32",
)


def new_tile(shape: tuple[int, ...], dtype: str, buffer: MemoryRegion = MemoryRegion.sbuf) -> NkiTensor:
    """A new tile on chip."""
    from .language import ndarray

    return ndarray(shape, dtype, buffer)


def on_chip(function: str, name: str, tensor: Any) -> NkiTensor:
    """Check that an operand is a tile."""
    if not isinstance(tensor, NkiTensor) or not tensor.on_chip:
        raise broken(f"nl.{function}", name, repr(tensor), "must be a tile in SBUF or PSUM", "Load it with nl.load.")
    return tensor


def _missing(name: str, cure: str) -> NotImplementedError:
    return NotImplementedError(f"nl.{name} is not implemented in this simulator. {cure}")


def _result_type(*tensors: NkiTensor) -> str:
    return max((tensor.dtype for tensor in tensors), key=_RANK.index)


def binary(name: str, x: Any, y: Any, dtype: Any) -> NkiTensor:
    """A new tile with `x <op> y`."""
    current(f"nl.{name}")
    if name in ("divide", "fmod", "mod"):
        raise _missing(name, "The release notes say that it fails on the device: multiply by nisa.reciprocal, for a division.")
    op = FUNCTIONS[name]
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        on_chip(name, "x", x)
        on_chip(name, "y", y)
        result = new_tile(x.shape, _result_type(x, y) if dtype is None else canonical(dtype))
        if x.shape[0] == y.shape[0] and x.free_size != y.free_size == 1:
            isa.tensor_scalar(result, x, op, y)
            return result
        if x.buffer is y.buffer is MemoryRegion.psum:
            moved = new_tile(y.shape, y.dtype)
            isa.tensor_copy(moved, y)
            y = moved
        isa.tensor_tensor(result, x, y, op)
        return result
    tile, other, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
    on_chip(name, "x", tile)
    result = new_tile(tile.shape, tile.dtype if dtype is None else canonical(dtype))
    isa.tensor_scalar(result, tile, op, other, reverse0=reverse)
    return result


def unary(name: str, x: Any, dtype: Any) -> NkiTensor:
    """A new tile with `op(x)`."""
    current(f"nl.{name}")
    if name in ("tan", "ceil", "floor", "trunc"):
        raise _missing(name, "No engine evaluates it.")
    tile = on_chip(name, "x", x)
    result = new_tile(tile.shape, tile.dtype if dtype is None else canonical(dtype))
    if name == "negative":
        isa.tensor_scalar(result, tile, FUNCTIONS["multiply"], -1.0)
    elif name == "logical_not":
        isa.tensor_scalar(result, tile, FUNCTIONS["equal"], 0.0)
    elif name in ("sin", "cos"):
        _sine(result, tile, 0.0 if name == "sin" else math.pi / 2)
    elif name == "copy":
        isa.tensor_copy(result, tile)
    elif name == "invert":
        isa.tensor_scalar(result, tile, FUNCTIONS["invert"], 0)
    elif name in ACTIVATIONS:
        isa.activation(result, FUNCTIONS[name], tile)
    else:
        assert name in OPERATORS, name
        isa.tensor_scalar(result, tile, FUNCTIONS[name], 0.0)
    return result


def _sine(result: NkiTensor, tile: NkiTensor, shift: float) -> None:
    """sin(x + shift) with the argument brought to [-pi, pi], where the engine evaluates it."""
    turns = new_tile(tile.shape, "float32")
    isa.tensor_scalar(
        turns, tile, FUNCTIONS["multiply"], 1 / (2 * math.pi), op1=FUNCTIONS["add"], operand1=shift / (2 * math.pi)
    )
    # a store to an integer rounds to nearest: the number of whole turns
    whole = new_tile(tile.shape, "int32")
    isa.tensor_copy(whole, turns)
    rest = new_tile(tile.shape, "float32")
    isa.tensor_tensor(rest, turns, whole, FUNCTIONS["subtract"])
    isa.activation(result, FUNCTIONS["sin"], rest, scale=2 * math.pi * (1 - 1e-7))


def reduction(name: str, x: Any, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    """A new tile with `x` reduced over its last free dimensions."""
    current(f"nl.{name}")
    tile = on_chip(name, "x", x)
    rank = len(tile.shape)
    axes = tuple(sorted(a + rank if a < 0 else a for a in ((axis,) if isinstance(axis, int) else tuple(axis))))
    kept = tuple(1 if i in axes else size for i, size in enumerate(tile.shape))
    shape = kept if keepdims else tuple(size for i, size in enumerate(tile.shape) if i not in axes)
    if len(shape) < 2:
        shape = (*shape, 1)
    kind = tile.dtype if dtype is None else canonical(dtype)
    count = math.prod(tile.shape[a] for a in axes)
    if name in ("mean", "var"):
        total = new_tile(shape, "float32")
        isa.tensor_reduce(total, FUNCTIONS["add"], tile, axes)
        result = new_tile(shape, kind if is_float(kind) else "float32")
        if name == "mean":
            isa.tensor_scalar(result, total, FUNCTIONS["multiply"], 1.0 / count)
            return result
        return _variance(result, total, tile, axes, count)
    operator = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}[name]
    result = new_tile(shape, kind)
    isa.tensor_reduce(result, FUNCTIONS[operator], tile, axes, keepdims=keepdims)
    return result


def _variance(result: NkiTensor, total: NkiTensor, tile: NkiTensor, axes: tuple[int, ...], count: int) -> NkiTensor:
    mean = new_tile(total.shape, "float32")
    isa.tensor_scalar(mean, total, FUNCTIONS["multiply"], 1.0 / count)
    spread = mean.reshape((*tile.shape[: len(tile.shape) - len(axes)], *(1 for _ in axes)))
    for axis in axes:
        spread = spread.broadcast(axis, tile.shape[axis])
    centred = new_tile(tile.shape, "float32")
    isa.tensor_tensor(centred, tile, spread, FUNCTIONS["subtract"])
    isa.tensor_tensor(centred, centred, centred, FUNCTIONS["multiply"])
    squares = new_tile(total.shape, "float32")
    isa.tensor_reduce(squares, FUNCTIONS["add"], centred, axes)
    isa.tensor_scalar(result, squares, FUNCTIONS["multiply"], 1.0 / count)
    return result


def all_(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """A new tile with 1 where all elements over `axis` are not 0."""
    tile = on_chip("all", "x", x)
    rank = len(tile.shape)
    axes = tuple(sorted(a + rank if a < 0 else a for a in ((axis,) if isinstance(axis, int) else tuple(axis))))
    shape = tuple(size for i, size in enumerate(tile.shape) if i not in axes)
    result = new_tile(shape if len(shape) > 1 else (*shape, 1), "bool" if dtype is None else canonical(dtype))
    isa.tensor_reduce(result, FUNCTIONS["logical_and"], tile, axes)
    return result


def softmax(x: Any, axis: Any, dtype: Any) -> NkiTensor:
    """A new tile with exp(x - max) / sum over the last free dimension."""
    tile = on_chip("softmax", "x", x)
    rank = len(tile.shape)
    axis = axis[0] if isinstance(axis, tuple | list) else axis
    if rank != 2 or axis not in (1, -1):
        raise _missing("softmax over other dimensions than the last of two", "Reshape the tile to two dimensions.")
    lowest = new_tile((tile.shape[0], 1), "float32")
    isa.tensor_reduce(lowest, FUNCTIONS["maximum"], tile, 1, negate=True)
    total = new_tile((tile.shape[0], 1), "float32")
    powers = new_tile(tile.shape, "float32")
    isa.activation_reduce(powers, FUNCTIONS["exp"], tile, FUNCTIONS["add"], total, bias=lowest)
    isa.reciprocal(total, total)
    result = new_tile(tile.shape, tile.dtype if dtype is None else canonical(dtype))
    isa.tensor_scalar(result, powers, FUNCTIONS["multiply"], total)
    return result


def where(condition: Any, x: Any, y: Any, dtype: Any) -> NkiTensor:
    """A new tile with `x` where the condition is not 0, else `y`."""
    mask = on_chip("where", "condition", condition)
    tiles = [value for value in (x, y) if isinstance(value, NkiTensor)]
    kind = canonical(dtype) if dtype is not None else (_result_type(*tiles) if tiles else "float32")
    result = new_tile(mask.shape, kind)
    for value, reverse in ((y, True), (x, False)):
        chosen = value
        if isinstance(value, NkiTensor) and value.dtype != kind:
            chosen = new_tile(value.shape, kind)
            isa.tensor_copy(chosen, value)
        isa.tensor_copy_predicated(result, chosen, _as_predicate(mask), reverse_pred=reverse)
    return result


def _as_predicate(mask: NkiTensor) -> NkiTensor:
    if mask.dtype in ("uint8", "uint16", "uint32"):
        return mask
    bits = new_tile(mask.shape, "uint8")
    isa.tensor_scalar(bits, mask, FUNCTIONS["not_equal"], 0.0)
    return bits


def transpose(x: Any, dtype: Any) -> NkiTensor:
    """A new tile [F, P] from [P, F]."""
    tile = on_chip("transpose", "x", x)
    moved = new_tile((tile.free_size, tile.shape[0]), tile.dtype, MemoryRegion.psum)
    if tile.buffer is MemoryRegion.psum:
        copied = new_tile(tile.shape, tile.dtype)
        isa.tensor_copy(copied, tile)
        tile = copied
    isa.nc_transpose(moved, tile)
    if dtype is None or canonical(dtype) == tile.dtype:
        return moved
    result = new_tile(moved.shape, canonical(dtype))
    isa.tensor_copy(result, moved)
    return result


def matmul(x: Any, y: Any, transpose_x: bool) -> NkiTensor:
    """A new PSUM tile with x @ y; `x` is [K, M] with transpose_x, else [M, K]."""
    left, right = on_chip("matmul", "x", x), on_chip("matmul", "y", y)
    if not transpose_x:
        flipped = transpose(left, None)
        left = new_tile(flipped.shape, flipped.dtype)
        isa.tensor_copy(left, flipped)
    result = new_tile((left.free_size, *right.shape[1:]), "float32", MemoryRegion.psum)
    isa.nc_matmul(result, left, right)
    return result


def rms_norm(x: Any, w: Any, axis: Any, n: int, epsilon: float, dtype: Any, compute_dtype: Any) -> NkiTensor:
    """A new tile with x / sqrt(mean(x^2) + epsilon) * w over the last of two dimensions."""
    tile, weights = on_chip("rms_norm", "x", x), on_chip("rms_norm", "w", w)
    if len(tile.shape) != 2 or (axis[0] if isinstance(axis, tuple | list) else axis) not in (1, -1):
        raise _missing("rms_norm over other dimensions than the last of two", "Reshape the tile to two dimensions.")
    kind = "float32" if compute_dtype is None else canonical(compute_dtype)
    squares, total = new_tile(tile.shape, kind), new_tile((tile.shape[0], 1), "float32")
    isa.activation_reduce(squares, FUNCTIONS["square"], tile, FUNCTIONS["add"], total)
    isa.tensor_scalar(total, total, FUNCTIONS["multiply"], 1.0 / n, op1=FUNCTIONS["add"], operand1=epsilon)
    isa.activation(total, FUNCTIONS["rsqrt"], total)
    scaled = new_tile(tile.shape, kind)
    isa.tensor_scalar(scaled, tile, FUNCTIONS["multiply"], total)
    result = new_tile(tile.shape, tile.dtype if dtype is None else canonical(dtype))
    wide = broadcast_to(weights, tile.shape, None) if weights.shape != tile.shape else weights
    isa.tensor_tensor(result, scaled, wide, FUNCTIONS["multiply"])
    return result


def broadcast_to(x: Any, shape: tuple[int, ...], dtype: Any) -> NkiTensor:
    """A tile of another shape: free dimensions of size 1 repeat as a view, one partition repeats by a product with ones."""
    tile = on_chip("broadcast_to", "x", x)
    target = tuple(shape)
    view = tile
    for _ in range(len(target) - len(tile.shape)):
        view = view.expand_dim(1)
    for dim, (have, want) in enumerate(zip(view.shape, target, strict=True)):
        if dim and have != want:
            view = view.broadcast(dim, want)
    kind = tile.dtype if dtype is None else canonical(dtype)
    if view.shape[0] == target[0]:
        result = new_tile(target, kind)
        isa.tensor_copy(result, view)
        return result
    if view.shape[0] != 1:
        raise broken("nl.broadcast_to", "shape", str(target), f"does not extend {tile.shape}")
    result = new_tile(target, kind)
    # each DMA descriptor reads the one partition again
    source = view
    for first in range(target[0]):
        isa.dma_copy(result[first : first + 1], source)
    return result


def load_transpose2d(src: NkiTensor, dtype: Any) -> NkiTensor:
    """A new SBUF tile with the transpose of an HBM matrix."""
    tile = new_tile((src.shape[1], src.shape[0]), src.dtype)
    isa.dma_transpose(tile, src)
    if dtype is None or canonical(dtype) == src.dtype:
        return tile
    result = new_tile(tile.shape, canonical(dtype))
    isa.tensor_copy(result, tile)
    return result


def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int, dtype: Any) -> NkiTensor:
    """A new tile with the elements of each partition at flat indices."""
    if axis != 0:
        raise _missing("gather_flattened with another axis than 0", "Use nisa.nc_n_gather.")
    tile = on_chip("gather_flattened", "data", data)
    result = new_tile(indices.shape, tile.dtype)
    isa.nc_n_gather(result, tile, indices)
    if dtype is None or canonical(dtype) == tile.dtype:
        return result
    converted = new_tile(result.shape, canonical(dtype))
    isa.tensor_copy(converted, result)
    return converted


def identity(n: int, dtype: str) -> np.ndarray:
    """An identity matrix of a NKI type."""
    from .dtypes import numpy_dtype

    return np.eye(n).astype(numpy_dtype(dtype))
