# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The two pictures of the demo."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws files, needs no display

import matplotlib.pyplot as plt
import numpy as np
from data import AXIS, CLASSES, RESOLUTION, Volume
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

GREY, WHITE, WRONG = "#f2a541", "#3fa7d6", "#ff2e63"
PAPER, INK = "#ffffff", "#22303c"


def draw_loss(losses: Sequence[float], file: Path) -> None:
    """The loss of every step, and its running mean."""
    window = min(15, len(losses))
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, color=WHITE, alpha=0.4, linewidth=1, label="each step")
    axes.plot(np.arange(len(mean)) + (window + 1) / 2, mean, color=INK, linewidth=2, label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="cross-entropy + 1 - soft Dice", yscale="log", xlim=(1, max(2, len(losses))))
    axes.set_title("Training loss", loc="left", color=INK, fontweight="bold")
    axes.grid(which="both", axis="y", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_labels(half: Volume, predicted: np.ndarray, dice: Sequence[float], file: Path, slices: int = 4) -> None:
    """Slices through the held-out half: the scan, its labels, the predicted ones, and where these differ."""
    size = half.image.shape[AXIS]
    chosen = np.linspace(0.04 * size, 0.58 * size, slices).astype(int)
    titles = ("T1", "Labels", "Predicted", "Different")
    # all rows share one frame, just large enough for the brain
    x, z = (_extent(half.brain.any(axis=other)) for other in ((1, 2), (0, 1)))
    figure, grid = plt.subplots(
        slices, 4, figsize=(9.2, 2.05 * slices + 0.9), layout="constrained", facecolor="black", squeeze=False
    )
    for row, place in zip(grid, chosen, strict=True):
        t1, truth, guess = (np.take(a, place, axis=AXIS)[x, z].T for a in (half.image, half.labels, predicted))
        grey = np.repeat(t1[..., None], 3, axis=2)
        panels = (grey, _tint(grey, truth), _tint(grey, guess), _mark(grey, truth != guess))
        for axes, panel in zip(row, panels, strict=True):
            axes.imshow(panel.clip(0, 1), origin="lower", interpolation="nearest")
            axes.set_axis_off()
        slice_ = RESOLUTION * (half.first_slice + place)
        row[0].text(0.0, 1.0, f"{slice_} mm\nfrom the back", color="#b8c4ce", fontsize=7, transform=row[0].transAxes, va="top")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, color="white", fontsize=12)
    wrong = (predicted != half.labels)[half.brain].mean()
    legend = [
        Patch(color=GREY, label=f"{CLASSES[1]}, Dice {dice[1]:.3f}"),
        Patch(color=WHITE, label=f"{CLASSES[2]}, Dice {dice[2]:.3f}"),
        Patch(color=WRONG, label=f"labels differ, {wrong:.1%} of the brain"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, labelcolor="white")
    figure.suptitle("Held-out front half, slices from the middle forwards", color="white", fontweight="bold")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _extent(some: np.ndarray) -> slice:
    """From the first to the last True, with a margin of two."""
    places = np.flatnonzero(some)
    return slice(max(0, places[0] - 2), places[-1] + 3)


def _tint(grey: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The scan with its tissues coloured."""
    panel = grey.copy()
    for label, color in ((1, GREY), (2, WHITE)):
        panel[labels == label] = 0.3 * panel[labels == label] + 0.7 * np.array(to_rgb(color))
    return panel


def _mark(grey: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """The scan, darkened, with the voxels marked."""
    panel = 0.6 * grey
    panel[wrong] = to_rgb(WRONG)
    return panel
