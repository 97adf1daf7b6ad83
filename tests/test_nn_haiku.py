# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Haiku modules against Haiku's own: outputs, gradients, parameters, and what they refuse."""

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from layers import BFLOAT16, FLOAT32, assert_agree, cast, falls, normal, results, rounded

from jax_nki3d.nn.haiku import AvgPool3D, Conv3D, Conv3DTranspose

BIAS = {"b_init": hk.initializers.RandomNormal()}
CONV = [
    {"kernel_shape": 3},
    {"kernel_shape": (2, 3, 4), "stride": (1, 2, 3), "padding": "VALID", "data_format": "NCDHW"},
    {"kernel_shape": (3, 1, 2), "stride": 2, "padding": (1, 1), "with_bias": False},
    {"kernel_shape": (3, 2, 2), "rate": (2, 1, 3), "padding": [(0, 1), (2, 0), (1, 1)], "data_format": "channels_first"},
    {"kernel_shape": 3, "padding": hk.pad.full, "rate": 2},
    {"kernel_shape": (3, 2, 3), "padding": [hk.pad.causal, hk.pad.same, hk.pad.same]},
]
TRANSPOSED = [
    {"kernel_shape": 2, "stride": 2},
    {"kernel_shape": (1, 2, 3), "stride": 3, "data_format": "NCDHW"},
    {"kernel_shape": (3, 4, 2), "stride": (1, 2, 4), "padding": "VALID"},
    {"kernel_shape": (3, 3, 2), "stride": 2, "output_shape": (5, 7, 10)},
    {"kernel_shape": (3, 2, 5), "stride": (2, 3, 1), "output_shape": (8, 13, 9), "padding": "VALID", "data_format": "NCDHW"},
    {"kernel_shape": (3, 2, 3), "stride": (2, 3, 1), "padding": [(0, 5), (4, 0), (3, 4)], "with_bias": False},
]


def network(module, *arguments, **settings):
    return hk.without_apply_rng(hk.transform(lambda x: module(*arguments, **settings)(x)))


def check(ours, theirs, case, x):
    x = jnp.moveaxis(x, -1, 1) if case.get("data_format", "NDHWC") != "NDHWC" else x
    ours, theirs = network(ours, 5, **case, **BIAS), network(theirs, 5, **case, **BIAS)
    parameters = theirs.init(layers.key(0), x)
    chex.assert_trees_all_equal(ours.init(layers.key(0), x), parameters)  # names, shapes and initial values
    a, e = results(ours, parameters, x), results(theirs, parameters, x)
    chex.assert_trees_all_equal_dtypes(a, e)
    assert_agree(a, e)


@pytest.mark.parametrize("case", CONV, ids=range(len(CONV)))
def test_conv_is_haiku_conv(case):
    check(Conv3D, hk.Conv3D, case, normal(0, (2, 6, 7, 9, 3)))


@pytest.mark.parametrize("case", TRANSPOSED, ids=range(len(TRANSPOSED)))
def test_conv_transpose_is_haiku_conv_transpose(case):
    check(Conv3DTranspose, hk.Conv3DTranspose, case, normal(0, (2, 3, 4, 5, 3)))


@pytest.mark.parametrize(("ours", "theirs"), [(Conv3D, hk.Conv3D), (Conv3DTranspose, hk.Conv3DTranspose)])
@pytest.mark.parametrize("data_format", ["NDHWC", "NCDHW"])
def test_one_example_without_a_batch(ours, theirs, data_format):
    x = normal(0, (4, 5, 6, 3) if data_format == "NDHWC" else (3, 4, 5, 6))
    a, e = (network(module, 5, 3, stride=2, data_format=data_format) for module in (ours, theirs))
    parameters = e.init(layers.key(0), x)
    assert_agree(a.apply(parameters, x), e.apply(parameters, x))


@pytest.mark.parametrize(("ours", "theirs"), [(Conv3D, hk.Conv3D), (Conv3DTranspose, hk.Conv3DTranspose)])
def test_bfloat16(ours, theirs):
    """Against Haiku in float32 with the same rounded numbers: its own bfloat16 gradients are sums in bfloat16."""
    a, e = (network(module, 5, (3, 2, 3), stride=2, **BIAS) for module in (ours, theirs))
    x = normal(0, (2, 5, 4, 3, 3), jnp.bfloat16)
    parameters = a.init(layers.key(0), x)
    got = results(a, parameters, x)
    # Haiku makes parameters in the dtype of the input
    chex.assert_trees_all_equal_dtypes(parameters, e.init(layers.key(0), x), got[1])
    assert got[0].dtype == got[2].dtype == e.apply(parameters, x).dtype == jnp.bfloat16
    assert_agree(got, results(e, rounded(parameters), x.astype(jnp.float32)), BFLOAT16)


@pytest.mark.parametrize(("module", "shape"), [(Conv3D, (2, 3, 2, 3, 5)), (Conv3DTranspose, (2, 3, 2, 5, 3))])
def test_mask_and_activation(module, shape):
    mask = np.random.default_rng(0).integers(0, 2, shape).astype(np.float32)
    x = normal(1, (2, 4, 4, 4, 3))
    fused = network(module, 5, (2, 3, 2), mask=mask, activation_fn="GELU")
    theirs = network(hk.Conv3D if module is Conv3D else hk.Conv3DTranspose, 5, (2, 3, 2), mask=mask)
    parameters = fused.init(layers.key(0), x)
    assert_agree(fused.apply(parameters, x), jax.nn.gelu(theirs.apply(parameters, x), approximate=False))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_avg_pool_is_haiku_avg_pool(padding, channels_first, batch):
    """In Haiku's own form of the windows, one int for each axis, and in ours."""
    x = normal(0, (*batch, 5, 6, 7, 3))
    whole = {"window_shape": (2, 3, 2, 1), "strides": (2, 1, 3, 1)}
    if channels_first:
        x = jnp.moveaxis(x, -1, -4)
        whole = {name: (1, *sizes[:3]) for name, sizes in whole.items()}
    theirs, ours, short = (
        network(module, *sizes, padding, channel_axis=-4 if channels_first else -1)
        for module, sizes in ((hk.AvgPool, whole.values()), (AvgPool3D, whole.values()), (AvgPool3D, ((2, 3, 2), (2, 1, 3))))
    )
    with jax.numpy_dtype_promotion("standard"):  # Haiku divides by an int
        expected = results(theirs, {}, x)
    assert_agree(results(ours, {}, x), expected)
    assert_agree(results(short, {}, x), expected)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_avg_pool_rounds_bfloat16_once(padding):
    x = normal(0, (2, 5, 6, 7, 3), jnp.bfloat16)
    ours = results(network(AvgPool3D, (2, 3, 2), 2, padding), {}, x)
    with jax.numpy_dtype_promotion("standard"):  # Haiku divides by an int
        exact = results(network(hk.AvgPool, (2, 3, 2, 1), (2, 2, 2, 1), padding), {}, x.astype(jnp.float32))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(ours))
    chex.assert_trees_all_close(ours[0].astype(jnp.float32), exact[0], atol=0.0, rtol=2.0**-8)
    assert_agree(ours, exact, BFLOAT16)


def test_a_mistake_is_noticed():
    x, net = normal(0, (1, 5, 5, 5, 3)), network(Conv3DTranspose, 3, 3)
    parameters = net.init(layers.key(0), x)
    swapped = jax.tree.map(lambda p: p.swapaxes(3, 4) if p.ndim == 5 else p, parameters)  # shapes cannot tell
    with pytest.raises(AssertionError):
        assert_agree(net.apply(swapped, x), net.apply(parameters, x), BFLOAT16)
    with pytest.raises(AssertionError):
        assert_agree(cast(jnp.float16(net.apply(parameters, x)), jnp.float32), net.apply(parameters, x), FLOAT32)


def model(x):
    coarse = Conv3D(4, 3, stride=2, activation_fn="GELU")(x)
    return Conv3DTranspose(1, 2, stride=2)(coarse) + AvgPool3D(3, 1, "SAME")(x)


def test_training_lowers_the_loss():
    net, tx = hk.without_apply_rng(hk.transform(model)), optax.adam(1e-2)
    x, y = normal(1, (2, 6, 6, 6, 1)), normal(2, (2, 6, 6, 6, 1))
    parameters = net.init(layers.key(0), x)

    @jax.jit
    def step(state):
        parameters, opt_state = state
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - y) ** 2))(parameters)
        updates, opt_state = tx.update(gradients, opt_state)
        return (optax.apply_updates(parameters, updates), opt_state), loss

    falls(step, (parameters, tx.init(parameters)))


def test_the_operations_are_this_library_s():
    net, x = hk.without_apply_rng(hk.transform(model)), normal(1, (1, 4, 4, 4, 1))
    jaxpr = str(jax.make_jaxpr(net.apply)(net.init(layers.key(0), x), x))
    assert "conv3d_transpose" in jaxpr
    assert "avg_pooling_3d" in jaxpr
    assert "conv_general_dilated" not in jaxpr
    assert "reduce_window" not in jaxpr


def run(module, *arguments, shape=(1, 4, 4, 4, 2), **settings):
    return network(module, *arguments, **settings).init(layers.key(0), jnp.ones(shape))


REFUSED = [
    (lambda: run(Conv3D, 1, (3, 3)), ValueError, "`kernel_shape` must be one int or three"),
    (lambda: run(Conv3D, 1, 3, stride=None), TypeError, "`stride` must be"),
    (lambda: run(Conv3D, 1, 3, padding=None), TypeError, "`padding` must"),
    (lambda: run(Conv3D, 1, 3, stride=0), ValueError, "`stride` must be at least 1"),
    (lambda: run(Conv3D, 1, 3, padding="CAUSAL"), ValueError, "`padding` must be"),
    (lambda: run(Conv3D, 1, 3, padding=[(-1, 0)] * 3), ValueError, "`padding` must be at least 0"),
    (lambda: run(Conv3D, 2, 3, feature_group_count=2), NotImplementedError, "`feature_group_count` must be 1"),
    (lambda: run(Conv3D, 1, 3, shape=(2, 1, 4, 4, 4, 2)), ValueError, r"input must be \[B, .* or without B"),
    (lambda: run(Conv3D, 1, 3, mask=np.ones((3, 3, 3))), ValueError, "`mask` must have"),
    (lambda: run(Conv3DTranspose, 1, 3, output_shape=8, padding=[(1, 1)] * 3), ValueError, "must be 'SAME' or 'VALID'"),
    (lambda: run(Conv3DTranspose, 1, 3, 2, output_shape=9), ValueError, "`output_shape` 9 on axis D belongs to an input of 5"),
    (lambda: run(AvgPool3D, 2, 2, [(1, 1)] * 3), ValueError, "`padding` must be 'SAME' or 'VALID'"),
    (lambda: run(AvgPool3D, (2, 2, 2, 2), 1, "SAME"), ValueError, "`window_shape` must be 1 for batch and channels"),
    (lambda: run(AvgPool3D, 2, 2, "SAME", channel_axis=2), ValueError, "`channel_axis` must be"),
    (lambda: run(AvgPool3D, 2, 2, "SAME", shape=(4, 4, 2)), ValueError, "`channel_axis` must be|input must be"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{e.__name__}-{m}" for _, e, m in REFUSED])
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
