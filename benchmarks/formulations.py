# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.formulations`: milliseconds of every formulation of every workload, and which one the plan takes.

This is how the constants of `jax_nki3d/_lax/plan.py` were found; run it before changing them.
"""

import argparse
from functools import partial

import jax
import numpy as np

from jax_nki3d._geometry import Geometry, convolved_size, transposed_size
from jax_nki3d._lax import native, plan, products

from .__main__ import measure
from .workloads import WORKLOADS, Workload

MAPS = {
    "correlate": (products.correlate, native.correlate, plan.plan_correlate),
    "spread": (products.spread, native.spread, plan.plan_spread),
    "filter_gradient": (products.filter_gradient, native.filter_gradient, plan.plan_filter_gradient),
}


def geometry_of(workload: Workload) -> tuple[Geometry, int, int]:
    """The index relation of the convolution in a workload, with its C_in and C_out."""
    front = workload.padding[::2]
    kernel, stride = (workload.kernel,) * 3, (workload.stride,) * 3
    if workload.operation == "conv3d":
        pads = zip(workload.size, workload.padding[::2], workload.padding[1::2], strict=True)
        out = tuple(convolved_size(n, workload.kernel, workload.stride, 1, a, b) for n, a, b in pads)
        return Geometry(workload.size, out, kernel, stride, (1, 1, 1), front), workload.c_in, workload.c_out
    size = tuple(
        transposed_size(n, workload.kernel, workload.stride, 1, p, 0) for n, p in zip(workload.size, front, strict=True)
    )
    return Geometry(size, workload.size, kernel, stride, (1, 1, 1), front), workload.c_out, workload.c_in


def main() -> None:
    """Prints one line per workload and map."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formulations", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run workloads whose name contains this")
    parser.add_argument("--without-native", action="store_true", help="leave plain lax out, which can take seconds")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    for workload in WORKLOADS:
        if workload.operation == "avg_pooling_3d" or arguments.only not in str(workload):
            continue
        geometry, c_in, c_out = geometry_of(workload)
        x = rng.standard_normal((workload.batch, c_in, *geometry.size), np.float32)
        dy = rng.standard_normal((workload.batch, c_out, *geometry.out), np.float32)
        filters = rng.standard_normal((*geometry.kernel, c_in, c_out), np.float32)
        operands = {"correlate": (x, filters), "spread": (dy, filters), "filter_gradient": (x, dy)}
        for name, (product, as_lax, make_plan) in MAPS.items():
            taken = make_plan(geometry, workload.batch, c_in, c_out, 4)
            functions = {}
            for summed in plan.CANDIDATES:
                label = "sum " + ("".join("DHW"[a] for a in summed) or "none")
                label += " (planned)" if summed == taken.summed else ""
                functions[label] = partial(product, geometry=geometry, summed=summed)
            functions[f"plan, {taken.slabs} slabs"] = partial(getattr(plan, name), geometry=geometry)
            if not arguments.without_native:
                functions["lax"] = partial(as_lax, geometry=geometry)
            runs = {label: _runner(function, operands[name]) for label, function in functions.items()}
            times = measure(runs, blocks=3, block_seconds=0.05)
            print(f"{workload!s:<44} {name:<16}" + "  ".join(f"{k}: {v:.2f}" for k, v in times.items()), flush=True)


def _runner(function, operands):
    jitted, placed = jax.jit(function), tuple(map(jax.device_put, operands))
    return lambda: jax.block_until_ready(jitted(*placed))


if __name__ == "__main__":
    main()
