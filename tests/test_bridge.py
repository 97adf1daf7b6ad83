# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge to the kernels, with a stand-in for `nki`: which kernels a program for neuron has, and what the bridge refuses.

Lowered, not run: no Trainium is here. In the tests of the version gate a CPU plays the device.
"""

import dataclasses
import importlib
import logging
import os
import re
import subprocess
import sys
from functools import partial

import fake_nki
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_nki import FakeKernel, FakeNki, kernels_in
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from operations import ROWS

import jax_nki3d
from jax_nki3d import _costs, _neuron, _options, explain
from jax_nki3d._neuron import gate, installed
from jax_nki3d._primitive import PRIMITIVES

every_operation = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
PRIMITIVE_OF = {"conv3d_bias_silu": "conv3d", "conv3d_transpose_bias": "conv3d_transpose"}


@pytest.fixture
def fake(monkeypatch):
    jax.clear_caches()  # what was lowered for this platform under another bridge
    yield FakeNki(monkeypatch)
    jax.clear_caches()


def kernels(function, *operands):
    return kernels_in(jax.jit(function).trace(*operands).lower(lowering_platforms=("neuron",)).as_text())


def loss(function):
    return lambda *operands: sum((y.astype("float32") ** 2).sum() for y in jax.tree.leaves(function(*operands)))


def name_of(row):
    return PRIMITIVE_OF.get(row.name, row.name)


# ---- which kernels ---------------------------------------------------------------------------------------------------


@every_operation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward(row, dtype, fake, rng):
    operands = row.operands(rng, dtype)
    name = "conv3d_bwd 111" if row.name == "conv3d_bwd" else name_of(row)
    assert kernels(row.function, *operands) == {name: 1}
    assert kernels(partial(row.function, implementation="nki"), *operands) == {name: 1}
    assert kernels(partial(row.function, implementation="lax"), *operands) == {}


FLAGS = [(dx, dw, db) for dx in (0, 1) for dw in (0, 1) for db in (0, 1) if dx or dw or db]


@pytest.mark.parametrize("wanted", FLAGS, ids=lambda flags: "".join(map(str, flags)))
def test_each_subset_of_gradients(wanted, fake, rng):
    operands = ROWS[1].operands(rng, "float32")
    argnums = tuple(i for i in range(3) if wanted[i])
    flags = "".join(map(str, wanted))
    expected = {"conv3d": 1, f"conv3d_bwd {flags}": 1}
    assert kernels(jax.grad(loss(ROWS[1].function), argnums), *operands) == expected
    x, w, _ = operands
    dy = ROWS[4].operands(rng, "float32")[0]
    flags_by_name = dict(zip(("compute_dx", "compute_dw", "compute_db"), map(bool, wanted), strict=True))
    direct = partial(jax_nki3d.conv3d_bwd, stride=(2, 1, 2), padding=(1, 0, 0, 1, 2, 1), **flags_by_name)
    assert kernels(direct, dy, x, w) == {f"conv3d_bwd {flags}": 1}


def test_gradients_of_the_others(fake, rng):
    transpose = ROWS[3]
    operands = transpose.operands(rng, "float32")
    gradients = partial(jax.grad, loss(transpose.function))
    assert kernels(gradients(0), *operands) == {"conv3d_transpose": 1, "conv3d": 1}
    assert kernels(gradients(1), *operands) == {"conv3d_transpose": 1, "conv3d_bwd 010": 1}
    assert kernels(gradients(2), *operands) == {"conv3d_transpose": 1}
    assert kernels(gradients((0, 1, 2)), *operands) == {"conv3d_transpose": 1, "conv3d": 1, "conv3d_bwd 010": 1}
    for pool, other in ((ROWS[5], ROWS[6]), (ROWS[6], ROWS[5])):
        assert kernels(jax.grad(loss(pool.function)), *pool.operands(rng, "float32")) == {pool.name: 1, other.name: 1}


def test_a_frozen_layer_has_no_kernel_for_its_filters(fake, rng):
    x, w = ROWS[0].operands(rng, "float32")
    frozen = loss(lambda x, w: ROWS[0].function(x, jax.lax.stop_gradient(w)))
    assert kernels(jax.grad(frozen, (0, 1)), x, w) == {"conv3d": 1, "conv3d_bwd 100": 1}


@every_operation
def test_vmap_folds_into_one_call(row, fake, rng):
    first, *rest = row.operands(rng, "float32")
    name = "conv3d_bwd 111" if row.name == "conv3d_bwd" else name_of(row)
    mapped = kernels(jax.vmap(row.function, (0, *[None] * len(rest))), np.stack([first, first]), *rest)
    if row.name == "conv3d_bwd":  # dx folds into the batch, dw into the output channels, db is one call per example
        assert mapped == {"conv3d_bwd 100": 1, "conv3d_bwd 010": 1, "conv3d_bwd 001": 1}
    else:
        assert mapped == {name: 1}


def test_per_example_gradients_loop_over_the_kernel(fake, rng):
    x, w = ROWS[0].operands(rng, "float32")
    each = jax.vmap(jax.grad(loss(ROWS[0].function), 1), (0, None))
    text = jax.jit(each).trace(np.stack([x, x]), w).lower(lowering_platforms=("neuron",)).as_text()
    assert kernels_in(text) == {"conv3d": 1, "conv3d_bwd 010": 1}
    assert "stablehlo.while" in text


def test_scan_and_checkpoint(fake, rng):
    x, w = ROWS[0].operands(rng, "float32")

    def scanned(xs, w):
        return jax.lax.scan(lambda carry, x: (carry + loss(ROWS[0].function)(x, w), None), jnp.zeros(()), xs)[0]

    xs = np.stack([x, x])
    assert kernels(scanned, xs, w) == {"conv3d": 1}
    assert kernels(jax.grad(scanned, (0, 1)), xs, w) == {"conv3d": 1, "conv3d_bwd 110": 1}
    twice = lambda x, w: jax.nn.relu(ROWS[0].function(x, w)) ** 2  # noqa: E731
    again = jax.grad(lambda x, w: jax.checkpoint(twice)(x, w).sum(), (0, 1))
    assert kernels(again, x, w) == {"conv3d": 1, "conv3d_bwd 110": 1}
    assert kernels(jax.value_and_grad(lambda x, w: jax.checkpoint(twice)(x, w).sum(), (0, 1)), x, w) == {
        "conv3d": 2,
        "conv3d_bwd 110": 1,
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, fake, rng):
    x, w = ROWS[0].operands(rng, "float32", batch=8)
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def local(x, w):
        g = jax.grad(loss(ROWS[0].function), 1)(x, w)
        return g if check_vma else jax.lax.psum(g, "data")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check_vma)
    text = jax.jit(sharded).trace(x, w).lower(lowering_platforms=("neuron",)).as_text()
    assert kernels_in(text) == {"conv3d": 1, "conv3d_bwd 010": 1}
    assert "tensor<2x2x3x4x3xf32>" in text  # a quarter of the batch


def test_higher_orders(fake, rng):
    x, w = ROWS[0].operands(rng, "float32")
    hvp = lambda x, w: jax.jvp(jax.grad(loss(ROWS[0].function)), (x, w), (x, w))[1]  # noqa: E731
    found = kernels(hvp, x, w)
    assert set(found) == {"conv3d", "conv3d_bwd 100"}
    assert found["conv3d"] >= 3  # the value, and its tangents through x and w


@pytest.mark.parametrize(("degree", "mark"), [(None, ""), ("1", ""), ("2", "[2]")])
def test_lnc_shard(degree, mark, fake, rng, monkeypatch):
    if degree is None:
        monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    else:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", degree)
    x, w, b = ROWS[1].operands(rng, "float32")
    for operation in ("conv3d", "conv3d_transpose"):
        f = partial(getattr(jax_nki3d, operation), lnc_shard=True)
        assert kernels(f, x, w, b) == {f"{operation}{mark}": 1}
        assert kernels(getattr(jax_nki3d, operation), x, w, b) == {operation: 1}
    gradients = kernels(jax.grad(loss(partial(jax_nki3d.conv3d, lnc_shard=True)), (0, 1, 2)), x, w, b)
    assert gradients == {f"conv3d{mark}": 1, f"conv3d_bwd{mark} 111": 1}


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32", "float16"])
def test_bias_of_another_dtype(bias_dtype, fake, rng):
    """A kernel reads it; its gradient, which the kernel would round to 16 bits, is summed beside the kernel."""
    x, w = (jnp.asarray(o) for o in ROWS[0].operands(rng, "bfloat16"))
    b = jnp.zeros(3, bias_dtype)
    mine = bias_dtype == "bfloat16"
    expected = {"conv3d": 1, f"conv3d_bwd 11{int(mine)}": 1}
    assert kernels(jax.grad(loss(jax_nki3d.conv3d), (0, 1, 2)), x, w, b) == expected
    alone = kernels(jax.grad(loss(jax_nki3d.conv3d), 2), x, w, b)
    assert alone == ({"conv3d": 1, "conv3d_bwd 001": 1} if mine else {"conv3d": 1})


@every_operation
def test_empty_batch_has_no_kernel(row, fake, rng):
    operands = row.operands(rng, "float32", batch=0)
    assert kernels(row.function, *operands) == {}
    assert kernels(partial(row.function, implementation="nki"), *operands) == {}


@every_operation
def test_explain_names_the_kernel_and_its_plan(row, fake, rng):
    operands = row.operands(rng, "bfloat16")
    for platform in ("neuron", "cpu"):
        ((entry, count),) = explain(row.function, *operands, platform=platform).counts
        assert (entry.neuron, count) == ("nki", 1)
        assert entry.implementation == ("nki" if platform == "neuron" else "lax")
        assert "SBUF about" in entry.plans[0]
        assert (entry.multiply_adds == 0) == row.name.startswith("avg")
        assert entry.bytes > 0
        assert entry.microseconds > 0


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_an_unsupported_case_is_lax_with_one_line(fake, x64, caplog, monkeypatch):
    monkeypatch.setattr(_neuron, "_logged", set())
    x, w = np.ones((1, 1, 2, 2, 2)), np.ones((1,) * 5)
    with caplog.at_level(logging.WARNING, logger="jax_nki3d"):
        for scale in (1.0, 2.0):
            assert kernels(lambda x, w, s=scale: s * jax_nki3d.conv3d(x, w), x, w) == {}
    (record,) = caplog.records
    assert "conv3d runs as lax on platform neuron: dtype float64 is none of" in record.getMessage()
    with pytest.raises(NotImplementedError, match="conv3d: `implementation` is 'nki', but dtype float64 is none of"):
        jax_nki3d.conv3d(x, w, implementation="nki")
    ((entry, _),) = explain(jax_nki3d.conv3d, x, w).counts
    assert entry.plans == ("no kernel: dtype float64 is none of float32, bfloat16, float16",)


def test_nki_by_name_on_another_platform_is_refused(fake, rng):
    operands = ROWS[0].operands(rng, "float32")
    with pytest.raises(NotImplementedError, match="'nki', but the program is compiled for cpu, not for neuron"):
        ROWS[0].function(*operands, implementation="nki")
    with pytest.raises(NotImplementedError, match="'simulate', but the kernels are bound to the nki"):
        ROWS[0].function(*operands, implementation="simulate")


def test_an_old_nki_is_not_used(fake, rng, monkeypatch):
    operands = ROWS[0].operands(rng, "float32")
    for found, used in (("0.5.1", False), ("0.6.0+gabc", True), ("0.7.0", True), ("1.0", True)):
        monkeypatch.setattr(installed, "version", lambda name, found=found: found)
        jax.clear_caches()
        assert kernels(ROWS[0].function, *operands) == ({"conv3d": 1} if used else {})
    monkeypatch.setattr(installed, "version", lambda name: "0.5.1")
    with pytest.raises(NotImplementedError, match=r"nki 0\.5\.1 is installed, and the kernels are written for 0\.6 or newer"):
        ROWS[0].function(*operands, implementation="nki")


# ---- the version gate ------------------------------------------------------------------------------------------------


@pytest.fixture
def device(fake, monkeypatch):
    """A CPU that plays the Trainium."""
    monkeypatch.setattr(installed, "device", lambda: jax.devices("cpu")[1])
    monkeypatch.setattr(gate, "_verdicts", {})
    return fake


@pytest.mark.parametrize("name", [p.name for p in PRIMITIVES])
def test_a_right_kernel_is_tried_once(name, device, rng):
    row = next(row for row in ROWS if name_of(row) == name)
    for dtype in ("float32", "bfloat16"):
        assert kernels(row.function, *row.operands(rng, dtype)).total() == 1
    assert device.runs == {name: 1}


@pytest.mark.parametrize("name", [p.name for p in PRIMITIVES])
def test_a_wrong_kernel_is_an_error_every_time(name, device, rng):
    device.corrupt.add(name)
    row = next(row for row in ROWS if name_of(row) == name)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            RuntimeError, match=rf"^{name}: the NKI kernel gives wrong results on .*1 of \d+ elements of result 0, at"
        ):
            kernels(row.function, *row.operands(rng, dtype))
    assert device.runs == {name: 1}
    with jax_nki3d.options(check_kernels=False):
        assert kernels(row.function, *row.operands(rng, "float32")).total() == 1
    assert kernels(partial(row.function, implementation="lax"), *row.operands(rng, "float32")) == {}


def test_the_check_can_be_turned_off(device, rng, monkeypatch):
    device.corrupt.add("conv3d")
    monkeypatch.setattr(_options, "_CHECK", False)  # JAX_NKI3D_CHECK_KERNELS=0
    assert kernels(ROWS[0].function, *ROWS[0].operands(rng, "float32")) == {"conv3d": 1}
    assert not device.runs
    with jax_nki3d.options(check_kernels=True), pytest.raises(RuntimeError, match="check_kernels=False"):
        kernels(ROWS[0].function, *ROWS[0].operands(rng, "float32"))
    with (
        pytest.raises(TypeError, match="options: `check_kernels` must be True, False or None"),
        jax_nki3d.options(check_kernels=1),
    ):
        pass


def test_a_kernel_that_fails_is_no_verdict(device, rng, monkeypatch):
    monkeypatch.setattr(gate, "small_case", lambda operation: (_ for _ in ()).throw(OSError("no memory")))
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            kernels(ROWS[0].function, *ROWS[0].operands(rng, "float32"))


def test_without_a_device_nothing_is_tried(fake, rng):
    assert installed.device() is None
    kernels(ROWS[0].function, *ROWS[0].operands(rng, "float32"))
    assert not fake.runs


def test_explaining_runs_nothing_on_the_device(device, rng):
    device.corrupt.add("conv3d")
    explain(ROWS[0].function, *ROWS[0].operands(rng, "float32"), platform="neuron")
    assert not device.runs


# ---- the vendor's kernels --------------------------------------------------------------------------------------------


@pytest.fixture
def nkilib(fake, monkeypatch):
    """Kernels of the vendor's signatures: ours, with fewer arguments."""

    def body(name):
        return getattr(importlib.import_module(f"nki3d.{name}"), name).function

    def conv3d(x_in, filters, bias=None, stride=1, padding=0, dilation=1, activation_fn=None, lnc_shard=False):
        return body("conv3d")(x_in, filters, bias, stride, padding, dilation, activation_fn, lnc_shard)

    def conv3d_transpose(
        x_in,
        filters,
        bias=None,
        stride=1,
        padding=0,
        dilation=1,
        activation_fn=None,
        lnc_shard=False,
        filter_shape="KDHW_CI_CO",
    ):
        return body("conv3d_transpose")(x_in, filters, bias, stride, padding, dilation, activation_fn, lnc_shard, filter_shape)

    def conv3d_bwd(dy, x_in, filters, stride=1, padding=0, dilation=1, compute_dx=True, compute_dw=True, compute_db=True):
        assert dy.dtype == x_in.dtype == filters.dtype
        return body("conv3d_bwd")(dy, x_in, filters, stride, padding, dilation, compute_dx, compute_dw, compute_db)

    def avg_pooling_3d(src_tensor, kernel_size, stride=None, padding=0, data_format="NCDHW", output_format=None):
        return body("avg_pooling_3d")(src_tensor, kernel_size, stride, padding, data_format, output_format)

    def avg_pooling_3d_backward(
        grad_output, input_tensor, kernel_size, stride=None, padding=0, data_format="NCDHW", output_format=None
    ):
        return body("avg_pooling_3d_backward")(
            grad_output, input_tensor, kernel_size, stride, padding, data_format, output_format
        )

    def made(*functions):
        return {f.__name__: FakeKernel(f, fake, label=f"vendor {f.__name__}") for f in functions}

    import enum

    fake.add_module("nkilib")
    for package in ("nkilib.experimental", "nkilib.core", "nkilib.core.utils"):
        fake.add_module(package)
    fake.add_module("nkilib.experimental.conv", **made(conv3d, conv3d_transpose, conv3d_bwd))
    fake.add_module("nkilib.experimental.pooling", **made(avg_pooling_3d, avg_pooling_3d_backward))
    names = {"SiLU": 0, "GELU": 1, "GELU_Tanh_Approx": 2, "Swish": 3}
    fake.add_module("nkilib.core.utils.common_types", ActFnType=enum.Enum("ActFnType", names))
    monkeypatch.setattr(installed, "KERNELS", "nkilib")
    return fake


def test_kernels_of_nkilib(nkilib, rng):
    for row in (ROWS[0], ROWS[1], ROWS[4], ROWS[5], ROWS[6]):
        name = "conv3d_bwd 111" if row.name == "conv3d_bwd" else name_of(row)
        assert kernels(row.function, *row.operands(rng, "float32")) == {f"vendor {name}": 1}
    x, w, b = ROWS[1].operands(rng, "float32")
    assert kernels(partial(jax_nki3d.conv3d_transpose, stride=2), x, w, b) == {"vendor conv3d_transpose": 1}
    for argnum, flags in enumerate(("100", "010", "001")):  # a bare tensor each
        found = kernels(jax.grad(loss(ROWS[1].function), argnum), x, w, b)
        assert found == {"vendor conv3d": 1, f"vendor conv3d_bwd {flags}": 1}


def test_what_nkilib_cannot(nkilib, rng, caplog, monkeypatch):
    x, w, b = ROWS[1].operands(rng, "float32")
    refused = {
        "no output_padding": partial(jax_nki3d.conv3d_transpose, stride=2, output_padding=1),
        "no padding beyond": partial(jax_nki3d.conv3d_transpose, padding=(2, 0, 0), stride=3),
        "no activation ReLU": partial(jax_nki3d.conv3d, activation_fn="ReLU"),
        "always counts padding": lambda x, w, b: jax_nki3d.avg_pooling_3d(x, 2, padding=1, count_include_pad=False),
    }
    for said, function in refused.items():
        monkeypatch.setattr(_neuron, "_logged", set())
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="jax_nki3d"):
            assert kernels(function, x, w, b) == {}
        assert said.removeprefix("no ") in caplog.records[0].getMessage()


def test_a_library_that_is_missing_is_named(fake, rng, monkeypatch):
    operands = ROWS[0].operands(rng, "float32")
    monkeypatch.setattr(installed, "KERNELS", "nkilib")
    with pytest.raises(ImportError, match=r"JAX_NKI3D_KERNELS is 'nkilib', but the package nkilib is not installed\. Install"):
        kernels(ROWS[0].function, *operands)
    assert explain(ROWS[0].function, *operands).counts[0][0].neuron.startswith("an error: ")
    ROWS[0].function(*operands)  # on a CPU nobody asks for it
    monkeypatch.setattr(installed, "KERNELS", "others")
    with pytest.raises(ValueError, match=r"JAX_NKI3D_KERNELS is 'others'\. Set it to one of nki3d, nkilib"):
        kernels(ROWS[0].function, *operands)


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_multiply_adds_are_those_that_a_loop_counts():
    for size, kernel, stride, dilation, front in (
        ((5, 4, 7), (3, 1, 2), (2, 1, 3), (1, 2, 3), (1, 0, 2)),
        ((3,) * 3, (2,) * 3, (1,) * 3, (2,) * 3, (3,) * 3),
    ):
        spec = _conv_spec(size, kernel, stride, dilation, front)
        g = spec.geometry
        axes = range(3)
        counted = [
            sum(
                0 <= o * g.stride[a] + k * g.dilation[a] - g.front[a] < g.size[a]
                for o in range(g.out[a])
                for k in range(g.kernel[a])
            )
            for a in axes
        ]
        assert _costs.touched(g) == np.prod(counted)


def _conv_spec(size, kernel, stride, dilation, front):
    from jax_nki3d._spec import conv3d_spec

    x, w = jnp.zeros((1, 1, *size)), jnp.zeros((*kernel, 1, 1))
    return conv3d_spec("conv3d", x, w, None, stride, front, dilation, None, False, "NCDHW", None)


def test_time_is_that_of_the_larger_bound():
    x, w = jax.ShapeDtypeStruct((1, 512, 32, 32, 32), "bfloat16"), jax.ShapeDtypeStruct((1, 1, 1, 512, 512), "bfloat16")
    ((entry, _),) = explain(jax_nki3d.conv3d, x, w).counts
    assert entry.multiply_adds == 32**3 * 512 * 512
    assert entry.microseconds == pytest.approx(entry.multiply_adds / 16384 / 2400)
    ((entry, _),) = explain(partial(jax_nki3d.avg_pooling_3d, kernel_size=2), x).counts
    assert entry.bytes == 2 * 512 * (32**3 + 16**3)
    assert entry.microseconds == pytest.approx(entry.bytes / 368e3)


def test_a_report_can_be_read(rng):
    gradient = jax.grad(loss(ROWS[1].function), (0, 1, 2))
    text = str(explain(gradient, *ROWS[1].operands(rng, "float32")))
    assert "Kernels on neuron (computed for one call; nothing was run):" in text
    assert "dx: blocks" in text
    assert "dw: " in text
    assert "lax: nki is not installed" in text
    assert max(map(len, text.splitlines())) <= 160


def test_explain_lists_what_the_gradient_adds(rng):
    x, w = rng.standard_normal((1, 2, 4, 4, 4)), rng.standard_normal((3, 3, 3, 2, 2))

    def twice(x, w):
        return jax_nki3d.conv3d(jax_nki3d.conv3d(x, w, padding=1), w, padding=1)

    report = explain(twice, x, w)
    assert [(entry.operation, count) for entry, count in report.counts] == [("conv3d", 2)]
    assert [(entry.operation, count) for entry, count in report.gradient] == [("conv3d_bwd (dx, dw)", 2)]
    assert "conv3d_bwd (dx, dw)  gradient  2" in str(report)
    # labels that are integers have no gradient
    (mixed,) = explain(lambda x, label: (jax_nki3d.avg_pooling_3d(x, 2), label + 1), x, 3).gradient
    assert mixed[0].operation == "avg_pooling_3d_backward"
    # of a gradient, and of what has none in reverse, nothing is added
    assert explain(jax.grad(loss(twice), (0, 1)), x, w).gradient == ()
    loop = explain(lambda x, n: jax.lax.while_loop(lambda s: s[1] < n, lambda s: (twice(s[0], w), s[1] + 1), (x, 0))[0], x, 3)
    assert (loop.counts[0][1], loop.gradient) == (2, ())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ["nki          not installed", "conv3d_bwd               lax     lax: nki is not installed  runs on cpu"]),
        ({"JAX_NKI3D_KERNELS": "nkilib"}, ["see (1)", "the package nkilib is not installed"]),
        ({"JAX_NKI3D_IMPLEMENTATION": "simulate"}, ["conv3d                   simulate (asked for)"]),
    ],
)
def test_command_line(variables, said):
    environment = {**os.environ, **variables}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jax_nki3d"], capture_output=True, text=True, check=False, env=environment
    )
    assert run.returncode == 0, run.stderr
    for line in said:
        assert line in run.stdout


def test_nothing_of_nki3d_is_imported_with_the_library():
    code = "import jax_nki3d, sys; print([m for m in sys.modules if m.split('.')[0] in ('nki', 'nki3d', 'nkilib')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- supports --------------------------------------------------------------------------------------------------------


def test_supports_says_what_the_kernels_say(rng):
    """For every row: a reason, or a plan for each result and a kernel that runs."""
    from nki3d.planning import supports

    for row in ROWS:
        (entry,) = [
            eqn
            for eqn in _equations(row.function, row.operands(rng, "float32"))
            if eqn.primitive.name in {p.name for p in PRIMITIVES}
        ]
        from jax_nki3d._neuron import calls

        case = calls.case_of(entry.primitive.name, entry.params, [v.aval for v in entry.invars])
        assert supports.supports(case) is None
        assert supports.plans(case)
        tiny = supports.supports(case, budget=2000)
        assert tiny is not None
        with pytest.raises(supports.Unsupported, match=re.escape(tiny)):
            supports.plans(case, budget=2000)
        assert supports.supports(case, budget=2000, quickly=True) is not None
        empty = {"shape": (0, *case.shape[1:])} if hasattr(case, "shape") else {"batch": 0}
        assert supports.supports(dataclasses.replace(case, **empty)) == "the batch is empty"
        assert "float64" in supports.supports(dataclasses.replace(case, dtype="float64"))


def _equations(function, operands):
    return jax.make_jaxpr(partial(function, forward_mode=True))(*operands).jaxpr.eqns


def test_the_stand_in_counts_through_called_functions():
    text = """module { func.func public @main(%0: f32) { %1 = call @f(%0) : f32 %2 = call @f(%0) : f32 }
    func.func private @f(%0: f32) { stablehlo.custom_call @AwsNeuronCustomNativeKernel(%0) {backend_config = "nki a 1"} } }"""
    assert fake_nki.kernels_in(text) == {"a 1": 2}
