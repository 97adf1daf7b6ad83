# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""NKI on any CPU: run a kernel, see which limit of the hardware it breaks, and what it would cost.

This module stands in for `nki`: it has `jit`, `simulate`, `language` and `isa` with the signatures of NKI 0.6. Beyond NKI it has `profile`, which
costs a kernel. It needs NumPy and ml_dtypes only.

Example:
    >>> import numpy as np
    >>> import nki3d.simulator as nki
    >>> nl, nisa = nki.language, nki.isa
    >>> @nki.jit
    ... def matmul(x, y):
    ...     left, right = nl.load(x), nl.load(y)
    ...     product = nl.ndarray((left.shape[1], right.shape[1]), nl.float32, buffer=nl.psum)
    ...     nisa.nc_matmul(dst=product, stationary=left, moving=right)
    ...     out = nl.ndarray(product.shape, nl.float32, buffer=nl.shared_hbm)
    ...     nl.store(out, product)
    ...     return out
    >>> x, y = np.ones((128, 64), np.float32), np.ones((128, 512), np.float32)
    >>> bool((matmul(x, y) == x.T @ y).all())
    True
    >>> _, cost = nki.profile(matmul)(x, y)
    >>> cost.engines["tensor"].cycles, round(cost.tensor_utilization, 3)
    (2048.0, 0.125)
"""

from __future__ import annotations

import sys
import types
from typing import Any

from . import collectives, isa, language
from .core import Instruction
from .errors import NkiValidationError
from .kernel import Kernel, jit, simulate
from .machine import MACHINES, Machine
from .profile import EngineCost, Profile, profile

__all__ = [
    "MACHINES",
    "EngineCost",
    "Instruction",
    "Kernel",
    "Machine",
    "NkiValidationError",
    "Profile",
    "collectives",
    "install_as_nki",
    "isa",
    "jit",
    "language",
    "profile",
    "simulate",
]


def install_as_nki() -> None:
    """Let `import nki`, `import nki.language as nl`, `import nki.isa as nisa` find this simulator, to run kernels that other people wrote.

    Raises:
        RuntimeError: another package called nki has been imported.
    """
    here = sys.modules[__name__]
    found = sys.modules.get("nki")
    if found is not None and found is not here:
        raise RuntimeError("a package called nki is imported already. Call install_as_nki() before anything imports it.")
    typing = types.ModuleType("nki.typing")
    typing.tensor = language.NkiTensor  # type: ignore[attr-defined]
    modules: dict[str, Any] = {
        "nki": here,
        "nki.language": language,
        "nki.isa": isa,
        "nki.collectives": collectives,
        "nki.typing": typing,
    }
    sys.modules.update(modules)
