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
# # A U-Net learns the tissues of the brain
#
# What this notebook shows, in a bit more than a minute on two CPU cores:
#
# - the scan, its labels, and how they are divided into a half to train on and a half to test on;
# - training a small 3-D U-Net of this library's Flax layers, with the curve of its loss;
# - its labels on the held-out half, where they are wrong, and Dice, beside two thresholds on intensity;
# - how long a training step takes on this machine, beside the same network in Flax's own layers;
# - what runs: the operations of the network and of its gradient.
#
# The code is that of `examples/brain_unet`: `model.py` is the network to copy, and `make demo` runs all of it as a program.
#
# **What it can say.** The scan is a template, an average of 152 people, with hardly any noise, and its labels come from probability maps of the same
# average. So the notebook shows that the layers train, and how fast. It says nothing about the scan of one patient.

# %%
import io
import sys
import time
from collections import Counter

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from IPython.display import Image
from matplotlib.colors import ListedColormap
from tqdm import tqdm

import jax_nki3d

sys.path.insert(0, "../examples/brain_unet")
import data
import pictures
import train
from model import UNet

# %matplotlib inline
plt.rcParams["figure.dpi"] = 90

# %% [markdown]
# ## The scan
#
# The MNI152 T1 template comes with the nilearn package, so that nothing is downloaded. A voxel counts as grey or white matter where the probability
# of that tissue is above one half. The template's right half mirrors its left half, voxel by voxel: trained on one and tested on the other, a
# network would have seen the answers. So the halves are the back and the front, with a gap between them that belongs to neither.

# %%
whole = data.load()
back, front = data.halves(whole)

at_1_mm = data.read("t1")
assert bool((at_1_mm == at_1_mm[::-1]).all())  # its own mirror image
for name, half in {"back (training)": back, "front (test)": front}.items():
    shares = [f"{name} {(half.labels == label).mean():.1%}" for label, name in enumerate(data.CLASSES)]
    print(f"{name:<16} {' x '.join(map(str, half.image.shape))} voxels: {', '.join(shares)}")

# %%
place = whole.image.shape[0] // 2 + 8  # 16 mm beside the middle
tissues = ListedColormap([pictures.GREY, pictures.WHITE])
figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained", sharey=True)
for axes, title in zip(panels, ("T1 intensity", "labels: grey matter (orange), white matter (blue)"), strict=True):
    axes.imshow(whole.image[place].T, cmap="gray", origin="lower", vmin=0, vmax=1)
    axes.set_title(title, fontsize=11)
    axes.set(xticks=[], yticks=[])
    axes.axvspan(back.image.shape[1] - 0.5, front.first_slice - 0.5, color=pictures.WRONG, alpha=0.6, linewidth=0)
    for x, text in ((back.image.shape[1] - 4, "← back: training"), (front.first_slice + 4, "front: test →")):
        axes.text(x, whole.image.shape[2] - 6, text, color="white", ha="right" if "←" in text else "left", fontsize=10)
labels = np.ma.masked_equal(whole.labels[place].T, 0)
panels[1].imshow(labels, cmap=tissues, origin="lower", alpha=0.7, interpolation="nearest")
plt.show()

# %% [markdown]
# ## Training
#
# Two random cubes of 32³ voxels a step. The network has three resolutions, with average pooling on the way down and transposed convolutions on the
# way up. Its norm looks at one voxel at a time, so that what it learns on cubes holds for a volume of any size.

# %%
STEPS, BATCH, PATCH = 150, 2, 32

model = UNet(rngs=nnx.Rngs(jax.random.key(0, impl="rbg")))
optimizer = nnx.Optimizer(model, train.adamw(STEPS), wrt=nnx.Param)
print(f"{train.count(nnx.state(model, nnx.Param)):,} parameters")

# %%
rng = np.random.default_rng(0)
losses = []
bar = "{desc}: {percentage:3.0f}%|{bar:40}| step {n_fmt} of {total_fmt}{postfix}"
progress = tqdm(range(STEPS), desc="training", file=sys.stdout, bar_format=bar, mininterval=1)
for _ in progress:
    losses.append(float(train.step(model, optimizer, *data.patches(back, BATCH, PATCH, rng))))
    progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)

# %%
first, last = np.mean(losses[:5]), np.mean(losses[-5:])
print(f"loss {first:.3f} (mean of the first 5 steps) → {last:.3f} (of the last 5)")
assert last < first / 2

picture = io.BytesIO()
pictures.draw_loss(losses, picture)
Image(picture.getvalue(), width=640)

# %% [markdown]
# ## The held-out half
#
# The network labels the front half in one call. Dice compares with the labels: twice the voxels that both give a tissue, over the sum of those that
# each does; 1 is agreement. Two thresholds on intensity, chosen on the back half, are there for comparison: on an average of 152 people, which
# has hardly any noise, they are hard to beat.

# %%
predicted = train.predict(model, front.image)
dice = [train.dice(predicted, front.labels, label) for label in range(3)]
thresholds = np.digitize(front.image, train.two_thresholds(back.image, back.labels))
by_thresholds = [train.dice(thresholds, front.labels, label) for label in range(3)]

print(f"{'Dice':<16}" + "".join(f"{name:>14}" for name in data.CLASSES))
for name, values in {"U-Net": dice, "two thresholds": by_thresholds}.items():
    print(f"{name:<16}" + "".join(f"{value:>14.3f}" for value in values))
assert min(dice) > 0.8

# %%
picture = io.BytesIO()
pictures.draw_labels(front, predicted, dice, picture, slices=3)
Image(picture.getvalue(), width=760)

# %% [markdown]
# Most of what differs lies on the borders between tissues, where one voxel holds both.


# %%
def on_a_border(labels):
    """Voxels of which one of the six neighbours has another label."""
    border = np.zeros(labels.shape, bool)
    for axis in range(3):
        changes = np.diff(labels, axis=axis) != 0
        ahead, behind = ([(0, 0)] * axis + [pad] + [(0, 0)] * (2 - axis) for pad in ((0, 1), (1, 0)))
        border |= np.pad(changes, ahead) | np.pad(changes, behind)
    return border


border, wrong = on_a_border(front.labels), predicted != front.labels
print(
    f"{border[wrong].mean():.0%} of the voxels that differ lie on a border; of all voxels of the brain {border[front.brain].mean():.0%} do"
)
assert border[wrong].mean() > 0.5

# %% [markdown]
# ## A step's speed
#
# The same network in Flax Linen, with Flax's own convolutions and pooling, takes the same parameters and must start with the same loss. Steps of both
# in turns, medians, after compilation. The ratio depends on the machine and on what else it does.

# %%
image, labels = map(jax.numpy.asarray, data.patches(back, BATCH, PATCH, np.random.default_rng(0)))
tx = train.adamw(STEPS)
ours = nnx.clone(model)
optimizer = nnx.Optimizer(ours, tx, wrt=nnx.Param)
parameters = train.linen_parameters(model)
state, linen_step = tx.init(parameters), train.linen_step(tx)

seconds, starts = {"jax_nki3d": [], "flax.linen": []}, []
for _ in range(4):
    moments = [time.perf_counter()]
    loss = jax.block_until_ready(train.step(ours, optimizer, image, labels))
    moments.append(time.perf_counter())
    parameters, state, linen_loss = jax.block_until_ready(linen_step(parameters, state, image, labels))
    moments.append(time.perf_counter())
    starts.append((float(loss), float(linen_loss)))
    for name, duration in zip(seconds, np.diff(moments), strict=True):
        seconds[name].append(duration)

medians = {name: float(np.median(times[1:])) for name, times in seconds.items()}  # the first of each compiles
for name, median in medians.items():
    print(f"{name:<12} {median:.2f} s a step on this machine")
print(f"flax.linen takes {medians['flax.linen'] / medians['jax_nki3d']:.1f} times as long.")
np.testing.assert_allclose(*starts[0], rtol=1e-4)

# %% [markdown]
# ## What runs
#
# The operations in the network, and those that its gradient with respect to the parameters adds. Of the first layer only `dw` and `db` are there:
# nobody asks for the gradient of the scan.

# %%
graph, parameters = nnx.split(model, nnx.Param)


def loss_of(parameters):
    return train.loss_of(nnx.merge(graph, parameters)(image), labels)


report = jax_nki3d.explain(loss_of, parameters)
for where, entries in {"network": report.counts, "gradient": report.gradient}.items():
    totals = Counter()
    for entry, count in entries:
        totals[entry.operation] += count
    for operation, count in totals.items():
        print(f"{where:<10}{operation:<26}{count}")
assert [count for entry, count in report.gradient if entry.operation == "conv3d_bwd (dw, db)"] == [1]

# %% [markdown]
# `print(report)` shows each of them with its shapes and the way that `lax` computes it on a CPU, then the plans of the NKI kernels on a Trainium, with
# the least time of each: computed, not run.
