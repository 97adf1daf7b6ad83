# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where one way of computing ends and another begins: large strides, long programs, open batches, overflow."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import reference
from jax import export
from operations import ROWS

import jax_nki3d
from jax_nki3d import _lax
from jax_nki3d._lax import blocks, plan
from jax_nki3d._spec import conv3d_spec

assert_equal = partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)

# Kernels up to the stride, aligned or not, with rows that no window reaches, and thin volumes.
DISJOINT = [
    ((2, 2, 2), (2, 2, 2), 0, (4, 6, 8)),
    ((2, 2, 2), (2, 2, 2), 1, (5, 6, 7)),
    ((1, 2, 3), (2, 3, 4), (0, 1, 2), (5, 7, 9)),
    ((1, 1, 1), (1, 1, 1), 0, (2, 3, 4)),
    ((1, 1, 1), (3, 2, 1), 0, (7, 3, 4)),
    ((3, 3, 3), (4, 4, 4), 3, (3, 2, 1)),
    ((4, 4, 4), (4, 4, 4), 0, (8, 5, 11)),
]


def integers(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


def both_ways(function, *operands):
    y, pullback = jax.vjp(function, *operands)
    ct = np.arange(y.size, dtype=np.float32).reshape(y.shape) % 5
    return y, pullback(jnp.asarray(ct))


@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), DISJOINT)
@pytest.mark.parametrize("batch", [1, 2])
def test_windows_that_share_no_element(kernel, stride, padding, size, batch, rng):
    pads = np.repeat(np.broadcast_to(padding, 3), 2).tolist()
    x, w = integers(rng, batch, 2, *size), integers(rng, *kernel, 2, 3)
    ours = partial(jax_nki3d.conv3d, stride=stride, padding=pads)
    report = jax_nki3d.explain(jax.grad(lambda x, w: ours(x, w).sum(), (0, 1)), x, w, platform="cpu")
    assert {entry.how for entry, _ in report.counts} == {"one product per block"}
    assert_equal(both_ways(ours, x, w), both_ways(partial(reference.conv3d, stride=stride, padding=pads), x, w))


@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), DISJOINT)
def test_transposed_windows_that_share_no_element(kernel, stride, padding, size, rng):
    crop = tuple(min(p, k - 1) // 2 for p, k in zip(np.broadcast_to(padding, 3).tolist(), kernel, strict=True))
    extra = tuple(s - 1 for s in stride)
    settings = {"stride": stride, "padding": crop, "output_padding": extra}
    x, w = integers(rng, 2, 2, *size), integers(rng, *kernel, 2, 3)
    ours, expected = (partial(f, **settings) for f in (jax_nki3d.conv3d_transpose, reference.conv3d_transpose))
    assert_equal(both_ways(ours, x, w), both_ways(expected, x, w))


@pytest.mark.parametrize("operation", ["conv3d", "conv3d_transpose"])
def test_programs_do_not_grow_with_the_stride(operation):
    """Patch embeddings, their transposes and their gradients, at stride 16."""
    size = (1, 3, 16, 16, 16) if operation == "conv3d" else (1, 3, 1, 1, 1)
    x, w = np.ones(size, np.float32), np.ones((16, 16, 16, 3, 2), np.float32)
    loss = lambda x, w: (getattr(jax_nki3d, operation)(x, w, stride=16) ** 2).sum()  # noqa: E731
    assert len(jax.jit(jax.grad(loss, (0, 1))).lower(x, w).as_text().splitlines()) < 120


def test_blocks_need_windows_apart():
    geometry = plan.Geometry((8,) * 3, (4,) * 3, (3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3)
    assert not blocks.applies(geometry)


@pytest.mark.parametrize("row", ROWS[:5], ids=lambda row: row.name)
def test_a_program_that_would_grow_too_long_is_lax(row, rng, monkeypatch):
    monkeypatch.setattr(plan, "MAX_SLICES", 0)
    operands = row.operands(rng, "float32")
    for cached in (plan.plan_correlate, plan.plan_spread, plan.plan_filter_gradient):
        cached.cache_clear()
    jax.clear_caches()
    try:
        assert "stablehlo.convolution" in jax.jit(row.function).lower(*operands).as_text()
        assert_equal(row.function(*operands), row.reference(*operands))
    finally:
        for cached in (plan.plan_correlate, plan.plan_spread, plan.plan_filter_gradient):
            cached.cache_clear()
        jax.clear_caches()


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "avg_pooling_3d_backward"], ids=lambda row: row.name)
def test_export_with_an_open_batch(row, rng):
    """One exported program for all batches, with its gradients."""
    (symbol,) = export.symbolic_shape("batch")
    operands = row.operands(rng, "float32")
    types = [
        jax.ShapeDtypeStruct((symbol, *o.shape[1:]) if i in row.batched else o.shape, o.dtype) for i, o in enumerate(operands)
    ]
    argnums = tuple(range(len(operands)))

    def loss(function, *operands):
        return sum((y**2).sum() for y in jax.tree.leaves(function(*operands)))

    exported = export.export(jax.jit(jax.grad(partial(loss, row.function), argnums)))(*types)
    for batch in (1, 3):
        some = row.operands(rng, "float32", batch=batch)
        chex.assert_trees_all_close(
            exported.call(*some), jax.grad(partial(loss, row.reference), argnums)(*some), rtol=1e-5, atol=1e-3
        )


def test_an_open_volume_is_refused_in_our_words():
    (symbol,) = export.symbolic_shape("depth")
    x = jax.ShapeDtypeStruct((1, 2, symbol, 8, 8), np.float32)
    with pytest.raises(
        NotImplementedError, match=r"conv3d: every size of `x_in` except the batch .*depth.* Leave only the batch"
    ):
        export.export(jax.jit(lambda x: jax_nki3d.conv3d(x, np.ones((1, 1, 1, 2, 2), np.float32))))(x)


@pytest.mark.parametrize("activation", ["SiLU", "GELU", "GELU_Tanh_Approx", "Swish", "ReLU"])
def test_overflow_before_an_activation_that_vanishes(activation):
    """Under a gradient the value before the activation is kept in 16 bits, where -90000 is -inf; the result is still 0."""
    x, w = np.full((1,) * 5, 300, np.float16), np.full((1,) * 5, -300, np.float16)
    value, gradient = jax.value_and_grad(lambda x: jax_nki3d.conv3d(x, w, activation_fn=activation).sum())(x)
    assert float(value) == 0
    assert float(gradient.sum()) == 0


def test_an_activation_has_no_transpose():
    x, w = np.ones((1,) * 5, np.float32), np.ones((1,) * 5, np.float32)
    f = lambda x: jax_nki3d.conv3d(x, w, activation_fn="ReLU", forward_mode=True)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"activation_fn ReLU is not linear .* Use jax\.vjp"):
        jax.linear_transpose(f, x)(x)


@pytest.mark.parametrize(("kernel", "stride", "size"), [(100, 100, 1050), (100, 130, 1000), (5000, 5000, 10_000)])
def test_long_windows_of_a_pooling_are_short_programs(kernel, stride, size, rng):
    """As many slices as a window has elements would take seconds, or minutes, to compile."""
    x = integers(rng, 1, 2, 2, 3, size)
    ours = partial(jax_nki3d.avg_pooling_3d, kernel_size=(1, 1, kernel), stride=(1, 1, stride))
    y, (dx,) = both_ways(ours, x)
    windows = [x[..., first : first + kernel] for first in range(0, size - kernel + 1, stride)]
    chex.assert_trees_all_close(y, np.stack([w.mean(-1) for w in windows], -1), rtol=1e-5, atol=1e-6)
    ct = np.arange(y.size, dtype=np.float32).reshape(y.shape) % 5
    expected = np.zeros(x.shape, np.float32)
    for o in range(y.shape[-1]):
        expected[..., o * stride : o * stride + kernel] = ct[..., o : o + 1] / kernel
    assert_equal(dx, expected)
    for function in (ours, jax.grad(lambda x: ours(x).sum())):
        assert len(jax.jit(function).lower(x).as_text().splitlines()) < 100


@pytest.mark.parametrize(
    ("kernel", "stride", "front", "size"), [(2, 3, 3, 1), (1, 3, 2, 2), (2, 4, 3, 2), (3, 9, 5, 2), (2, 3, 3, 4)]
)
@pytest.mark.parametrize("maps", [_lax.CPU, _lax.NATIVE], ids=["cpu", "native"])
def test_windows_that_lie_in_the_padding_alone(kernel, stride, front, size, maps, rng):
    """All windows may end before the volume starts: zeros, also on accelerators, whose form of it is run here."""
    x, w = integers(rng, 2, 3, size, 3, 4), integers(rng, kernel, 2, 2, 3, 2)
    settings = {"stride": (stride, 1, 1), "padding": (front, 0, 0, 0, 0, 0)}
    y, gradients = both_ways(partial(jax_nki3d.conv3d, **settings), x, w)
    dy = np.arange(y.size, dtype=np.float32).reshape(y.shape) % 5
    assert_equal(y, oracle.conv3d(x, w, **settings))
    assert_equal(gradients, oracle.conv3d_bwd(dy, x, w, **settings)[:2])
    geometry = conv3d_spec("test", x, w, None, (stride, 1, 1), settings["padding"], 1, None, False, "NCDHW", None).geometry
    assert_equal(maps.correlate(x, w, geometry), np.asarray(y))
    assert_equal(maps.spread(dy, w, geometry), np.asarray(gradients[0]))
    assert_equal(maps.filter_gradient(x, dy, geometry), np.asarray(gradients[1]))
