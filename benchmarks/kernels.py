# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.kernels`: what our NKI kernels issue on trn2 in bfloat16, beside the vendor's. Label: simulated.

The rows and the vendor's figures are data (`vendor_kernels.json`, which names their source). Ours come from `nki3d.simulator.profile` by the
same cost rules; results are compared with lax. Times are per-engine lower bounds, not predictions.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jax_nki3d
import nki3d
from nki3d.simulator import MACHINES, Profile, profile

DATA = Path(__file__).with_name("vendor_kernels.json")
# The vendor's figures book a two-operand instruction in float32 with N cycles.
MACHINE = MACHINES["trn2"].replace(two_input_factor=1)
ENGINES = ("tensor", "vector", "scalar", "gpsimd")


def run(row: dict[str, Any]) -> tuple[Profile, float]:
    """The profile of our kernel on a row, after a check of its values; and the seconds of the simulation."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    taps, stride, padding = (row["kernel_size"],) * 3, (row["stride"],) * 3, tuple(row["padding"])
    x = random(row["batch"], row["c_in"], *row["size"])
    kind = row["kernel"]
    arguments: dict[str, Any]
    if kind in ("poolF", "poolB"):
        arguments = {"kernel_size": taps, "stride": stride, "padding": padding[::2]}
        kernel, reference, operands = nki3d.avg_pooling_3d, jax_nki3d.avg_pooling_3d, (x,)
        if kind == "poolB":
            dy = np.asarray(jax_nki3d.avg_pooling_3d(x, **arguments))
            kernel, reference, operands = nki3d.avg_pooling_3d_backward, jax_nki3d.avg_pooling_3d_backward, (dy, x)
    else:
        filters = random(*taps, row["c_in"], row["c_out"])
        if kind == "convT":
            arguments = {"stride": stride, "padding": padding[::2]}
            kernel, reference, operands = nki3d.conv3d_transpose, jax_nki3d.conv3d_transpose, (x, filters)
        elif kind == "conv":
            arguments = {"stride": stride, "padding": padding}
            kernel, reference, operands = nki3d.conv3d, jax_nki3d.conv3d, (x, filters)
        else:
            wanted = {f"compute_{gradient}": kind in (gradient, "all") for gradient in ("dx", "dw", "db")}
            arguments = {"stride": stride, "padding": padding, **wanted}
            dy = random(*jax.eval_shape(lambda: jax_nki3d.conv3d(x, filters, stride=stride, padding=padding)).shape)
            kernel, reference, operands = nki3d.conv3d_bwd, jax_nki3d.conv3d_bwd, (dy, x, filters)
    start = time.perf_counter()
    outputs, cost = profile(kernel, MACHINE)(*operands, **arguments)
    seconds = time.perf_counter() - start
    check(row["name"], outputs, reference(*operands, implementation="lax", **arguments))
    return cost, seconds


def check(name: str, outputs: Any, expected: Any) -> None:
    """Both round one float32 sum: they differ by the last place of a bfloat16 at most."""
    for ours, theirs in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        one, two = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        assert one.shape == two.shape, name
        error, allowed = np.abs(one - two), 2**-7 * np.abs(two) + 2**-12 * np.abs(two).max()
        assert (error <= allowed).all(), f"{name}: off by {float((error - allowed).max())}"


def line(row: dict[str, Any], cost: Profile, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    engines = {name: cost.engines[name].cycles for name in ENGINES}
    return {
        "name": row["name"],
        "kernel": row["kernel"],
        **engines,
        "ideal": row["ideal_tensor"],
        "bytes": (cost.hbm_read_bytes + cost.hbm_write_bytes) / row["least_bytes"],
        "instructions": cost.instructions,
        "overlapped": cost.overlapped_us,
        "serial": cost.serial_us,
        "sbuf": cost.sbuf_peak_bytes,
        "seconds": seconds,
        "vendor": row["vendor"],
        "vendor_bytes": row["vendor"]["hbm_bytes"] / row["least_bytes"],
    }


def ratio(ours: float, theirs: float) -> float:
    """Ours over theirs; nothing over nothing is even."""
    return ours / theirs if theirs else (1.0 if not ours else math.inf)


def geometric_mean(values: list[float]) -> float:
    """The geometric mean, 0 counting as a hundredth."""
    return math.exp(sum(math.log(max(value, 0.01)) for value in values) / len(values))


def bars(lines: list[dict[str, Any]]) -> list[tuple[str, float | str, bool]]:
    """(what, measured, whether it holds) of each bar."""
    convolutions = [entry for entry in lines if not entry["kernel"].startswith("pool")]
    tensor = [ratio(entry["tensor"], entry["vendor"]["tensor"]) for entry in convolutions]
    vector = [ratio(entry["vector"], entry["vendor"]["vector"]) for entry in convolutions]
    every_vector = [ratio(entry["vector"], entry["vendor"]["vector"]) for entry in lines]
    moved = [entry["bytes"] for entry in lines]
    return [
        ("rows that run", f"{len(lines)}", True),
        ("tensor cycles, worst row over the vendor's (at most 1)", max(tensor), max(tensor) <= 1),
        ("vector cycles, worst row over the vendor's (at most 1)", max(every_vector), max(every_vector) <= 1),
        ("tensor cycles, geometric mean of convolutions (at most 0.5)", geometric_mean(tensor), geometric_mean(tensor) <= 0.5),
        ("vector cycles, geometric mean of convolutions (at most 0.4)", geometric_mean(vector), geometric_mean(vector) <= 0.4),
        ("HBM bytes over the least, geometric mean (at most 1.5)", geometric_mean(moved), geometric_mean(moved) <= 1.5),
        ("HBM bytes over the least, worst row (at most 2.5)", max(moved), max(moved) <= 2.5),
    ]


def table(lines: list[dict[str, Any]]) -> str:
    """The rows and the bars as Markdown."""
    text = [
        "| workload | tensor / ideal (vendor) | tensor, of vendor's | vector, of vendor's | scalar (vendor) | gpsimd (vendor) "
        "| HBM / least (vendor) | instructions (vendor) | us overlapped, one by one | vendor's us |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in lines:
        vendor = entry["vendor"]
        ideal = entry["ideal"]
        tensor = f"{entry['tensor'] / ideal:.2f} ({vendor['tensor'] / ideal:.2f})" if ideal else "-"
        share = f"{ratio(entry['tensor'], vendor['tensor']):.2f}" if ideal else "-"
        patched = " *" if vendor.get("patched") else ""
        text.append(
            f"| {entry['name']}{patched} | {tensor} | {share} | {entry['vector']:,.0f}, {ratio(entry['vector'], vendor['vector']):.2f} "
            f"| {entry['scalar']:,.0f} ({vendor['scalar']:,}) | {entry['gpsimd']:,.0f} ({vendor['gpsimd']:,}) "
            f"| {entry['bytes']:.2f} ({entry['vendor_bytes']:.2f}) | {entry['instructions']:,} ({vendor['instructions']:,}) "
            f"| {entry['overlapped']:.0f}, {entry['serial']:.0f} | {vendor['us']:,} |"
        )
    text += ["", "`*`: the vendor's kernel fails on this row as shipped; its figures are of a patched one.", ""]
    for what, measured, holds in bars(lines):
        shown = measured if isinstance(measured, str) else f"{measured:.2f}"
        text.append(f"- {what}: {shown}{'' if holds else ' **missed**'}")
    return "\n".join(text)


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run rows whose name contains this")
    parser.add_argument("--markdown", type=Path, help="also write docs/kernels.md, or another file")
    options = parser.parse_args()
    data = json.loads(DATA.read_text())
    lines = []
    for row in data["rows"]:
        if options.only in row["name"]:
            lines.append(line(row, *run(row)))
            print(f"{row['name']}: {lines[-1]['seconds']:.1f} s", flush=True)
    text = table(lines)
    print(text)
    if options.markdown:
        head = (
            "# What the kernels issue\n\nGenerated by `python -m benchmarks.kernels --markdown docs/kernels.md`; do not edit.\n\n"
            "How this is known: simulated (ours) and computed (the vendor's) for trn2, one core, bfloat16; nothing was run on a device. "
            f"{data['source']}\n\nTimes are the busiest engine's, a lower bound; the vendor's leave out the fixed cost of DMAs and of descriptors, ours "
            "count them. Vector cycles are shown as ours, and as a share of the vendor's.\n\n"
        )
        options.markdown.write_text(head + text + "\n")


if __name__ == "__main__":
    main()
