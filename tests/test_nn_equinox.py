# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Equinox layers against Equinox's own: outputs, gradients, weights, and what they refuse."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import layers
import optax
import pytest
from layers import BFLOAT16, assert_agree, cast, falls, normal, rounded, weigh

from jax_nki3d.nn.equinox import AvgPool3d, Conv3d, ConvTranspose3d

CONV = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3, 4), "stride": (1, 2, 3), "padding": "SAME"},
    {"kernel_size": (2, 3, 4), "padding": "SAME_LOWER", "dilation": (2, 1, 1)},
    {"kernel_size": (3, 1, 2), "padding": (1, 0, 1), "use_bias": False},
    {"kernel_size": 2, "padding": ((0, 1), (2, 0), (1, 1)), "dilation": 2},
    {"kernel_size": (3, 2, 3), "padding": "SAME", "padding_mode": "circular", "stride": 2},
    {"kernel_size": (3, 2, 3), "padding": "SAME_LOWER", "padding_mode": "REFLECT"},
    {"kernel_size": (3, 2, 3), "padding": ((2, 1), (0, 1), (3, 3)), "padding_mode": "REPLICATE"},
    {"kernel_size": (3, 2, 3), "padding": "VALID", "padding_mode": "REFLECT"},
]
TRANSPOSED = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": (1, 2, 3), "stride": (3, 2, 3), "padding": "VALID", "output_padding": (2, 0, 1)},
    {"kernel_size": (3, 4, 2), "stride": (1, 2, 4), "padding": "SAME"},
    {"kernel_size": (3, 4, 2), "stride": (1, 3, 2), "padding": "SAME_LOWER", "output_padding": (0, 2, 1)},
    {"kernel_size": (3, 3, 2), "stride": 2, "dilation": (2, 1, 3), "padding": ((1, 0), (0, 2), (1, 1)), "use_bias": False},
    {"kernel_size": (3, 4, 5), "stride": (1, 2, 2), "padding": "SAME", "padding_mode": "CIRCULAR"},
    {"kernel_size": (5, 2, 3), "stride": (2, 1, 3), "padding": "SAME_LOWER", "padding_mode": "CIRCULAR", "dilation": (1, 3, 2)},
]
each_pair = pytest.mark.parametrize(
    ("ours", "theirs"), [(Conv3d, eqx.nn.Conv3d), (ConvTranspose3d, eqx.nn.ConvTranspose3d)], ids=["conv", "transpose"]
)


@eqx.filter_jit
def results(layer, x):
    """For a batch: the output, and the gradients in the weights and in the input."""

    def loss(both):
        y = jax.vmap(both[0])(both[1])
        return weigh(y), y

    (of_layer, of_x), y = eqx.filter_grad(loss, has_aux=True)((layer, x))
    return y, of_layer.weight, of_layer.bias, of_x


def check(ours, theirs, case, x):
    ours, theirs = (layer(3, 5, **case, key=layers.key(0)) for layer in (ours, theirs))
    # one key, one initial value
    chex.assert_trees_all_equal((ours.weight, ours.bias), (theirs.weight, theirs.bias))
    a, e = results(ours, x), results(theirs, x)
    chex.assert_trees_all_equal_dtypes(a, e)
    assert_agree(a, e)


@pytest.mark.parametrize("case", CONV, ids=str)
def test_conv_is_equinox_conv(case):
    check(Conv3d, eqx.nn.Conv3d, case, normal(0, (2, 3, 6, 7, 9)))


@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
def test_conv_transpose_is_equinox_conv_transpose(case):
    check(ConvTranspose3d, eqx.nn.ConvTranspose3d, case, normal(0, (2, 3, 3, 4, 5)))


@each_pair
def test_weights_move_both_ways(ours, theirs):
    a, b = ours(3, 5, 3, key=layers.key(0)), theirs(3, 5, 3, key=layers.key(1))
    assert isinstance(a, theirs)  # so that code that looks for convolutions finds ours
    of = lambda layer: (layer.weight, layer.bias)  # noqa: E731 - the form of Equinox's own examples
    x = normal(0, (3, 4, 4, 4))
    assert_agree(eqx.tree_at(of, a, of(b))(x), b(x))
    assert_agree(eqx.tree_at(of, b, of(a))(x), a(x))


@each_pair
def test_bfloat16(ours, theirs):
    """Against Equinox in float32 with the same rounded numbers: its own bfloat16 gradients are sums in bfloat16."""
    case, x = {"kernel_size": (3, 2, 3), "stride": 2}, normal(0, (2, 3, 5, 4, 3), jnp.bfloat16)
    layer = ours(3, 5, **case, dtype=jnp.bfloat16, key=layers.key(0))
    reference = theirs(3, 5, **case, key=layers.key(1))
    of = lambda layer: (layer.weight, layer.bias)  # noqa: E731
    reference = eqx.tree_at(of, reference, rounded(of(layer)))
    a = results(layer, x)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(a))
    assert_agree(a, results(reference, x.astype(jnp.float32)), BFLOAT16)


@each_pair
def test_dtypes_are_not_promoted_as_in_equinox(ours, theirs):
    x = normal(0, (3, 4, 4, 4), jnp.bfloat16)
    for layer in (ours, theirs):
        with pytest.raises(TypeError):
            layer(3, 5, 3, key=layers.key(0))(x)


@each_pair
def test_fused_activation(ours, theirs):
    x = normal(1, (3, 4, 4, 4))
    fused, plain = ours(3, 5, 3, key=layers.key(0), activation_fn="GELU"), theirs(3, 5, 3, key=layers.key(0))
    assert_agree(fused(x), jax.nn.gelu(plain(x), approximate=False))


POOLS = [
    {"kernel_size": 2},
    {"kernel_size": (2, 3, 2), "stride": 2},
    {"kernel_size": 3, "stride": (2, 1, 3), "padding": 1},
    {"kernel_size": (2, 3, 1), "stride": 2, "padding": ((1, 0), (0, 2), (1, 1))},
    {"kernel_size": (2, 3, 2), "stride": 2, "use_ceil": True},
    {"kernel_size": 3, "stride": 2, "padding": (1, 0, 1), "use_ceil": True},
]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_avg_pool_is_equinox_avg_pool(case):
    x = normal(0, (2, 3, 6, 7, 8))

    def both(pool):
        return jax.value_and_grad(lambda x: weigh(jax.vmap(pool)(x)))(x), jax.vmap(pool)(x)

    assert_agree(both(AvgPool3d(**case)), both(eqx.nn.AvgPool3d(**case)))


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_avg_pool_rounds_bfloat16_once(case):
    x = normal(0, (3, 5, 6, 7), jnp.bfloat16)

    def both(pool, x):
        return pool(x), jax.grad(lambda x: weigh(pool(x)))(x)

    ours, exact = both(AvgPool3d(**case), x), both(eqx.nn.AvgPool3d(**case), x.astype(jnp.float32))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in ours)
    chex.assert_trees_all_close(ours[0].astype(jnp.float32), exact[0], atol=2.0**-20, rtol=2.0**-8)
    assert_agree(ours, exact, BFLOAT16)


def test_a_mistake_is_noticed():
    x, layer = normal(0, (3, 5, 5, 5)), ConvTranspose3d(3, 5, 3, key=layers.key(0))
    flipped = eqx.tree_at(lambda layer: layer.weight, layer, layer.weight[:, :, ::-1, ::-1, ::-1])
    with pytest.raises(AssertionError):
        assert_agree(flipped(x), layer(x), BFLOAT16)
    with pytest.raises(AssertionError):
        assert_agree(cast(jnp.float16(layer(x)), jnp.float32), layer(x))


class Net(eqx.Module):
    """Every layer once."""

    down: Conv3d
    up: ConvTranspose3d
    pool: AvgPool3d

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.down = Conv3d(1, 4, 3, stride=2, padding=1, activation_fn="GELU", key=a)
        self.up = ConvTranspose3d(4, 1, 2, stride=2, key=b)
        self.pool = AvgPool3d(3, padding=1)

    def __call__(self, x):
        return self.up(self.down(x)) + self.pool(x)


def test_training_lowers_the_loss():
    model, tx = Net(layers.key(0)), optax.adam(1e-2)
    x, y = normal(1, (2, 1, 6, 6, 6)), normal(2, (2, 1, 6, 6, 6))

    @eqx.filter_jit
    def step(state):
        model, opt_state = state
        loss, gradients = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
        updates, opt_state = tx.update(gradients, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), loss

    falls(step, (model, tx.init(eqx.filter(model, eqx.is_inexact_array))))


def test_the_operations_are_this_library_s():
    jaxpr = str(jax.make_jaxpr(jax.vmap(Net(layers.key(0))))(normal(1, (2, 1, 4, 4, 4))))
    assert "conv3d_transpose" in jaxpr
    assert "avg_pooling_3d" in jaxpr
    assert "conv_general_dilated" not in jaxpr
    assert "reduce_window" not in jaxpr


def conv(*arguments, **settings):
    return Conv3d(*arguments, **settings, key=layers.key(0))


def transposed(*arguments, **settings):
    return ConvTranspose3d(*arguments, **settings, key=layers.key(0))


REFUSED = [
    (lambda: conv(1, 1, (3, 3)), ValueError, "`kernel_size` must be one int or three"),
    (lambda: conv(1, 1, 3, stride=0), ValueError, "`stride` must be at least 1"),
    (lambda: conv(1, 1, 3, padding="CAUSAL"), ValueError, "`padding` must be"),
    (lambda: conv(1, 1, 3, padding=-1), ValueError, "`padding` must be at least 0"),
    (lambda: conv(2, 2, 3, groups=2), NotImplementedError, "`groups` must be 1"),
    (lambda: conv(1, 1, 3, padding_mode="MIRROR"), ValueError, "`padding_mode` must be"),
    (lambda: conv(2, 1, 3)(jnp.ones((1, 4, 4, 4))), ValueError, r"input must be \[2 channels, D, H, W\]"),
    (lambda: conv(2, 1, 3)(jnp.ones((5, 2, 4, 4, 4))), ValueError, "with jax.vmap"),
    (lambda: transposed(2, 2, 3, groups=2), NotImplementedError, "`groups` must be 1"),
    (lambda: transposed(1, 1, 3, padding_mode="REFLECT"), NotImplementedError, "`padding_mode` must be"),
    (lambda: transposed(1, 1, 3, padding=3)(jnp.ones((1, 2, 4, 4))), ValueError, "nothing is left on axis D"),
    (lambda: transposed(1, 1, 3, 2, output_padding=2), ValueError, "`output_padding` must be smaller than `stride`"),
    (lambda: AvgPool3d(2, padding=3), ValueError, "`padding` must not be larger than `kernel_size`"),
    (lambda: AvgPool3d(2, padding="SAME"), ValueError, "`padding` must be"),
    (lambda: AvgPool3d(2)(jnp.ones((4, 4, 4))), ValueError, "input must be"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{e.__name__}-{m}" for _, e, m in REFUSED])
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
