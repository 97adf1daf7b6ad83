# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss, training steps of the two networks, prediction of a whole volume, Dice."""

from collections.abc import Callable
from typing import Any

import jax
import linen_model
import numpy as np
import optax
from flax import nnx
from jax import Array
from model import UNet

MULTIPLE = 4  # the network halves its input twice


def adamw(steps: int) -> optax.GradientTransformation:
    """AdamW whose rate rises for a tenth of the steps and then falls along a cosine."""
    return optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, max(1, steps // 10), max(2, steps), 1e-4))


def loss_of(logits: Array, labels: Array) -> Array:
    """Cross-entropy plus one minus the mean soft Dice of the tissues; logits [..., classes], labels [...]."""
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    p, truth = jax.nn.softmax(logits), jax.nn.one_hot(labels, logits.shape[-1])
    everywhere = tuple(range(labels.ndim))
    overlap = 2 * (p * truth).sum(everywhere) / (p + truth).sum(everywhere)
    return entropy + 1 - overlap[1:].mean()


@nnx.jit
def step(model: UNet, optimizer: nnx.Optimizer, image: Array, labels: Array) -> Array:
    """One step of ours, in place; the loss before it."""
    loss, gradients = nnx.value_and_grad(lambda model: loss_of(model(image), labels))(model)
    optimizer.update(model, gradients)
    return loss


def linen_step(tx: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, Array]]:
    """The step of the reference: (parameters, optimizer state, image, labels) -> (parameters, optimizer state, loss)."""

    @jax.jit
    def step(params, state, image, labels):
        loss, gradients = jax.value_and_grad(
            lambda params: loss_of(linen_model.UNet().apply({"params": params}, image), labels)
        )(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def linen_parameters(model: UNet) -> dict:
    """The parameters of our network as those of the reference: the names are the same."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def count(parameters: Any) -> int:
    """The number of scalars in a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters))


def predict(model: UNet, image: np.ndarray) -> np.ndarray:
    """The label of every voxel of a volume [X, Y, Z] of any size, in one call."""
    pads = [(0, -n % MULTIPLE) for n in image.shape]
    logits = nnx.jit(lambda model, x: model(x))(model, np.pad(image, pads)[None, ..., None])
    x, y, z = image.shape
    return np.asarray(logits[0, :x, :y, :z].argmax(-1))


def dice(predicted: np.ndarray, truth: np.ndarray, label: int) -> float:
    """Twice the voxels that both give the label, over the sum of those that each does: 1 is agreement, 0 none."""
    a, b = predicted == label, truth == label
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def two_thresholds(image: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The intensities between background, grey and white that give the best mean Dice: what a network has to beat."""
    values = np.quantile(image[truth > 0], np.linspace(0.0, 1.0, 60))
    low = max(values[:20], key=lambda v: dice(np.where(image > v, 1, 0), np.minimum(truth, 1), 1))
    return low, max(values[20:], key=lambda v: dice(np.where(image > v, 2, 0), truth, 2))
