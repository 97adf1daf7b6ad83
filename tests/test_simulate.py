# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`implementation="simulate"`: the NKI kernels in the interpreter, inside JAX, under its transformations.

Expected values come from the reference in float64. Operands are small integers, so that sums are exact in every dtype; what is not
(SiLU, the division by a window of 12, a result that is rounded to 16 bits) is within a few roundings.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from operations import ROWS

import jax_nki3d
from jax_nki3d._neuron import installed

every_operation = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
quick_jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
)  # a reference runs once


def loss(function):
    """Squares of the results, scaled so that second derivatives stay small."""
    return lambda *operands: sum((y * y).sum() for y in jax.tree.leaves(function(*operands))) / 8


def grad(function, count):
    return jax.grad(loss(function), tuple(range(count)))


def scan(function, count):
    del count

    def total(first, *rest):
        def step(carry, scale):
            return carry + loss(function)(scale * first, *rest), None

        return jax.lax.scan(step, jnp.zeros((), first.dtype), jnp.arange(1, 3).astype(first.dtype))[0]

    return jax.grad(total)


def mapped(function, axes):
    return jax.vmap(function, axes)


def first_alone(function, count):
    """vmap over the first operand, the others unmapped."""
    return mapped(lambda scale, *o: function(scale * o[0], *o[1:]), (0, *[None] * count))


def hessian_vector_product(function, count):
    def hvp(*operands):
        slopes = jax.grad(loss(function), tuple(range(count)))
        return jax.jvp(slopes, operands, tuple(o + jnp.ones((), o.dtype) for o in operands))[1]

    return hvp


# name: (function, number of operands) -> function of (operands); vmaps also take scales of the first operand.
TRANSFORMATIONS = {
    "forward": lambda f, n: f,
    "grad": grad,
    "grad_of_checkpoint": lambda f, n: jax.grad(jax.checkpoint(loss(f)), tuple(range(n))),
    "grad_of_scan": scan,
    "hvp": hessian_vector_product,
}
VMAPS = {
    "vmap": lambda f, n: first_alone(f, n),
    "per_example_grad": lambda f, n: first_alone(grad(f, n), n),
    "nested_vmap": lambda f, n: jax.vmap(first_alone(f, n), (1, *[None] * n)),
}


def exact(function, *operands):
    """A function of the reference in float64."""
    with enable_x64():
        return jax.tree.map(np.asarray, quick_jit(function)(*(jnp.asarray(o, "float64") for o in operands)))


def assert_agree(actual, expected, dtype="float32"):
    """Within roundings of the results' own type, relative to the largest of each array: sums cancel."""
    eps = float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == dtype
        assert ours.shape == theirs.shape
        scale = np.abs(theirs).max(initial=1.0)
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=8 * eps, atol=8 * eps * scale)


@every_operation
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(row, name, rng):
    operands = row.operands(rng, "float32", batch=1)
    transform = TRANSFORMATIONS[name]
    ours = jax.jit(transform(partial(row.function, implementation="simulate"), len(operands)))
    assert_agree(ours(*operands), exact(transform(row.reference, len(operands)), *operands))


@every_operation
@pytest.mark.parametrize("name", VMAPS)
def test_vmaps(row, name, rng):
    operands = row.operands(rng, "float32", batch=1)
    scales = np.float32([[1, 2], [-1, 3]]) if name == "nested_vmap" else np.float32([1, -2])
    transform = VMAPS[name]
    ours = jax.jit(transform(partial(row.function, implementation="simulate"), len(operands)))
    assert_agree(ours(scales, *operands), exact(transform(row.reference, len(operands)), scales, *operands))


@every_operation
def test_vmap_of_all_operands(row, rng):
    operands = [np.stack([o, o + 1]) for o in row.operands(rng, "float32", batch=1)]
    ours = jax.vmap(grad(partial(row.function, implementation="simulate"), len(operands)))
    assert_agree(ours(*operands), exact(jax.vmap(grad(row.reference, len(operands))), *operands))


@pytest.mark.parametrize("row", [ROWS[0], ROWS[2], ROWS[5]], ids=lambda row: row.name)
def test_hessian(row, rng):
    operands = row.operands(rng, "float32", batch=1)
    argument = len(operands) - 1
    ours = jax.hessian(loss(partial(row.function, implementation="simulate")), argument)
    assert_agree(jax.jit(ours)(*operands), exact(jax.hessian(loss(row.reference), argument), *operands))


@every_operation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(row, dtype, rng):
    operands = [jnp.asarray(o) for o in row.operands(rng, dtype)]
    outputs = jax.jit(partial(row.function, implementation="simulate"))(*operands)
    expected = exact(row.reference, *operands)
    eps = float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, rtol=eps, atol=eps / 8)
    gradients = jax.jit(grad(partial(row.function, implementation="simulate"), len(operands)))(*operands)
    assert [g.dtype for g in gradients] == [o.dtype for o in operands]
    same = quick_jit(grad(partial(row.function, implementation="lax"), len(operands)))(*operands)
    for ours, theirs in zip(gradients, same, strict=True):
        scale = np.abs(np.asarray(theirs, np.float64)).max()
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(theirs, np.float64), rtol=2 * eps, atol=eps * scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_float32_bias_keeps_its_gradient(dtype):
    """257 ones: a sum that bfloat16 does not hold."""
    x, w, b = jnp.ones((1, 1, 1, 1, 257), dtype), jnp.ones((1,) * 5, dtype), jnp.zeros(1, "float32")
    f = lambda b: jax_nki3d.conv3d(x, w, b, implementation="simulate").astype("float32").sum()  # noqa: E731
    gradient = jax.grad(f)(b)
    assert gradient.dtype == "float32"
    assert float(gradient[0]) == 257


@pytest.mark.parametrize("cores", ["1", "2"])
def test_sharing_the_work_of_two_cores(cores, rng, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", cores)
    jax.clear_caches()
    operands = ROWS[1].operands(rng, "float32")
    for operation in (jax_nki3d.conv3d, jax_nki3d.conv3d_transpose):
        ours, theirs = (
            quick_jit(grad(partial(operation, lnc_shard=True, implementation=name), 3))(*operands)
            for name in ("simulate", "lax")
        )
        for mine, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5)
    jax.clear_caches()


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def specs(row):
    return tuple(P("data") if i in row.batched else P() for i in range(len(row.shapes)))


@every_operation
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(row, mesh, check_vma, rng):
    """Forward and gradients, each device with its own interpreter; gradients of replicated operands are summed."""
    operands = row.operands(rng, "float32", batch=4)
    replicated = [i for i in range(len(operands)) if i not in row.batched]

    def gradients(*shards):
        # one result: those that are sums over the batch differ from shard to shard
        first = lambda *o: jax.tree.leaves(row.function(*o, implementation="simulate"))[0]  # noqa: E731
        grads = grad(first, len(shards))(*shards)
        if check_vma:
            return grads
        return tuple(jax.lax.psum(g, "data") if i in replicated else g for i, g in enumerate(grads))

    sharded = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs(row), out_specs=specs(row), check_vma=check_vma))
    whole = grad(lambda *o: jax.tree.leaves(row.reference(*o))[0], len(operands))
    assert_agree(sharded(*operands), exact(whole, *operands))


def test_jit_with_named_sharding(mesh, rng):
    """The interpreter is opaque to the partitioner: operands are gathered, results are right."""
    row = ROWS[0]
    operands = row.operands(rng, "float32", batch=4)
    placed = [jax.device_put(o, NamedSharding(mesh, s)) for o, s in zip(operands, specs(row), strict=True)]
    ours = jax.jit(grad(partial(row.function, implementation="simulate"), 2))
    assert_agree(ours(*placed), exact(grad(row.reference, 2), *operands))


# ---- what cannot run, and errors -------------------------------------------------------------------------------------

X, W = np.ones((1, 1, 2, 2, 2), np.float32), np.ones((1, 1, 1, 1, 1), np.float32)


@every_operation
def test_float64_is_refused_where_it_is_bound(row, rng, x64):
    operands = row.operands(rng, "float64")
    name = "conv3d_transpose" if "transpose" in row.name else row.name.removesuffix("_bias_silu")
    with pytest.raises(
        NotImplementedError,
        match=rf"^{name}: `implementation` is 'simulate', but dtype float64 is none of .* Use implementation='lax'",
    ):
        jax.make_jaxpr(lambda *o: row.function(*o, implementation="simulate"))(*operands)


def test_a_volume_that_does_not_fit_is_refused_with_the_planners_reason():
    x = jax.ShapeDtypeStruct((1, 1024, 1, 1, 30000), np.float32)
    w = jax.ShapeDtypeStruct((1, 1, 20000, 1024, 1), np.float32)
    with pytest.raises(NotImplementedError, match=r"conv3d: `implementation` is 'simulate', but .* B per partition"):
        jax.eval_shape(partial(jax_nki3d.conv3d, implementation="simulate"), x, w)


def test_a_gradient_that_no_kernel_computes_is_refused(monkeypatch):
    """Not only what the user binds is asked for, but also what the rules bind."""
    from nki3d.planning import supports

    original = supports.supports

    def refuse(case, budget=None, quickly=False):
        return "no" if isinstance(case, supports.Conv3dBwdCase) else original(case, budget, quickly)

    monkeypatch.setattr(supports, "supports", refuse)
    with pytest.raises(NotImplementedError, match="conv3d_bwd: `implementation` is 'simulate', but no"):
        jax.grad(lambda x: jax_nki3d.conv3d(x, 3 * W, implementation="simulate").sum())(X)


def test_another_platform_is_refused():
    lowered = jax.jit(partial(jax_nki3d.conv3d, implementation="simulate")).trace(X, W)
    for platform in ("neuron", "cuda"):
        with pytest.raises(NotImplementedError, match=f"'simulate', but a program for {platform} cannot call back"):
            lowered.lower(lowering_platforms=(platform,))


def test_kernels_bound_to_a_real_nki_are_refused(monkeypatch):
    monkeypatch.setattr(installed, "_is_simulated", lambda: False)
    with pytest.raises(NotImplementedError, match=r"'simulate', but the kernels are bound to the nki .* NKI3D_SIMULATOR=1"):
        jax_nki3d.conv3d(X, W, implementation="simulate")


def test_an_error_in_the_kernel_comes_out_with_its_text(monkeypatch):
    from nki3d import simulator

    @simulator.jit
    def broken(x_in, filters, **static):
        simulator.language.ndarray((256, 4), simulator.language.float32, buffer=simulator.language.sbuf)

    monkeypatch.setattr(installed, "own_kernel", lambda operation: broken)
    jax.clear_caches()
    with pytest.raises(Exception, match=r"NkiValidationError: .*256"):
        jax.block_until_ready(jax.jit(lambda x: jax_nki3d.conv3d(x, 7 * W, implementation="simulate"))(X))
    jax.clear_caches()


def test_an_empty_batch_asks_for_no_kernel(monkeypatch):
    monkeypatch.setattr(installed, "own_kernel", lambda operation: pytest.fail("a kernel was asked for"))
    x = np.zeros((0, 1, 2, 2, 2), np.float32)
    y, pullback = jax.vjp(partial(jax_nki3d.conv3d, implementation="simulate"), x, 5 * W)
    dx, dw = pullback(y)
    assert (y.shape, dx.shape, float(dw.sum())) == (x.shape, x.shape, 0.0)
