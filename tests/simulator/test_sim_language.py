# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""nki.language in the NKI interpreter: tensors and views, functions of tiles, loops, registers, two cores, names that are missing."""

import math
import threading

import numpy as np
import pytest
from simkit import BF16, NAN, f32, i32, nisa, nki, nl, out, run, same, tile_of

EMPTY = f32([0])


def values(kernel, *arrays, target="trn2", **static):
    """What a kernel that returns a tile has in it."""
    return run(lambda *a: out(kernel(*(tile_of(x) for x in a), **static)), *(arrays or (EMPTY,)), target=target)


# Tensors


def test_load_and_store_move_tiles_and_convert():
    def kernel(a):
        tile = nl.load(a)
        assert (tile.buffer, tile.dtype, tile.shape) == (nl.sbuf, nl.float32, (2, 2))
        half = nl.load(a, nl.bfloat16)
        assert half.dtype == nl.bfloat16
        result = nl.ndarray((2, 2), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(result, tile)
        return result

    same(run(kernel, f32([1, 1 + 2**-9], [3, NAN])), [[1, 1], [3, NAN]])


def test_load_of_a_slice_and_store_to_a_slice():
    def kernel(a):
        result = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        for i in range(2):
            nl.store(result[1 - i : 2 - i], value=nl.load(a[i : i + 1]))
        return result

    same(run(kernel, f32([1, 2], [3, 4])), [[3, 4], [1, 2]])


def test_store_of_a_psum_tile():
    def kernel(a):
        result = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        nl.store(result, nl.matmul(nl.load(a), nl.load(a), transpose_x=True))
        return result

    same(run(kernel, f32([2], [3])), [[13]])


def test_assignment_to_a_part_copies():
    def kernel(a):
        tile = nl.zeros((1, 4), nl.float32)
        tile[:, 1:3] = nl.load(a)
        return out(tile)

    same(run(kernel, f32([5, 6])), [[0, 5, 6, 0]])


@pytest.mark.parametrize("buffer", ["sbuf", "psum", "shared_hbm"])
def test_filled_tensors(buffer):
    def kernel(_):
        region = getattr(nl, buffer)
        tiles = (
            nl.zeros((2, 2), nl.float32, region),
            nl.ones((2, 2), nl.bfloat16, buffer=region),
            nl.full((2, 2), -3, nl.int32, buffer=region, name="threes"),
        )
        assert tiles[2].name == "threes"
        return tiles if buffer == "shared_hbm" else tuple(out(tile) for tile in tiles)

    zeros, ones, threes = run(kernel, EMPTY)
    same(zeros, np.zeros((2, 2)))
    same(ones, np.ones((2, 2)))
    assert threes.tolist() == [[-3, -3], [-3, -3]]


def test_zeros_like_and_empty_like():
    def kernel(a):
        tile = tile_of(a)
        zeros, other, empty = nl.zeros_like(tile), nl.zeros_like(tile, nl.int32, nl.psum), nl.empty_like(tile, name="e")
        assert (zeros.shape, zeros.dtype, zeros.buffer) == ((1, 2), nl.bfloat16, nl.sbuf)
        assert (other.dtype, other.buffer, empty.name) == (nl.int32, nl.psum, "e")
        return out(zeros), out(other), out(empty)

    zeros, other, empty = run(kernel, np.array([[1, 2]], BF16))
    same(zeros, [[0, 0]])
    assert other.tolist() == [[0, 0]]
    assert np.isnan(empty.astype(np.float32)).all()


def test_shared_constant_from_an_array_and_from_a_file(tmp_path):
    data = f32([1, 2], [3, 4])
    np.save(tmp_path / "constant.npy", data)

    def kernel(_):
        one, two = nl.shared_constant(data), nl.shared_constant(str(tmp_path / "constant.npy"))
        assert one.buffer is nl.shared_hbm
        return out(nl.add(nl.load(one), nl.load(two)))

    same(run(kernel, EMPTY), [[2, 4], [6, 8]])


def test_shared_identity_matrix():
    def kernel(_):
        bytes_ = nl.shared_identity_matrix(3)
        assert (bytes_.dtype, bytes_.buffer) == (nl.uint8, nl.sbuf)
        given = nl.ndarray((2, 2), nl.bfloat16, buffer=nl.sbuf)
        nl.shared_identity_matrix(2, dst=given)
        return out(bytes_), out(nl.shared_identity_matrix(2, nl.float32)), out(given)

    bytes_, real, given = run(kernel, EMPTY)
    assert bytes_.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    same(real, np.eye(2))
    same(given, np.eye(2))


def test_tensors_know_their_layout():
    def kernel(a):
        tile = nl.ndarray(dtype=nl.float32, shape=(128, 24), buffer=nl.sbuf, name="t")
        assert (tile.shape, tile.ndim, tile.size, tile.dtype, tile.name) == ((128, 24), 2, 3072, "float32", "t")
        assert (tile.strides, tile.offset, tile.get_pattern()) == ((24, 1), 0, [[24, 128], [1, 24]])
        part = tile[:, 8:24:2]
        assert (part.shape, part.strides, part.offset, part.is_contiguous()) == ((128, 8), (24, 2), 8, False)
        # on chip, contiguous means within each partition
        assert tile[:, 0:8].is_contiguous()
        assert not a[:, 0:1].is_contiguous()
        assert not tile.is_indirect()
        assert nl.is_sbuf(tile.buffer)
        assert nl.is_on_chip(nl.psum)
        assert nl.is_psum(nl.psum)
        assert nl.is_hbm(nl.shared_hbm)
        assert nl.hbm is nl.private_hbm

    run(kernel, f32([1, 2], [3, 4]))


def test_indexing_keeps_two_dimensions_on_chip_and_one_in_hbm():
    def kernel(a):
        tile = nl.ndarray((4, 3, 2), nl.float32, buffer=nl.sbuf)
        shapes = [
            tile[1].shape,
            tile[1, 2].shape,
            tile[:, 0].shape,
            tile[..., 1].shape,
            tile[:, 0, 1].shape,
            tile[-1, -1, -1].shape,
        ]
        assert shapes == [(1, 3, 2), (1, 2), (4, 2), (4, 3), (4, 1), (1, 1)]
        assert [a[1].shape, a[1, 1].shape, a[:, 0].shape, a[nl.ds(1, 1)].shape] == [(2,), (1,), (2,), (1, 2)]

    run(kernel, f32([1, 2], [3, 4]))


CUBE = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t.slice(2, 1, 4, 2), CUBE[:, :, 1:4:2]),
        (lambda t: t.select(1, 2), CUBE[:, 2]),
        (lambda t: t.permute((0, 2, 1)), CUBE.transpose(0, 2, 1)),
        (lambda t: t.select(1, 0).expand_dim(1).broadcast(1, 3), np.repeat(CUBE[:, :1], 3, 1)),
        (lambda t: t.expand_dim(1).squeeze_dim(1), CUBE),
        (lambda t: t.reshape_dim(2, (2, -1)), CUBE.reshape(2, 3, 2, 2)),
        (lambda t: t.flatten_dims(1, 2), CUBE.reshape(2, 12)),
        (lambda t: t.reshape((2, 2, 6)), CUBE.reshape(2, 2, 6)),
        (
            lambda t: t.rearrange(("p", "h", ("w", "x")), ("p", ("w", "x"), "h"), {"x": 2}),
            CUBE.transpose(0, 2, 1),
        ),
        (
            lambda t: t.ap([[12, 2], [4, 2], [1, 3]], offset=5),
            np.stack([CUBE.reshape(2, 12)[:, [5, 6, 7]], CUBE.reshape(2, 12)[:, [9, 10, 11]]], 1),
        ),
        (lambda t: t.ap([[12, 2], [1, 10], [1, 3]]), np.stack([CUBE.reshape(2, 12)[:, i : i + 3] for i in range(10)], 1)),
    ],
    ids=[
        "slice",
        "select",
        "permute",
        "broadcast",
        "squeeze",
        "reshape_dim",
        "flatten",
        "reshape",
        "rearrange",
        "ap",
        "windows",
    ],
)
@pytest.mark.parametrize("buffer", ["sbuf", "psum", "hbm"])
def test_views_read_what_numpy_reads(view, expected, buffer):
    def kernel(a):
        if buffer == "hbm":
            result = nl.ndarray(expected.shape, nl.float32, buffer=nl.shared_hbm)
            nisa.dma_copy(result, view(a))
            return result
        picked = view(tile_of(a, getattr(nl, buffer)))
        assert picked.shape == expected.shape
        copied = nl.ndarray(expected.shape, nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(copied, picked)
        return out(copied)

    same(run(kernel, CUBE), expected)


def test_views_of_another_type_share_the_bytes():
    def kernel(a):
        tile = tile_of(a)
        assert tile.view(nl.uint8).shape == (1, 8)
        assert tile.view(nl.uint8).reinterpret_cast(nl.float32).shape == (1, 2)
        return out(tile.view(nl.int32)), out(tile.view(nl.uint16))

    words, halves = run(kernel, f32([1, -2]))
    assert words.tolist() == [[0x3F800000, -0x40000000]]
    assert halves.tolist() == [[0, 0x3F80, 0, 0xC000]]


@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        ("trn2", {"sbuf_fmax_bytes": 212992, "sbuf_fmax": 53248, "total_available_sbuf_size": 212992}),
        ("trn3", {"sbuf_fmax_bytes": 262144, "sbuf_fmax": 65536, "total_available_sbuf_size": 262144}),
    ],
)
def test_tile_sizes_are_those_of_the_target(target, sizes):
    common = {
        "pmax": 128,
        "psum_fmax": 512,
        "psum_bank_fmax": 512,
        "psum_bank_fmax_bytes": 2048,
        "psum_num_banks": 8,
        "gemm_stationary_fmax": 128,
        "gemm_moving_fmax": 512,
        "bn_stats_fmax": 512,
    }
    found = {}

    def kernel(_):
        found.update({name: getattr(nl.tile_size, name) for name in (*common, *sizes)})

    run(kernel, EMPTY, target=target)
    assert found == common | sizes


@pytest.mark.parametrize(("target", "version"), [("trn2", "gen3"), ("trn3", "gen4")])
def test_a_kernel_knows_its_generation(target, version):
    def kernel(_):
        assert nisa.get_nc_version() == getattr(nisa.nc_version, version)

    run(kernel, EMPTY, target=target)


def test_device_print_prints_at_once(capsys):
    run(lambda a: nl.device_print("values", tile_of(a)), f32([1.5, 2.5]))
    text = capsys.readouterr().out
    assert "values" in text
    assert "1.5" in text
    assert "2.5" in text


def test_data_types_are_strings():
    assert (nl.float32, nl.bfloat16, nl.bool_, nl.uint8) == ("float32", "bfloat16", "bool", "uint8")


# Functions of tiles


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add", [6, -1]),
        ("subtract", [2, -5]),
        ("multiply", [8, -6]),
        ("maximum", [4, 2]),
        ("minimum", [2, -3]),
        ("equal", [0, 0]),
        ("not_equal", [1, 1]),
        ("less", [0, 1]),
        ("less_equal", [0, 1]),
        ("greater", [1, 0]),
        ("greater_equal", [1, 0]),
        ("power", [16, 9]),
        ("logical_and", [1, 1]),
        ("logical_or", [1, 1]),
        ("logical_xor", [0, 0]),
    ],
)
def test_functions_of_two_tiles(name, expected):
    same(values(lambda a, b: getattr(nl, name)(a, b), f32([4, -3]), f32([2, 2])), [expected])


def test_functions_of_a_tile_and_a_number_or_a_column():
    same(values(lambda a: nl.subtract(a, 1.0), f32([4, -3])), [[3, -4]])
    same(values(lambda a: nl.subtract(1.0, a), f32([4, -3])), [[-3, 4]])
    same(values(lambda a, b: nl.multiply(a, b), f32([4, -3], [1, 2]), f32([10], [100])), [[40, -30], [100, 200]])


def test_functions_take_a_result_type():
    got = values(lambda a: nl.add(a, 0.0, dtype=nl.bfloat16), f32([1 + 2**-9]))
    assert got.dtype == BF16
    same(got, [[1]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bitwise_and", 0b1000), ("bitwise_or", 0b1110), ("bitwise_xor", 0b0110), ("left_shift", 0), ("right_shift", 0)],
)
def test_functions_of_bits(name, expected):
    got = values(lambda a, b: getattr(nl, name)(a, b), np.array([[0b1100]], np.uint8), np.array([[0b1010]], np.uint8))
    assert got.tolist() == [[expected]]


def test_invert():
    assert values(lambda a: nl.invert(a), np.array([[0xF0]], np.uint8)).tolist() == [[0x0F]]


UNARY = {
    "abs": abs,
    "negative": lambda x: -x,
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "relu": lambda x: max(x, 0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "erf": math.erf,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x * x,
    "arctan": math.atan,
    "copy": lambda x: x,
    "sign": lambda x: 1,
    "logical_not": lambda x: 0,
    "sin": math.sin,
    "cos": math.cos,
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tile(name):
    x = [0.25, 1.0, 1.375]
    got = values(lambda a: getattr(nl, name)(a), f32(x), target="trn3")
    np.testing.assert_allclose(got, [[UNARY[name](v) for v in x]], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"), [("sum", [6, 15]), ("max", [3, 6]), ("min", [1, 4]), ("prod", [6, 120]), ("mean", [2, 5])]
)
def test_reductions(name, expected):
    x = f32([1, 2, 3], [4, 5, 6])
    for axis in (1, (1,), [1]):
        same(values(lambda a, axis=axis: getattr(nl, name)(a, axis), x), np.reshape(expected, (2, 1)))
    same(values(lambda a: getattr(nl, name)(a, axis=1, keepdims=True), x), np.reshape(expected, (2, 1)))


def test_variance_and_all():
    x = f32([1, 2, 3, 6], [4, 4, 4, 0])
    np.testing.assert_allclose(values(lambda a: nl.var(a, 1), x), [[3.5], [3]], rtol=1e-6)
    same(values(lambda a: nl.all(a, 1, dtype=nl.float32), x), [[1], [0]])


def test_sum_over_two_axes_of_a_view():
    same(values(lambda a: nl.sum(a.reshape((1, 2, 2, 2)), axis=[2, 3]), f32([1, 2, 3, 4, 5, 6, 7, 8])), [[10, 26]])


def test_matmul_and_transpose():
    x, y = f32([1, 2], [3, 4]), f32([1, 0], [2, 1])
    same(values(lambda a, b: nl.matmul(a, b, transpose_x=True), x, y), x.T @ y)
    same(values(lambda a, b: nl.matmul(a, b), x, y), x @ y)
    same(values(lambda a: nl.transpose(a), f32([1, 2, 3], [4, 5, 6])), [[1, 4], [2, 5], [3, 6]])


def test_softmax_and_rms_norm():
    x = f32([1, 2, 3], [1000, 1000, 1000])
    e = np.exp([-2.0, -1.0, 0.0])
    np.testing.assert_allclose(values(lambda a: nl.softmax(a, axis=1), x), [e / e.sum(), [1 / 3] * 3], rtol=1e-6)
    w = f32([1, 2, 0.5], [1, 2, 0.5])
    got = values(lambda a, b: nl.rms_norm(a, b, axis=1, n=3, epsilon=0.0), f32([1, 2, 2], [0, 3, 4]), w)
    rms = np.sqrt([3.0, 25 / 3])[:, None]
    np.testing.assert_allclose(got, f32([1, 2, 2], [0, 3, 4]) / rms * w, rtol=1e-6)


def test_where():
    same(values(lambda c, a, b: nl.where(c, a, b), f32([1, 0, 2]), f32([1, 2, 3]), f32([7, 8, 9])), [[1, 8, 3]])
    same(values(lambda c, a: nl.where(c, a, 0.0), np.array([[0, 1]], np.uint8), f32([1, 2])), [[0, 2]])


def test_expand_dims_broadcast_to_and_gather():
    x = f32([1, 2])
    same(values(lambda a: nl.broadcast_to(nl.expand_dims(a, 1), (1, 3, 2)), x), [[[1, 2]] * 3])
    same(values(lambda a: nl.broadcast_to(a, (4, 2)), x), [[1, 2]] * 4)
    got = run(lambda a, i: out(nl.gather_flattened(tile_of(a), tile_of(i))), f32([5, 6, 7]), np.array([[2, 0]], np.uint32))
    same(got, [[7, 5]])


def test_load_transpose2d():
    data = np.arange(6).reshape(2, 3).astype(BF16)
    same(run(lambda a: out(nl.load_transpose2d(a)), data), data.T)


# Loops and registers


@pytest.mark.parametrize("name", ["affine_range", "sequential_range", "static_range"])
def test_ranges_are_those_of_python(name):
    function = getattr(nl, name)
    assert list(function(3)) == [0, 1, 2]
    assert list(function(1, 7, 2)) == [1, 3, 5]


def counted(loop):
    """How often a loop adds 1, and the sum of its counters through a dynamic address."""

    def kernel(a):
        table, total = tile_of(a), nl.zeros((1, 2), nl.float32)

        def body(i):
            nisa.tensor_scalar(total[:, 0:1], total[:, 0:1], nl.add, 1.0)
            nisa.tensor_tensor(total[:, 1:2], total[:, 1:2], table[:, nl.ds(i, 1)], nl.add)

        loop(body)
        return out(total)

    return run(kernel, f32(list(range(16))))[0].tolist()


def test_fori_loop_runs_from_lower_to_before_upper():
    assert counted(lambda body: nl.fori_loop(0, 4, body)) == [4, 6]
    assert counted(lambda body: nl.fori_loop(lower=3, upper=10, body_fun=body, step=3)) == [3, 18]
    assert counted(lambda body: nl.fori_loop(4, 4, body)) == [0, 0]
    assert counted(lambda body: nl.fori_loop(nisa.register_alloc(2), nisa.register_alloc(5), body)) == [3, 9]


def test_dynamic_range_is_a_loop_with_bounds_in_registers():
    def loop(bounds):
        def run_it(body):
            for i in nl.dynamic_range(*bounds()):
                body(i)

        return run_it

    assert counted(loop(lambda: (3,))) == [3, 3]
    assert counted(loop(lambda: (1, nisa.register_alloc(6), 2))) == [3, 9]


def countdown(start, loop):
    def kernel(a):
        cell = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(cell, a)
        turns = nl.zeros((1, 1), nl.int32)

        def step(register):
            nisa.tensor_scalar(turns, turns, nl.add, 1.0)
            nisa.tensor_scalar(cell, cell, nl.subtract, 1.0)
            nisa.register_load(register, cell)
            return register

        register = nisa.register_alloc()
        nisa.register_load(register, cell)
        loop(register, step)
        return out(turns)

    return run(kernel, i32([start])).item()


@pytest.mark.parametrize("start", [0, 1, 5])
def test_while_loop_runs_until_its_register_is_zero(start):
    assert countdown(start, nl.while_loop) == start


@pytest.mark.parametrize("start", [0, 1, 5])
def test_while_on_a_register_is_a_loop(start):
    def loop(register, step):
        while register:
            step(register)

    assert countdown(start, loop) == start


def test_registers_move_load_and_store():
    def kernel(a):
        one, two = nisa.register_alloc(7), nisa.register_alloc(None)
        nisa.register_move(two, one)
        nisa.register_move(one, 9)
        three = nisa.register_alloc()
        nisa.register_load(dst=three, src=a)
        result = nl.ndarray((3, 1), nl.int32, buffer=nl.shared_hbm)
        for i, register in enumerate((one, two, three)):
            cell = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
            nisa.register_store(cell, register)
            nisa.dma_copy(result[i], cell)
        return result

    assert run(kernel, i32([-5])).tolist() == [[9], [7], [-5]]


def test_registers_load_from_cells_of_one_dimension():
    def kernel(_):
        cell, result = nl.ones([1], nl.int32, buffer=nl.sbuf), nl.ndarray((1,), nl.int32, buffer=nl.shared_hbm)
        register = nisa.register_alloc()
        nisa.register_load(register, cell)
        nisa.register_store(result, register)
        return result

    assert run(kernel, EMPTY).tolist() == [1]


def test_a_register_without_a_value_cannot_be_read():
    with pytest.raises(RuntimeError, match="register"):
        run(lambda _: nl.fori_loop(0, nisa.register_alloc(), lambda i: None), EMPTY)


def test_no_reorder_runs_its_instructions():
    def kernel(a):
        x = tile_of(a)
        with nl.no_reorder():
            nisa.tensor_scalar(x, x, nl.add, 1.0)
            nisa.tensor_scalar(x, x, nl.multiply, 2.0)
        return out(x)

    same(run(kernel, f32([1])), [[4]])


# Kernels, arguments, two cores


def test_jit_simulate_and_calls_within_kernels():
    @nki.jit
    def double(a):
        x = tile_of(a)
        nisa.tensor_scalar(x, x, nl.multiply, 2.0)
        return out(x)

    @nki.jit()
    def fourfold(a):
        return double(double(a))

    def plain(a):
        return double(a)

    same(double(f32([3])), [[6]])
    same(fourfold(f32([3])), [[12]])
    same(nki.simulate(plain)(f32([3])), [[6]])
    assert double.__name__ == "double"


def test_results_come_back_in_their_structure():
    def kernel(a, scale, pair=(1, 2)):
        x = tile_of(a)
        nisa.tensor_scalar(x, x, nl.multiply, float(scale * pair[1]))
        return out(x), {"again": out(x)}

    one, rest = run(kernel, f32([3]), scale=5, pair=(0, 2))
    assert one.item() == rest["again"].item() == 30


def test_arrays_in_tuples_become_tensors():
    same(run(lambda pair: out(nl.add(tile_of(pair[0]), tile_of(pair[1]))), (f32([1]), f32([2]))), [[3]])


@pytest.mark.parametrize("order", ["C", "F"])
def test_inputs_are_updated_in_place(order):
    def kernel(a):
        x = tile_of(a)
        nisa.tensor_scalar(x, x, nl.add, 1.0)
        nisa.dma_copy(a, x)
        return a

    data = np.array([[1, 2], [3, 4]], np.float32, order=order)
    same(run(kernel, data), [[2, 3], [4, 5]])
    same(data, [[2, 3], [4, 5]])


def test_one_core_is_alone():
    def kernel(_):
        assert (nl.program_id(0), nl.num_programs(), nl.num_programs(axes=0)) == (0, 1, 1)

    run(kernel, EMPTY)


def halves(a):
    result = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    assert nl.num_programs(axes=0) == 2
    rows = nl.ds(nl.program_id() * 2, 2)
    x = tile_of(a[rows])
    nisa.tensor_scalar(x, x, nl.multiply, 10.0 + nl.program_id())
    nisa.dma_copy(result[rows], x)
    return result


@pytest.mark.parametrize("how", ["profile", "subscript", "simulate"])
def test_two_cores_write_halves_of_one_shared_tensor(how):
    data = f32([1], [2], [3], [4])
    if how == "profile":
        got = run(halves, data, lnc=2)
    elif how == "subscript":
        got = nki.jit(halves)[2](data)
    else:
        got = nki.simulate(nki.jit(halves)[2])(data)
    same(got, [[10], [20], [33], [44]])


def test_two_cores_update_halves_of_one_input():
    def kernel(a):
        part = a[nl.ds(nl.program_id(), 1)]
        x = tile_of(part)
        nisa.tensor_scalar(x, x, nl.add, 1.0)
        nisa.dma_copy(part, x)
        return a

    data = f32([1], [2])
    same(run(kernel, data, lnc=2), [[2], [3]])
    same(data, [[2], [3]])


def test_after_a_barrier_each_core_reads_what_the_other_wrote():
    def kernel(a):
        shared = nl.ndarray((2, 1), nl.float32, buffer=nl.shared_hbm)
        result = nl.ndarray((2, 1), nl.float32, buffer=nl.shared_hbm)
        me = nl.program_id()
        nisa.dma_copy(shared[me : me + 1], tile_of(a[me : me + 1]))
        nisa.core_barrier(shared, (0, 1))
        nisa.dma_copy(result[me : me + 1], tile_of(shared[1 - me : 2 - me]))
        return result

    same(run(kernel, f32([1], [2]), lnc=2), [[2], [1]])


def test_private_memory_is_private():
    def kernel(a):
        mine = nl.ndarray((1, 1), nl.float32, buffer=nl.hbm)
        result = nl.ndarray((2, 1), nl.float32, buffer=nl.shared_hbm)
        me = nl.program_id()
        nisa.dma_copy(mine, tile_of(a[me : me + 1]))
        nisa.core_barrier(result, (0, 1), nisa.engine.vector)
        nisa.dma_copy(result[me : me + 1], tile_of(mine))
        return result

    same(run(kernel, f32([1], [2]), lnc=2), [[1], [2]])


@pytest.mark.parametrize("engine", ["dma", "gpsimd_dma"])
def test_sendrecv_exchanges_tiles_several_times(engine):
    def kernel(a):
        me = nl.program_id()
        mine, theirs = tile_of(a[me : me + 1]), nl.ndarray((1, 2), nl.float32, buffer=nl.sbuf)
        for pipe in range(3):
            nisa.sendrecv(mine, theirs, 1 - me, 1 - me, pipe, getattr(nisa.dma_engine, engine))
            nisa.tensor_tensor(mine, mine, theirs, nl.add)
        result = nl.ndarray((2, 2), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(result[me : me + 1], mine)
        return result

    same(run(kernel, f32([1, 2], [10, 20]), lnc=2), [[44, 88], [44, 88]])


@pytest.mark.parametrize("lonely", [0, 1])
@pytest.mark.parametrize("what", ["barrier", "sendrecv"])
def test_a_partner_that_never_comes_is_an_error(what, lonely):
    def kernel(_):
        if nl.program_id() != lonely:
            return
        if what == "barrier":
            nisa.core_barrier(nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm), (0, 1))
        else:
            tile = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
            nisa.sendrecv(tile, tile, 1 - lonely, 1 - lonely, 0)

    raised = []

    def attempt():
        try:
            run(kernel, EMPTY, lnc=2)
        except nki.NkiValidationError as error:
            raised.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive(), "the kernel hangs"
    assert len(raised) == 1
    assert f"core {lonely} waits for core {1 - lonely}" in raised[0]


def test_cores_that_meet_at_different_points_are_an_error():
    def kernel(_):
        tile = nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf)
        other = 1 - nl.program_id()
        nisa.sendrecv(tile, tile, other, other, pipe_id=nl.program_id())

    with pytest.raises(nki.NkiValidationError, match="sendrecv"):
        run(kernel, EMPTY, lnc=2)


def test_the_error_of_one_core_is_raised_and_not_that_of_the_one_that_waits():
    def kernel(_):
        shared = nl.ndarray((1, 1), nl.float32, buffer=nl.shared_hbm)
        if nl.program_id() == 1:
            raise KeyError("the cause")
        nisa.core_barrier(shared, (0, 1))

    with pytest.raises(KeyError, match="the cause"):
        run(kernel, EMPTY, lnc=2)


# Names


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nisa, "nc_matmul_mx"),
        (nisa, "rng"),
        (nisa, "dropout"),
        (nisa, "rand2"),
        (nisa, "quantize_mx"),
        (nisa, "local_gather"),
        (nisa, "topk"),
        (nisa, "sequence_bounds"),
        (nisa, "set_rng_seed"),
        (nl, "rand"),
        (nl, "random_seed"),
        (nl, "dropout"),
        (nki.collectives, "all_reduce"),
        (nki.collectives, "all_gather"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.__name__.split(".")[-1],
)
def test_names_of_nki_that_are_not_implemented_say_so_when_they_are_called(module, name):
    function = getattr(module, name)
    with pytest.raises(NotImplementedError, match=name):
        run(lambda _: function(1, 2, option=3), EMPTY)


@pytest.mark.parametrize("name", ["divide", "mod", "fmod"])
def test_functions_that_fail_on_the_device_are_not_implemented(name):
    with pytest.raises(NotImplementedError, match=name):
        values(lambda a: getattr(nl, name)(a, a), f32([1]))


@pytest.mark.parametrize("name", ["ceil", "floor", "trunc", "tan"])
def test_functions_that_no_engine_has_are_not_implemented(name):
    with pytest.raises(NotImplementedError, match=name):
        values(lambda a: getattr(nl, name)(a), f32([1]))


@pytest.mark.parametrize(
    ("module", "name"),
    [(nisa, "matmul"), (nisa, "rsqrt"), (nl, "arange"), (nl, "mgrid"), (nl, "relu6"), (nki.collectives, "x")],
    ids=lambda v: v if isinstance(v, str) else v.__name__.split(".")[-1],
)
def test_names_that_nki_does_not_have_are_attribute_errors(module, name):
    with pytest.raises(AttributeError, match=name):
        getattr(module, name)


def test_a_misspelt_name_is_told_its_neighbour():
    with pytest.raises(AttributeError, match="tensor_tensor"):
        nisa.tensor_tensr  # noqa: B018


def test_every_exported_instruction_can_be_called_or_has_a_value():
    for name in nisa.__all__:
        assert getattr(nisa, name) is not None
