# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: milliseconds of ours, of plain lax and of torch, per workload and direction, in one run.

The machine is noisy, so that contenders take turns: each runs a block of calls, then the next one; medians over all blocks,
without the first call of each block, which finds the other's data in the caches and the other's threads awake.
"""

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median

import jax

from . import contenders
from .workloads import WORKLOADS, Workload


def measure(runs: dict[str, Callable], blocks: int, block_seconds: float) -> dict[str, float]:
    """Median milliseconds of each function, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(blocks):
        for name, run in runs.items():
            run()
            deadline = time.perf_counter() + block_seconds
            while True:
                start = time.perf_counter()
                run()
                stop = time.perf_counter()
                times[name].append(1e3 * (stop - start))
                if stop > deadline:
                    break
    return {name: median(values) for name, values in times.items()}


def run_workload(workload: Workload, blocks: int, block_seconds: float) -> dict[str, dict[str, float]]:
    """{direction: {contender: milliseconds}}."""
    contenders.check(workload)
    everyone = {"ours": contenders.ours(workload), "lax": contenders.plain_lax(workload)}
    everyone |= {"torch": t} if (t := contenders.torch_cpu(workload)) else {}
    return {
        direction: measure({name: runs[direction] for name, runs in everyone.items()}, blocks, block_seconds)
        for direction in workload.directions
    }


def main() -> None:
    """Runs all workloads, prints the table and the geometric means."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=5, help="turns of each contender (default 5)")
    parser.add_argument("--block-seconds", type=float, default=0.15, help="length of a turn (default 0.15)")
    parser.add_argument("--only", default="", help="run workloads whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, help="also write docs/performance.md, or another file")
    arguments = parser.parse_args()
    chosen = [w for w in WORKLOADS if arguments.only in str(w)]
    if not chosen:
        parser.error(f"no workload's name contains {arguments.only!r}: " + "; ".join(map(str, WORKLOADS)))

    machine = f"{_cpu_name()}, {os.cpu_count()} cores, jax {jax.__version__}, float32"
    print(f"CPU, measured: {machine}; milliseconds")
    print(f"{'workload':<44}{'':9}{'ours':>9}{'lax':>9}{'torch':>9}{'lax/ours':>10}{'ours/torch':>12}")
    results = {}
    for workload in chosen:
        figures = run_workload(workload, arguments.blocks, arguments.block_seconds)
        figures["sum"] = {name: sum(f[name] for f in figures.values()) for name in figures["forward"]}
        results[workload] = figures
        for direction, row in figures.items():
            name = str(workload) if direction == "forward" else ""
            print(f"{name:<44}{direction:<9}" + _row(row), flush=True)
    means = _means(results)
    print("\n".join(["", "Geometric means of forward + dx + dw per workload:", *(f"  {line}" for line in means)]))
    if arguments.json:
        arguments.json.write_text(json.dumps({str(w): f for w, f in results.items()}, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(_markdown(machine, results, means))


def _row(row: dict[str, float]) -> str:
    torch = row.get("torch")
    cells = f"{row['ours']:9.2f}{row['lax']:9.2f}" + (f"{torch:9.2f}" if torch else f"{'-':>9}")
    return cells + f"{row['lax'] / row['ours']:10.2f}" + (f"{row['ours'] / torch:12.2f}" if torch else f"{'-':>12}")


def _means(results: dict[Workload, dict[str, dict[str, float]]]) -> list[str]:
    """The summary: one line per bar of the project."""
    lines = []
    strided = [f["sum"]["lax"] / f["sum"]["ours"] for w, f in results.items() if w.zero_inserting]
    if strided:
        lines.append(f"lax / ours, strided and transposed ({len(strided)}): {geometric_mean(strided):.2f} (bar: at least 25)")
    everything = [f["sum"]["lax"] / f["sum"]["ours"] for f in results.values()]
    lines.append(f"lax / ours, all workloads ({len(everything)}): {geometric_mean(everything):.2f}")
    with_torch = [f["sum"]["ours"] / f["sum"]["torch"] for f in results.values() if "torch" in f["sum"]]
    if with_torch:
        lines.append(f"ours / torch, all workloads ({len(with_torch)}): {geometric_mean(with_torch):.2f} (bar: at most 2)")
    else:
        lines.append("torch is not installed: `make bench-torch` installs it")
    slower = [
        (f[d]["ours"] / f[d]["lax"], f"{w} {d}") for w, f in results.items() for d in w.directions if f[d]["ours"] > f[d]["lax"]
    ]
    worst = ", ".join(f"{name} {ratio:.2f}" for ratio, name in sorted(slower, reverse=True)) or "none"
    lines.append(f"directions in which ours takes longer than plain lax (bar: 1.05): {worst}")
    return lines


def _markdown(machine: str, results: dict[Workload, dict[str, dict[str, float]]], means: list[str]) -> str:
    lines = [
        "# Performance",
        "",
        "Generated by `python -m benchmarks --markdown docs/performance.md`; do not edit.",
        "",
        f"How this is known: CPU, measured on {machine}. Median milliseconds; contenders take turns in one run.",
        "`ours` and `lax` run under `jax.jit`, backward passes through `jax.vjp`; `lax` is `conv_general_dilated` or",
        "`reduce_window`; `torch` uses as many threads as there are cores. A sum is forward + dx + dw.",
        "",
        *(f"- {line}" for line in means),
        "",
        "| workload: batch, channels, size | direction | ours | lax | torch | lax / ours | ours / torch |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for workload, figures in results.items():
        for direction, row in figures.items():
            name = str(workload) if direction == "forward" else ""
            lines.append(f"| {name} | {direction} | " + " | ".join(_row(row).split()) + " |")
    lines += [
        "",
        "A convolution is one matrix product per phase; which taps become rows of it and which become columns is chosen per shape:",
        "see `jax_nki3d/_lax/plan.py`. `python -m benchmarks.formulations` measures every choice, and `explain` prints the one that a",
        "function of yours gets.",
    ]
    return "\n".join(lines) + "\n"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
