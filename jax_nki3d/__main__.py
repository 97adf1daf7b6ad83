# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m jax_nki3d`: what is installed here, and what would run where."""

import os
import platform
import sys

import jax
import jax.numpy as jnp

import jax_nki3d

from . import _neuron, _options
from ._neuron import installed
from ._primitive import PRIMITIVES
from ._report import explain, table

PACKAGES = ("jax", "jaxlib", "nki", "neuronx-cc", "jax-neuronx")
VARIABLES = (
    _options.ENVIRONMENT_VARIABLE,
    _options.CHECK_VARIABLE,
    installed.KERNELS_VARIABLE,
    "NKI3D_SIMULATOR",
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NKI_COMPILER_FRONTEND",  # read by the compiler of NKI 0.6: our kernels need its tracer
)


def report() -> str:
    """All of it, as text."""
    lines = [f"jax_nki3d {jax_nki3d.__version__}, Python {platform.python_version()}, platform {jax.default_backend()}", ""]
    lines += table([(name, installed.version(name) or "not installed") for name in PACKAGES])
    lines += ["", *table([(name, os.environ.get(name, "not set")) for name in VARIABLES]), ""]
    rows: list[tuple[str, ...]] = [("operation", f"on {jax.default_backend()}", "on neuron", "implementation='simulate'")]
    notes: list[str] = []
    for primitive in PRIMITIVES:
        operation, *cells = _where(primitive.name)
        for index, cell in enumerate(cells):
            text = cell.removeprefix("an error: ").removeprefix(f"{operation}: ")
            if len(cell) > 60:
                notes += [] if text in notes else [text]
                cells[index] = f"see ({notes.index(text) + 1})"
        rows.append((operation, *cells))
    lines += [*table(rows), *(f"({number}) {text}" for number, text in enumerate(notes, 1))]
    return "\n".join([*lines, "", "For a function of yours: print(jax_nki3d.explain(function, *arguments))."])


def _where(operation: str) -> tuple[str, ...]:
    """What runs one operation on a small case in float32."""
    x, filters = jnp.ones((1, 2, 4, 4, 4), jnp.float32), jnp.ones((2, 2, 2, 2, 2), jnp.float32)
    y = jnp.ones((1, 2, 2, 2, 2), jnp.float32)
    calls = {
        "conv3d": lambda: jax_nki3d.conv3d(x, filters, stride=2),
        "conv3d_transpose": lambda: jax_nki3d.conv3d_transpose(x, filters, stride=2),
        "conv3d_bwd": lambda: jax_nki3d.conv3d_bwd(y, x, filters, stride=2),
        "avg_pooling_3d": lambda: jax_nki3d.avg_pooling_3d(x, 2),
        "avg_pooling_3d_backward": lambda: jax_nki3d.avg_pooling_3d_backward(y, x, 2),
    }
    try:
        ((entry, _),) = explain(calls[operation]).counts
        here, neuron = entry.implementation, entry.neuron
    except (NotImplementedError, ImportError, ValueError) as error:  # a switch in the environment that cannot be followed
        here = neuron = f"an error: {error}"
    simulated = _neuron.why_unavailable(operation, "simulate")
    return operation, here, neuron, "runs on cpu" if simulated is None else simulated


if __name__ == "__main__":
    sys.stdout.write(f"{report()}\n")
