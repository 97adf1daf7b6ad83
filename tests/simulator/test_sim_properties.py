# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Properties of the simulator that hold for every program: views, accumulation in PSUM, casts, element-wise work, DMA and allocation.

Every expectation comes from NumPy on an independent array, from ml_dtypes, or from a model in plain Python; none from the simulator.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_strategies import BUFFERS, NUMPY, STEPS, allocate, dump, factors, nisa, nki, nl, overwrite, run, strided

Broken = nki.NkiValidationError

# An example takes a millisecond or two: more of them than the profile has, which is made for compiled functions.
_MANY = settings(max_examples=4 * settings.default.max_examples)


def _bytes(shape, dtype, seed):
    """Random bits as an array of any type, without NaN."""
    values = np.random.default_rng(seed).integers(1, 120, size=shape)
    if np.dtype(dtype).itemsize > 1 and np.issubdtype(dtype, np.integer):
        values = values * 201 + 7  # the bytes of one number differ
    return values.astype(dtype)


# a. Views


def _offsets(mirror):
    offsets = np.zeros((), np.int64)
    for size, stride in zip(mirror.shape, mirror.strides, strict=True):
        offsets = np.add.outer(offsets, stride * np.arange(size))
    return offsets.reshape(-1)


def _check_view(view, mirror, base, on_chip):
    item = mirror.itemsize
    assert view.shape == mirror.shape
    assert (view.ndim, view.size) == (mirror.ndim, mirror.size)
    assert np.dtype(NUMPY[view.dtype]) == mirror.dtype
    # the stride of a dimension of one element means nothing
    many = [i for i, size in enumerate(mirror.shape) if size != 1]
    assert [view.strides[i] * item for i in many] == [mirror.strides[i] for i in many]
    assert view.offset * item == mirror.ctypes.data - base.ctypes.data
    assert view.get_pattern() == [list(pair) for pair in zip(view.strides, view.shape, strict=True)]
    assert view.is_contiguous() == (mirror[0] if on_chip else mirror).flags.c_contiguous
    assert not view.is_indirect()


def _reachable(mirror, base):
    """Whether engines may start where this view starts: at partition 0 of these few."""
    pitch = base.nbytes // base.shape[0]
    return (mirror.ctypes.data - base.ctypes.data) // pitch == 0


@pytest.mark.parametrize("buffer", BUFFERS)
@settings(max_examples=8 * settings.default.max_examples)
@given(data=st.data())
def test_chains_of_views_read_and_write_what_numpy_views_do(buffer, data):
    # Catches: a wrong stride or offset after any method (such as a slice of a step view that forgets the step), a reshape that silently
    # copies or reads another order, a view of another type with a wrong offset, `.ap` that ignores or doubles the offset, a partition that
    # is moved, split or strided, and writes through a view that miss their elements or touch others.
    on_chip = buffer != "hbm"
    shape = data.draw(st.sampled_from(((4, 24), (2, 3, 8), (4, 2, 3, 4), (1, 12), (3, 1, 6))))
    start = _bytes(shape, np.int32, 0)

    def kernel(x):
        view = allocate(buffer, x) if on_chip else x
        whole, mirror, base = view, start, start
        for _ in range(data.draw(st.integers(1, 6))):
            made = data.draw(st.sampled_from(STEPS))(data.draw, view, mirror, base, on_chip)
            if made is None:
                continue
            step, expected = made
            if expected is None:
                with pytest.raises(Broken):
                    step()
            elif expected.ndim <= 5 and expected.size <= 1000:
                view, mirror = step(), expected
                _check_view(view, mirror, base, on_chip)
        offsets = _offsets(mirror)
        news = np.random.default_rng(1).integers(1, 100, mirror.shape).astype(mirror.dtype)
        if buffer == "psum" and not _reachable(mirror, base):
            with pytest.raises(Broken, match="start partition"):
                dump(view)
            return None
        before = dump(view)
        writes = np.unique(offsets).size == offsets.size
        if writes:
            overwrite(view, nl.shared_constant(news))
        found.update(mirror=mirror, news=news if writes else None)
        return before, dump(whole)

    found = {}
    given_array = start.copy()
    outputs = run(kernel, given_array)
    if outputs is None:
        return
    before, after = outputs
    mirror = found["mirror"]
    assert before.dtype == mirror.dtype
    assert before.tobytes() == mirror.tobytes()
    expected = start.copy()
    if found["news"] is not None:
        view = np.ndarray(mirror.shape, mirror.dtype, expected, mirror.ctypes.data - start.ctypes.data, mirror.strides)
        view[...] = found["news"]
    assert after.tobytes() == expected.tobytes()
    assert given_array.tobytes() == (start if on_chip else expected).tobytes()


# b. PSUM

_ROWS, _COLUMNS = 40, 24


@st.composite
def _region(draw):
    """A part of the PSUM tile: a function that cuts it, and its (partition, column) pairs in order."""
    first = draw(st.sampled_from((0, 0, 0, 32)))
    rows = draw(st.sampled_from((3, 8) if first else (5, 33, _ROWS, _ROWS)))
    spans = []
    sizes = (4, 6) if draw(st.booleans()) else (_COLUMNS,)
    for size in sizes:
        # large parts, since those overlap
        start, stop = (
            draw(st.sampled_from((0, 0, 0, 1, size // 2))),
            draw(st.sampled_from((size, size, size - 1, size // 2 + 1))),
        )
        spans.append(slice(start, stop, draw(st.sampled_from((1, 1, 2, 3)))))
    turned = len(sizes) == 2 and draw(st.booleans())

    def cut(tile):
        view = (tile if len(sizes) == 1 else tile.reshape_dim(1, sizes))[(slice(first, first + rows), *spans)]
        return view.permute((0, 2, 1)) if turned else view

    columns = np.arange(_COLUMNS).reshape(sizes)[tuple(spans)]
    columns = (columns.T if turned else columns).reshape(-1).tolist()
    return cut, [[(p, f) for f in columns] for p in range(first, first + rows)]


_PSUM_STEP = st.tuples(st.sampled_from(("matmul", "matmul", "matmul", "memset", "copy", "read")), _region(), st.integers(0, 5))


@_MANY
@given(steps=st.lists(st.tuples(_PSUM_STEP, st.sampled_from((None, None, None, False, True))), min_size=3, max_size=12))
def test_overlapping_accumulation_in_psum_follows_a_model_of_each_element(steps):
    # Catches: "first write" tracked per tile or per view and not per element, memset or tensor_copy that leave the element started,
    # accumulate=False that does not start, an accumulate=True that checks only some elements or that writes before it raises, and a read
    # that changes the state.
    rng = np.random.default_rng(3)
    weights = rng.integers(-4, 5, (2, _ROWS)).astype(np.float32)
    moving = rng.integers(-4, 5, (6, 2, _COLUMNS)).astype(np.float32)
    tiles = rng.integers(50, 99, (_ROWS, _COLUMNS)).astype(np.float32)
    value, started, raised = {}, set(), []

    def kernel(weights_in, moving_in, tiles_in):
        tile = nl.ndarray((_ROWS, _COLUMNS), nl.float32, buffer=nl.psum)
        left, sources, copied = nl.load(weights_in), [nl.load(moving_in[i]) for i in range(6)], nl.load(tiles_in)
        scratch = nl.ndarray((_ROWS, _COLUMNS), nl.float32)
        for (what, (cut, _), which), accumulate in steps:
            view = cut(tile)
            rows, count = view.shape[0], view.size // view.shape[0]
            try:
                if what == "matmul":
                    nisa.nc_matmul(view, left[:, :rows], sources[which][:, :count], accumulate=accumulate)
                elif what == "memset":
                    nisa.memset(view, which + 1.0)
                elif what == "copy":
                    nisa.tensor_copy(view, copied[:rows, :count])
                else:
                    nisa.tensor_copy(scratch[:rows, :count], view)
                raised.append(False)
            except Broken:
                raised.append(True)
        return dump(tile)

    result = run(kernel, weights, moving, tiles)
    for ((what, (_, cells), which), accumulate), was_raised in zip(steps, raised, strict=True):
        illegal = what == "matmul" and accumulate is True and any(cell not in started for row in cells for cell in row)
        assert was_raised == illegal, (what, accumulate)
        if illegal or what == "read":
            continue
        for i, row in enumerate(cells):
            for j, cell in enumerate(row):
                if what == "matmul":
                    product = float(weights[0, i] * moving[which, 0, j] + weights[1, i] * moving[which, 1, j])
                    adds = accumulate is True or (accumulate is None and cell in started)
                    value[cell] = value[cell] + product if adds else product
                    started.add(cell)
                else:
                    value[cell] = which + 1.0 if what == "memset" else float(tiles[i, j])
                    started.discard(cell)
    expected = np.full((_ROWS, _COLUMNS), np.nan, np.float32)
    for cell, number in value.items():
        expected[cell] = number
    np.testing.assert_array_equal(result, expected)


# c. Casts

_FLOATS = {name: np.dtype(NUMPY[name]) for name in NUMPY if not np.issubdtype(NUMPY[name], np.integer)}
_INTEGERS = {name: np.dtype(NUMPY[name]) for name in NUMPY if np.issubdtype(NUMPY[name], np.integer)}
# Halves, bounds of the types, and their neighbours.
_SPECIAL = np.array(
    [
        *(0.0, 0.5, 1.5, 2.5, 127.5, 128.5, 255.5, 256.5, 32767.5, 65535.5, 1e-45, 1e-38, 3.4e38, 1e10),
        *(240, 248, 447, 448, 464, 465, 57344, 61440, 65504, 65519.99, 65520, 2**31, 2**32, 2**31 - 128, 2**32 - 256),
    ],
    np.float32,
)


def _halfway(dtype):
    """Numbers half-way between two neighbours of a type, and right beside."""
    if np.issubdtype(dtype, np.integer):
        return st.integers(-70000, 70000).map(lambda n: [n + 0.5, np.nextafter(np.float32(n + 0.5), np.float32(n)), float(n)])
    bits = np.dtype(f"uint{8 * dtype.itemsize}")

    def around(code):
        with np.errstate(all="ignore"):
            pair = np.array([code, code + 1], bits).view(dtype).astype(np.float64)
            middle = np.float32(pair.mean()) if np.isfinite(pair).all() else np.float32(1)
        return [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))]

    return st.integers(0, int(np.iinfo(bits).max) - 1).map(around)


def _values(dtype):
    numbers = st.lists(st.floats(width=32), min_size=8, max_size=24)
    return st.tuples(numbers, st.lists(_halfway(dtype), min_size=4, max_size=8)).map(
        lambda parts: np.concatenate([_SPECIAL, np.float32(parts[0]), np.float32(parts[1]).reshape(-1)])
    )


def _cast(x, name):
    """x through each of the three ways of a cast."""
    tile = nl.load(x)
    outputs = []
    for how in range(3):
        out = nl.ndarray(x.shape, getattr(nl, name), buffer=nl.shared_hbm)
        if how == 0:
            nisa.dma_copy(out, tile)
        else:
            made = nl.ndarray(x.shape, getattr(nl, name))
            if how == 1:
                nisa.tensor_copy(made, tile)
            else:
                nisa.activation(made, nl.copy, tile)
            nisa.dma_copy(out, made)
        outputs.append(out)
    return tuple(outputs)


def _to_integer(value, dtype):
    """To nearest, ties to even, then saturated."""
    info = np.iinfo(dtype)
    if math.isinf(value):
        return info.max if value > 0 else info.min
    return min(max(round(Fraction(float(value))), info.min), info.max)


@pytest.mark.parametrize("name", [*_FLOATS, "tfloat32", *_INTEGERS])
@_MANY
@given(data=st.data())
def test_casts_of_float32_round_once_to_nearest_even(name, data):
    # Catches: truncation, rounding half away from zero or half up, integers that wrap, that saturate before they round or at bounds which
    # float32 cannot hold, a cast through a third type, and one of the three paths that differs from the others.
    dtype = np.dtype(NUMPY.get(name, np.float32))
    if name == "tfloat32":
        # between its neighbours: 13 bits of mantissa are dropped, of which 2**12 is the half
        codes = data.draw(st.lists(st.integers(0, 2**19 - 1), min_size=4, max_size=16))
        ties = (np.uint32(codes)[:, None] << 13) + np.uint32([0, 4095, 4096, 4097, 8191])
        values = np.concatenate([data.draw(_values(np.dtype(np.float32))), ties.reshape(-1).view(np.float32)])
    else:
        values = data.draw(_values(dtype))
    if name in _INTEGERS:
        values = values[~np.isnan(values)]  # no document says what NaN becomes
    values = np.concatenate([values, -values])[None]
    results = run(lambda x: _cast(x, name), values)
    if name in _INTEGERS:
        expected = np.array([[_to_integer(v, dtype) for v in values[0]]], dtype)
    elif name == "tfloat32":
        expected = np.float32([[_tfloat32(v) for v in values[0]]])
    else:
        with np.errstate(all="ignore"):
            expected = values.astype(dtype)
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    for result in results:
        assert result.dtype == dtype
        nan = np.zeros(values.shape, bool) if name in _INTEGERS else np.isnan(expected.astype(np.float32))
        if name not in _INTEGERS:
            np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), nan)
        np.testing.assert_array_equal(result.view(bits)[~nan], expected.view(bits)[~nan])


def _tfloat32(value):
    """A float32 with its mantissa rounded to 10 bits, by exact arithmetic."""
    if not math.isfinite(value) or value == 0:
        return value
    exponent = max(math.frexp(value)[1] - 1, -126)
    rounded = round(Fraction(float(value)) / Fraction(2) ** (exponent - 10)) * Fraction(2) ** (exponent - 10)
    largest = Fraction(2) ** 128
    return math.copysign(math.inf if abs(rounded) >= largest else float(abs(rounded)), value)


@pytest.mark.parametrize("source", ["int32", "uint32", "int16", "float16", "bfloat16", "float8_e5m2"])
@_MANY
@given(data=st.data())
def test_casts_of_other_types_go_through_float32(source, data):
    # Catches: a cast of integers that skips float32 (which rounds 32 bits to 24), and 8- or 16-bit sources that are read as others.
    bits = np.dtype(f"uint{8 * np.dtype(NUMPY[source]).itemsize}")
    codes = data.draw(st.lists(st.integers(0, int(np.iinfo(bits).max)), min_size=12, max_size=40))
    values = np.array([codes], bits).view(NUMPY[source])
    name = data.draw(st.sampled_from(sorted(set(_INTEGERS) | set(_FLOATS) - {"float32"})))
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
    if name in _INTEGERS and name != source:
        values, wide = values[~np.isnan(wide)][None], wide[~np.isnan(wide)][None]
    if values.size == 0:
        return
    results = run(lambda x: _cast(x, name), values)
    dtype = np.dtype(NUMPY[name])
    if name in _INTEGERS:
        expected = np.array([[_to_integer(v, dtype) for v in wide[0]]], dtype)
    else:
        with np.errstate(all="ignore"):
            expected = wide.astype(dtype)
    for how, result in enumerate(results):
        # equal types are copied bit for bit, but by the Scalar Engine's activation
        want = values if name == source and how < 2 else expected
        np.testing.assert_array_equal(result.astype(np.float64), want.astype(np.float64))


# d. Element by element

_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "less": np.less,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_xor": np.logical_xor,
}
_ENGINE_TYPES = ("float32", "bfloat16", "float16", "int16", "uint8", "int8", "float8_e4m3")


def _rounded(values, name):
    """float32 to a type of the simulator, once."""
    dtype = np.dtype(NUMPY[name])
    with np.errstate(all="ignore"):
        if np.issubdtype(dtype, np.integer):
            info = np.iinfo(dtype)
            return np.clip(np.rint(values.astype(np.float64)), info.min, info.max).astype(dtype)
        return values.astype(np.float32).astype(dtype)


def _small(shape, name, seed):
    """Values that all types hold without loss, and whose results are rounded in most of them."""
    dtype = np.dtype(NUMPY[name])
    values = np.random.default_rng(seed).integers(0 if name.startswith("u") else -9, 10, shape)
    return (values if np.issubdtype(dtype, np.integer) else values * 0.37).astype(dtype)


@st.composite
def _tile(draw, partitions, count, types=_ENGINE_TYPES):
    """The random layout and type of an operand with `count` elements in each of some partitions."""
    sizes = (partitions, *factors(draw, count))
    return draw(strided(sizes)), draw(st.sampled_from(types))


def _operation(draw, partitions, count):
    """A random instruction: a function that issues it, the same in NumPy, and how many inputs it has."""
    first, second = draw(st.sampled_from(sorted(_BINARY))), draw(st.sampled_from(sorted(_BINARY)))
    one, two = _BINARY[first], _BINARY[second]
    reverse0, reverse1 = draw(st.booleans()), draw(st.booleans())
    number = np.float32(draw(st.sampled_from((0.0, 1.0, -1.3, 2.7))))
    column = np.linspace(-2, 3, partitions, dtype=np.float32)[:, None] if draw(st.booleans()) else None
    scalar = number if column is None else column
    op0, op1 = getattr(nl, first), getattr(nl, second)

    def swap(function, left, right, reverse):
        result = function(right, left) if reverse else function(left, right)
        return result.astype(np.float32)

    def given_scalar():
        return float(number) if column is None else nl.load(nl.shared_constant(column))

    kind = draw(st.sampled_from(("tensor_tensor", "tensor_scalar", "tensor_scalar_2", "scalar_tensor_tensor", "activation")))
    if kind == "tensor_tensor":
        return (lambda dst, a, b: nisa.tensor_tensor(dst, a, b, op0)), (lambda a, b: swap(one, a, b, False)), 2
    if kind == "tensor_scalar":
        return (
            lambda dst, a: nisa.tensor_scalar(dst, a, op0, given_scalar(), reverse0),
            lambda a: swap(one, a, scalar, reverse0),
            1,
        )
    if kind == "tensor_scalar_2":
        return (
            lambda dst, a: nisa.tensor_scalar(dst, a, op0, given_scalar(), reverse0, op1, 0.7, reverse1),
            lambda a: swap(two, swap(one, a, scalar, reverse0), np.float32(0.7), reverse1),
            1,
        )
    if kind == "scalar_tensor_tensor":
        return (
            lambda dst, a, b: nisa.scalar_tensor_tensor(dst, a, op0, given_scalar(), op1, b, reverse0, reverse1),
            lambda a, b: swap(two, swap(one, a, scalar, reverse0), b, reverse1),
            2,
        )
    bias = np.linspace(1, -1, partitions, dtype=np.float32)[:, None]
    return (
        lambda dst, a: nisa.activation(dst, nl.relu, a, bias=nl.load(nl.shared_constant(bias)), scale=given_scalar()),
        lambda a: np.maximum(a * scalar + bias, np.float32(0)),
        1,
    )


@_MANY
@given(data=st.data())
def test_elementwise_instructions_compute_in_float32_and_round_once(data):
    # Catches: operands of another rank or layout paired in another order than row-major, arithmetic in the operand's type, two roundings,
    # `reverse` on the wrong operator, a per-partition operand along another dimension, and writes beside the view.
    partitions = data.draw(st.sampled_from((1, 3, 33)))
    count = data.draw(st.sampled_from((1, 6, 12, 16)))
    issue, expected, inputs = _operation(data.draw, partitions, count)
    layouts = [data.draw(_tile(partitions, count)) for _ in range(inputs + 1)]
    places = ["psum" if data.draw(st.integers(0, 3)) == 0 else "sbuf" for _ in layouts]
    if places[1:] == ["psum", "psum"]:
        places[1] = "sbuf"
    arrays = [_small(layout.shape, name, i) for i, (layout, name) in enumerate(layouts)]

    def kernel(*tensors):
        tiles = [allocate(place, tensor) for place, tensor in zip(places, tensors, strict=True)]
        views = [layout.of(tile) for (layout, _), tile in zip(layouts, tiles, strict=True)]
        issue(*views)
        return tuple(dump(tile) for tile in tiles)

    results = run(kernel, *arrays)
    mirrors = [layout.mirror(array) for (layout, _), array in zip(layouts, arrays, strict=True)]
    operands = [mirror.reshape(partitions, count).astype(np.float32) for mirror in mirrors[1:]]
    after = arrays[0].copy()
    target = layouts[0][0].mirror(after)
    target[...] = _rounded(expected(*operands), layouts[0][1]).reshape(target.shape)
    for result, want in zip(results, [after, *arrays[1:]], strict=True):
        np.testing.assert_array_equal(result.astype(np.float32), want.astype(np.float32))


@_MANY
@given(data=st.data())
def test_integer_arithmetic_of_32_bits_in_sbuf_is_exact(data):
    # Catches: integers that are added or multiplied in float32, and results that saturate where the device's integers wrap.
    name = data.draw(st.sampled_from(("int32", "uint32")))
    op = data.draw(st.sampled_from(("add", "subtract", "multiply", "maximum", "less")))
    info = np.iinfo(NUMPY[name])
    wrap = op in ("add", "subtract", "multiply")
    numbers = st.lists(st.integers(int(info.min), int(info.max)), min_size=6, max_size=6)
    one, two = (np.array(data.draw(numbers), NUMPY[name]).reshape(2, 3) for _ in range(2))

    def kernel(x, y):
        result = nl.ndarray((2, 3), x.dtype)
        nisa.tensor_tensor(result, nl.load(x), nl.load(y), getattr(nl, op))
        return dump(result)

    pairs = zip(one.reshape(-1).tolist(), two.reshape(-1).tolist(), strict=True)
    functions = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "maximum": max, "less": int.__lt__}
    exact = [int(functions[op](x, y)) for x, y in pairs]
    expected = np.array([e % 2**32 for e in exact], np.uint32).view(NUMPY[name]) if wrap else np.array(exact, NUMPY[name])
    assert run(kernel, one, two).reshape(-1).tolist() == expected.tolist()


@_MANY
@given(data=st.data())
def test_predicated_copies_keep_the_rest(data):
    # Catches: a predicate read in another order than the tiles, a reversed predicate, and elements that are not chosen but written.
    partitions, count = data.draw(st.sampled_from(((1, 6), (3, 12))))
    name = data.draw(st.sampled_from(("float32", "bfloat16", "int16")))
    reverse = data.draw(st.booleans())
    layouts = [
        data.draw(_tile(partitions, count, (name,))),
        data.draw(_tile(partitions, count, (name,))),
        data.draw(_tile(partitions, count, ("uint8", "uint16", "uint32"))),
    ]
    arrays = [_small(layout.shape, kind, i) for i, (layout, kind) in enumerate(layouts)]
    arrays[2] //= 5

    def kernel(*tensors):
        tiles = [allocate("sbuf", tensor) for tensor in tensors]
        dst, src, predicate = (layout.of(tile) for (layout, _), tile in zip(layouts, tiles, strict=True))
        nisa.tensor_copy_predicated(dst, src, predicate, reverse_pred=reverse)
        return dump(tiles[0])

    after = arrays[0].copy()
    target, source, mask = (layout.mirror(array) for (layout, _), array in zip(layouts, [after, *arrays[1:]], strict=True))
    chosen = (mask.reshape(target.shape) != 0) ^ reverse
    target[...] = np.where(chosen, source.reshape(target.shape), target)
    np.testing.assert_array_equal(run(kernel, *arrays).astype(np.float32), after.astype(np.float32))


@_MANY
@given(data=st.data())
def test_affine_patterns_number_and_select_elements_of_every_type(data):
    # Catches: a pattern whose last pair is not the fastest, a multiplier along the wrong dimension, a comparison with its sides exchanged,
    # and a selected type, such as an integer, that the constant cannot be cast to.
    partitions = data.draw(st.sampled_from((1, 3, 33)))
    pairs = data.draw(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 3)), min_size=1, max_size=4))
    offset, multiplier = data.draw(st.integers(-5, 5)), data.draw(st.integers(-2, 2))
    name = data.draw(st.sampled_from(("float32", "bfloat16", "int32", "int16", "uint8")))
    compare = data.draw(st.sampled_from(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")))
    count = math.prod(number for _, number in pairs)
    source = _small((partitions, count), name, 0)

    def kernel(x):
        numbers = nl.ndarray((partitions, count), nl.int32)
        nisa.iota(numbers, [list(pair) for pair in pairs], offset, multiplier)
        chosen = nl.ndarray((partitions, count), x.dtype)
        nisa.affine_select(chosen, pairs, multiplier, nl.load(x), 2.0, cmp_op=getattr(nl, compare), offset=offset)
        return dump(numbers), dump(chosen)

    numbers, chosen = run(kernel, source)
    expected = [
        [
            offset + multiplier * p + sum(i * step for i, (step, _) in zip(index, pairs, strict=True))
            for index in np.ndindex(*sizes)
        ]
        for sizes in [[number for _, number in pairs]]
        for p in range(partitions)
    ]
    assert numbers.tolist() == expected
    truth = getattr(np, compare)(np.array(expected), 0)
    np.testing.assert_array_equal(chosen, np.where(truth, source, np.array(2, source.dtype)))


# e. DMA


@_MANY
@given(data=st.data())
def test_dma_copies_between_any_two_patterns(data):
    # Catches: elements that are paired in another order than row-major, partitions of SBUF that are mistaken for its free dimensions, a
    # cast that is missing, doubled or not saturated, and bytes beside the pattern.
    count = data.draw(st.sampled_from((6, 12, 24)))
    sides, arrays = [], []
    for i in range(2):
        buffer = data.draw(st.sampled_from(("hbm", "sbuf")))
        on_chip = buffer == "sbuf"
        sizes = factors(data.draw, count)
        layout = data.draw(strided((1, *sizes) if on_chip and len(sizes) == 1 else sizes, on_chip))
        name = data.draw(st.sampled_from(_ENGINE_TYPES))
        sides.append((buffer, layout))
        arrays.append(_small(layout.shape, name, i))

    def kernel(*tensors):
        tensors = [
            tensor if buffer == "hbm" else allocate(buffer, tensor) for tensor, (buffer, _) in zip(tensors, sides, strict=True)
        ]
        dst, src = (layout.of(tensor) for tensor, (_, layout) in zip(tensors, sides, strict=True))
        nisa.dma_copy(dst, src)
        return tuple(dump(tensor) for tensor in tensors)

    given_arrays = [array.copy() for array in arrays]
    results = run(kernel, *given_arrays)
    after = arrays[0].copy()
    target, source = sides[0][1].mirror(after), sides[1][1].mirror(arrays[1])
    name = next(name for name in _ENGINE_TYPES if np.dtype(NUMPY[name]) == after.dtype)
    values = source if source.dtype == after.dtype else _rounded(source.astype(np.float32), name)
    target[...] = values.reshape(target.shape)
    assert results[0].tobytes() == after.tobytes()
    assert results[1].tobytes() == arrays[1].tobytes()
    # an array of the caller is memory of the kernel
    if sides[0][0] == "hbm":
        assert given_arrays[0].tobytes() == after.tobytes()


@_MANY
@given(data=st.data())
def test_gathers_and_scatters_move_the_rows_of_their_indices(data):
    # Catches: an index that is off by the row stride or the offset, an out-of-bounds row that wraps, clips or is silently dropped without
    # oob_mode.skip, and with skip a row that is written all the same or that ends the copy.
    table_rows, width, count = 7, 6, data.draw(st.integers(1, 9))
    first = data.draw(st.integers(0, 2))
    size = data.draw(st.integers(1, width - first))
    scatters, skip = data.draw(st.booleans()), data.draw(st.booleans())
    by_select = first == 0 and size == width and data.draw(st.booleans())
    signed = data.draw(st.booleans())
    indices = st.integers(-2 if signed else 0, table_rows + 1)
    # what two equal indices of a scatter leave behind depends on the queues
    rows = data.draw(st.lists(indices, min_size=count, max_size=count, unique=scatters))
    table = _bytes((table_rows, width), np.int32, 0)
    data_rows = _bytes((count, size), np.int32, 1) + 50000
    index = np.array(rows, np.int32 if signed else np.uint32)[:, None]

    def kernel(table_in, data_in, index_in):
        tile, where = nl.load(data_in), nl.load(index_in)
        if by_select:
            view = table_in.vector_select(0, where)
        else:
            view = table_in.ap([[width, count], [1, size]], offset=first, vector_offset=where, indirect_dim=0)
        mode = nisa.oob_mode.skip if skip else nisa.oob_mode.error
        dst, src = (view, tile) if scatters else (tile, view)
        nisa.dma_copy(dst, src, oob_mode=mode)
        return dump(tile)

    after = table.copy()
    outside = [row for row in rows if not 0 <= row < table_rows]
    if outside and not skip:
        with pytest.raises(Broken, match=r"out of bounds|outside"):
            run(kernel, after, data_rows, index)
        return
    result = run(kernel, after, data_rows, index)
    expected_table, expected_tile = table.copy(), data_rows.copy()
    for i, row in enumerate(rows):
        if 0 <= row < table_rows:
            if scatters:
                expected_table[row, first : first + size] = data_rows[i]
            else:
                expected_tile[i] = table[row, first : first + size]
    np.testing.assert_array_equal(after, expected_table)
    np.testing.assert_array_equal(result, expected_tile)


@_MANY
@given(data=st.data())
def test_offsets_of_one_element_or_register_address_at_run_time(data):
    # Catches: a run-time index that is scaled by another stride than that of its dimension, added to the wrong offset or frozen when the
    # view is made, and out-of-bounds copies that are not errors, or not skipped.
    shape = (3, 4, 5)
    table = _bytes(shape, np.int32, 0)
    dim = data.draw(st.integers(0, 2))
    index = data.draw(st.integers(-1, shape[dim]))
    by_register, skip, late = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.booleans())
    form = data.draw(st.sampled_from(("select", "getitem", "ds", "ap")))
    size = data.draw(st.integers(1, shape[dim])) if form == "ds" else 1
    kept = tuple(s for i, s in enumerate(shape) if i != dim)
    sizes = tuple(size if i == dim else s for i, s in enumerate(shape)) if form == "ds" else kept
    on_chip = form != "ap" and dim > 0 and not by_register and data.draw(st.booleans())

    def kernel(x, index_in):
        source = allocate("sbuf", x) if on_chip else x
        cell = nl.load(index_in)
        where = cell
        if by_register:
            where = nisa.register_alloc(0)
            nisa.register_load(where, cell)
        if late:
            # the view is made before the value is known
            nisa.memset(cell, 0)
            if by_register:
                nisa.register_move(where, 0)
        key = (slice(None),) * dim
        if form == "select":
            view = source.select(dim, where)
        elif form == "getitem":
            view = source[(*key, where)]
        elif form == "ds":
            view = source[(*key, nl.ds(where, size))]
        else:
            steps = (20, 5, 1)
            pattern = [[steps[i], s] for i, s in enumerate(shape) if i != dim]
            view = source.ap(pattern, offset=0, scalar_offset=where, indirect_dim=dim)
        if late:
            nisa.dma_copy(cell, index_in)
            if by_register:
                nisa.register_load(where, cell)
        out = nl.ndarray(sizes, nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, nl.shared_constant(np.zeros(sizes, np.int32)))
        nisa.dma_copy(out, view, oob_mode=nisa.oob_mode.skip if skip else nisa.oob_mode.error)
        return out

    cells = np.int32([[index]])
    inside = index >= 0 and index + size <= shape[dim]
    if form == "ap":
        # a raw pattern is bounded by the storage: the last element that it reaches
        start = index * (20, 5, 1)[dim]
        reach = sum((s - 1) * (20, 5, 1)[i] for i, s in enumerate(shape) if i != dim)
        inside = start >= 0 and start + reach < table.size
    if not inside and not skip:
        with pytest.raises(Broken, match=r"out of bounds|outside"):
            run(kernel, table.copy(), cells)
        return
    result = run(kernel, table.copy(), cells)
    if not inside:
        expected = np.zeros(sizes, np.int32)
    elif form == "ap":
        expected = np.ndarray(sizes, np.int32, table, start * 4, [(80, 20, 4)[i] for i in range(3) if i != dim])
    else:
        picked = slice(index, index + size) if form == "ds" else index
        expected = table[(slice(None),) * dim + (picked,)]
    np.testing.assert_array_equal(result, expected)


# f. Allocation

# The memories of trn2: eight units each, of 26 KiB and of a bank.
_UNIT = {"sbuf": 212992 // 8, "psum": 2048}
_UNITS = 8
_ACTIONS = ("new", "new", "new", "write", "write", "read", "read", "update", "forget", "address")


@st.composite
def _program(draw):
    """Steps (action, tensor number, ...) on tensors of one region; tensor 0 is a small tile of SBUF that other instructions use."""
    region = draw(st.sampled_from(("sbuf", "psum")))
    steps, alive, count = [], [], 0
    for _ in range(draw(st.integers(4, 16))):
        # an offset is read from SBUF only
        action = draw(st.sampled_from(_ACTIONS if region == "sbuf" else _ACTIONS[:-1])) if alive else "new"
        if action == "new":
            units = draw(st.integers(1, 4))
            partial = draw(st.booleans())
            address = None
            if draw(st.booleans()):
                address = (draw(st.sampled_from((0, 32))), draw(st.integers(0, _UNITS - units)))
            count += 1
            alive.append(count)
            steps.append(("new", count, units, partial, address))
        else:
            number = draw(st.sampled_from(alive))
            if action == "forget":
                alive.remove(number)
            steps.append((action, number))
    return region, steps


class _Life:
    """What the model knows of one tensor: the instructions that need it."""

    def __init__(self, size, units, address, now):
        self.size, self.units, self.address = size, units, address
        self.created, self.first, self.last, self.read_last, self.forgotten = now, None, None, False, None

    def touch(self, now, read):
        self.first = now if self.first is None else self.first
        self.last, self.read_last = now, read

    def needed(self):
        start = self.created if self.first is None else self.first
        end = self.last + 1 if self.read_last else max(self.forgotten, (self.last or 0) + 1)
        return range(start, end)

    def collides(self, other):
        (p, f), (q, g) = self.address, other.address
        together = set(self.needed()) & set(other.needed())
        return bool(together) and p == q and f < g + other.units and g < f + self.units


def _size(region, units, partial):
    """Bytes per partition: whole units, or 4 bytes less than that."""
    return units * _UNIT[region] - 4 * partial


def _model(region, steps):
    """The lives of the tensors of a program, by independent rules, and the number of its instructions."""
    now, lives, held = 1, {}, {}  # instruction 0 fills the small tile
    for step in steps:
        action, number = step[:2]
        if action == "new":
            _, _, units, partial, address = step
            lives[number] = held[number] = _Life(_size(region, units, partial), units, address, now)
            # an instruction after each: nobody says whether a tensor that no instruction sees takes room
            now += 1
        elif action == "forget":
            held.pop(number).forgotten = now
        elif action == "address":
            held[number].touch(now, read=False)
            held[number].touch(now + 1, read=True)
            now += 2
        else:
            if action in ("read", "update"):
                held[number].touch(now, read=True)
            if action in ("write", "update"):
                held[number].touch(now, read=False)
            now += 1
    for life in held.values():
        life.forgotten = now
    return lives, now


def _kernel(region, steps):
    def kernel(x):
        small = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
        nisa.memset(small, 0.0)
        held = {}
        for step in steps:
            action, number = step[:2]
            if action == "new":
                _, _, units, partial, address = step
                shape = (1 + number % 2, _size(region, units, partial) // 4)
                place = None if address is None else (address[0], address[1] * _UNIT[region])
                tensor = nl.ndarray(shape, nl.float32, buffer=BUFFERS[region], address=place)
                # what keeps a tensor in use may be a view of it
                held[number] = tensor if number % 3 else tensor[:, 0:1]
                del tensor
                nisa.memset(small, 0.0)
            elif action == "forget":
                del held[number]
            elif action == "write":
                nisa.memset(held[number][0:1, 0:1], 1.0)
            elif action == "read":
                nisa.tensor_copy(small, held[number][0:1, 0:1])
            elif action == "address":
                # write an offset, and read it to address another tensor
                nisa.memset(held[number][0:1, 0:1].view(nl.int32), 0)
                nisa.dma_copy(small, x[held[number][0:1, 0:1].view(nl.int32)])
            else:
                nisa.tensor_scalar(held[number][0:1, 0:1], held[number][0:1, 0:1], nl.add, 1.0)
        return x

    return kernel


@_MANY
@given(program=_program())
def test_capacity_and_overlap_are_errors_exactly_when_lives_collide(program):
    # Catches: a life that starts at allocation or ends at the last access whatever it was, an offset whose use is no read, a dead tensor
    # that still counts, PSUM counted in bytes and not in banks, addresses compared without their partitions or lives, and addressed tensors
    # that take no room from others.
    region, steps = program
    lives, end = _model(region, steps)
    tensors = list(lives.values())
    placed = [life for life in tensors if life.address is not None]
    overlap = any(one.collides(two) for i, one in enumerate(placed) for two in placed[:i])
    peak, capacity = 0, _UNIT["sbuf"] * 8 if region == "sbuf" else 8
    for moment in range(end):
        live = [life for life in tensors if moment in life.needed()]
        if region == "sbuf":
            spans = {u for life in live if life.address for u in range(life.address[1], life.address[1] + life.units)}
            bytes_at = {}
            for life in live:
                if life.address:
                    for unit in range(life.units):
                        here = min(_UNIT[region], life.size - unit * _UNIT[region])
                        bytes_at[life.address[1] + unit] = max(bytes_at.get(life.address[1] + unit, 0), here)
            assert set(bytes_at) == spans
            level = sum(life.size for life in live if not life.address) + sum(bytes_at.values()) + 4  # the small tile
        else:
            banks = {u for life in live if life.address for u in range(life.address[1], life.address[1] + life.units)}
            level = sum(life.units for life in live if not life.address) + len(banks)
        peak = max(peak, level)
    array = np.zeros((1, 1), np.float32)
    profiled = nki.profile(_kernel(region, steps), target="trn2")
    if overlap or peak > capacity:
        with pytest.raises(Broken, match="overlap" if overlap else "exceed"):
            profiled(array)
        return
    _, cost = profiled(array)
    assert (cost.sbuf_peak_bytes if region == "sbuf" else cost.psum_banks) == peak


# g. Two cores


@given(cut=st.integers(1, 7), in_place=st.booleans(), swapped=st.booleans())
def test_two_cores_return_what_both_of_them_wrote(cut, in_place, swapped):
    # Catches: outputs that are read when the first core ends, shared tensors that are one per core, and inputs that one core updates alone.
    # A kernel ends when both cores have ended: nothing asks for a barrier before the return.
    def kernel(x):
        first = (nl.program_id(0) == 0) != swapped
        out = x if in_place else nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        rows = nl.ds(0, cut) if first else nl.ds(cut, 8 - cut)
        tile = nl.load(x[rows])
        nisa.tensor_scalar(tile, tile, nl.add, 100.0 if first else 200.0)
        nisa.dma_copy(out[rows], tile)
        return out

    start = np.arange(48, dtype=np.float32).reshape(8, 6)
    array = start.copy()
    result, cost = nki.profile(kernel, target="trn2", lnc=2)(array)
    expected = start + np.where(np.arange(8) < cut, 100, 200)[:, None].astype(np.float32)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(array, expected if in_place else start)
    assert cost.dma_instructions == 4
