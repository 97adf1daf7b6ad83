# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From PyTorch to JAX
#
# What this notebook shows, in about 20 seconds on two CPU cores:
#
# - one layer of each kind, converted with `from_torch`, and what is permuted and flipped on the way;
# - what happens if the flip is forgotten: plausible numbers that are wrong;
# - a residual 3-D U-Net in PyTorch as a function of JAX: equal logits, loss and gradients;
# - the same weights in Flax, Haiku and Equinox layers, and from a state dict;
# - which settings are refused, and how the error reads.
#
# How each claim is known: both run on the CPU here, and the `assert`s compare them. The library itself never needs PyTorch; `from_torch` reads
# a module's attributes without importing it.

# %%
import copy
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown
from torch import nn

from jax_nki3d import conv3d_transpose
from jax_nki3d.nn.torch import from_torch

plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})
torch.manual_seed(0)


def to_jax(tensor):
    return jnp.asarray(tensor.detach().numpy())


def difference(ours, theirs):
    """The largest difference, over the largest value."""
    theirs = theirs.detach().numpy()
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


# %% [markdown]
# ## One layer of each kind
#
# `from_torch` takes a module and gives an object that computes the same, in the same layout `[B, C, D, H, W]`. It is a function, and a pytree of its
# parameters.

# %%
modules = [
    nn.Conv3d(4, 8, 3, stride=2, padding=1),
    nn.Conv3d(4, 8, (1, 3, 3), padding="same", bias=False),
    nn.ConvTranspose3d(4, 8, 3, stride=2, padding=1, output_padding=1),
    nn.ConvTranspose3d(4, 8, 3, stride=(1, 2, 2), padding=(2, 1, 1), dilation=(2, 1, 1)),
    nn.AvgPool3d(2),
    nn.AvgPool3d(3, stride=2, padding=1, count_include_pad=False),
]
x = torch.randn(2, 4, 8, 9, 10)
for module in modules:
    layer = from_torch(module)
    worst = difference(layer(to_jax(x)), module(x))
    print(f"{type(layer).__name__:<16} {layer(to_jax(x)).shape!s:<22} differs by {worst:.0e} at most")
    assert worst < 1e-5

# %% [markdown]
# ## What changes on the way
#
# | | PyTorch's weight | here |
# |---|---|---|
# | `Conv3d` | `[C_out, C_in, K_d, K_h, K_w]` | `[K_d, K_h, K_w, C_in, C_out]` |
# | `ConvTranspose3d` | `[C_in, C_out, K_d, K_h, K_w]` | `[K_d, K_h, K_w, C_in, C_out]`, **flipped** in D, H and W |
#
# PyTorch scatters the taps of a transposed convolution; `conv3d_transpose` takes the filters that slide over the input with zeros between its elements,
# as the NKI kernels do. These are the same taps in reverse. Without the flip all shapes fit and every number looks reasonable:

# %%
up = nn.ConvTranspose3d(1, 1, 3, stride=2, padding=1, bias=False)
with torch.no_grad():  # a wedge: taps that grow along the width
    up.weight[:] = torch.tensor([0.2, 0.6, 1.0]).expand(3, 3, 3)
impulses = torch.zeros(1, 1, 3, 5, 7)
impulses[..., 1, 1::2, 1::2] = 1.0

layer = from_torch(up)
pictures = {
    "PyTorch": up(impulses).detach().numpy(),
    "from_torch": layer(to_jax(impulses)),
    "the flip forgotten": conv3d_transpose(to_jax(impulses), layer.filters[::-1, ::-1, ::-1], stride=2, padding=1),
}
figure, panels = plt.subplots(1, 3, figsize=(9, 2.6), layout="constrained")
for axes, (name, y) in zip(panels, pictures.items(), strict=True):
    axes.imshow(np.asarray(y)[0, 0, 2], cmap="viridis")
    axes.set_title(name, fontsize=11)
    axes.set(xticks=[], yticks=[])
figure.suptitle("A plane of the output for six impulses", fontsize=11)
plt.show()

np.testing.assert_allclose(pictures["from_torch"], pictures["PyTorch"], atol=1e-6)
assert np.abs(pictures["the flip forgotten"] - pictures["PyTorch"]).max() > 0.5

# %% [markdown]
# ## A U-Net
#
# `examples/torch_unet/torch_model.py` is a small residual U-Net of the kind that medical imaging frameworks build: strided residual units on the way
# down, transposed convolutions with `output_padding` on the way up. In `jax_model.py`, `convert` walks over its modules, and `unet` is the forward
# pass:

# %%
sys.path.insert(0, "../examples/torch_unet")
import jax_model
from torch_model import UNet

Markdown("```python\n" + Path("../examples/torch_unet/jax_model.py").read_text() + "```")

# %%
model = UNet(widths=(8, 16, 32))
parameters = jax_model.convert(model)
unet = jax.jit(jax_model.unet)

sys.path.insert(0, "../examples/brain_unet")
import data

scan = data.load().image[22:70, 20:84, 8:72][None, None]  # a part of a brain template: [1, 1, 48, 64, 64]
image = torch.from_numpy(scan)
logits, expected = unet(parameters, scan), model(image)

print(f"{len(parameters)} layers and slopes; logits {logits.shape} differ by {difference(logits, expected):.0e} at most")
assert difference(logits, expected) < 1e-4

# %%
place = 30
theirs = expected.detach().numpy()
panels = {
    "input": scan[0, 0, place],
    "PyTorch, class 0": theirs[0, 0, place],
    "JAX, class 0": np.asarray(logits)[0, 0, place],
    "difference": np.asarray(logits)[0, 0, place] - theirs[0, 0, place],
}
figure, axes = plt.subplots(1, 4, figsize=(9.5, 2.6), layout="constrained")
for panel, (name, picture) in zip(axes, panels.items(), strict=True):
    shown = panel.imshow(picture.T, origin="lower", cmap="PuOr" if name == "difference" else "gray")
    panel.set_title(name, fontsize=11)
    panel.set(xticks=[], yticks=[])
    bar = figure.colorbar(shown, ax=panel, shrink=0.75)
    bar.formatter.set_powerlimits((-2, 3))
plt.show()

# %% [markdown]
# The weights are random, so that the logits mean nothing yet. Their difference is rounding.
#
# ## Equal gradients
#
# Cross-entropy with random labels, and its gradient in every parameter, in float64: where a value lies next to the kink of a PReLU, rounding
# decides on which side, so that gradients in float32 may differ more than rounding alone would tell. `jax.grad` gives a tree of the same layers,
# whose `filters` and `bias` are the gradients.

# %%
labels = torch.randint(0, 3, (1, *scan.shape[2:]))


def cross_entropy(parameters, x, labels):
    scores = jax.nn.log_softmax(jax_model.unet(parameters, x), axis=1)
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


value_and_gradients = jax.jit(jax.value_and_grad(cross_entropy))

exact = copy.deepcopy(model).double()
loss = nn.functional.cross_entropy(exact(image.double()), labels)
loss.backward()
with jax.enable_x64(True):
    value, gradients = value_and_gradients(jax_model.convert(exact), image.double().numpy(), labels.numpy())

    worst = {}
    for name, module in exact.named_modules():
        if isinstance(module, nn.Conv3d):
            worst[name] = difference(gradients[name].filters.transpose(4, 3, 0, 1, 2), module.weight.grad)
        elif isinstance(module, nn.ConvTranspose3d):
            worst[name] = difference(gradients[name].filters[::-1, ::-1, ::-1].transpose(3, 4, 0, 1, 2), module.weight.grad)
print(f"loss: PyTorch {loss.item():.10f}, JAX {float(value):.10f}")
for name, gap in worst.items():
    print(f"{name:<18} weight gradients differ by {gap:.0e} of the largest")
np.testing.assert_allclose(value, loss.item(), rtol=1e-10)
assert max(worst.values()) < 1e-9
assert len(worst) == 12

# %% [markdown]
# ## Speed on this machine
#
# The loss and all gradients in float32, median of a few runs in turns. PyTorch uses as many threads as there are cores.

# %%
seconds = {"PyTorch": [], "JAX": []}
for _ in range(6):
    start = time.perf_counter()
    nn.functional.cross_entropy(model(image), labels).backward()
    middle = time.perf_counter()
    jax.block_until_ready(value_and_gradients(parameters, scan, labels.numpy().astype(np.int32)))
    for name, duration in zip(seconds, (middle - start, time.perf_counter() - middle), strict=True):
        seconds[name].append(1e3 * duration)
for name, times in seconds.items():
    print(f"{name:<8} {np.median(times[1:]):.0f} ms on this machine")

# %% [markdown]
# ## The same layer in Flax, Haiku and Equinox
#
# Each library has its own names, layouts and paddings. `settings` gives the arguments of the layer in `jax_nki3d.nn`, `parameters` its weights.

# %%
import equinox as eqx
import haiku as hk
from flax import nnx

from jax_nki3d.nn import equinox, flax_linen, flax_nnx, haiku

module = nn.ConvTranspose3d(3, 4, 3, stride=2, padding=1, output_padding=1)
up = from_torch(module)
for library in ("flax_nnx", "flax_linen", "haiku", "equinox"):
    print(f"{library:<12}{up.settings(library)}")

# %%
x = torch.randn(2, 3, 4, 5, 6)
channels_last = np.moveaxis(x.numpy(), 1, -1)

in_nnx = flax_nnx.ConvTranspose3D(**up.settings("flax_nnx"), rngs=nnx.Rngs(0))
nnx.update(in_nnx, up.parameters("flax_nnx"))

in_linen = flax_linen.ConvTranspose3D(**up.settings("flax_linen"))
in_haiku = hk.without_apply_rng(hk.transform(lambda x: haiku.Conv3DTranspose(**up.settings("haiku"), name="up")(x)))

in_equinox = equinox.ConvTranspose3d(**up.settings("equinox"), key=jax.random.key(0))
weights = up.parameters("equinox")
in_equinox = eqx.tree_at(lambda layer: (layer.weight, layer.bias), in_equinox, (weights["weight"], weights["bias"]))

results = {
    "flax_nnx": jnp.moveaxis(in_nnx(channels_last), -1, 1),
    "flax_linen": jnp.moveaxis(in_linen.apply({"params": up.parameters("flax_linen")}, channels_last), -1, 1),
    "haiku": jnp.moveaxis(in_haiku.apply({"up": up.parameters("haiku")}, channels_last), -1, 1),
    "equinox": jax.vmap(in_equinox)(to_jax(x)),
}
for library, y in results.items():
    print(f"{library:<12}differs from PyTorch by {difference(y, module(x)):.0e} at most")
    assert difference(y, module(x)) < 1e-5

# %% [markdown]
# ## From a state dict
#
# A state dict holds weights, but no strides: they are given here, by the names that the torch class has.

# %%
entries = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(4, 1, 2, stride=2)).state_dict()
first = from_torch(entries, kind="Conv3d", prefix="0.", padding=1)
last = from_torch(entries, kind="ConvTranspose3d", prefix="2.", stride=2)
y = last(first(jnp.ones((1, 1, 4, 4, 4)), activation_fn="ReLU"))  # the activation runs within the convolution
print(list(entries), "→", y.shape)
assert y.shape == (1, 1, 8, 8, 8)

# %% [markdown]
# ## What is refused
#
# What the operations cannot do is an error that names the attribute, never another result.

# %%
refused = [
    nn.Conv3d(8, 8, 3, groups=8),
    nn.Conv3d(8, 8, 3, padding=1, padding_mode="replicate"),
    nn.AvgPool3d(2, ceil_mode=True),
    nn.AvgPool3d(2, divisor_override=3),
]
for module in refused:
    try:
        from_torch(module)
    except NotImplementedError as error:
        print(error, "\n")
    else:
        raise AssertionError(module)
