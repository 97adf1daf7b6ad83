# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Flax linen layers against Flax's own: outputs, gradients, variables, and what they refuse."""

import chex
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from layers import BFLOAT16, FLAX_CONV, FLAX_TRANSPOSED, FLOAT32, assert_agree, cast, falls, normal, results, rounded

from jax_nki3d.nn import flax_nnx
from jax_nki3d.nn.flax_linen import Conv3D, ConvTranspose3D, avg_pool3d, conv_general_dilated

BIAS = {"bias_init": nn.initializers.normal(1.0)}
each_pair = pytest.mark.parametrize(("ours", "theirs"), [(Conv3D, nn.Conv), (ConvTranspose3D, nn.ConvTranspose)])


def check(ours, theirs, case, x):
    ours, theirs = ours(5, **case, **BIAS), theirs(5, **case, **BIAS)
    variables = theirs.init(layers.key(0), x)
    chex.assert_trees_all_equal(ours.init(layers.key(0), x), variables)  # one key, one initial value
    a, e = results(ours, variables, x), results(theirs, variables, x)
    chex.assert_trees_all_equal_dtypes(a, e)
    assert_agree(a, e)


@pytest.mark.parametrize("case", FLAX_CONV, ids=str)
def test_conv_is_flax_conv(case):
    check(Conv3D, nn.Conv, case, normal(0, (2, 6, 7, 9, 3)))


@pytest.mark.parametrize("case", FLAX_TRANSPOSED, ids=str)
def test_conv_transpose_is_flax_conv_transpose(case):
    check(ConvTranspose3D, nn.ConvTranspose, case, normal(0, (2, 3, 4, 5, 3)))


@each_pair
@pytest.mark.parametrize("batch", [(), (2, 3), (2, 0)])
def test_batch_dims(ours, theirs, batch):
    x = normal(1, (*batch, 4, 4, 6, 3))
    y, variables = ours(5, (3, 3, 3), strides=2).init_with_output(layers.key(0), x)
    assert y.shape == (*batch, *((2, 2, 3) if ours is Conv3D else (8, 8, 12)), 5)
    if x.size:
        assert_agree(y, theirs(5, (3, 3, 3), strides=2).apply(variables, x))


@each_pair
@pytest.mark.parametrize("dtypes", [{"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}], ids=str)
def test_bfloat16(ours, theirs, dtypes):
    """Against Flax in float32 with the same rounded numbers: its own bfloat16 gradients are sums in bfloat16."""
    case, x = {"kernel_size": (3, 2, 3), "strides": 2, **BIAS}, normal(0, (2, 5, 4, 3, 3), jnp.bfloat16)
    layer = ours(5, **case, **dtypes)
    variables = layer.init(layers.key(0), x)
    a = results(layer, variables, x)
    assert a[0].dtype == a[2].dtype == theirs(5, **case, **dtypes).apply(variables, x).dtype == jnp.bfloat16
    chex.assert_trees_all_equal_dtypes(a[1], variables)
    assert_agree(a, results(theirs(5, **case), rounded(variables), x.astype(jnp.float32)), BFLOAT16)


@each_pair
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.int32])
def test_inputs_are_promoted_as_in_flax(ours, theirs, x_dtype):
    x = (3 * normal(0, (2, 5, 4, 3, 3))).astype(x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        y, variables = ours(5, (3, 2, 3), strides=2).init_with_output(layers.key(0), x)
        expected = theirs(5, (3, 2, 3), strides=2).apply(variables, x)
    assert y.dtype == expected.dtype == jnp.float32
    assert_agree(y, expected)


@each_pair
def test_mask_and_activation(ours, theirs):
    mask = np.random.default_rng(0).integers(0, 2, (2, 3, 2, 3, 5)).astype(np.float32)
    x = normal(1, (2, 4, 4, 4, 3))
    fused = ours(5, (2, 3, 2), mask=mask, activation_fn="GELU")
    y, variables = fused.init_with_output(layers.key(0), x)
    plain = theirs(5, (2, 3, 2), mask=mask).apply(variables, x)
    assert_agree(y, jax.nn.gelu(plain, approximate=False))


@each_pair
@pytest.mark.parametrize("mask_dtype", [jnp.float32, jnp.bfloat16, jnp.bool_])
def test_a_mask_is_promoted_as_in_flax(ours, theirs, mask_dtype):
    mask, x = jnp.ones((2, 3, 2, 3, 5), mask_dtype), normal(1, (2, 4, 4, 4, 3), jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        y, variables = ours(5, (2, 3, 2), mask=mask, param_dtype=jnp.bfloat16).init_with_output(layers.key(0), x)
        expected = theirs(5, (2, 3, 2), mask=mask, param_dtype=jnp.bfloat16).apply(variables, x)
    assert y.dtype == expected.dtype
    assert_agree(y, expected.astype(jnp.float32), BFLOAT16)


def test_the_pooling_is_that_of_nnx():
    """Flax has one function, too; tests/test_nn_flax_nnx.py compares it with Flax's."""
    assert avg_pool3d is flax_nnx.avg_pool3d
    assert nn.avg_pool is nnx.avg_pool or nn.avg_pool.__code__.co_code == nnx.avg_pool.__code__.co_code


def test_a_mistake_is_noticed():
    """The tolerances would not let numbers of half the precision pass."""
    x, layer = normal(0, (1, 5, 5, 5, 3)), Conv3D(5, (3, 3, 3))
    y, variables = layer.init_with_output(layers.key(0), x)
    coarse = jnp.float16(layer.apply(variables, x))
    tiny = cast(y.astype(jnp.float8_e4m3fn), jnp.float32)
    for wrong, tolerance in ((coarse, FLOAT32), (tiny, BFLOAT16), (y[::-1, ::-1], BFLOAT16)):
        with pytest.raises(AssertionError):
            assert_agree(wrong, y, tolerance)


class Net(nn.Module):
    """Every layer once, and Flax's own convolution with ours inside."""

    @nn.compact
    def __call__(self, x):
        fine = nn.Conv(4, (3, 3, 3), conv_general_dilated=conv_general_dilated)(x)
        coarse = Conv3D(4, (3, 3, 3), strides=2, activation_fn="GELU")(fine)
        return ConvTranspose3D(1, (2, 2, 2), strides=(2, 2, 2))(coarse) + avg_pool3d(x, (3, 3, 3), padding="SAME")


def test_training_lowers_the_loss():
    model, tx = Net(), optax.adam(1e-2)
    x, y = normal(1, (2, 6, 6, 6, 1)), normal(2, (2, 6, 6, 6, 1))
    variables = model.init(layers.key(0), x)
    assert set(variables["params"]) == {"Conv_0", "Conv3D_0", "ConvTranspose3D_0"}

    @jax.jit
    def step(state):
        variables, opt_state = state
        loss, gradients = jax.value_and_grad(lambda v: jnp.mean((model.apply(v, x) - y) ** 2))(variables)
        updates, opt_state = tx.update(gradients, opt_state)
        return (optax.apply_updates(variables, updates), opt_state), loss

    falls(step, (variables, tx.init(variables)))


def test_the_operations_are_this_library_s():
    x = normal(0, (1, 4, 4, 4, 1))
    jaxpr = str(jax.make_jaxpr(lambda x: Net().init_with_output(layers.key(0), x)[0])(x))
    assert "conv3d_transpose" in jaxpr
    assert "avg_pooling_3d" in jaxpr
    assert "conv_general_dilated" not in jaxpr
    assert "reduce_window" not in jaxpr


def apply(layer, shape=(1, 4, 4, 4, 2)):
    return layer.init_with_output(layers.key(0), jnp.ones(shape))


REFUSED = [
    (lambda: apply(Conv3D(1, (3, 3))), ValueError, "`kernel_size` must be one int or three"),
    (lambda: apply(Conv3D(1, 3, strides=0)), ValueError, "`strides` must be at least 1"),
    (lambda: apply(Conv3D(1, 3, padding="CAUSAL")), ValueError, "`padding` must be .* jnp.pad"),
    (lambda: apply(Conv3D(1, 3, padding=((1, 2, 3),) * 3)), ValueError, "`padding` must be .* pairs"),
    (lambda: apply(Conv3D(2, 3, feature_group_count=2)), NotImplementedError, "`feature_group_count` must be 1"),
    (lambda: apply(Conv3D(1, 3, input_dilation=2)), NotImplementedError, "`input_dilation` must be"),
    (
        lambda: apply(Conv3D(1, 3, conv_general_dilated=jax.lax.conv_general_dilated)),
        NotImplementedError,
        "`conv_general_dilated`",
    ),
    (lambda: apply(Conv3D(1, 3, mask=np.ones((3, 3, 3)))), ValueError, "`mask` must have"),
    (lambda: apply(Conv3D(1, 3), (4, 4, 2)), ValueError, "input must be"),
    (lambda: apply(ConvTranspose3D(1, 3, padding="REFLECT")), ValueError, "`padding` must be"),
    (lambda: apply(ConvTranspose3D(1, 3, padding=0), (1, 2, 4, 4, 1)), ValueError, "nothing is left on axis D"),
    (lambda: apply(ConvTranspose3D(1, 3, preferred_element_type=jnp.float32)), NotImplementedError, "`preferred_element_type`"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{e.__name__}-{m}" for _, e, m in REFUSED])
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
