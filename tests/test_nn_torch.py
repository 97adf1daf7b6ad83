# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`from_torch` on entries of state dicts, and the settings it gives for each library. tests/with_torch has live modules."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import layers
import numpy as np
import oracle
import pytest
from flax import nnx
from layers import assert_agree, normal

from jax_nki3d.nn import equinox, flax_linen, flax_nnx, haiku
from jax_nki3d.nn.torch import from_torch

RNG = np.random.default_rng(0)
CONV = {"weight": RNG.integers(-3, 4, (4, 3, 3, 2, 4)).astype(np.float32), "bias": RNG.integers(-3, 4, 4).astype(np.float32)}
UP = {"weight": RNG.integers(-3, 4, (3, 4, 3, 2, 4)).astype(np.float32), "bias": RNG.integers(-3, 4, 4).astype(np.float32)}
X = RNG.integers(-3, 4, (2, 3, 5, 6, 7)).astype(np.float32)


def make(kind, **more):
    entries = {"Conv3d": CONV, "ConvTranspose3d": UP, "AvgPool3d": None}[kind]
    return from_torch(entries, kind=kind, **more)


def test_a_convolution_has_the_values_of_the_oracle():
    layer = make("Conv3d", stride=(1, 2, 2), padding=(2, 0, 1), dilation=(1, 2, 1))
    filters = CONV["weight"].transpose(2, 3, 4, 1, 0)
    expected = oracle.conv3d(X, filters, CONV["bias"], stride=(1, 2, 2), padding=(2, 0, 1), dilation=(1, 2, 1))
    np.testing.assert_array_equal(layer(X), expected)
    np.testing.assert_array_equal(layer(X[0]), expected[0])


def test_a_transposed_convolution_has_the_values_of_the_oracle():
    layer = make("ConvTranspose3d", stride=(1, 2, 3), padding=(2, 0, 1), output_padding=(0, 1, 2))
    flipped = UP["weight"].transpose(2, 3, 4, 0, 1)[::-1, ::-1, ::-1]
    settings = {"stride": (1, 2, 3), "padding": (2, 0, 1), "output_padding": (0, 1, 2)}
    expected = oracle.conv3d_transpose(X, flipped, UP["bias"], **settings)
    np.testing.assert_array_equal(layer(X), expected)
    unflipped = from_torch(UP | {"weight": UP["weight"][:, :, ::-1, ::-1, ::-1]}, kind="ConvTranspose3d", stride=(1, 2, 3))
    assert not np.array_equal(unflipped(X), make("ConvTranspose3d", stride=(1, 2, 3))(X))


@pytest.mark.parametrize("count", [True, False])
def test_a_pooling_has_the_values_of_the_oracle(count):
    layer = make("AvgPool3d", kernel_size=(2, 3, 2), padding=(1, 0, 1), count_include_pad=count)
    share = oracle.shares(X.shape[2:], (2, 3, 2), (2, 3, 2), (1, 0, 1), count)
    expected = oracle.avg_pooling_3d(X, share, kernel=(2, 3, 2), padding=(1, 0, 1))
    np.testing.assert_allclose(layer(X), expected, rtol=1e-6)


def test_same_padding_is_torch_s():
    """An even kernel has the odd zero behind, as lax's "SAME" at a stride of 1."""
    layer = make("Conv3d", padding="same")
    assert layer.padding == ((1, 1), (0, 1), (1, 2))
    assert layer(X).shape == (2, 4, 5, 6, 7)
    assert make("Conv3d", padding="valid").padding == ((0, 0),) * 3


def test_dtypes_and_prefixes():
    entries = {"net.3.weight": jnp.asarray(CONV["weight"], jnp.bfloat16)}
    layer = from_torch(entries, kind="Conv3d", prefix="net.3.")
    assert layer.filters.dtype == jnp.bfloat16
    assert layer.bias is None
    assert layer(jnp.asarray(X, jnp.bfloat16)).dtype == jnp.bfloat16


def test_weights_in_the_other_byte_order():
    swapped = {name: value.astype(value.dtype.newbyteorder("S")) for name, value in CONV.items()}
    np.testing.assert_array_equal(from_torch(swapped, kind="Conv3d")(X), make("Conv3d")(X))


def test_layers_compare_by_identity():
    layer = make("Conv3d")
    assert layer == layer
    assert layer != make("Conv3d")
    assert len({layer, layer}) == 1


def test_a_layer_is_a_pytree_of_its_parameters():
    layer = make("ConvTranspose3d", stride=2)
    assert len(jax.tree.leaves(layer)) == 2
    gradients = jax.jit(jax.grad(lambda layer: layer(X).sum()))(layer)
    assert gradients.stride == (2, 2, 2)
    np.testing.assert_array_equal(gradients.bias, np.full(4, layer(X)[:, 0].size))
    assert not jax.tree.leaves(make("AvgPool3d", kernel_size=2))


def test_an_activation_is_fused():
    layer = make("Conv3d")
    np.testing.assert_allclose(layer(X, activation_fn="ReLU"), np.maximum(layer(X), 0))


CASES = {
    "conv": ("Conv3d", {"stride": 2, "padding": (1, 0, 2), "dilation": (1, 2, 1)}),
    "transpose": ("ConvTranspose3d", {"stride": (2, 1, 3), "padding": (1, 0, 2), "output_padding": (1, 0, 0)}),
    "dilated transpose": ("ConvTranspose3d", {"stride": (2, 1, 3), "dilation": (1, 2, 1), "output_padding": (1, 0, 2)}),
    "far transpose": ("ConvTranspose3d", {"stride": (2, 1, 3), "dilation": (1, 2, 1), "output_padding": (0, 1, 2)}),
    "pool": ("AvgPool3d", {"kernel_size": 2, "stride": (2, 1, 2)}),
    "padded pool": ("AvgPool3d", {"kernel_size": (2, 3, 2), "padding": 1}),
    "other divisor": ("AvgPool3d", {"kernel_size": (2, 3, 2), "padding": 1, "count_include_pad": False}),
}
LAST = {"Conv3d": "Conv3D", "ConvTranspose3d": "ConvTranspose3D", "AvgPool3d": "avg_pool3d"}


def channels_last(function):
    return lambda x: jnp.moveaxis(function(jnp.moveaxis(x, 1, -1)), -1, 1)


def in_nnx(kind, settings, parameters):
    layer = getattr(flax_nnx, LAST[kind])(**settings, rngs=nnx.Rngs(layers.key(0)))
    nnx.update(layer, parameters)
    return channels_last(layer)


def in_linen(kind, settings, parameters):
    return channels_last(lambda x: getattr(flax_linen, LAST[kind])(**settings).apply({"params": parameters}, x))


def in_haiku(kind, settings, parameters):
    name = {"Conv3d": "Conv3D", "ConvTranspose3d": "Conv3DTranspose", "AvgPool3d": "AvgPool3D"}[kind]
    net = hk.without_apply_rng(hk.transform(lambda x: getattr(haiku, name)(**settings, name="it")(x)))
    return channels_last(lambda x: net.apply({"it": parameters}, x))


def in_equinox(kind, settings, parameters):
    layer = getattr(equinox, kind)(**settings, **({} if kind == "AvgPool3d" else {"key": layers.key(0)}))
    return jax.vmap(eqx.tree_at(lambda layer: [getattr(layer, name) for name in parameters], layer, list(parameters.values())))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", ["flax_nnx", "flax_linen", "haiku", "equinox"])
def test_settings_and_parameters_make_the_same_layer_in_each_library(library, case):
    kind, arguments = CASES[case]
    layer, x = make(kind, **arguments), normal(0, (2, 3, 5, 6, 7))
    refused = {
        "haiku": ("dilated transpose", "far transpose", "padded pool", "other divisor"),
        "equinox": ("far transpose", "other divisor"),
    }
    if case in refused.get(library, ()):
        with pytest.raises(NotImplementedError, match="Call this object instead"):
            layer.settings(library)
        return
    settings = layer.settings(library)
    if kind == "AvgPool3d" and library.startswith("flax"):
        result = channels_last(lambda x: flax_nnx.avg_pool3d(x, **settings))(x)
    else:
        parameters = layer.parameters(library) if kind != "AvgPool3d" else {}
        build = {"flax_nnx": in_nnx, "flax_linen": in_linen, "haiku": in_haiku, "equinox": in_equinox}[library]
        result = build(kind, settings, parameters)(x)
    assert_agree(result, layer(x))


WEIGHT = CONV["weight"]
REFUSED = [
    (lambda: from_torch(CONV), TypeError, "`kind` must be one of"),
    (lambda: from_torch(CONV, kind="Conv2d"), TypeError, "`kind` must be one of"),
    (lambda: from_torch(CONV, kind="Conv3d", kernel_size=3), TypeError, "`kernel_size` is not an argument of Conv3d"),
    (lambda: from_torch(CONV, kind="Conv3d", prefix="a."), ValueError, "no entry 'a.weight' .*; entries: 'weight', 'bias'"),
    (lambda: from_torch({"weight_g": WEIGHT}, kind="Conv3d"), ValueError, "weight norm"),
    (lambda: from_torch({"weight": WEIGHT[0]}, kind="Conv3d"), ValueError, "`weight` must have 5 dimensions"),
    (lambda: from_torch({"weight": WEIGHT.astype(int)}, kind="Conv3d"), TypeError, "`weight` must have one of the dtypes"),
    (
        lambda: from_torch({"weight": WEIGHT, "bias": UP["bias"][:3]}, kind="Conv3d"),
        ValueError,
        r"`bias` must have shape \(4,\)",
    ),
    (lambda: make("Conv3d", stride=2, padding="same"), ValueError, "`padding` 'same' goes with a stride of 1"),
    (lambda: make("Conv3d", padding="reflect"), ValueError, "`padding` must be ints, 'same' or 'valid'"),
    (lambda: make("Conv3d", groups=2), NotImplementedError, "`groups` must be 1"),
    (lambda: make("Conv3d", padding=1, padding_mode="circular"), NotImplementedError, "`padding_mode` must be 'zeros'"),
    (lambda: make("ConvTranspose3d", groups=3), NotImplementedError, "`groups` must be 1"),
    (lambda: make("AvgPool3d"), TypeError, "`kernel_size` must be"),
    (lambda: make("AvgPool3d", kernel_size=2, ceil_mode=True), NotImplementedError, "`ceil_mode` must be False"),
    (lambda: make("AvgPool3d", kernel_size=2, divisor_override=3), NotImplementedError, "`divisor_override` must be None"),
    (lambda: from_torch(object()), TypeError, "`source` must be a torch.nn module Conv3d"),
    (lambda: from_torch(object(), kind="Conv3d"), TypeError, "a module has its own"),
    (lambda: make("Conv3d").settings("keras"), ValueError, "`library` must be one of"),
    (lambda: make("Conv3d")(X[:, :2]), ValueError, r"input must be \[B, 3 channels, D, H, W\] or without B"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[f"{e.__name__}-{m}" for _, e, m in REFUSED])
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_padding_mode_without_padding_has_nothing_to_fill():
    assert make("Conv3d", padding_mode="circular").padding == ((0, 0),) * 3
