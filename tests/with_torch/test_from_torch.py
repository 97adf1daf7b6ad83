# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`from_torch` against live modules of PyTorch: outputs, and gradients in the input and in the parameters."""

import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from layers import BFLOAT16, assert_agree
from torch import nn

from jax_nki3d.nn.torch import AvgPool3d, Conv3d, ConvTranspose3d, from_torch

CONV = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": (1, 3, 2), "stride": (1, 2, 3), "padding": (0, 2, 1), "bias": False},
    {"kernel_size": (3, 2, 4), "dilation": (1, 3, 2), "padding": "same"},
    {"kernel_size": 2, "padding": "valid", "stride": 2},
    {"kernel_size": 2, "padding_mode": "circular"},
]
TRANSPOSED = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": (1, 3, 4), "stride": (3, 1, 2), "padding": (0, 2, 1), "output_padding": (2, 0, 1), "bias": False},
    {"kernel_size": (3, 2, 3), "stride": (1, 2, 1), "dilation": (2, 1, 3), "padding": 2, "output_padding": (1, 0, 2)},
]
POOLS = [
    {"kernel_size": 2},
    {"kernel_size": (2, 3, 1), "stride": 2, "padding": (1, 1, 0)},
    {"kernel_size": 3, "stride": (1, 2, 3), "padding": 1, "count_include_pad": False},
]
MODULES = [
    *((lambda case=case: nn.Conv3d(3, 4, **case), f"conv{i}") for i, case in enumerate(CONV)),
    *((lambda case=case: nn.ConvTranspose3d(3, 4, **case), f"transpose{i}") for i, case in enumerate(TRANSPOSED)),
    *((lambda case=case: nn.AvgPool3d(**case), f"pool{i}") for i, case in enumerate(POOLS)),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def numbers(tensor):
    return jnp.asarray(tensor.detach().float().numpy())


def run_torch(module, x, weights):
    x = x.clone().requires_grad_()
    y = module(x)
    (y * weights(y)).sum().backward()
    named = dict(module.named_parameters())
    return numbers(y), numbers(x.grad), {name: numbers(p.grad) for name, p in named.items()}


def run_ours(layer, x, weights):
    def loss(layer, x):
        y = layer(x)
        return (y * weights(y)).sum(), y

    (of_layer, of_x), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(layer, jnp.asarray(x.numpy()))
    return y, of_x, of_layer


def weigh(y):
    """The same numbers for both: torch.Tensor or jax.Array."""
    w = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    return torch.from_numpy(w) if isinstance(y, torch.Tensor) else jnp.asarray(w)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch: that it makes a copy
@pytest.mark.parametrize("make", [make for make, _ in MODULES], ids=[name for _, name in MODULES])
def test_outputs_and_gradients_are_torch_s(make):
    module = make()
    layer, x = from_torch(module), torch.randn(2, 3, 6, 7, 8)
    y, of_x, parameters = run_torch(module, x, weigh)
    ours, gradient, of_layer = run_ours(layer, x, weigh)
    assert_agree((ours, gradient), (y, of_x))
    if "weight" in parameters:
        # the gradient of the filters, in torch's axes
        of_filters = of_layer.filters
        if isinstance(layer, ConvTranspose3d):
            weight = of_filters[::-1, ::-1, ::-1].transpose(3, 4, 0, 1, 2)
        else:
            weight = of_filters.transpose(4, 3, 0, 1, 2)
        assert_agree(weight, parameters["weight"])
    assert (of_layer.bias is not None if hasattr(of_layer, "bias") else False) == ("bias" in parameters)
    if "bias" in parameters:
        assert_agree(of_layer.bias, parameters["bias"])
    with torch.no_grad():
        assert_agree(layer(jnp.asarray(x[0].numpy())), numbers(module(x[0])))


@pytest.mark.parametrize("make", [MODULES[0][0], MODULES[5][0]], ids=["conv", "transpose"])
def test_bfloat16(make):
    """Against torch in float32 with the same rounded numbers."""
    module = make().bfloat16()
    layer = from_torch(module)
    assert layer.filters.dtype == layer.bias.dtype == jnp.bfloat16
    x = torch.randn(2, 3, 5, 6, 7).bfloat16()
    y = layer(numbers(x).astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert_agree(y, numbers(module.float()(x.float())), BFLOAT16)


def test_a_state_dict():
    model = nn.Sequential(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.ConvTranspose3d(2, 1, 2, stride=2))
    entries, x = model.state_dict(), torch.randn(1, 1, 5, 5, 5)
    first = from_torch(entries, kind="Conv3d", prefix="0.")
    last = from_torch(entries, kind="ConvTranspose3d", prefix="2.", stride=2)
    with torch.no_grad():
        assert_agree(last(first(jnp.asarray(x.numpy()), activation_fn="ReLU")), numbers(model(x)))


def test_derived_and_parametrized_modules():
    class Own(nn.Conv3d):
        pass

    normed = nn.utils.parametrizations.weight_norm(Own(2, 3, 3))
    x = torch.randn(1, 2, 4, 4, 4)
    with torch.no_grad():
        assert_agree(from_torch(normed)(jnp.asarray(x.numpy())), numbers(normed(x)))
    with pytest.raises(ValueError, match="remove a parametrization"):
        from_torch(normed.state_dict(), kind="Conv3d")


def test_later_updates_of_the_module_do_not_reach_the_layer():
    module = nn.Conv3d(1, 1, 1)
    layer = from_torch(module)
    before = np.array(layer.filters)
    with torch.no_grad():
        module.weight.add_(1.0)
    np.testing.assert_array_equal(layer.filters, before)


def test_torch_s_row_of_the_table_in_the_conventions():
    x, taps = (torch.tensor(values).reshape(1, 1, 1, 1, -1) for values in ([1.0, 2.0, 3.0], [1.0, 10.0, 100.0]))
    y = nn.functional.conv_transpose3d(x, taps, stride=(1, 1, 2), padding=(0, 0, 1))
    assert y.ravel().tolist() == [10, 102, 20, 203, 30]
    layer = from_torch({"weight": taps}, kind="ConvTranspose3d", stride=(1, 1, 2), padding=(0, 0, 1))
    np.testing.assert_array_equal(layer(x.numpy()), y.numpy())


def test_kinds():
    assert isinstance(from_torch(nn.Conv3d(1, 1, 1)), Conv3d)
    assert isinstance(from_torch(nn.ConvTranspose3d(1, 1, 1)), ConvTranspose3d)
    assert isinstance(from_torch(nn.AvgPool3d(2)), AvgPool3d)


def normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch: that parametrizations are newer
        return nn.utils.weight_norm(nn.Conv3d(4, 4, 3))


def hooked():
    module = nn.Conv3d(4, 4, 3)
    module.register_forward_hook(lambda module, inputs, output: output.relu())
    return module


class Standardized(nn.Conv3d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


REFUSED = [
    (normed, NotImplementedError, "`_forward_pre_hooks` of this Conv3d .*remove_weight_norm"),
    (hooked, NotImplementedError, "`_forward_hooks` of this Conv3d"),
    (lambda: Standardized(4, 4, 3), NotImplementedError, "`forward` of this Standardized"),
    (lambda: nn.Conv3d(4, 4, 3, groups=2), NotImplementedError, "`groups` must be 1, got 2"),
    (lambda: nn.Conv3d(4, 4, 3, padding=1, padding_mode="replicate"), NotImplementedError, "`padding_mode` must be 'zeros'"),
    (lambda: nn.ConvTranspose3d(4, 4, 3, groups=4), NotImplementedError, "`groups` must be 1, got 4"),
    (lambda: nn.AvgPool3d(2, ceil_mode=True), NotImplementedError, "`ceil_mode` must be False"),
    (lambda: nn.AvgPool3d(2, divisor_override=3), NotImplementedError, "`divisor_override` must be None, got 3"),
    (lambda: nn.Conv2d(4, 4, 3), TypeError, "`source` must be .* got Conv2d"),
    (lambda: nn.Sequential(nn.Conv3d(4, 4, 3)), TypeError, "named_modules"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[m for _, _, m in REFUSED])
def test_what_is_refused_names_the_attribute(make, error, message):
    with pytest.raises(error, match=message):
        from_torch(make())


def example(name):
    file = Path(__file__).parents[2] / "examples" / "torch_unet" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_converted_unet_has_torch_s_outputs_and_gradients():
    torch_model, jax_model = example("torch_model"), example("jax_model")
    model = torch_model.UNet(widths=(4, 8, 8)).double()  # in float64, so that the comparison sees the conversion alone
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases before a norm have no gradient of their own at 0
    x = torch.randn(1, 1, 8, 12, 8, dtype=torch.float64)
    labels = torch.randint(0, 3, (1, 8, 12, 8))
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()

    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        parameters = jax_model.convert(model)

        def cross_entropy(parameters):
            logits = jax_model.unet(parameters, jnp.asarray(x.numpy()))
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), jnp.asarray(labels.numpy())[:, None], axis=1)
            return -picked.mean(), logits

        (value, logits), gradients = jax.jit(jax.value_and_grad(cross_entropy, has_aux=True))(parameters)
        tolerance = {"atol": 1e-10, "rtol": 1e-10}
        np.testing.assert_allclose(logits, model(x).detach().numpy(), **tolerance)
        np.testing.assert_allclose(value, loss.item(), **tolerance)
        compared = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv3d):
                pair = (gradients[name].filters.transpose(4, 3, 0, 1, 2), module.weight.grad)
            elif isinstance(module, nn.ConvTranspose3d):
                pair = (gradients[name].filters[::-1, ::-1, ::-1].transpose(3, 4, 0, 1, 2), module.weight.grad)
            elif isinstance(module, nn.PReLU):
                pair = (gradients[name.removesuffix(".1")], module.weight.grad)
            else:
                continue
            np.testing.assert_allclose(pair[0], pair[1].numpy(), **tolerance, err_msg=name)
            if module.__class__ is not nn.PReLU:
                np.testing.assert_allclose(gradients[name].bias, module.bias.grad.numpy(), **tolerance, err_msg=name)
            compared += 1
        assert compared == 19
