# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""nki.collectives: communication between devices, which one simulated device does not have."""

from __future__ import annotations

from typing import Any

from .missing import missing


def __getattr__(name: str) -> Any:
    """Every function of NKI 0.6 raises when it is called."""
    return missing("nki.collectives", "nki.collectives", name)
