# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge to the NKI kernels: which kernel an operation has, when it applies, and why not.

The kernels are not written yet, so that every answer here is the same: lax runs. The primitives already ask at lowering, which
is the only place where the platform is known; nothing here imports `nki`.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

_logger = logging.getLogger("jax_nki3d")
_logged: set[tuple[str, str]] = set()


class Choice(NamedTuple):
    """The kernel call that replaces the lax body, or None and the reason."""

    call: Callable | None
    reason: str


def choose(operation: str, params: dict) -> Choice:
    """Whether the kernel of `operation` can run what the primitive's static `params` describe."""
    del params
    return Choice(None, f"this version of jax_nki3d has no NKI kernel for {operation}")


def log_fallback(operation: str, reason: str) -> None:
    """One line per operation and reason: the fallback is slower, and must not go unseen."""
    if (operation, reason) not in _logged:
        _logged.add((operation, reason))
        _logger.warning("%s runs as lax on platform neuron: %s.", operation, reason)


def why_unavailable(operation: str, implementation: str) -> str | None:
    """Why an implementation that was asked for by name cannot run; None if it can."""
    what = "NKI kernel" if implementation == "nki" else "simulated NKI kernel"
    return (
        f"this version of jax_nki3d has no {what} for {operation}. Use implementation='lax', or None, which takes the kernel "
        "on platform neuron as soon as there is one."
    )
