# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small 3-D U-Net to tell grey from white matter, on the back half of a brain, and tests it on the front half.

python examples/brain_unet/main.py --help
"""

import argparse
import time
from pathlib import Path

import data
import jax
import jax.numpy as jnp
import numpy as np
import pictures
import train
from flax import nnx
from model import UNet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import jax_nki3d

BATCH, PATCH = 2, 32
TIMED_STEPS = 9

console = Console(highlight=False)


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder of the pictures (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the patches (default: %(default)s)")
    arguments = parser.parse_args()
    start = time.perf_counter()

    console.rule("Data", align="left")
    back, front = show_data(data.load())

    console.rule("Training", align="left")
    model, losses = fit(back, arguments.steps, arguments.seed)

    console.rule("Held-out half", align="left")
    predicted, dice = test(model, back, front)
    arguments.output.mkdir(parents=True, exist_ok=True)
    pictures.draw_loss(losses, arguments.output / "loss.png")
    pictures.draw_labels(front, predicted, dice, arguments.output / "labels.png")
    console.print(f"Pictures: {arguments.output / 'loss.png'}, {arguments.output / 'labels.png'}")

    console.rule("What ran", align="left")
    show_implementations(model, back)

    console.rule("Speed", align="left")
    compare_speed(model, back)

    console.rule(align="left")
    console.print(f"{time.perf_counter() - start:.0f} s in all on {jax.device_count()} {jax.devices()[0].platform} device(s).")


def show_data(whole: data.Volume) -> tuple[data.Volume, data.Volume]:
    """Prints what the scan is; its two halves."""
    back, front = data.halves(whole)
    console.print(
        f"MNI152 T1 template as shipped with nilearn: the average of 152 people, skull-stripped, at {data.RESOLUTION} mm. "
        "Its right half mirrors its left half exactly, so the halves are back (training) and front (test). "
        f"{data.GAP} slices ({data.GAP * data.RESOLUTION} mm) between them belong to neither."
    )
    table = Table("", "voxels", *data.CLASSES, box=None, header_style="dim")
    for name, half in (("back", back), ("front", front)):
        shares = [f"{(half.labels == label).mean():.1%}" for label in range(len(data.CLASSES))]
        table.add_row(name, " x ".join(map(str, half.image.shape)), *shares)
    console.print(table)
    return back, front


def fit(back: data.Volume, steps: int, seed: int) -> tuple[UNet, list[float]]:
    """Trains on random patches; the network and the loss of every step."""
    rng = np.random.default_rng(seed)
    # "rbg" draws numbers as good for this; its programs, one for each shape, compile in a fifth of the time
    model = UNet(rngs=nnx.Rngs(jax.random.key(seed, impl="rbg")))
    optimizer = nnx.Optimizer(model, train.adamw(steps), wrt=nnx.Param)
    parameters = train.count(nnx.state(model, nnx.Param))
    console.print(f"U-Net with {parameters:,} parameters, {BATCH} patches of {PATCH}³ voxels a step.")
    losses: list[float] = []
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compile", total=steps, loss="-")
        for _ in range(steps):
            losses.append(float(train.step(model, optimizer, *data.patches(back, BATCH, PATCH, rng))))
            progress.update(task, advance=1, description="train", loss=f"{losses[-1]:.3f}")
    console.print(f"Loss {np.mean(losses[:5]):.3f} (first 5 steps) → {np.mean(losses[-5:]):.3f} (last 5).")
    return model, losses


def test(model: UNet, back: data.Volume, front: data.Volume) -> tuple[np.ndarray, list[float]]:
    """Labels the front half; the labels and their Dice, by class."""
    predicted = train.predict(model, front.image)
    dice = [train.dice(predicted, front.labels, label) for label in range(len(data.CLASSES))]
    thresholds = np.digitize(front.image, train.two_thresholds(back.image, back.labels))
    table = Table("Dice", *data.CLASSES, box=None, header_style="dim")
    table.add_row("U-Net", *(f"[bold]{d:.3f}" for d in dice))
    table.add_row("two thresholds", *(f"{train.dice(thresholds, front.labels, label):.3f}" for label in range(3)))
    console.print(table)
    console.print(
        "The two thresholds on intensity, chosen on the back half, are there for comparison: an average of 152 people has hardly "
        "any noise, so they are hard to beat. The demo shows that the layers train; it says nothing about the scan of one patient."
    )
    return predicted, dice


def show_implementations(model: UNet, back: data.Volume) -> None:
    """Prints which implementation each operation of a training step has."""
    image, labels = data.patches(back, BATCH, PATCH, np.random.default_rng(0))
    graph, parameters = nnx.split(model, nnx.Param)

    def gradients(parameters):
        return jax.grad(lambda parameters: train.loss_of(nnx.merge(graph, parameters)(image), labels))(parameters)

    console.print(str(jax_nki3d.explain(gradients, parameters)), markup=False, soft_wrap=True)  # lines wider than a terminal


def compare_speed(model: UNet, back: data.Volume) -> None:
    """Times training steps of ours and of the same network in Flax Linen, in turns, from the same parameters."""
    image, labels = map(jnp.asarray, data.patches(back, BATCH, PATCH, np.random.default_rng(0)))
    tx = train.adamw(TIMED_STEPS)
    ours = nnx.clone(model)
    optimizer = nnx.Optimizer(ours, tx, wrt=nnx.Param)
    parameters = train.linen_parameters(model)
    state = tx.init(parameters)
    linen_step = train.linen_step(tx)
    seconds: dict[str, list[float]] = {"ours": [], "linen": []}
    first: dict[str, float] = {}
    for _ in range(TIMED_STEPS + 1):
        before = time.perf_counter()
        loss = jax.block_until_ready(train.step(ours, optimizer, image, labels))
        between = time.perf_counter()
        parameters, state, linen_loss = jax.block_until_ready(linen_step(parameters, state, image, labels))
        after = time.perf_counter()
        seconds["ours"].append(between - before)
        seconds["linen"].append(after - between)
        first = first or {"ours": float(loss), "linen": float(linen_loss)}
    medians = {name: float(np.median(times[1:])) for name, times in seconds.items()}  # the first of each compiles
    table = Table("training step", "parameters", "first loss", "seconds", box=None, header_style="dim")
    for name, label, tree in (("ours", "jax_nki3d", nnx.state(ours, nnx.Param)), ("linen", "flax.linen", parameters)):
        table.add_row(label, f"{train.count(tree):,}", f"{first[name]:.6f}", f"{medians[name]:.3f}")
    console.print(table)
    console.print(
        f"jax_nki3d takes [bold]{medians['ours'] / medians['linen']:.2f}[/bold] times the time of flax.linen "
        f"(medians of {TIMED_STEPS} steps each, in turns, after compilation)."
    )


if __name__ == "__main__":
    main()
