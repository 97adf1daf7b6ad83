# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one place that binds `nki`, `nl` and `nisa`: the vendor's package where it is installed, else the simulator.

The package called nki on the public index is an empty placeholder without `nki.isa`: it counts as not installed. With NKI3D_SIMULATOR=1 the
simulator is bound on a machine with the real package, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

__all__ = ["is_simulated", "nisa", "nki", "nl"]


def _real_nki() -> bool:
    try:
        return importlib.util.find_spec("nki.isa") is not None
    except (ImportError, ValueError):
        return False


is_simulated = os.environ.get("NKI3D_SIMULATOR") == "1" or not _real_nki()

_ROOT = "nki3d.simulator" if is_simulated else "nki"

nki: Any = importlib.import_module(_ROOT)
nl: Any = importlib.import_module(f"{_ROOT}.language")
nisa: Any = importlib.import_module(f"{_ROOT}.isa")
