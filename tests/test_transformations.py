# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""All operations under all transformations of JAX, against the same transformations of the reference.

In float64, where any wrong rule shows: operands are small integers, so that most results are exact.
"""

import itertools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from operations import ROWS, Row

pytestmark = pytest.mark.usefixtures("x64")
every_operation = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
# Compiled with little optimisation: a reference runs once, and compiling it well would take most of the suite's time.
quick_jit = partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
)
assert_equal = partial(chex.assert_trees_all_close, rtol=1e-11, atol=1e-10)


def operands_of(row: Row, rng, **options):
    return tuple(map(jnp.asarray, row.operands(rng, **options)))


def scalar(function):
    """A scalar that no two elements of the results enter alike, and not linearly: so second derivatives exist."""

    def weighted(*operands):
        total = 0.0
        for y in jax.tree.leaves(function(*operands)):
            weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            total = total + (weights * y).sum() + (y * y).sum() / 8
        return total

    return weighted


def subsets(count: int):
    """All non-empty choices among `count` operands."""
    for n in range(1, count + 1):
        yield from itertools.combinations(range(count), n)


# ---- compiling -------------------------------------------------------------------------------------------------------


@every_operation
def test_jit(row, rng):
    operands = operands_of(row, rng)

    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def operation(*operands):
        return row.function(*operands)

    jitted = jax.jit(operation)
    assert_equal(jitted(*operands), row.reference(*operands))
    assert_equal(jitted(*operands), row.function(*operands))


@every_operation
def test_donated_operands(row, rng):
    operands = operands_of(row, rng)
    expected = row.reference(*operands)

    @partial(jax.jit, donate_argnums=0)
    def step(first, rest):
        return first * 2, row.function(first, *rest)

    _, y = step(operands[0] + 0, operands[1:])
    assert_equal(y, expected)


@every_operation
def test_export_round_trip(row, rng):
    operands = operands_of(row, rng)
    grad = jax.grad(scalar(row.function), argnums=tuple(range(len(operands))))
    exported = export.export(jax.jit(grad))(*operands)
    restored = export.deserialize(exported.serialize())
    assert_equal(restored.call(*operands), jax.grad(scalar(row.reference), argnums=tuple(range(len(operands))))(*operands))


@every_operation
def test_export_for_several_platforms(row, rng):
    operands = operands_of(row, rng)
    exported = export.export(jax.jit(row.function), platforms=["cpu", "cuda"])(*operands)
    assert_equal(exported.call(*operands), row.reference(*operands))


@every_operation
def test_checkpoint(row, rng):
    operands = operands_of(row, rng)
    argnums = tuple(range(len(operands)))
    ours = jax.grad(jax.checkpoint(scalar(row.function)), argnums=argnums)
    assert_equal(jax.jit(ours)(*operands), quick_jit(jax.grad(scalar(row.reference), argnums))(*operands))


@every_operation
def test_scan(row, rng):
    operands = operands_of(row, rng)
    steps = jnp.stack([operands[0], operands[0] + 1, 2 * operands[0]])

    def total(function, first, rest):
        def step(carry, x):
            return carry + scalar(function)(x, *rest), None

        return jax.lax.scan(step, jnp.zeros((), first.dtype), first)[0]

    ours = jax.grad(partial(total, row.function), argnums=(0, 1))(steps, operands[1:])
    assert_equal(ours, jax.grad(partial(total, row.reference), argnums=(0, 1))(steps, operands[1:]))


# ---- reverse mode ----------------------------------------------------------------------------------------------------


@every_operation
def test_gradients_of_every_subset(row, rng):
    operands = operands_of(row, rng)
    for argnums in subsets(len(operands)):
        ours = jax.jit(jax.grad(scalar(row.function), argnums=argnums))(*operands)
        assert_equal(ours, quick_jit(jax.grad(scalar(row.reference), argnums))(*operands))


@every_operation
def test_gradients_one_after_the_other_through_one_jitted_function(row, rng):
    """The answer of a backward rule must have one structure, whatever is wanted."""
    operands = operands_of(row, rng)
    inner = jax.jit(row.function)
    for argnums in range(len(operands)):
        ours = jax.grad(scalar(inner), argnums=argnums)(*operands)
        assert_equal(ours, quick_jit(jax.grad(scalar(row.reference), argnums))(*operands))


@every_operation
@pytest.mark.parametrize("forward_mode", [False, True])
def test_gradient_of_gradient(row, forward_mode, rng):
    operands = operands_of(row, rng, batch=1)
    argnums = tuple(range(len(operands)))

    def norm_of_gradient(function):
        inner = jax.grad(scalar(function), argnums=argnums)
        return lambda *operands: sum((g * g).sum() for g in inner(*operands))

    ours = jax.jit(jax.grad(norm_of_gradient(partial(row.function, forward_mode=forward_mode)), argnums=argnums))
    assert_equal(ours(*operands), quick_jit(jax.grad(norm_of_gradient(row.reference), argnums))(*operands), rtol=1e-9)


@every_operation
def test_third_order(row, rng):
    first, *rest = operands_of(row, rng, batch=1)

    def thrice(jit, function):
        f = lambda x: jnp.sin(scalar(function)(x, *rest) / 100)  # noqa: E731
        return jit(jax.grad(lambda x: jax.grad(lambda x: jax.grad(f)(x).sum())(x).sum()))

    assert_equal(thrice(jax.jit, row.function)(first), thrice(quick_jit, row.reference)(first))


@every_operation
@pytest.mark.parametrize("forward_mode", [False, True])
def test_hessian_vector_product(row, forward_mode, rng):
    """Forward mode over reverse mode needs no switch."""
    operands = operands_of(row, rng, batch=1)
    tangents = operands_of(row, rng, batch=1)
    argnums = tuple(range(len(operands)))

    def hvp(jit, function):
        return jit(lambda a, t: jax.jvp(jax.grad(scalar(function), argnums=argnums), a, t))(operands, tangents)

    assert_equal(hvp(jax.jit, partial(row.function, forward_mode=forward_mode)), hvp(quick_jit, row.reference))


def test_hessian(rng):
    for row in ROWS:
        first, *rest = operands_of(row, rng, batch=1)
        ours = jax.jit(jax.hessian(lambda x, row=row, rest=rest: scalar(row.function)(x, *rest)))(first)
        assert_equal(ours, quick_jit(jax.hessian(lambda x, row=row, rest=rest: scalar(row.reference)(x, *rest)))(first))


# ---- forward mode ----------------------------------------------------------------------------------------------------


@every_operation
def test_jvp_of_every_subset(row, rng):
    operands, tangents = operands_of(row, rng), operands_of(row, rng)
    for moving in subsets(len(operands)):

        def along(function, moving=moving):
            def f(*some):
                whole = list(operands)
                for index, value in zip(moving, some, strict=True):
                    whole[index] = value
                return function(*whole)

            return jax.jvp(f, tuple(operands[i] for i in moving), tuple(tangents[i] for i in moving))

        assert_equal(along(partial(row.function, forward_mode=True)), along(row.reference))


@every_operation
def test_jacfwd_linearize_and_linear_transpose(row, rng):
    operands = operands_of(row, rng, batch=1)
    ours = partial(row.function, forward_mode=True)
    argnums = tuple(range(len(operands)))
    expected = jax.jacrev(row.reference, argnums=argnums)(*operands)
    assert_equal(jax.jacfwd(ours, argnums=argnums)(*operands), expected)
    y, linear = jax.linearize(ours, *operands)
    assert_equal((y, linear(*operands)), jax.jvp(row.reference, operands, operands))
    back = jax.linear_transpose(linear, *operands)
    assert_equal(back(y), jax.vjp(row.reference, *operands)[1](y))


@every_operation
def test_forward_mode_without_the_switch_says_so(row, rng):
    operands = operands_of(row, rng)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(row.function, operands, operands)


# ---- vmap ------------------------------------------------------------------------------------------------------------


def mapped_operands(row: Row, rng, axes, size=3):
    """Operands with a further axis of `size` wherever `axes` says so."""
    operands = []
    for shape, axis in zip(row.shapes, axes, strict=True):
        if axis is None:
            operands.append(jnp.asarray(rng.integers(-3, 4, shape), float))
        else:
            position = axis % (len(shape) + 1)
            operands.append(jnp.asarray(rng.integers(-3, 4, (*shape[:position], size, *shape[position:])), float))
    return tuple(operands)


def axes_of_subsets(row: Row):
    """For each subset of the operands, mapped axes in different places."""
    places = (0, -1, 1)
    for mapped in subsets(len(row.shapes)):
        yield tuple(places[i % 3] if i in mapped else None for i in range(len(row.shapes)))


def axes_alone_and_together(row: Row):
    """Each operand mapped alone, and all of them."""
    return [axes for axes in axes_of_subsets(row) if sum(a is not None for a in axes) in (1, len(axes))]


@every_operation
@pytest.mark.parametrize("forward_mode", [False, True])
def test_vmap_of_every_subset(row, forward_mode, rng):
    for axes in axes_of_subsets(row):
        operands = mapped_operands(row, rng, axes)
        ours = jax.jit(jax.vmap(partial(row.function, forward_mode=forward_mode), axes))(*operands)
        loop = [
            row.reference(*(o if a is None else jnp.take(o, i, axis=a) for o, a in zip(operands, axes, strict=True)))
            for i in range(3)
        ]
        assert_equal(ours, jax.tree.map(lambda *ys: jnp.stack(ys), *loop))


@every_operation
def test_per_example_gradients(row, rng):
    """vmap of grad, for every subset of mapped operands and every wanted gradient."""
    argnums = tuple(range(len(row.shapes)))
    for axes in axes_alone_and_together(row):
        operands = mapped_operands(row, rng, axes)
        ours = jax.jit(jax.vmap(jax.grad(scalar(row.function), argnums), axes))(*operands)
        assert_equal(ours, quick_jit(jax.vmap(jax.grad(scalar(row.reference), argnums), axes))(*operands))


@every_operation
def test_gradient_of_vmap(row, rng):
    argnums = tuple(range(len(row.shapes)))
    for axes in axes_alone_and_together(row):
        operands = mapped_operands(row, rng, axes)
        ours = jax.jit(jax.grad(scalar(jax.vmap(row.function, axes)), argnums))(*operands)
        assert_equal(ours, quick_jit(jax.grad(scalar(jax.vmap(row.reference, axes)), argnums))(*operands))


@every_operation
def test_vmap_with_an_unmapped_cotangent(row, rng):
    operands = mapped_operands(row, rng, (0,) * len(row.shapes))
    first = tuple(o[0] for o in operands)

    def pull(function):
        ct = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size, dtype=float)).reshape(y.shape), function(*first))
        return jax.vmap(lambda *a: jax.vjp(function, *a)[1](ct))(*operands)

    assert_equal(pull(row.function), pull(row.reference))


@every_operation
def test_nested_vmap(row, rng):
    operands = []
    for shape in row.shapes:
        operands.append(jnp.asarray(rng.integers(-3, 4, (2, *shape, 3)), float))
    nest = lambda f: jax.vmap(jax.vmap(f, in_axes=-1), in_axes=0)  # noqa: E731
    argnums = tuple(range(len(operands)))
    assert_equal(jax.jit(nest(row.function))(*operands), nest(row.reference)(*operands))
    ours = jax.jit(nest(jax.grad(scalar(row.function), argnums)))(*operands)
    assert_equal(ours, quick_jit(nest(jax.grad(scalar(row.reference), argnums)))(*operands))


@every_operation
def test_vmap_over_nothing(row):
    for axes in axes_of_subsets(row):
        operands = mapped_operands(row, np.random.default_rng(0), axes, size=0)
        chex.assert_trees_all_equal_shapes_and_dtypes(
            jax.vmap(row.function, axes)(*operands), jax.vmap(row.reference, axes)(*operands)
        )


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    chex.assert_devices_available(4, "cpu")
    return Mesh(np.array(jax.devices()), ("data",))


def specs(row: Row):
    """Operands with a batch are sharded over it, the others replicated."""
    return tuple(P("data") if i in row.batched else P() for i in range(len(row.shapes)))


@every_operation
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_data_parallel_gradients(row, mesh, check_vma, rng):
    """The gradients of replicated operands are summed over the shards; nothing is gathered."""
    operands = operands_of(row, rng, batch=8)
    replicated = tuple(i for i in range(len(operands)) if i not in row.batched)
    argnums = tuple(range(len(operands)))

    def local_loss(*shards):
        return sum((y * y).sum() for y in jax.tree.leaves(row.function(*shards))[:1])

    def gradients(*shards):
        grads = jax.grad(local_loss, argnums)(*shards)
        if check_vma:  # the psum of replicated operands' gradients is part of the transposition
            return grads
        return tuple(jax.lax.psum(g, "data") if i in replicated else g for i, g in enumerate(grads))

    sharded = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs(row), out_specs=specs(row), check_vma=check_vma))

    def whole_loss(*operands):
        return sum((y * y).sum() for y in jax.tree.leaves(row.reference(*operands))[:1])

    assert_equal(sharded(*operands), jax.grad(whole_loss, argnums)(*operands))
    text = sharded.lower(*operands).compile().as_text()
    assert "all-gather" not in text
    assert ("all-reduce" in text) == bool(replicated)


@every_operation
def test_gradient_through_shard_map(row, mesh, rng):
    operands = operands_of(row, rng, batch=4)
    argnums = tuple(range(len(operands)))

    def local(*shards):
        return jax.tree.leaves(row.function(*shards))[0]

    out = P("data")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs(row), out_specs=out)
    ours = jax.jit(jax.grad(scalar(sharded), argnums))(*operands)
    assert_equal(ours, jax.grad(scalar(lambda *o: jax.tree.leaves(row.reference(*o))[0]), argnums)(*operands))


@every_operation
def test_jit_with_named_sharding(row, mesh, rng):
    operands = operands_of(row, rng, batch=4)
    placed = [jax.device_put(o, NamedSharding(mesh, s)) for o, s in zip(operands, specs(row), strict=True)]
    argnums = tuple(range(len(operands)))
    forward = jax.jit(row.function)
    assert_equal(forward(*placed), row.reference(*operands))
    first = jax.tree.leaves(forward(*placed))[0]
    assert first.sharding.spec[0] == "data"
    backward = jax.jit(jax.grad(scalar(row.function), argnums))
    assert_equal(backward(*placed), quick_jit(jax.grad(scalar(row.reference), argnums))(*operands))
    assert "all-gather" not in forward.lower(*placed).compile().as_text()


def test_slabs_under_shard_map(mesh, rng, monkeypatch):
    """The loop over slabs carries an array that must vary like the operands."""
    monkeypatch.setattr("jax_nki3d._lax.plan.SLAB_BYTES", 2**10)
    clear_plans()
    try:
        for row in ROWS:
            test_shard_map_with_data_parallel_gradients(row, mesh, True, rng)
    finally:
        clear_plans()


def clear_plans():
    """Forgets what was planned, and compiled, under another limit of memory."""
    from jax_nki3d._lax import plan

    for cached in (plan.plan_correlate, plan.plan_spread, plan.plan_filter_gradient):
        cached.cache_clear()
    jax.clear_caches()


# ---- dtypes and layouts ----------------------------------------------------------------------------------------------


@every_operation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_results_and_gradients_have_the_operands_dtype(row, dtype, rng):
    operands = tuple(jnp.asarray(o, dtype) for o in row.operands(rng))
    outputs = jax.tree.leaves(row.function(*operands))
    assert {y.dtype.name for y in outputs} == {dtype}
    argnums = tuple(range(len(operands)))
    loss = lambda *o: sum(y.astype(jnp.float32).sum() for y in jax.tree.leaves(row.function(*o)))  # noqa: E731
    gradients = jax.grad(loss, argnums)(*operands)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, operands)
    exact = row.reference(*(jnp.asarray(o, float) for o in operands))
    for ours, expected in zip(outputs, jax.tree.leaves(exact), strict=True):
        # One rounding of a sum of small integers, which float32 holds exactly (SiLU and division aside).
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(ours, float), expected, rtol=eps if dtype != "float64" else 1e-14, atol=2 * eps)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith("conv3d")], ids=lambda row: row.name)
def test_channels_last(row, rng):
    """NDHWC volumes in, NDHWC volumes out, and the same for gradients; filters and biases have one layout."""
    operands = operands_of(row, rng)
    last = tuple(jnp.moveaxis(o, 1, 4) if i in row.batched else o for i, o in enumerate(operands))

    def first_result(function):
        return lambda *o: jax.tree.leaves(function(*o))[0]  # y, or dx: a volume

    ours = first_result(partial(row.function, data_format="NDHWC"))
    assert_equal(jnp.moveaxis(ours(*last), 4, 1), first_result(row.reference)(*operands))
    argnums = tuple(range(len(operands)))
    gradients = jax.grad(lambda *o: (ours(*o) ** 2).sum(), argnums)(*last)
    gradients = tuple(jnp.moveaxis(g, 4, 1) if i in row.batched else g for i, g in enumerate(gradients))
    assert_equal(gradients, jax.grad(lambda *o: (first_result(row.reference)(*o) ** 2).sum(), argnums)(*operands))


@pytest.mark.parametrize("row", [row for row in ROWS if row.name.startswith("avg")], ids=lambda row: row.name)
@pytest.mark.parametrize("data_format", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("output_format", ["NCDHW", "NDHWC"])
def test_pooling_changes_layout(row, data_format, output_format, rng):
    (x,) = operands_of(row, rng)
    into, out = data_format, output_format
    if row.name == "avg_pooling_3d_backward":  # it reads what the forward pass writes
        into, out = out, into
    as_given = jnp.moveaxis(x, 1, 4) if into == "NDHWC" else x

    def pool(function):
        y = function(as_given, data_format=data_format, output_format=output_format)
        return jnp.moveaxis(y, 4, 1) if out == "NDHWC" else y

    assert_equal(pool(row.function), row.reference(x))
