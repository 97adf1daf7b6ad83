# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The convolution kernels in the interpreter: values against the float64 oracle over pairwise grids, limits, and what they write.

New memory holds NaN in the interpreter, so that a finite result shows that nothing unwritten was read. Together with HBM bytes written that
equal the size of the results, it shows that every element is written exactly once.
"""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import terms
from pairwise import pairwise
from tolerances import activated, assert_close, assert_equal

import nki3d
from nki3d._nki import nisa, nki, nl
from nki3d.sbuf import SbufManager
from nki3d.simulator import profile

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def random(rng, dtype, *shape):
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def run(kernel, *arrays, target="trn2", lnc=1, **static):
    """The results, after a check that each element was written once and that memory was kept."""
    outputs, cost = profile(kernel, target, lnc)(*arrays, **static)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    assert cost.hbm_write_bytes == sum(result.nbytes for result in results), "an element is written twice, or never"
    assert cost.psum_banks <= 8
    return outputs


# ---- grids -----------------------------------------------------------------------------------------------------------

SIZES = ((1, 1, 1), (5, 4, 6), (3, 7, 5), (1, 9, 8), (8, 6, 3), (2, 5, 33))
KERNELS = ((1, 1, 1), (3, 3, 3), (2, 2, 2), (1, 3, 3), (4, 1, 2), (2, 5, 3), (3, 2, 7))
FACTORS = {
    "size": SIZES,
    "kernel": KERNELS,
    "stride": ((1, 1, 1), (2, 2, 2), (1, 2, 3), (3, 1, 2)),
    "dilation": ((1, 1, 1), (2, 1, 1), (1, 2, 3)),
    "padding": ((0,) * 6, (1,) * 6, (0, 1, 2, 0, 1, 3), (3, 3, 4, 4, 2, 2)),
    "channels": ((1, 1), (3, 5), (16, 32), (33, 20), (64, 64), (1, 40), (70, 3), (130, 6), (6, 140)),
    "batch": (1, 2),
    "dtype": ("float32", "bfloat16", "float16"),
    "lnc": (1, 2),
    "target": ("trn2", "trn3"),
}


def fits(row):
    """Whether the window fits in the padded volume, and the case is small."""
    for axis in range(3):
        padded = row["size"][axis] + row["padding"][2 * axis] + row["padding"][2 * axis + 1]
        if padded < row["dilation"][axis] * (row["kernel"][axis] - 1) + 1:
            return False
    return np.prod(row["channels"]) * np.prod(row["kernel"]) < 40_000


def spreads(row):
    """Whether a transposed convolution has outputs."""
    out = oracle.transposed_size(row["size"], row["kernel"], row["stride"], row["crop"], row["dilation"], row["output_padding"])
    legal = all(o < max(s, d) for o, s, d in zip(row["output_padding"], row["stride"], row["dilation"], strict=True))
    return min(out) > 0 and legal and np.prod(row["channels"]) * np.prod(row["kernel"]) < 40_000 and np.prod(out) < 8000


CONV = pairwise(FACTORS | {"bias": (None, "float32", "same")}, 320, 1, fits)
TRANSPOSE = pairwise(
    {name: values for name, values in FACTORS.items() if name != "padding"}
    | {
        "crop": ((0, 0, 0), (1, 1, 1), (0, 1, 3), (2, 0, 1)),
        "output_padding": ((0, 0, 0), (1, 0, 1), (0, 1, 2)),
        "filter_shape": ("KDHW_CI_CO", "KDHW_CO_CI"),
        "bias": (None, "float32", "same"),
    },
    320,
    2,
    spreads,
)
WANTED = tuple(wanted for wanted in itertools.product((True, False), repeat=3) if any(wanted))
BWD = pairwise(FACTORS | {"wanted": WANTED}, 320, 3, fits)


def name(row):
    """A readable id."""

    def short(value):
        return (
            "".join(map(str, value)) if isinstance(value, tuple) and max(map(int, value)) < 10 else str(value).replace(" ", "")
        )

    return "-".join(f"{key}{short(value)}" for key, value in row.items())


def table(rows):
    return pytest.mark.parametrize("row", rows, ids=[f"{i}-{name(row)}" for i, row in enumerate(rows)])


@pytest.mark.parametrize(("rows", "factors"), [(CONV, FACTORS), (BWD, FACTORS)], ids=["conv3d", "conv3d_bwd"])
def test_grids_hold_every_pair_of_values(rows, factors):
    assert len(rows) >= 300
    for (a, ones), (b, others) in itertools.combinations(factors.items(), 2):
        present = {(row[a], row[b]) for row in rows}
        for one, other in itertools.product(ones, others):
            possible = any(
                fits(dict(rows[0]) | {a: one, b: other} | dict(zip((c, d), more, strict=True)))
                for c, d in (("size", "padding"), ("size", "channels"), ("kernel", "channels"), ("kernel", "padding"))
                if not {a, b} & {c, d}
                for more in itertools.product(factors[c], factors[d])
            )
            assert (one, other) in present or not possible, (a, one, b, other)


@table(CONV)
def test_conv3d(row, rng):
    dtype = row["dtype"]
    x = random(rng, dtype, row["batch"], row["channels"][0], *row["size"])
    filters = random(rng, dtype, *row["kernel"], *row["channels"])
    bias = None if row["bias"] is None else random(rng, dtype if row["bias"] == "same" else row["bias"], row["channels"][1])
    geometry = {"stride": row["stride"], "padding": row["padding"], "dilation": row["dilation"]}
    y = run(nki3d.conv3d, x, filters, bias, target=row["target"], lnc=row["lnc"], lnc_shard=row["lnc"] == 2, **geometry)
    operands = (x, filters) if bias is None else (x, filters, bias)
    assert_close(y, terms(lambda *a: oracle.conv3d(*a, **geometry), *operands), dtype)


@table(TRANSPOSE)
def test_conv3d_transpose(row, rng):
    dtype, (c_in, c_out) = row["dtype"], row["channels"]
    x = random(rng, dtype, row["batch"], c_in, *row["size"])
    filters = random(rng, dtype, *row["kernel"], *((c_in, c_out) if row["filter_shape"] == "KDHW_CI_CO" else (c_out, c_in)))
    bias = None if row["bias"] is None else random(rng, dtype if row["bias"] == "same" else row["bias"], c_out)
    geometry = {
        "stride": row["stride"],
        "padding": row["crop"],
        "dilation": row["dilation"],
        "output_padding": row["output_padding"],
        "filter_shape": row["filter_shape"],
    }
    y = run(
        nki3d.conv3d_transpose, x, filters, bias, target=row["target"], lnc=row["lnc"], lnc_shard=row["lnc"] == 2, **geometry
    )
    operands = (x, filters) if bias is None else (x, filters, bias)
    assert_close(y, terms(lambda *a: oracle.conv3d_transpose(*a, **geometry), *operands), dtype)


@table(BWD)
def test_conv3d_bwd(row, rng):
    dtype = row["dtype"]
    x = random(rng, dtype, row["batch"], row["channels"][0], *row["size"])
    filters = random(rng, dtype, *row["kernel"], *row["channels"])
    geometry = {"stride": row["stride"], "padding": row["padding"], "dilation": row["dilation"]}
    window = oracle.Window(row["kernel"], row["stride"], row["padding"], row["dilation"])
    dy = random(rng, dtype, row["batch"], row["channels"][1], *window.out(row["size"]))
    on_dx, on_dw, on_db = row["wanted"]
    found = run(
        nki3d.conv3d_bwd,
        dy,
        x if on_dw else x.shape,
        filters if on_dx else filters.shape,
        target=row["target"],
        lnc=row["lnc"],
        compute_dx=on_dx,
        compute_dw=on_dw,
        compute_db=on_db,
        lnc_shard=row["lnc"] == 2,
        **geometry,
    )
    found = list(found) if isinstance(found, tuple) else [found]
    assert len(found) == sum(row["wanted"])
    if on_dx:
        assert_close(found.pop(0), terms(lambda a, b: oracle.spread(a, b, window, row["size"]), dy, filters), dtype)
    if on_dw:
        assert_close(found.pop(0), terms(lambda a, b: oracle.filter_gradient(a, b, window), x, dy), dtype)
    if on_db:
        assert_close(found.pop(0), terms(oracle.bias_gradient, dy), dtype)


# ---- mistakes that the comparison must notice ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_tap_a_flip_and_a_shift_are_noticed(dtype, rng):
    x, filters = random(rng, dtype, 1, 16, 5, 6, 7), random(rng, dtype, 3, 3, 3, 16, 8)
    y = run(nki3d.conv3d, x, filters, padding=(1,) * 6)
    dropped = filters.copy()
    dropped[0, 0, 0] = 0
    for wrong, pads in ((dropped, 1), (filters[::-1, ::-1, ::-1], 1), (filters, (2, 0, 1, 1, 1, 1))):
        with pytest.raises(AssertionError):
            assert_close(y, terms(lambda a, b, pads=pads: oracle.conv3d(a, b, padding=pads), x, wrong), dtype)
    dy = random(rng, dtype, 1, 8, 5, 6, 7)
    window = oracle.Window((3, 3, 3), padding=(1,) * 6)
    dx, dw, db = run(nki3d.conv3d_bwd, dy, x, filters, padding=(1,) * 6)
    with pytest.raises(AssertionError):
        assert_close(dx, terms(lambda a, b: oracle.spread(a, b, window, x.shape[2:]), dy, dropped), dtype)
    shifted = np.roll(x, 1, axis=4)
    with pytest.raises(AssertionError):
        assert_close(dw, terms(lambda a, b: oracle.filter_gradient(a, b, window), shifted, dy), dtype)
    with pytest.raises(AssertionError):
        assert_close(db, terms(oracle.bias_gradient, dy[..., :-1]), dtype)


# ---- particular cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["conv3d", "conv3d_transpose"])
@pytest.mark.parametrize("activation", nki3d.ActFnType, ids=lambda member: member.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_follow_the_bias_and_round_once(kernel, activation, dtype, rng):
    x, filters, bias = random(rng, dtype, 1, 4, 3, 4, 5), random(rng, dtype, 2, 2, 2, 4, 6), random(rng, "float32", 6)
    y = run(getattr(nki3d, kernel), x, filters, bias, activation_fn=activation)
    z = terms(getattr(oracle, kernel), x, filters, bias)
    assert_close(y, activated(z, oracle.ACTIVATIONS[activation.name](z.value)[0]), dtype)


def test_cores_give_the_same_bits(rng):
    x, filters = random(rng, "bfloat16", 3, 20, 6, 7, 8), random(rng, "bfloat16", 3, 3, 3, 20, 12)
    one = run(nki3d.conv3d, x, filters, padding=(1,) * 6)
    two = run(nki3d.conv3d, x, filters, padding=(1,) * 6, lnc=2, lnc_shard=True)
    assert_equal(two, one)
    # not sharded, on two cores: both compute everything
    outputs, _ = profile(nki3d.conv3d, lnc=2)(x, filters, padding=(1,) * 6)
    assert_equal(outputs, one)


def test_rows_that_no_window_reaches_get_zeros(rng):
    x, filters = random(rng, "float32", 1, 2, 7, 7, 7), random(rng, "float32", 1, 1, 1, 2, 3)
    dy = random(rng, "float32", 1, 3, 2, 2, 2)
    dx = run(nki3d.conv3d_bwd, dy, x, filters, stride=(4, 4, 4), compute_dw=False, compute_db=False)
    reached = np.zeros((7, 7, 7), bool)
    reached[::4, ::4, ::4] = True
    assert (dx[..., ~reached] == 0).all()
    assert (dx[..., reached] != 0).all()


def test_outputs_that_no_input_reaches_are_the_bias(rng):
    x, filters, bias = random(rng, "float32", 1, 2, 2, 2, 2), random(rng, "float32", 1, 1, 1, 2, 3), random(rng, "float32", 3)
    y = run(nki3d.conv3d_transpose, x, filters, bias, stride=(3, 3, 3), output_padding=(2, 0, 1))
    assert_equal(y[:, :, 1], np.broadcast_to(bias[:, None, None], y[:, :, 1].shape))


def test_taps_that_meet_padding_only_have_no_gradient(rng):
    """D = 1 under a kernel of 3 with padding 1: two of three taps of the depth never meet x."""
    x, dy = random(rng, "float32", 1, 2, 1, 5, 5), random(rng, "float32", 1, 3, 1, 5, 5)
    dw = run(nki3d.conv3d_bwd, dy, x, (3, 3, 3, 2, 3), padding=(1,) * 6, compute_dx=False, compute_db=False)
    assert (dw[[0, 2]] == 0).all()
    assert_close(
        dw, terms(lambda a, b: oracle.filter_gradient(a, b, oracle.Window((3, 3, 3), padding=(1,) * 6)), x, dy), "float32"
    )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "channels"),
    [
        ((3, 8, 8), (3, 3, 3), 1, (1, 1, 1, 1, 1, 1), (300, 5)),
        ((2, 4, 4), (2, 2, 2), 2, (0,) * 6, (5, 300)),
        ((9, 9, 9), (7, 7, 7), 2, (3,) * 6, (3, 32)),
        ((4, 5, 200), (1, 1, 7), 1, (0, 0, 0, 0, 3, 3), (2, 3)),
        ((1, 12, 12), (1, 3, 3), 1, (0, 0, 1, 1, 1, 1), (6, 48)),
        ((6, 6, 6), (1, 1, 1), 2, (0,) * 6, (8, 8)),
        ((2, 9, 600), (2, 3, 3), 1, (1, 0, 1, 1, 1, 1), (1, 2)),
        ((8, 1, 1), (8, 1, 1), 1, (0,) * 6, (4, 4)),
    ],
    ids=["many-in", "many-out", "stem", "wide", "flat", "strided-pointwise", "wider-than-a-bank", "one-output"],
)
def test_shapes_that_are_hard(size, kernel, stride, padding, channels, rng):
    """Kinds of shapes on which the vendor's kernels were seen to fail, and the edges of ours."""
    x, filters = random(rng, "bfloat16", 2, channels[0], *size), random(rng, "bfloat16", *kernel, *channels)
    geometry = {"stride": (stride,) * 3, "padding": padding}
    window = oracle.Window(kernel, (stride,) * 3, padding)
    y = run(nki3d.conv3d, x, filters, **geometry)
    assert_close(y, terms(lambda a, b: oracle.conv3d(a, b, **geometry), x, filters), "bfloat16")
    dy = random(rng, "bfloat16", *y.shape)
    dx, dw, db = run(nki3d.conv3d_bwd, dy, x, filters, **geometry)
    assert_close(dx, terms(lambda a, b: oracle.spread(a, b, window, size), dy, filters), "bfloat16")
    assert_close(dw, terms(lambda a, b: oracle.filter_gradient(a, b, window), x, dy), "bfloat16")
    assert_close(db, terms(oracle.bias_gradient, dy), "bfloat16")


def test_the_adjoint_identity(rng):
    """<conv3d(x), y> = <x, conv3d_transpose(y)> with filters flipped and channels exchanged."""
    x, filters = random(rng, "float32", 1, 5, 6, 7, 8), random(rng, "float32", 3, 2, 3, 5, 4)
    y = random(rng, "float32", 1, 4, 2, 3, 2)
    forward = run(nki3d.conv3d, x, filters, stride=(2, 2, 3), padding=(0,) * 6)
    flipped = np.ascontiguousarray(filters[::-1, ::-1, ::-1].transpose(0, 1, 2, 4, 3))
    back = run(nki3d.conv3d_transpose, y, flipped, stride=(2, 2, 3), output_padding=(1, 1, 2))
    left, right = (np.vdot(a.astype(np.float64), b) for a, b in ((forward, y), (back, x)))
    scale = np.linalg.norm(forward.astype(np.float64)) * np.linalg.norm(y.astype(np.float64))
    assert abs(left - right) < 1e-6 * scale


# ---- wrong arguments -------------------------------------------------------------------------------------------------

X, W = np.zeros((1, 3, 4, 4, 4), np.float32), np.zeros((3, 3, 3, 3, 2), np.float32)
DY = np.zeros((1, 2, 2, 2, 2), np.float32)
WRONG = [
    ("rank", lambda: nki3d.conv3d(X[0], W), r"conv3d `x_in`: \(3, 4, 4, 4\) has 4 dimensions. Give"),
    ("channels", lambda: nki3d.conv3d(X[:, :2], W), r"conv3d `filters`: .* has 3 input channels and `x_in` .* has 2. Give"),
    ("dtype", lambda: nki3d.conv3d(X, W.astype(np.float16)), r"conv3d `filters`: dtype float16 differs .* float32. Cast"),
    ("integers", lambda: nki3d.conv3d(X.astype(np.int32), W), r"conv3d `x_in`: dtype int32 is none of .*. Cast"),
    ("stride", lambda: nki3d.conv3d(X, W, stride=(0, 1, 1)), r"conv3d `stride`: \(0, 1, 1\) .* >= 1. Give"),
    ("padding", lambda: nki3d.conv3d(X, W, padding=(1, 1, 1)), r"conv3d `padding`: \(1, 1, 1\) is no tuple of six .*. Give"),
    ("dilation", lambda: nki3d.conv3d(X, W, dilation=(0, 0, 0)), r"conv3d `dilation`: .* >= 1. Give"),
    ("bias", lambda: nki3d.conv3d(X, W, np.zeros(3, np.float32)), r"conv3d `bias`: shape \(3,\) must be \(2,\). Give"),
    (
        "empty",
        lambda: nki3d.conv3d(X, W, dilation=(2, 2, 2)),
        r"conv3d `padding`: the kernel reaches over 5 in D.* is 4. Pad by 1",
    ),
    ("layout", lambda: nki3d.conv3d_transpose(X, W, filter_shape="OIDHW"), r"conv3d_transpose `filter_shape`: 'OIDHW' .*. Use"),
    (
        "transposed-channels",
        lambda: nki3d.conv3d_transpose(X[:, :2], W),
        r"conv3d_transpose `filters`: .* has 3 .* has 2. Exchange",
    ),
    (
        "crop",
        lambda: nki3d.conv3d_transpose(X, W, padding=(4, 0, 0)),
        r"conv3d_transpose `padding`: 4 leaves -2 outputs in D. Reduce",
    ),
    (
        "extra",
        lambda: nki3d.conv3d_transpose(X, W, output_padding=(1, 0, 0)),
        r"`output_padding`: 1 in D must be smaller .*. Reduce",
    ),
    (
        "nothing",
        lambda: nki3d.conv3d_bwd(DY, X, W, compute_dx=False, compute_dw=False, compute_db=False),
        r"conv3d_bwd `compute_dx`, `compute_dw`, `compute_db`: all are False. Ask",
    ),
    (
        "dy",
        lambda: nki3d.conv3d_bwd(DY[:, :, 1:], X, W),
        r"conv3d_bwd `dy`: shape \(1, 2, 1, 2, 2\) must be \(1, 2, 2, 2, 2\). Pass",
    ),
    ("values", lambda: nki3d.conv3d_bwd(DY, X.shape, W), r"conv3d_bwd `x_in`: a shape does not give dw. Pass"),
]


@pytest.mark.parametrize(("call", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_arguments_are_named_with_their_cure(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- a caller's SbufManager ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "addresses"])
@pytest.mark.parametrize("channels", [(3, 5), (70, 130)], ids=str)
def test_a_manager_of_the_caller_places_the_buffers(automatic, channels, rng):
    """With addresses, the interpreter checks that buffers which are needed at one time do not overlap."""
    x, filters = random(rng, "bfloat16", 2, channels[0], 3, 4, 5), random(rng, "bfloat16", 3, 2, 3, *channels)

    @nki.jit
    def kernel(x, filters):
        manager = SbufManager(0, nl.tile_size.total_available_sbuf_size, use_auto_alloc=automatic)
        manager.open_scope()
        # a buffer of the caller's, below the kernel's
        mine = manager.alloc_stack((4, 100), nl.float32)
        nisa.memset(dst=mine, value=7.0)
        y = nki3d.conv3d_transpose(x, filters, stride=(2, 1, 2), padding=(1, 0, 0), sbm=manager, use_auto_allocation=automatic)
        kept = nl.ndarray((4, 100), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=kept, src=mine)
        manager.close_scope()
        return y, kept

    y, kept = run(kernel, x, filters)
    assert (kept == 7).all()
    geometry = {"stride": (2, 1, 2), "padding": (1, 0, 0)}
    assert_close(y, terms(lambda *a: oracle.conv3d_transpose(*a, **geometry), x, filters), "bfloat16")


def test_the_manager_and_the_flag_must_agree():
    @nki.jit
    def kernel(x, filters):
        manager = SbufManager(0, nl.tile_size.total_available_sbuf_size, use_auto_alloc=True)
        return nki3d.conv3d_transpose(x, filters, sbm=manager, use_auto_allocation=False)

    with pytest.raises(AssertionError, match="`use_auto_allocation`: False differs"):
        kernel(X, W)
