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
# # jax_nki3d in a few minutes
#
# What this notebook shows, in about 20 seconds on two CPU cores:
#
# - the operations, and the shapes that go in and come out;
# - gradients: of a small model, only those that are wanted, per example, second ones, forward mode;
# - two identities that hold exactly: the transposed convolution is the adjoint, and 16-bit sums do not stall;
# - the speed of a strided transposed convolution beside plain `lax`, on this machine;
# - data-parallel training over several devices (four that the CPU pretends to be);
# - how to see, and choose, what runs: `explain` and `options`.
#
# How each claim is known: everything here runs on the CPU, and the `assert`s check what the text says. What is said of NKI kernels is
# computed, or simulated by an interpreter. Nothing has run on a Trainium.

# %%
import os

# Before JAX is imported: the CPU presents itself as four devices. Only the section on sharding needs them.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import time
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_nki3d
from jax_nki3d import avg_pooling_3d, conv3d, conv3d_transpose, explain

plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


# %% [markdown]
# ## The operations
#
# Volumes are `[B, C, D, H, W]` (or `[B, D, H, W, C]` with `data_format="NDHWC"`), filters `[K_d, K_h, K_w, C_in, C_out]`. Strides,
# paddings and dilations are one int, or one per axis.

# %%
x = normal(2, 4, 12, 12, 12)
same = conv3d(x, normal(3, 3, 3, 4, 8), normal(8), padding=1, activation_fn="SiLU")
half = conv3d(same, normal(3, 3, 3, 8, 16), stride=2, padding=1)
pooled = avg_pooling_3d(same, kernel_size=2)
double = conv3d_transpose(half, normal(2, 2, 2, 16, 8), stride=2)

volumes = {"input": x, "conv3d": same, "with stride 2": half, "avg_pooling_3d": pooled, "conv3d_transpose": double}
for name, volume in volumes.items():
    print(f"{name:<18}{volume.shape}")

assert half.shape == (2, 16, 6, 6, 6)
assert pooled.shape == (2, 8, 6, 6, 6)
assert double.shape == same.shape

# %% [markdown]
# A video layer that must not look into the future pads in front of the depth (here: time) only. Six values say so.

# %%
clip, filters = normal(1, 3, 5, 8, 8), normal(3, 3, 3, 3, 6)
causal = partial(conv3d, padding=(2, 0, 1, 1, 1, 1))
later_changed = np.concatenate([clip[:, :, :3], normal(1, 3, 2, 8, 8)], axis=2)

before, after = causal(clip, filters), causal(later_changed, filters)
assert before.shape == (1, 6, 5, 8, 8)
assert bool((before[:, :, :3] == after[:, :, :3]).all())
print("Frames 0 to 2 of the output do not change when frames 3 and 4 of the input do.")

# %% [markdown]
# ## Gradients of a small model
#
# Down, up, and a skip connection: the shape of a U-Net. The operations are ordinary JAX functions.


# %%
def model(params, x):
    fine = conv3d(x, params["in"], padding=1, activation_fn="SiLU")
    coarse = avg_pooling_3d(fine, kernel_size=2)
    up = conv3d_transpose(coarse, params["up"], stride=2)
    return conv3d(up + fine, params["out"])


def loss(params, x, target):
    return ((model(params, x) - target) ** 2).mean()


params = {"in": normal(3, 3, 3, 1, 8) / 5, "up": normal(2, 2, 2, 8, 8) / 8, "out": normal(1, 1, 1, 8, 1) / 3}
x = normal(8, 1, 8, 8, 8)
target = np.roll(x, 1, axis=4)  # to learn: a shift by one voxel

step = jax.jit(jax.value_and_grad(loss))
losses = []
for _ in range(60):
    value, gradients = step(params, x, target)
    losses.append(float(value))
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients)

print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps of plain gradient descent")
assert losses[-1] < losses[0] / 2

# %% [markdown]
# ## Only wanted gradients are computed
#
# `explain` traces a function, and lists its operations without running them. Here the filters are wanted and the input is not: the
# backward pass of the convolution holds `dw` alone.

# %%
x, filters, bias = normal(1, 4, 8, 8, 8), normal(3, 3, 3, 4, 8), normal(8)


def total(x, filters, bias):
    return (conv3d(x, filters, bias, padding=1) ** 2).sum()


def backward_operations(argnums):
    report = explain(jax.grad(total, argnums), x, filters, bias)
    return [entry.operation for entry, _ in report.counts if "bwd" in entry.operation]


wanted = {"filters": 1, "input": 0, "filters, bias": (1, 2), "all three": (0, 1, 2)}
for name, argnums in wanted.items():
    print(f"gradient of {name:<15}{', '.join(backward_operations(argnums))}")

assert backward_operations(1) == ["conv3d_bwd (dw)"]
assert backward_operations((0, 1, 2)) == ["conv3d_bwd (dx, dw, db)"]

# %% [markdown]
# ## vmap: one gradient per example
#
# `jax.vmap` over `jax.grad` gives the gradient of each example by itself, as for differential privacy or influence functions. A loop gives
# the same.

# %%
batch = normal(4, 1, 4, 8, 8, 8)  # four examples of [1, 4, 8, 8, 8]
per_example = jax.jit(jax.vmap(jax.grad(total, 1), (0, None, None)))(batch, filters, bias)
one_by_one = np.stack([jax.grad(total, 1)(example, filters, bias) for example in batch])

assert per_example.shape == (4, *filters.shape)
np.testing.assert_allclose(per_example, one_by_one, rtol=1e-4, atol=1e-4 * np.abs(one_by_one).max())
print("per-example gradients:", per_example.shape)

# %% [markdown]
# ## Second derivatives
#
# A product of the Hessian with a vector is a forward derivative of the gradient. It needs no switch. For a small enough problem
# the whole Hessian is there to compare with.

# %%
small, tiny = normal(1, 1, 4, 4, 4), normal(2, 2, 2, 1, 1)


def energy(filters):
    return (conv3d(small, filters, stride=2) ** 4).sum()


direction = normal(*tiny.shape)
_, product = jax.jvp(jax.grad(energy), (tiny,), (direction,))
hessian = jax.hessian(energy)(tiny).reshape(8, 8)

np.testing.assert_allclose(hessian, hessian.T, rtol=1e-4, atol=1e-3)
np.testing.assert_allclose(product.ravel(), hessian @ direction.ravel(), rtol=1e-4, atol=1e-3)
print("Hessian:", hessian.shape, "is symmetric; its product with a vector agrees with the matrix")

# %% [markdown]
# Forward mode *alone* (`jax.jvp`, `jax.jacfwd`, `jax.linearize` of an operation) needs `forward_mode=True`: JAX allows a
# function one custom rule, and by default it is the one of reverse mode.

# %%
try:
    jax.jvp(lambda x: conv3d(x, filters), (x,), (x,))
except TypeError as error:
    print("without the switch:", str(error).partition(".")[0])

with jax_nki3d.options(forward_mode=True):
    y, tangent = jax.jvp(lambda x: conv3d(x, filters), (x,), (x,))

assert bool((y == tangent).all())  # a convolution is linear: its derivative along x is its value at x
print("with the switch:    the derivative along x equals the value, as it must for a linear function")

# %% [markdown]
# ## It is the adjoint, exactly
#
# For all x and y: ⟨conv3d(x), y⟩ = ⟨x, conv3d_transpose(y)⟩. The filters of `conv3d_transpose` are already flipped, and their channels
# swapped. With integers no rounding happens, so that both sides are equal to the last bit.


# %%
def integers(*shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


x, w, y = integers(1, 2, 7, 7, 7), integers(3, 3, 3, 2, 4), integers(1, 4, 4, 4, 4)
flipped = w[::-1, ::-1, ::-1].swapaxes(3, 4)
left = float((conv3d(x, w, stride=2, padding=1) * y).sum())
right = float((x * conv3d_transpose(y, flipped, stride=2, padding=1)).sum())

print(left, "=", right)
assert left == right

# %% [markdown]
# ## 16-bit sums do not stall
#
# bfloat16 has 8 significant bits: 256 + 1 is 256 again. A sum that is kept in bfloat16 stops growing. Here all sums run in
# float32, and are rounded once, at the end. Two places where it shows: the mean of 16³ ones, and the gradient of a bias, which is a sum
# over all voxels.

# %%
ones = jnp.ones((1, 1, 16, 16, 16), jnp.bfloat16)
window = (1, 1, 16, 16, 16)
by_lax = lax.reduce_window(ones, jnp.bfloat16(0), lax.add, window, window, "VALID") / 16**3
ours = avg_pooling_3d(ones, 16)

print(f"mean of 16³ ones:   lax.reduce_window {by_lax.item():.4f}, avg_pooling_3d {ours.item():.4f}")
assert ours.item() == 1.0
assert by_lax.item() < 1.0

# %%
filters, bias = jnp.ones((1, 1, 1, 1, 1), jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)


def by_hand(bias):
    """A bias that is added to the result of lax; its gradient is a sum over 4096 voxels."""
    y = lax.conv_general_dilated(ones, filters, (1, 1, 1), "VALID", dimension_numbers=("NCDHW", "DHWIO", "NCDHW"))
    return y + bias.reshape(1, 1, 1, 1, 1)


def pull(function):
    """The gradient of the sum of the results, in the bias's type."""
    y, pullback = jax.vjp(function, bias)
    return pullback(jnp.ones_like(y))[0].item()


print(f"gradient of a bias: lax {pull(by_hand):.0f}, conv3d {pull(lambda bias: conv3d(ones, filters, bias)):.0f}, exact 4096")
assert pull(lambda bias: conv3d(ones, filters, bias)) == 4096

# %% [markdown]
# ## Speed on this machine
#
# On a CPU, `lax` computes a strided transposed convolution by inserting zeros between the inputs and multiplying them, too. Here
# each of the stride³ phases is a dense matrix product of what is really there. Below: one layer of a decoder, forward and both
# gradients, medians of a few runs in turns. The ratio depends on the machine and on what else it does;
# `docs/performance.md` has more layers, and `make bench` measures them all on yours.

# %%
layer = {"x": normal(1, 32, 8, 8, 8), "w": normal(4, 4, 4, 32, 32)}


def ours(x, w):
    return conv3d_transpose(x, w, stride=2, padding=1)


def plain_lax(x, w):  # padding 4 - 1 - 1 = 2 around an input with zeros between its elements
    return lax.conv_general_dilated(
        x, w, (1, 1, 1), [(2, 2)] * 3, lhs_dilation=(2, 2, 2), dimension_numbers=("NCDHW", "DHWIO", "NCDHW")
    )


expected = np.asarray(plain_lax(**layer))
np.testing.assert_allclose(ours(**layer), expected, atol=1e-4 * np.abs(expected).max())


def directions(operation):
    dy = normal(*expected.shape)
    return {
        "forward": jax.jit(operation),
        "gradient of x": jax.jit(lambda x, w: jax.vjp(lambda x: operation(x, w), x)[1](dy)[0]),
        "gradient of filters": jax.jit(lambda x, w: jax.vjp(lambda w: operation(x, w), w)[1](dy)[0]),
    }


# %%
def seconds(function):
    start = time.perf_counter()
    jax.block_until_ready(function(**layer))
    return time.perf_counter() - start


contenders = {"jax_nki3d": directions(ours), "plain lax": directions(plain_lax)}
times = {name: {} for name in contenders}
for direction in contenders["jax_nki3d"]:
    runs = {name: [] for name in contenders}
    for _ in range(6):  # in turns; the first run of each compiles
        for name, functions in contenders.items():
            runs[name].append(seconds(functions[direction]))
    for name in contenders:
        times[name][direction] = 1e3 * float(np.median(runs[name][1:]))

# %%
BLUE, ORANGE = "#0072b2", "#e69f00"  # told apart with any kind of colour vision
figure, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
places = np.arange(len(times["plain lax"]))
for shift, name, color in ((-0.2, "plain lax", ORANGE), (0.2, "jax_nki3d", BLUE)):
    bars = axes.barh(places + shift, times[name].values(), 0.36, color=color, label=name)
    axes.bar_label(bars, [f"{t:.2g} ms" if t < 10 else f"{t:.0f} ms" for t in times[name].values()], padding=4)
axes.set_yticks(places, times["plain lax"])
axes.invert_yaxis()
axes.set(xscale="log", xlabel="milliseconds on this machine, logarithmic")
axes.set_xlim(min(times["jax_nki3d"].values()) / 3, max(times["plain lax"].values()) * 3)
axes.set_title("Transposed convolution, 32 → 32 channels, 8³ → 16³, 4³ taps, stride 2", loc="left", fontsize=11)
axes.legend(frameon=False, loc="lower right")
plt.show()

ratio = sum(times["plain lax"].values()) / sum(times["jax_nki3d"].values())
print(f"All three together, on this machine: plain lax takes {ratio:.0f} times as long.")
assert ratio > 2

# %% [markdown]
# ## Sharding
#
# Data-parallel training: each device has a share of the batch, and the gradients are summed over the devices. The four devices here are
# one CPU; the program is the same elsewhere. The result must be that of one device with the whole batch.

# %%
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
x = normal(8, 1, 8, 8, 8)
target = np.roll(x, 1, axis=4)


@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
def sharded_gradients(params, x, target):  # sees two examples of the eight
    gradients = jax.grad(loss)(params, x, target)
    return jax.tree.map(lambda g: lax.psum(g, "data") / 4, gradients)


sharded = jax.jit(sharded_gradients)(params, x, target)
whole = jax.jit(jax.grad(loss))(params, x, target)
for name in whole:
    np.testing.assert_allclose(sharded[name], whole[name], rtol=1e-4, atol=1e-5 * np.abs(whole[name]).max())

print(f"{len(jax.devices())} devices: the gradients equal those of one device with the whole batch, up to rounding")
assert len(jax.devices()) == 4

# %% [markdown]
# `jit` with `NamedSharding` works as well, and then JAX inserts the sum. `docs/conventions.md` says what does not work.

# %% [markdown]
# ## What runs
#
# `explain` lists the operations of a function and of its gradient, with the way that `lax` computes each on a CPU.

# %%
report = explain(lambda params: loss(params, x, target), params)
print(str(report).partition("\n\n")[0])

# %% [markdown]
# A second table is about the NKI kernels on a Trainium: the plan of each, and the time that its multiply-adds and bytes take at least. It is
# computed; nothing ran. `runs as` says why a program lowered for a Trainium on this machine would not hold the kernel.

# %%
coarse = avg_pooling_3d(x, 2)
print(explain(lambda w: conv3d_transpose(coarse, w, stride=2), normal(2, 2, 2, 1, 8)))

# %% [markdown]
# ## Picking an implementation
#
# On platform `neuron` the NKI kernels run where they apply, elsewhere `lax` does. An argument, or a block of `options`, chooses
# another one. `"simulate"` runs the NKI kernels inside JAX on any CPU, in an interpreter: slowly, so this volume is tiny. Gradients go
# through the kernels, too.

# %%
x, w = integers(1, 2, 3, 4, 4), integers(3, 3, 3, 2, 3)


def squares(w):
    return (conv3d(x, w, padding=1) ** 2).sum()


by_lax = jax.value_and_grad(squares)(w)
with jax_nki3d.options(implementation="simulate"):
    by_kernels = jax.value_and_grad(squares)(w)
    report = explain(jax.grad(squares), w)

for entry, _ in report.counts:
    print(f"{entry.operation:<18}{entry.implementation}")
assert all(entry.implementation == "simulate (asked for)" for entry, _ in report.counts)
assert all(bool((ours == theirs).all()) for ours, theirs in zip(by_kernels, by_lax, strict=True))
print("The NKI kernels, simulated, give the value and the gradient of lax, bit for bit: all sums are of integers.")

# %% [markdown]
# ## Where to go on
#
# - `brain_unet`: a U-Net that learns to tell grey from white matter.
# - `inside_a_kernel`: what the NKI kernel of a transposed convolution does, step by step.
# - `docs/conventions.md`: flips, paddings, layouts, and how they differ between libraries.
