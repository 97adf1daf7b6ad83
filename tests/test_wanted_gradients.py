# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients that nobody wants are neither computed nor prepared for: counted in compiled programs and in residuals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_nki3d

# With stride 1, each product of each map is one dot of the compiled program.
X = np.ones((1, 3, 5, 6, 7), np.float32)
W = np.ones((2, 2, 2, 3, 4), np.float32)
B = np.ones((4,), np.float32)
OPERATIONS = {"conv3d": jax_nki3d.conv3d, "conv3d_transpose": jax_nki3d.conv3d_transpose}
each_convolution = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())


def dots(function, *operands) -> int:
    """Matrix products in the optimised program."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    assert "convolution(" not in text
    return len(re.findall(r"= \S+ dot\(", text))


def square_loss(operation):
    return lambda x, w, b: (operation(x, w, b) ** 2).sum()


@each_convolution
@pytest.mark.parametrize(
    ("argnums", "products"),
    [((0,), 2), ((1,), 2), ((2,), 1), ((0, 1), 3), ((0, 2), 2), ((1, 2), 2), ((0, 1, 2), 3)],
)
@pytest.mark.parametrize("jit_inside", [False, True])
def test_argnums(operation, argnums, products, jit_inside):
    """The forward product, one more for dx and one more for dw; db is a sum."""
    inner = jax.jit(operation) if jit_inside else operation
    assert dots(jax.grad(square_loss(inner), argnums), X, W, B) == products


@each_convolution
def test_a_linear_loss_needs_no_forward_product(operation):
    weights = np.ones(operation(X, W).shape, np.float32)
    gradient = jax.grad(lambda w, x, weights: (operation(x, w) * weights).sum())
    # Everything is an argument, or some versions of XLA compute it while they compile.
    assert dots(gradient, W, X, weights) == 1


@each_convolution
def test_stop_gradient(operation):
    def loss(x, w, b):
        return square_loss(operation)(x, jax.lax.stop_gradient(w), b)

    assert dots(jax.grad(loss, (0, 1, 2)), X, W, B) == 2


@each_convolution
def test_frozen_layers(operation):
    """Three layers of which some are trained: the frozen front needs no gradient at all, a frozen middle its dx alone."""
    x = np.ones((1, 3, 7, 8, 9), np.float32)
    weights = [np.full((2, 2, 2, 3, 3), 1 / 24, np.float32)] * 3

    def products(trained):
        def loss(some, frozen, x):
            for index in range(3):
                x = operation(x, some[index] if index in trained else frozen[index])
            return (x**2).sum()

        return dots(jax.grad(loss), {index: weights[index] for index in trained}, weights, x)

    assert products([2]) == 3 + 1  # dw of the last
    assert products([1]) == 3 + 2  # dx of the last, dw of the middle
    assert products([0]) == 3 + 3  # dx of two, dw of the first
    assert products([0, 1, 2]) == 3 + 2 + 3  # the data needs no gradient


@each_convolution
@pytest.mark.parametrize(
    "under", [jax.checkpoint, lambda f: jax.checkpoint(jax.jit(f)), jax.vmap], ids=["remat", "jit", "vmap"]
)
def test_under_transformations(operation, under):
    """Flags reach the primitive through other transformations, too."""
    x, w = X, W
    mapped = under is jax.vmap
    if mapped:
        x = x[None]

    def loss(w):
        return (under(lambda x: operation(x, w))(x) ** 2).sum()

    report = jax_nki3d.explain(jax.grad(loss), w)
    gradients = [entry.operation for entry, _ in report.counts if entry.operation.startswith("conv3d_bwd")]
    assert gradients == ["conv3d_bwd (dw)"]


@each_convolution
@pytest.mark.parametrize(("argnum", "kept"), [(0, [W.shape]), (1, [X.shape]), (2, [])])
def test_residuals(operation, argnum, kept):
    """Between the passes only the operands live that the wanted gradient reads."""
    operands = [jnp.asarray(v) for v in (X, W, B)]

    def f(some):
        whole = list(operands)
        whole[argnum] = some
        return operation(*whole)

    _, pullback = jax.vjp(jax.jit(f), operands[argnum])
    assert sorted(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.size) == kept


def test_pooling_keeps_nothing():
    _, pullback = jax.vjp(jax.jit(lambda x: jax_nki3d.avg_pooling_3d(x, 2)), jnp.asarray(X))
    assert jax.tree.leaves(pullback) == []


def test_a_result_that_does_not_matter():
    """A symbolically zero cotangent costs nothing."""

    def loss(w):
        return jax.lax.stop_gradient(jax_nki3d.conv3d(X, w)).sum() + w.sum()

    assert dots(jax.grad(loss), W) == 0


@pytest.mark.parametrize("flags", [(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1) if i or j or k])
def test_conv3d_bwd_computes_its_flags(flags):
    dx, dw, db = map(bool, flags)
    dy = np.ones((1, 4, 4, 5, 6), np.float32)
    run = lambda dy, x, w: jax_nki3d.conv3d_bwd(dy, x, w, compute_dx=dx, compute_dw=dw, compute_db=db)  # noqa: E731
    assert dots(run, dy, X, W) == dx + dw


def test_db_alone_reads_neither_x_nor_filters():
    """The shapes suffice."""
    dy = np.ones((1, 4, 4, 5, 6), np.float32)
    jaxpr = jax.make_jaxpr(lambda dy, x, w: jax_nki3d.conv3d_bwd(dy, x, w, compute_dx=False, compute_dw=False))(dy, X, W)
    assert [eqn.primitive.name for eqn in jaxpr.eqns if X.shape in [v.aval.shape for v in eqn.invars]] == []
