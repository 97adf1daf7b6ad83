# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`conv_general_dilated` with lax's signature: in Flax's hooks, and against lax in any layout."""

import itertools

import jax
import jax.numpy as jnp
import layers
import pytest
from flax import linen, nnx
from jax import lax
from layers import assert_agree, normal, weigh

from jax_nki3d.nn import flax_linen, flax_nnx

hook = flax_nnx.conv_general_dilated


def test_both_modules_have_the_same_function():
    assert flax_linen.conv_general_dilated is hook


def test_nnx_conv_with_one_argument_changed():
    plain, hooked = (
        nnx.Conv(3, 5, (3, 2, 3), strides=2, rngs=nnx.Rngs(layers.key(0)), **a) for a in ({}, {"conv_general_dilated": hook})
    )
    x = normal(0, (2, 5, 6, 7, 3))

    def results(layer):
        gradients, y = nnx.grad(lambda layer, x: (weigh(layer(x)), layer(x)), argnums=(0, 1), has_aux=True)(layer, x)
        return y, nnx.to_pure_dict(gradients[0]), gradients[1]

    assert_agree(results(hooked), results(plain))
    assert "conv3d" in str(jax.make_jaxpr(hooked)(x))


@pytest.mark.parametrize(
    "argument", [{"conv_general_dilated": hook}, {"conv_general_dilated_cls": lambda: hook}], ids=["function", "class"]
)
def test_linen_conv_with_one_argument_changed(argument):
    plain, hooked = (linen.Conv(5, (3, 2, 3), padding="CIRCULAR", **a) for a in ({}, argument))
    x = normal(0, (2, 5, 6, 7, 3))
    variables = plain.init(layers.key(0), x)

    def results(layer):
        return jax.value_and_grad(lambda v: weigh(layer.apply(v, x)))(variables), layer.apply(variables, x)

    assert_agree(results(hooked), results(plain))
    assert "conv3d" in str(jax.make_jaxpr(lambda v: hooked.apply(v, x))(variables))


LAYOUTS = [
    None,
    ("NDHWC", "DHWIO", "NDHWC"),
    ("NCDHW", "DHWIO", "NDHWC"),
    ("CNWHD", "WIDOH", "DNCHW"),
    ("DHWNC", "OIDHW", "NCDHW"),
]
SETTINGS = [
    {"window_strides": (1, 2, 3), "padding": "SAME"},
    {"window_strides": (2, 1, 1), "padding": [(1, 0), (0, 2), (1, 1)], "rhs_dilation": (1, 2, 1)},
    {"window_strides": (1, 1, 1), "padding": [(2, 1), (0, 3), (-1, 4)], "lhs_dilation": (2, 3, 1)},
    {"window_strides": (1, 1, 1), "padding": [(0, 0)] * 3, "lhs_dilation": (2, 1, 2), "rhs_dilation": (1, 2, 1)},
]


@pytest.mark.parametrize(("layout", "settings"), list(itertools.product(LAYOUTS, SETTINGS)), ids=str)
def test_every_layout_and_both_dilations(layout, settings):
    x, w = normal(0, (2, 3, 5, 6, 7)), normal(1, (4, 3, 3, 2, 3))  # NCDHW, OIDHW
    if layout is not None:
        x = jnp.transpose(x, ["NCDHW".index(axis) for axis in layout[0]])
        w = jnp.transpose(w, ["OIDHW".index(axis) for axis in layout[1]])
    assert_agree(
        hook(x, w, **settings, dimension_numbers=layout), lax.conv_general_dilated(x, w, **settings, dimension_numbers=layout)
    )


ONES, TAPS = jnp.ones((1, 2, 4, 4, 4)), jnp.ones((2, 2, 3, 3, 3))
REFUSED = [
    ({"lhs": ONES[0], "rhs": TAPS[0]}, ValueError, "must have five axes"),
    ({"feature_group_count": 2}, NotImplementedError, "`feature_group_count` must be 1"),
    ({"batch_group_count": 2}, NotImplementedError, "`batch_group_count` must be 1"),
    ({"preferred_element_type": jnp.bfloat16}, NotImplementedError, "`preferred_element_type`"),
    ({"out_sharding": "x"}, NotImplementedError, "`out_sharding`"),
    ({"window_strides": (2, 1, 1), "lhs_dilation": (2, 2, 2)}, NotImplementedError, "both above 1"),
    ({"padding": [(-1, 1)] * 3}, ValueError, "`padding` must be at least 0"),
    ({"padding": "SAME", "lhs_dilation": (2, 2, 2)}, ValueError, "`padding` must be"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=[m for _, _, m in REFUSED])
def test_refusals_name_the_argument(arguments, error, message):
    usual = {"lhs": ONES, "rhs": TAPS, "window_strides": (1, 1, 1), "padding": "VALID"}
    with pytest.raises(error, match=message):
        hook(**(usual | arguments))
