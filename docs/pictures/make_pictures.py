# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/conventions.md: `python docs/pictures/make_pictures.py [FOLDER]`.

What they show is asked of the operations, which are run on a single 1 at each place: no index is typed here. The files are the same,
byte for byte, wherever the same matplotlib draws them.
"""

import sys
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import jax_nki3d

FOLDER = Path(__file__).parent
STYLE = {
    "svg.hashsalt": "jax_nki3d",
    "svg.fonttype": "path",  # the glyphs are in the file: it looks the same without the font
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "figure.facecolor": "white",  # opaque: legible on a dark page, too
}
INK, FAINT, EMPTY = "#22272e", "#8a929c", "#f1f3f5"
# Three hues that people with any colour vision tell apart, light enough for dark ink.
HUES = ("#9ecae9", "#fdbf6f", "#b7dca8")
TAPS = (1, 10, 100)


def row(*values: float) -> np.ndarray:
    """A volume with one channel and one axis."""
    return np.float32(values).reshape(1, 1, 1, 1, -1)


def taps(*values: float) -> np.ndarray:
    """Filters with one channel and one axis."""
    return np.float32(values).reshape(1, 1, -1, 1, 1)


def values(y: np.ndarray) -> list[int]:
    """The elements of a row."""
    return np.asarray(y).ravel().astype(int).tolist()


def cell(axes: Axes, x: float, y: float, text: str = "", *, fill: str = EMPTY, dashed: bool = False, ink: str = INK) -> None:
    """One element: a square around (x, y)."""
    style = {"linestyle": (0, (2, 2)) if dashed else "solid", "edgecolor": FAINT if dashed else INK, "linewidth": 0.9}
    axes.add_patch(Rectangle((x - 0.46, y - 0.34), 0.92, 0.68, facecolor="white" if dashed else fill, **style))
    axes.text(x, y, text, ha="center", va="center", color=FAINT if dashed else ink, fontsize=8.5)


def canvas(width: float, height: float, left: float, right: float, bottom: float, top: float) -> tuple[Figure, Axes]:
    """A figure without frame, in the coordinates given."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.axis("off")
    return figure, axes


# ---- which inputs a window reads -------------------------------------------------------------------------------------

SIZE, STRIDE = 6, 2
PADDINGS = (
    ("padding=0 or 'VALID'", 0),
    ("padding=1", 1),
    ("padding='SAME'", "SAME"),
    ("causal: front 2, back 0", (0, 0, 0, 0, 2, 0)),
)


def windows(padding: object) -> list[list[int | None]]:
    """Of each output, the input that each of three taps reads; None for padding."""
    pads = padding if padding == "SAME" or isinstance(padding, tuple) else (0, 0, padding)
    read = []
    for tap in range(3):
        one = taps(*(float(k == tap) for k in range(3)))
        ys = [values(jax_nki3d.conv3d(row(*x), one, stride=(1, 1, STRIDE), padding=pads)) for x in np.eye(SIZE)]
        read.append([next((i for i, y in enumerate(ys) if y[o]), None) for o in range(len(ys[0]))])
    return [list(window) for window in zip(*read, strict=True)]


def padding_picture() -> Figure:
    """Four paddings of the same convolution."""
    figure, axes = canvas(8.0, 6.2, -7.4, 8.2, -16.3, 0.6)
    axes.text(
        -7.1, 0.05, f"{SIZE} elements, 3 taps, stride {STRIDE}: what each output reads", fontsize=11, color=INK, va="center"
    )
    top = -1.2
    for title, padding in PADDINGS:
        reads = windows(padding)
        # where each window starts: any of its taps that reads an element tells it
        starts = [next(i - k for k, i in enumerate(window) if i is not None) for window in reads]
        around = padding if isinstance(padding, int) else 0  # an int pads both sides, even where no window reads it
        first, last = min(-around, *starts), max(SIZE - 1 + around, *(s + 2 for s in starts))
        axes.text(-7.1, top, title, color=INK, va="center", fontsize=9.5)
        axes.text(-7.1, top - 0.75, f"{len(reads)} outputs", color=FAINT, va="center")
        unread = set(range(SIZE)) - {i for window in reads for i in window}
        for i in range(first, last + 1):
            inside = 0 <= i < SIZE
            cell(axes, i, top, f"x{i}" if inside else "0", dashed=not inside, ink=FAINT if i in unread else INK)
        for i in unread:
            axes.text(i, top - 0.75, "not read", ha="center", va="center", color=FAINT, fontsize=7.5)
        for number, start in enumerate(starts):
            y = top - 0.8 - 0.72 * number
            colour = HUES[number % 3]
            axes.add_patch(
                Rectangle((start - 0.42, y - 0.27), 2.84, 0.54, facecolor=colour, edgecolor=INK, linewidth=0.9, zorder=3)
            )
            axes.text(start + 1, y, f"y{number}", ha="center", va="center", fontsize=8.5, color=INK, zorder=4)
        top -= 4.0
    return figure


# ---- how a transposed convolution scatters ---------------------------------------------------------------------------

X = (1, 2, 3)
CROPS = (
    ("padding=0", {}),
    ("padding=1", {"padding": (0, 0, 1)}),
    ("padding=1, output_padding=1", {"padding": (0, 0, 1), "output_padding": (0, 0, 1)}),
    ("padding=0, output_padding=1", {"output_padding": (0, 0, 1)}),
)


def transposed(x: tuple[float, ...], **arguments: tuple[int, ...]) -> list[int]:
    """The library's result for torch's taps."""
    return values(jax_nki3d.conv3d_transpose(row(*x), taps(*TAPS)[::-1, ::-1, ::-1], stride=(1, 1, STRIDE), **arguments))


def transposed_picture() -> Figure:
    """Three elements, three taps, stride 2; then what padding and output_padding keep of it."""
    figure, axes = canvas(8.0, 5.9, -5.3, 8.3, -11.9, 1.3)
    axes.text(-5.0, 0.85, "conv_transpose: x = [1, 2, 3], taps [1, 10, 100], stride 2", fontsize=11, color=INK, va="center")
    whole = transposed(X)
    axes.text(-5.0, -0.35, "input", color=INK, va="center", fontsize=9.5)
    for z, value in enumerate(X):
        cell(axes, 1 + 2 * z, -0.35, str(value), fill=HUES[z])
    for z, value in enumerate(X):
        alone = transposed(tuple(float(i == z) for i in range(3)))
        y = -2.15 - 0.8 * z
        axes.text(-5.0, y, f"{value} times the taps", color=INK, va="center", fontsize=9.5)
        reached = [o for o, tap in enumerate(alone) if tap]
        for o in reached:
            cell(axes, o, y, str(alone[o] * value), fill=HUES[z])
        arrow = {"arrowstyle": "-|>", "mutation_scale": 8, "color": FAINT, "linewidth": 0.9, "zorder": 0}
        axes.add_patch(FancyArrowPatch((1 + 2 * z, -0.72), (1 + 2 * z, y + 0.36), **arrow))
    axes.text(-5.0, -5.2, "sum; then padding crops,", color=INK, va="center", fontsize=9.5)
    axes.text(-5.0, -5.75, "output_padding adds behind", color=INK, va="center", fontsize=9.5)
    for number, (title, arguments) in enumerate(CROPS):
        y = -6.75 - 1.3 * number
        kept = transposed(X, **arguments)
        start = arguments.get("padding", (0, 0, 0))[2]
        axes.text(-5.0, y, title, color=INK, va="center", fontsize=9.5)
        for o, value in enumerate(whole):
            if not start <= o < start + len(kept):
                cell(axes, o, y, str(value), dashed=True)
        for o, value in enumerate(kept, start):
            beyond = o >= len(whole)
            cell(axes, o, y, "bias" if beyond else str(value), fill="white" if beyond else EMPTY)
    return figure


# ---- the conventions -------------------------------------------------------------------------------------------------


def lax_transposed(x: tuple[float, ...], stored: tuple[int, ...], transpose_kernel: bool) -> list[int]:
    """lax's result with the padding that keeps everything."""
    numbers = ("NCDHW", "DHWIO", "NCDHW")
    settings = {"dimension_numbers": numbers, "transpose_kernel": transpose_kernel}
    return values(jax.lax.conv_transpose(row(*x), taps(*stored), (1, 1, STRIDE), [(0, 0), (0, 0), (2, 2)], **settings))


def ours(x: tuple[float, ...], stored: tuple[int, ...]) -> list[int]:
    """Our result for filters as they are stored."""
    return values(jax_nki3d.conv3d_transpose(row(*x), taps(*stored), stride=(1, 1, STRIDE)))


CONVENTIONS = (
    ("torch: ConvTranspose3d", "lax, Flax: transpose_kernel=True", TAPS, lambda x, w: lax_transposed(x, w, True)),
    ("jax_nki3d: conv3d_transpose", "filters already flipped", TAPS[::-1], ours),
    ("lax, Flax, Haiku: the default", "Equinox: ConvTranspose3d", TAPS, lambda x, w: lax_transposed(x, w, False)),
)


def conventions_picture() -> Figure:
    """What is stored, what one input becomes, and the result."""
    figure, axes = canvas(8.0, 3.7, -8.4, 12.6, -6.9, 1.6)
    for x, title in ((1.0, "stored taps"), (8.0, "what [1, 2, 3] becomes with stride 2")):
        axes.text(x, 0.9, title, ha="center", va="center", color=INK, fontsize=9.5)
    for number, (name, more, stored, run) in enumerate(CONVENTIONS):
        y = -0.6 - 2.2 * number
        axes.text(-8.1, y + 0.28, name, va="center", color=INK, fontsize=9.5)
        axes.text(-8.1, y - 0.34, more, va="center", color=INK, fontsize=9.5)
        for k, tap in enumerate(stored):
            cell(axes, k, y, str(tap), fill=HUES[TAPS.index(tap)])
        arrow = {"arrowstyle": "-|>", "mutation_scale": 9, "color": FAINT, "linewidth": 1.0}
        axes.add_patch(FancyArrowPatch((2.9, y), (4.4, y), **arrow))
        lone = run((1, 0, 0), stored)[:3]
        for o, value in enumerate(run(X, stored)):
            cell(axes, 5 + o, y, str(value))
        axes.text(
            4.6, y - 0.8, f"a lone 1 becomes {', '.join(map(str, lone))}", va="center", color=FAINT, fontsize=8.5, ha="left"
        )
    return figure


PICTURES = {
    "padding.svg": padding_picture,
    "transposed.svg": transposed_picture,
    "conventions.svg": conventions_picture,
}


def draw(folder: Path) -> list[Path]:
    """Draws all pictures into a folder."""
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, picture in PICTURES.items():
            paths.append(folder / name)
            picture().savefig(paths[-1], metadata={"Date": None, "Creator": None})
    return paths


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
