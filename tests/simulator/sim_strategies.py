# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the property tests of the simulator share: ways to look into its memories, random views, and views mirrored in NumPy.

Nothing here asks the simulator for an answer that a test then compares: the mirrors are NumPy views of an independent array.
"""

import dataclasses
import math

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import nki3d.simulator as nki

nl, nisa = nki.language, nki.isa

NUMPY = {
    "uint8": np.uint8,
    "int8": np.int8,
    "uint16": np.uint16,
    "int16": np.int16,
    "uint32": np.uint32,
    "int32": np.int32,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
BUFFERS = {"sbuf": nl.sbuf, "psum": nl.psum, "hbm": nl.shared_hbm}


def run(kernel, *arrays, target="trn2"):
    """The outputs of a kernel."""
    return nki.profile(kernel, target=target)(*arrays)[0]


def allocate(buffer, source):
    """A tensor in one of the memories that holds the values of an HBM tensor."""
    tensor = nl.ndarray(source.shape, source.dtype, buffer=BUFFERS[buffer])
    overwrite(tensor, source)
    return tensor


def overwrite(view, source):
    """Copy an HBM tensor to a view in any memory."""
    if view.buffer == nl.psum:
        staged = nl.ndarray(source.shape, source.dtype, buffer=nl.sbuf)
        nisa.dma_copy(staged, source)
        nisa.tensor_copy(view, staged)
    else:
        nisa.dma_copy(view, source)


def dump(view):
    """A new tensor in shared HBM with the elements of a view in any memory."""
    out = nl.ndarray(view.shape, view.dtype, buffer=nl.shared_hbm)
    if view.buffer == nl.psum:
        staged = nl.ndarray(view.shape, view.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(staged, view)
        view = staged
    nisa.dma_copy(out, view)
    return out


def without_copy(array, shape):
    """The reshaped view; None where NumPy would have to copy."""
    try:
        return array.reshape(shape, copy=False)
    except ValueError:
        return None


def factors(draw, size, most=3):
    """Random sizes, `most` at most, whose product is `size`."""
    sizes = []
    for _ in range(draw(st.integers(0, most - 1))):
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        size //= sizes[-1]
    return (*sizes, size)


@dataclasses.dataclass
class Strided:
    """A random view: a base of `shape`, of which `key` and then `order` (a permutation) make the view."""

    shape: tuple
    key: tuple
    order: tuple

    def of(self, tensor):
        """The view of a tensor of the simulator."""
        view = tensor[self.key]
        return view if self.order == tuple(range(len(self.order))) else view.permute(self.order)

    def mirror(self, array):
        """The same view of a NumPy array."""
        return array[self.key].transpose(self.order)


@st.composite
def strided(draw, sizes, on_chip=True):
    """A view with these sizes, in this order; on chip the first is the partition, which stays."""
    rank = len(sizes)
    fixed = 1 if on_chip else 0
    order = (*range(fixed), *draw(st.permutations(range(fixed, rank))))
    shape, key = [0] * rank, [None] * rank
    for position, source in enumerate(order):
        size = sizes[position]
        step = 1 if on_chip and position == 0 else draw(st.sampled_from((1, 1, 2, 3)))
        start = 0 if on_chip and position == 0 else draw(st.integers(0, 2))
        reach = start + (size - 1) * step + 1
        shape[source] = reach + draw(st.integers(0, 2))
        key[source] = slice(start, reach, step)
    return Strided(tuple(shape), tuple(key), order)


# Each step below draws its arguments, applies them to a view of the simulator, and returns the result with its NumPy mirror, or with None
# where the simulator must raise. `t` is the view, `m` its mirror, `base` the flat array behind the mirror.


def step_getitem(draw, t, m, base, on_chip):
    """Integers, slices, steps, `...`, nl.ds, from either end."""
    keys, mirrored = [], []
    for dim, size in enumerate(m.shape):
        kind = draw(st.sampled_from(("all", "slice", "slice", "integer", "ds")))
        partition = on_chip and dim == 0
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        if kind == "integer":
            keys.append(start - size if draw(st.booleans()) else start)
            mirrored.append(slice(start, start + 1) if partition else start)
        elif kind == "slice":
            step = 1 if partition else draw(st.sampled_from((1, 1, 2, 3)))
            low = (
                draw(st.sampled_from((start, start - size, None)))
                if start == 0
                else draw(st.sampled_from((start, start - size)))
            )
            high = draw(st.sampled_from((stop, None))) if stop == size else draw(st.sampled_from((stop, stop - size)))
            keys.append(slice(low, high, step))
            mirrored.append(slice(start, stop, step))
        elif kind == "ds":
            keys.append(nl.ds(start, stop - start))
            mirrored.append(slice(start, stop))
        else:
            keys.append(slice(None))
            mirrored.append(slice(None))
    result = m[(*mirrored, ...)]  # with `...` NumPy gives a view and no scalar
    least = 2 if on_chip else 1
    result = result.reshape(result.shape + (1,) * (least - result.ndim), copy=False) if result.ndim < least else result
    whole = [i for i, key in enumerate(keys) if key == slice(None)]
    if whole and draw(st.booleans()):
        first = last = draw(st.sampled_from(whole))
        while last + 1 in whole and draw(st.booleans()):
            last += 1
        keys[first : last + 1] = [...]
    elif keys[-1] == slice(None) and len(keys) > 1:
        keys.pop()
    return (lambda: t[tuple(keys) if len(keys) > 1 or draw(st.booleans()) else keys[0]]), result


def step_slice(draw, t, m, base, on_chip):
    """The method, including ends that are out of bounds."""
    dim = draw(st.integers(0, m.ndim - 1))
    size = m.shape[dim]
    start, end = draw(st.integers(0, size)), draw(st.integers(0, size + 1))
    step = draw(st.sampled_from((1, 1, 2, 3)))
    legal = start < end <= size and not (on_chip and dim == 0 and step > 1 and end - start > step)
    key = [slice(None)] * m.ndim
    key[dim] = slice(start, end, step)
    return (lambda: t.slice(dim=dim, start=start, end=end, step=step)), m[tuple(key)] if legal else None


def step_select(draw, t, m, base, on_chip):
    """The method, including the partition dimension and an index out of bounds."""
    dim = draw(st.integers(0, m.ndim - 1))
    index = draw(st.integers(0, m.shape[dim]))
    if m.ndim < 3 and not (on_chip and dim == 0):
        return None
    legal = index < m.shape[dim] and not (on_chip and dim == 0)
    return (lambda: t.select(dim, index)), np.take(m, 0, axis=dim) if False else (
        m[(*[slice(None)] * dim, index)] if legal else None
    )


def step_permute(draw, t, m, base, on_chip):
    """A permutation; on chip it may try to move the partition."""
    dims = tuple(draw(st.permutations(range(m.ndim))))
    if on_chip and draw(st.integers(0, 3)):
        dims = (0, *(d for d in dims if d))
    return (lambda: t.permute(dims)), m.transpose(dims) if not on_chip or dims[0] == 0 else None


def step_broadcast(draw, t, m, base, on_chip):
    """A dimension of size 1, or one that is not."""
    dim = draw(st.integers(0, m.ndim - 1))
    ones = [d for d in range(on_chip, m.ndim) if m.shape[d] == 1]
    if ones and draw(st.integers(0, 3)):
        dim = draw(st.sampled_from(ones))
    size = draw(st.integers(1, 3))
    legal = m.shape[dim] == 1 and not (on_chip and dim == 0)
    shape = (*m.shape[:dim], size, *m.shape[dim + 1 :])
    return (lambda: t.broadcast(dim, size)), np.broadcast_to(m, shape) if legal else None


def step_expand(draw, t, m, base, on_chip):
    """A new dimension, which may not come before the partition."""
    dim = draw(st.integers(0, m.ndim))
    return (lambda: t.expand_dim(dim)), np.expand_dims(m, dim) if not (on_chip and dim == 0) else None


def step_squeeze(draw, t, m, base, on_chip):
    """A dimension of size 1, or one that is not."""
    dim = draw(st.integers(0, m.ndim - 1))
    if m.ndim <= 1 + on_chip:
        return None
    legal = m.shape[dim] == 1 and not (on_chip and dim == 0)
    return (lambda: t.squeeze_dim(dim)), np.squeeze(m, dim) if legal else None


def step_reshape_dim(draw, t, m, base, on_chip):
    """One dimension in several, one of which may be -1."""
    dim = draw(st.integers(on_chip, m.ndim - 1))
    sizes = factors(draw, m.shape[dim])
    given = list(sizes)
    if draw(st.booleans()):
        given[draw(st.integers(0, len(given) - 1))] = -1
    if draw(st.integers(0, 5)) == 0:
        given[0] = m.shape[dim] + 1
        return (lambda: t.reshape_dim(dim, tuple(given))), None
    return (lambda: t.reshape_dim(dim, tuple(given))), without_copy(m, (*m.shape[:dim], *sizes, *m.shape[dim + 1 :]))


def step_flatten(draw, t, m, base, on_chip):
    """Neighbouring dimensions in one, if they follow each other in storage."""
    start = draw(st.integers(0, m.ndim - 1))
    end = draw(st.integers(start, m.ndim - 1))
    shape = (*m.shape[:start], math.prod(m.shape[start : end + 1]), *m.shape[end + 1 :])
    partition = on_chip and start == 0 and end > 0
    if partition and m.shape[0] == 1:
        return None  # nobody says whether one partition may be merged
    return (lambda: t.flatten_dims(start, end)), None if partition else without_copy(m, shape)


def step_reshape(draw, t, m, base, on_chip):
    """Any sizes of the same product, if that needs no copy."""
    sizes = (m.shape[0], *factors(draw, m[0].size)) if on_chip else factors(draw, m.size, 4)
    if on_chip and m.shape[0] % 2 == 0 and draw(st.integers(0, 5)) == 0:
        return (lambda: t.reshape((sizes[0] // 2, 2, *sizes[1:]))), None
    return (lambda: t.reshape(sizes)), without_copy(m, sizes)


def step_rearrange(draw, t, m, base, on_chip):
    """Split, reorder and merge by name."""
    source, fixed, names, sizes = [], {}, [], []
    for dim, size in enumerate(m.shape):
        parts = (size,) if on_chip and dim == 0 else factors(draw, size, 2)
        group = [f"d{dim}{'abc'[i]}" for i in range(len(parts))]
        unknown = draw(st.integers(0, len(parts) - 1))
        fixed.update({name: part for i, (name, part) in enumerate(zip(group, parts, strict=True)) if i != unknown})
        source.append(group[0] if len(group) == 1 else tuple(group))
        names += group
        sizes += parts
    free = draw(st.permutations(names[on_chip:]))
    flat = names[:on_chip] + list(free)
    split = without_copy(m, tuple(sizes))
    moved = None if split is None else split.transpose([names.index(name) for name in flat])
    target, shape, position = [], [], 0
    while position < len(flat):
        count = 1 if on_chip and position == 0 else draw(st.sampled_from((1, 1, 1, 2)))
        group = flat[position : position + count]
        target.append(group[0] if len(group) == 1 else tuple(group))
        shape.append(math.prod(sizes[names.index(name)] for name in group))
        position += count
    # dimensions are merged one group at a time, so that each group must be mergeable by itself: that is what NumPy does, too
    return (lambda: t.rearrange(tuple(source), tuple(target), fixed)), None if moved is None else without_copy(
        moved, tuple(shape)
    )


def step_view(draw, t, m, base, on_chip):
    """The same bytes as another type."""
    name = draw(st.sampled_from(("uint8", "int16", "bfloat16", "int32", "float32", "uint32")))
    kind = np.dtype(NUMPY[name])
    start = m.ctypes.data - base.ctypes.data
    steps = [s for s, n in zip(m.strides[:-1], m.shape[:-1], strict=True) if n != 1]
    try:
        result = m.view(kind)
    except ValueError:
        result = None
    if kind.itemsize != m.itemsize and any(value % kind.itemsize for value in (start, *steps)):
        result = None
    return (lambda: t.view(getattr(nl, name))), result


def step_ap(draw, t, m, base, on_chip):
    """A raw pattern in the whole storage, with the view's own offset, or with a given one where the view has none."""
    item = m.itemsize
    start = (m.ctypes.data - base.ctypes.data) // item
    pitch = (base.nbytes // base.shape[0]) // item
    elements = base.nbytes // item
    explicit = start == 0 and draw(st.booleans())
    if explicit:
        start = draw(st.integers(0, elements - 1))
    if on_chip:
        first = start // pitch
        count = draw(st.integers(1, base.shape[0] - first))
        pattern, room = [[pitch, count]], pitch - start % pitch - 1
    else:
        pattern, room = [], elements - start - 1
    for _ in range(draw(st.integers(1, 3))):
        stride = draw(st.integers(0, min(room, 7)))
        number = draw(st.integers(1, min(4, 1 + room // stride) if stride else 2))
        room -= stride * (number - 1)
        pattern.append([stride, number])
    wrong = draw(st.sampled_from((None, None, "far", "partition")))
    if wrong == "far":
        pattern[-1] = [room + 1 + pattern[-1][0] * (pattern[-1][1] - 1), 2]  # one element too far
        expected = None
    elif wrong == "partition" and on_chip and pattern[0][1] > 1 and pitch > 1:
        pattern[0][0] = pitch - 1  # not the next partition, but inside the storage
        expected = None
    else:
        flat = base.reshape(-1).view(np.uint8)[start * item :]
        expected = np.ndarray([n for _, n in pattern], m.dtype, flat, 0, [s * item for s, _ in pattern])
    entries = tuple(map(tuple, pattern)) if draw(st.booleans()) else pattern
    return (lambda: t.ap(pattern=entries, offset=start) if explicit else t.ap(entries)), expected


STEPS = (
    step_getitem,
    step_getitem,
    step_slice,
    step_select,
    step_permute,
    step_broadcast,
    step_expand,
    step_squeeze,
    step_reshape_dim,
    step_flatten,
    step_reshape,
    step_rearrange,
    step_view,
    step_ap,
    step_ap,
)
