# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Flax NNX layers against Flax's own: outputs, gradients, parameters, and what they refuse."""

import chex
import jax
import jax.numpy as jnp
import layers
import numpy as np
import optax
import pytest
from flax import nnx
from layers import BFLOAT16, FLAX_CONV, FLAX_TRANSPOSED, FLOAT32, assert_agree, falls, normal, rounded, weigh

import jax_nki3d
from jax_nki3d.nn.flax_nnx import Conv3D, ConvTranspose3D, avg_pool3d


def rngs(seed):
    return nnx.Rngs(layers.key(seed))


def pair(ours, theirs, case, **more):
    """One layer of ours and one of Flax's with the same parameters, bias not zero."""
    a = ours(3, 5, **case, bias_init=nnx.initializers.normal(1.0), rngs=rngs(7), **more)
    b = theirs(3, 5, **case, bias_init=nnx.initializers.normal(1.0), rngs=rngs(8), **more)
    nnx.update(a, nnx.state(b))
    return a, b


@nnx.jit
def results(layer, x):
    """The output, and the gradients in the parameters and in the input."""

    def loss(layer, x):
        y = layer(x)
        return weigh(y), y

    (of_layer, of_x), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)
    return y, nnx.to_pure_dict(of_layer), of_x


def check(ours, theirs, x):
    a, e = results(ours, x), results(theirs, x)
    chex.assert_trees_all_equal_dtypes(a, e)
    assert_agree(a, e)


@pytest.mark.parametrize("case", FLAX_CONV, ids=str)
def test_conv_is_flax_conv(case):
    check(*pair(Conv3D, nnx.Conv, case), normal(0, (2, 6, 7, 9, 3)))


@pytest.mark.parametrize("case", FLAX_TRANSPOSED, ids=str)
def test_conv_transpose_is_flax_conv_transpose(case):
    check(*pair(ConvTranspose3D, nnx.ConvTranspose, case), normal(0, (2, 3, 4, 5, 3)))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_conv_transpose_has_flax_values_for_every_small_kernel_and_stride(padding):
    """The three axes take different (kernel, stride, dilation), so that 16 layers see 48 combinations."""
    combinations = [(k, s, d) for k in (1, 2, 3, 5) for s in (1, 2, 3, 4) for d in (1, 2, 3)]
    triples = [zip(*combinations[i::16], strict=True) for i in range(16)]
    names = ("kernel_size", "strides", "kernel_dilation")
    layers = [pair(ConvTranspose3D, nnx.ConvTranspose, dict(zip(names, t, strict=True)), padding=padding) for t in triples]
    outputs = nnx.jit(lambda layers, x: [(ours(x), theirs(x)) for ours, theirs in layers])(layers, normal(0, (1, 3, 2, 4, 3)))
    for ours, theirs in outputs:
        chex.assert_trees_all_close(ours, theirs, **FLOAT32)


@pytest.mark.parametrize("batch", [(), (2, 3), (2, 0)])
@pytest.mark.parametrize("ours", [Conv3D, ConvTranspose3D])
def test_batch_dims(ours, batch):
    layer = ours(3, 5, (3, 3, 3), strides=2, rngs=rngs(0))
    x = normal(1, (*batch, 4, 4, 6, 3))
    y = layer(x)
    size = (2, 2, 3) if ours is Conv3D else (8, 8, 12)
    assert y.shape == (*batch, *size, 5)
    if x.size:
        theirs = {Conv3D: nnx.Conv, ConvTranspose3D: nnx.ConvTranspose}[ours](3, 5, (3, 3, 3), strides=2, rngs=rngs(0))
        chex.assert_trees_all_close(y, theirs(x), **FLOAT32)


@pytest.mark.parametrize(("ours", "theirs"), [(Conv3D, nnx.Conv), (ConvTranspose3D, nnx.ConvTranspose)])
@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_move_both_ways(ours, theirs, use_bias):
    a, b = (layer(3, 5, (2, 3, 4), use_bias=use_bias, rngs=rngs(3)) for layer in (ours, theirs))
    # the same streams give the same initial values, under the same names
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(a)), nnx.to_pure_dict(nnx.state(b)))
    x = normal(2, (2, 4, 4, 4, 3))
    c, d = (layer(3, 5, (2, 3, 4), use_bias=use_bias, rngs=rngs(9)) for layer in (ours, theirs))
    nnx.update(d, nnx.state(a))
    chex.assert_trees_all_close(d(x), a(x), **FLOAT32)
    nnx.update(c, nnx.state(b))
    chex.assert_trees_all_close(c(x), b(x), **FLOAT32)


@pytest.mark.parametrize("ours", [Conv3D, ConvTranspose3D])
def test_variables_carry_metadata(ours):
    axes = (None, None, None, "in", "out")
    layer = ours(3, 5, 3, rngs=rngs(0), kernel_metadata={"note": axes}, bias_metadata={"note": axes[4:]})
    assert (layer.kernel.note, layer.bias.note) == (axes, ("out",))
    initial = nnx.with_metadata(nnx.initializers.lecun_normal(), note=axes)
    assert ours(3, 5, 3, kernel_init=initial, rngs=rngs(0)).kernel.note == axes


def test_transposed_kernel_shape():
    layer = ConvTranspose3D(3, 5, (1, 2, 3), transpose_kernel=True, rngs=rngs(0))
    assert layer.kernel.shape == (1, 2, 3, 5, 3)


@pytest.mark.parametrize(("ours", "theirs"), [(Conv3D, nnx.Conv), (ConvTranspose3D, nnx.ConvTranspose)])
@pytest.mark.parametrize("dtypes", [{"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}], ids=str)
def test_bfloat16(ours, theirs, dtypes):
    """Against Flax in float32 with the same rounded numbers: its own bfloat16 gradients are sums in bfloat16."""
    case = {"kernel_size": (3, 2, 3), "strides": 2}
    layer, in_flax = pair(ours, theirs, case, **dtypes)
    reference, x = theirs(3, 5, **case, rngs=rngs(0)), normal(0, (2, 5, 4, 3, 3), jnp.bfloat16)
    nnx.update(reference, rounded(nnx.state(layer)))
    y, of_layer, of_x = results(layer, x)
    assert y.dtype == of_x.dtype == jax.eval_shape(in_flax, x).dtype == jnp.bfloat16
    assert of_layer["kernel"].dtype == layer.kernel.dtype
    assert_agree((y, of_layer, of_x), results(reference, x.astype(jnp.float32)), BFLOAT16)


@pytest.mark.parametrize(("ours", "theirs"), [(Conv3D, nnx.Conv), (ConvTranspose3D, nnx.ConvTranspose)])
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.int32])
def test_inputs_are_promoted_as_in_flax(ours, theirs, x_dtype):
    a, b = pair(ours, theirs, {"kernel_size": (3, 2, 3), "strides": 2})
    x = (3 * normal(0, (2, 5, 4, 3, 3))).astype(x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        assert a(x).dtype == b(x).dtype == jnp.float32
        chex.assert_trees_all_close(a(x), b(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [Conv3D, ConvTranspose3D])
def test_fused_activation(layer):
    fused, plain = (layer(3, 5, (3, 3, 3), strides=2, activation_fn=f, rngs=rngs(0)) for f in ("GELU", None))
    x = normal(1, (2, 4, 4, 4, 3))
    chex.assert_trees_all_close(fused(x), jax.nn.gelu(plain(x), approximate=False), **FLOAT32)


def flax_avg_pool(*arguments):
    with jax.numpy_dtype_promotion("standard"):  # Flax divides by an int32
        return nnx.avg_pool(*arguments)


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("strides", [None, (2, 3, 1)])
@pytest.mark.parametrize("window", [(2, 2, 2), (3, 4, 1)])
@pytest.mark.parametrize("padding", ["SAME", "VALID", "pairs", "one-sided"])
def test_avg_pool_is_flax_avg_pool(window, strides, padding, count_include_pad):
    if padding == "pairs":
        padding = tuple((k // 2, k // 2) for k in window)
    elif padding == "one-sided":
        padding = [(0, k - 1) for k in window]
    x, arguments = normal(0, (2, 5, 6, 7, 3)), (window, strides, padding, count_include_pad)

    def output_and_gradient(pool):
        y, pullback = jax.vjp(lambda x: pool(x, *arguments), x)
        return y, pullback(y)

    ours, theirs = jax.jit(lambda: (output_and_gradient(avg_pool3d), output_and_gradient(flax_avg_pool)))()
    chex.assert_trees_all_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("batch", [(), (2, 3), (2, 0)])
def test_avg_pool_batch_dims(batch):
    x = normal(0, (*batch, 4, 5, 6, 2))
    y = avg_pool3d(x, 2, 2, "SAME")
    assert y.shape == (*batch, 2, 3, 3, 2)
    if x.size:
        chex.assert_trees_all_close(y, flax_avg_pool(x, (2, 2, 2), (2, 2, 2), "SAME"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 1)] * 3])
@pytest.mark.parametrize("count_include_pad", [True, False])
def test_avg_pool_rounds_bfloat16_once(padding, count_include_pad):
    x = normal(0, (2, 5, 6, 7, 3), jnp.bfloat16)
    arguments = ((2, 3, 2), (2, 2, 1), padding, count_include_pad)
    y = jax.jit(lambda x: avg_pool3d(x, *arguments))(x)
    exact = flax_avg_pool(x.astype(jnp.float32), *arguments)
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_close(y.astype(jnp.float32), exact, atol=0.0, rtol=2.0**-8)
    ours = jax.grad(lambda x: weigh(avg_pool3d(x, *arguments)))(x)
    assert ours.dtype == jnp.bfloat16
    assert_agree(ours, jax.grad(lambda x: weigh(flax_avg_pool(x, *arguments)))(x.astype(jnp.float32)), BFLOAT16)


def test_training_lowers_the_loss():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.down = Conv3D(1, 4, (3, 3, 3), strides=2, activation_fn="GELU", rngs=rngs)
            self.up = ConvTranspose3D(4, 1, (2, 2, 2), strides=2, rngs=rngs)

        def __call__(self, x):
            return self.up(self.down(x)) + avg_pool3d(x, (3, 3, 3), padding="SAME")

    model = Net(rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x, y = normal(1, (2, 6, 6, 6, 1)), normal(2, (2, 6, 6, 6, 1))

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    falls(lambda state: (state, step(model, optimizer)), None)


def test_the_operations_are_this_library_s():
    layers = (Conv3D(1, 1, 3, rngs=rngs(0)), ConvTranspose3D(1, 1, 3, rngs=rngs(0)), lambda x: avg_pool3d(x, 2))
    for layer, name in zip(layers, ("conv3d", "conv3d_transpose", "avg_pooling_3d"), strict=True):
        assert name in str(jax.make_jaxpr(layer)(np.ones((1, 4, 4, 4, 1), np.float32)))
    with jax_nki3d.options(implementation="lax"):
        assert layers[0](np.ones((1, 4, 4, 4, 1), np.float32)).shape == (1, 4, 4, 4, 1)


REFUSED = [
    (lambda: Conv3D(1, 1, (3, 3), rngs=rngs(0)), ValueError, "`kernel_size` must be one int or three"),
    (lambda: Conv3D(1, 1, 3, strides=0, rngs=rngs(0)), ValueError, "`strides` must be at least 1"),
    (lambda: Conv3D(1, 1, 3, strides=1.5, rngs=rngs(0)), TypeError, "`strides` must hold ints"),
    (lambda: Conv3D(1, 1, 3, padding="CAUSAL", rngs=rngs(0)), ValueError, "`padding` must be .* jnp.pad"),
    (lambda: Conv3D(1, 1, 3, padding=-1, rngs=rngs(0)), ValueError, "`padding` must be at least 0"),
    (lambda: Conv3D(1, 1, 3, padding=((1, 2, 3),) * 3, rngs=rngs(0)), ValueError, "`padding` must be .* pairs"),
    (lambda: Conv3D(1, 1, 3, padding=(1, 1), rngs=rngs(0)), ValueError, "`padding` must be .* pairs"),
    (lambda: Conv3D(1, 1, 3, kernel_dilation="2", rngs=rngs(0)), TypeError, "`kernel_dilation` must be one int or three"),
    (
        lambda: Conv3D(2, 1, 3, rngs=rngs(0))(jnp.ones((4, 4, 4, 1))),
        ValueError,
        r"input must be \[\.\.\., D, H, W, 2 channels\]",
    ),
    (lambda: Conv3D(2, 1, 3, rngs=rngs(0))(jnp.ones((4, 4, 2))), ValueError, "input must be"),
    (lambda: ConvTranspose3D(1, 1, 3, padding="REFLECT", rngs=rngs(0)), ValueError, "`padding` must be"),
    (lambda: Conv3D(1, 1, 3, mask=np.ones((3, 3, 3)), rngs=rngs(0))(jnp.ones((4, 4, 4, 1))), ValueError, "`mask` must have"),
    (
        lambda: ConvTranspose3D(1, 1, 3, padding=0, rngs=rngs(0))(jnp.ones((2, 4, 4, 1))),
        ValueError,
        "nothing is left on axis D: .* `padding` adds outputs",
    ),
    (lambda: avg_pool3d(jnp.ones((4, 4, 1)), 2), ValueError, "input must be"),
    (lambda: avg_pool3d(jnp.ones((4, 4, 4, 1)), 2, padding=1), TypeError, r"pass \[\(1, 1\)\] \* 3"),
    (lambda: avg_pool3d(jnp.ones((4, 4, 4, 1)), 2, padding=[(0, 2)] * 3), ValueError, "smaller than `window_shape`"),
    (lambda: avg_pool3d(jnp.ones((4, 4, 4, 1)), 2, padding="FULL"), ValueError, "`padding` must be"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{e.__name__}-{m}" for _, e, m in REFUSED])
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
