# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the layers share: inputs, and the comparison of our layer's output and gradients with the library's own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

# a few units of 2**-24, as sums are taken in different orders
FLOAT32 = {"atol": 2e-6, "rtol": 2e-6}
# two roundings of a number of at most the scale; the library's layer computes in float32
BFLOAT16 = {"atol": 2.0**-7, "rtol": 0.0}


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def key(seed):
    return jax.random.key(seed, impl="rbg")  # compiles faster


def weigh(y):
    """A loss that weighs every output differently."""
    return jnp.sum(normal(5, y.shape) * y.astype(jnp.float32))


def results(model, parameters, x):
    """Of a model with an `apply`, as linen and Haiku have: the output, and the gradients in the parameters and in the input."""

    @jax.jit
    def both(parameters, x):
        def loss(parameters, x):
            y = model.apply(parameters, x)
            return weigh(y), y

        gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
        return y, *gradients

    return both(parameters, x)


def assert_agree(ours, theirs, tolerance=FLOAT32):
    """Each array is compared on its own scale: gradients are sums of many more products than outputs."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        chex.assert_equal_shape((a, e))
        scale = float(jnp.max(jnp.abs(e.astype(jnp.float32)))) or 1.0
        chex.assert_trees_all_close(np.float32(a) / scale, np.float32(e) / scale, **tolerance)


def rounded(tree):
    """float32 numbers that bfloat16 has, too."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), tree)


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def falls(step, state, count=10):
    """Ten steps of (state) -> (state, loss) lower the loss."""
    losses = []
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies floats and ints
        for _ in range(count):
            state, loss = step(state)
            losses.append(float(loss))
    assert losses[-1] < 0.97 * losses[0], losses


# the settings that Flax's two convolutions share, in NNX and in linen
FLAX_CONV = [
    {"kernel_size": (3, 3, 3)},
    {"kernel_size": (3, 3, 3), "strides": 2},
    {"kernel_size": (2, 3, 4), "strides": (1, 2, 3), "padding": "VALID"},
    {"kernel_size": (3, 1, 2), "strides": (2, 1, 1), "padding": 1, "use_bias": False},
    {"kernel_size": (2, 2, 2), "padding": [(0, 1), (2, 0), (1, 1)]},
    {"kernel_size": (3, 3, 2), "padding": (1, 0, (0, 2)), "kernel_dilation": 2},
    {"kernel_size": (3, 2, 4), "padding": "CIRCULAR", "strides": (1, 2, 1)},
    {"kernel_size": (3, 2, 3), "padding": "REFLECT", "kernel_dilation": (1, 2, 1)},
]
FLAX_TRANSPOSED = [
    {"kernel_size": (2, 2, 2), "strides": (2, 2, 2)},
    {"kernel_size": (3, 3, 3), "strides": 2},
    {"kernel_size": (1, 2, 3), "strides": 3, "transpose_kernel": True},
    {"kernel_size": (3, 4, 2), "strides": (1, 2, 4), "padding": "VALID", "transpose_kernel": True},
    {"kernel_size": (1, 3, 5), "strides": (3, 2, 5), "padding": "VALID", "use_bias": False},
    {"kernel_size": (3, 3, 2), "strides": 2, "kernel_dilation": (2, 1, 3), "transpose_kernel": True},
    {"kernel_size": (3, 2, 3), "strides": (2, 3, 1), "padding": [(0, 5), (4, 0), (3, 4)], "transpose_kernel": True},
    {"kernel_size": (3, 3, 3), "strides": 2, "padding": ((-1, 3), (2, -1), (7, 0))},
    {"kernel_size": (3, 4, 5), "strides": (2, 1, 3), "padding": "CIRCULAR"},
    {"kernel_size": (4, 6, 2), "strides": (2, 3, 4), "padding": "CIRCULAR", "transpose_kernel": True},
    {"kernel_size": (5, 3, 2), "strides": (1, 2, 2), "padding": "CIRCULAR", "kernel_dilation": (3, 2, 1)},
]
