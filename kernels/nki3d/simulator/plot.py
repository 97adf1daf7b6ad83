# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A picture of a recording: what each engine does when, and the memory in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core import ENGINES
from .machine import MACHINES

if TYPE_CHECKING:
    from .profile import Profile

__all__ = ["timeline"]


def timeline(profile: Profile, path: Any = None) -> Any:
    """Draw engine timelines over the live SBUF bytes and PSUM banks; saves the figure if `path` is given, and returns it.

    Raises:
        RuntimeError: the profile has no recording.
        ImportError: matplotlib is not installed.
    """
    if profile.scheduled_us is None:
        raise RuntimeError("this profile has no recording. Make it with profile(kernel, record=True).")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("Profile.plot needs matplotlib. Install jax-nki3d[plot].") from error

    lanes = [*ENGINES, "dma"]
    names = sorted({instruction.name for instruction in profile.recording if instruction.us})
    palette = colormaps["tab20"]
    colours = {name: palette(i % 20) for i, name in enumerate(names)}
    figure = Figure(figsize=(11, 6), layout="constrained")
    engines, sbuf, psum = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    for row, lane in enumerate(lanes):
        for name in names:
            spans = [(i.start_us, i.us) for i in profile.recording if i.engine == lane and i.name == name]
            if spans:
                engines.broken_barh(spans, (row - 0.4, 0.8), facecolors=colours[name], edgecolor="white", linewidth=0.2)
    engines.set_yticks(range(len(lanes)), lanes)
    engines.invert_yaxis()
    engines.set_title(
        f"{profile.target}: {profile.scheduled_us:,.1f} us scheduled, {profile.overlapped_us:,.1f} us busiest engine (simulated)"
    )
    engines.legend(
        handles=[Patch(color=colours[name], label=name) for name in names],
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )

    machine = MACHINES.get(profile.target)
    for axes, region, label, limit in (
        (sbuf, "sbuf", "SBUF KiB\nper partition", None if machine is None else machine.sbuf_usable_bytes),
        (psum, "psum", "PSUM banks", None if machine is None else machine.psum_banks),
    ):
        unit = 1024 if region == "sbuf" else 1
        steps = [(0.0, 0), *profile.memory_steps.get(region, []), (profile.scheduled_us, 0)]
        axes.fill_between([when for when, _ in steps], [level / unit for _, level in steps], step="post", alpha=0.5)
        if limit is not None:
            axes.axhline(limit / unit, color="tab:red", linewidth=0.8, linestyle="--")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    psum.set_xlabel("us")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
