# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What each platform gets, read from the StableHLO that is lowered for it. No device of that platform is needed."""

import dataclasses
import logging
import re

import jax
import numpy as np
import pytest
from jax.extend.core import Primitive
from operations import ROWS

from jax_nki3d import _neuron, _primitive, explain

every_operation = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def stablehlo(row, rng, platform, dtype="float32", gradient=False):
    jax.clear_caches()  # what was lowered for this platform under another bridge
    operands = row.operands(rng, dtype)
    function = row.function
    if gradient:
        loss = lambda *o: sum(y.astype("float32").sum() for y in jax.tree.leaves(row.function(*o)))  # noqa: E731
        function = jax.grad(loss, tuple(range(len(operands))))
    return jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


@every_operation
@pytest.mark.parametrize("gradient", [False, True])
def test_cpu_gets_products_and_no_zeros_inside(row, gradient, rng):
    """No convolution, hence none that dilates its input; no pad with zeros between elements."""
    text = stablehlo(row, rng, "cpu", gradient=gradient)
    assert "stablehlo.convolution" not in text
    interiors = re.findall(r"interior = array<i64([^>]*)>|interior = \[([^\]]*)\]", text)
    assert all(set(re.findall(r"\d+", "".join(found))) <= {"0"} for found in interiors)
    assert interiors or "stablehlo.pad" not in text
    if row.name.startswith("conv3d"):
        assert "stablehlo.dot_general" in text


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
@every_operation
def test_accelerators_get_the_convolution_that_they_recognise(row, platform, rng):
    text = stablehlo(row, rng, platform)
    expected = {"conv3d_bwd": 2, "avg_pooling_3d": 0, "avg_pooling_3d_backward": 0}.get(row.name, 1)
    assert text.count("stablehlo.convolution") == expected
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("row", ROWS[:5], ids=lambda row: row.name)
def test_accelerators_sum_16_bit_types_in_float32(row, dtype, rng):
    """Operands stay in 16 bits, for the matrix units; the convolution's result is float32."""
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    results = re.findall(r"stablehlo\.convolution.*: \((\S+), (\S+)\) -> (\S+)", stablehlo(row, rng, "cuda", dtype))
    assert results
    for left, right, out in results:
        assert left.endswith(f"x{short}>")
        assert right.endswith(f"x{short}>")
        assert out.endswith("xf32>")


@every_operation
def test_neuron_falls_back_to_lax_with_one_line(row, rng, caplog, monkeypatch):
    monkeypatch.setattr(_neuron, "_logged", set())
    with caplog.at_level(logging.WARNING, logger="jax_nki3d"):
        for _ in range(2):
            text = stablehlo(row, rng, "neuron", dtype="float32")
    assert "custom_call" not in text
    (record,) = caplog.records
    assert "runs as lax on platform neuron" in record.getMessage()
    assert record.getMessage().split()[0] in row.name


@every_operation
def test_the_neuron_branch_takes_a_kernel_where_there_is_one(row, rng, monkeypatch):
    """With a bridge that has kernels, the platform neuron gets them, and no other platform does."""
    kernel_p = Primitive("fake_kernel")
    kernel_p.multiple_results = True
    kernel_p.def_abstract_eval(lambda *avals, like: list(like))

    def lower_kernel(ctx, *operands, like):
        return jax.ffi.ffi_lowering("AwsNeuronCustomNativeKernel", backend_config="fake", api_version=2)(ctx, *operands)

    jax.interpreters.mlir.register_lowering(kernel_p, lower_kernel)

    def choose(operation, params, avals):
        rules_of = {p.name: p for p in _primitive.PRIMITIVES}

        def call(*operands, **params):
            like = rules_of[operation].abstract_eval(*map(jax.typeof, operands), **params)[0]
            return kernel_p.bind(*operands, like=tuple(like))

        return _neuron.Choice(call, "")

    monkeypatch.setattr(_neuron, "choose", choose)
    on_neuron = stablehlo(row, rng, "neuron")
    assert on_neuron.count("@AwsNeuronCustomNativeKernel") == 1
    assert "stablehlo.convolution" not in on_neuron
    assert "AwsNeuronCustomNativeKernel" not in stablehlo(row, rng, "cpu")
    assert explain(row.function, *row.operands(rng, "float32"), platform="neuron").counts[0][0].implementation == "nki"


@every_operation
def test_lax_asked_for_by_name_stays_lax_on_neuron(row, rng, monkeypatch):
    monkeypatch.setattr(_neuron, "choose", lambda *_: pytest.fail("the bridge was asked"))
    operands = row.operands(rng, "float32")
    lowered = jax.jit(lambda *o: row.function(*o, implementation="lax")).trace(*operands)
    lowered.lower(lowering_platforms=("neuron",))


@pytest.mark.parametrize("missing", [field.name for field in dataclasses.fields(_primitive.Rules)])
def test_a_primitive_must_answer_everything(missing):
    answers = {field.name: print for field in dataclasses.fields(_primitive.Rules)}
    del answers[missing]
    with pytest.raises(TypeError, match=missing):
        _primitive.Rules(**answers)


def test_five_primitives_are_registered():
    from jax.interpreters import ad

    assert [p.name for p in _primitive.PRIMITIVES] == [
        "conv3d",
        "conv3d_transpose",
        "conv3d_bwd",
        "avg_pooling_3d",
        "avg_pooling_3d_backward",
    ]
    for primitive in _primitive.PRIMITIVES:
        for rules in (ad.primitive_jvps, ad.primitive_transposes):
            assert callable(rules[primitive])


@every_operation
def test_a_literal_custom_vjp_stands_around_the_primitive(row, rng):
    jaxpr = str(jax.make_jaxpr(row.function)(*row.operands(rng, "float32")))
    assert "custom_vjp_call" in jaxpr
    inside = str(
        jax.make_jaxpr(lambda *o: row.function(*o, forward_mode=True))(*row.operands(np.random.default_rng(0), "float32"))
    )
    assert "custom_vjp_call" not in inside
