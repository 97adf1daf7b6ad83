# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What this machine has: nki, the library whose kernels are called, cores, devices."""

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

KERNELS_VARIABLE = "JAX_NKI3D_KERNELS"
LIBRARIES = ("nki3d", "nkilib")
# Read once: a value that changed later could not reach functions that are already compiled.
KERNELS = os.environ.get(KERNELS_VARIABLE) or "nki3d"

OLDEST_NKI = (0, 6)
# Where nkilib has its kernels.
_NKILIB = {
    "conv3d": "nkilib.experimental.conv",
    "conv3d_transpose": "nkilib.experimental.conv",
    "conv3d_bwd": "nkilib.experimental.conv",
    "avg_pooling_3d": "nkilib.experimental.pooling",
    "avg_pooling_3d_backward": "nkilib.experimental.pooling",
}


def why_no_nki() -> str | None:
    """Why no kernel can be compiled here; None if one can.

    Raises:
        ImportError: JAX_NKI3D_KERNELS names a library that is not installed.
        ValueError: it names none.
    """
    library()
    if _is_simulated():
        if os.environ.get("NKI3D_SIMULATOR") == "1":
            return "NKI3D_SIMULATOR=1 binds the kernels to the interpreter"
        return "nki is not installed"
    found = version("nki")
    if found is not None and _numbers(found) < OLDEST_NKI:
        return f"nki {found} is installed, and the kernels are written for {'.'.join(map(str, OLDEST_NKI))} or newer"
    return None


def why_no_simulator() -> str | None:
    """Why no kernel can be interpreted here; None if one can."""
    if not _is_simulated():
        return "the kernels are bound to the nki that is installed; the environment variable NKI3D_SIMULATOR=1 binds them to the interpreter"
    return None


def _is_simulated() -> bool:
    """Which nki the kernels are bound to; `nki3d._nki` looks for the real one without importing it where there is none."""
    return bool(importlib.import_module("nki3d._nki").is_simulated)


def library() -> str:
    """The library whose kernels are called on neuron: "nki3d", or "nkilib" if JAX_NKI3D_KERNELS says so."""
    if KERNELS not in LIBRARIES:
        raise ValueError(
            f"jax_nki3d: the environment variable {KERNELS_VARIABLE} is {KERNELS!r}. Set it to one of {', '.join(LIBRARIES)}."
        )
    if KERNELS == "nkilib" and not is_installed("nkilib"):
        raise ImportError(
            f"jax_nki3d: the environment variable {KERNELS_VARIABLE} is 'nkilib', but the package nkilib is not installed. "
            "Install the vendor's kernel library (nki-library), or unset the variable for the kernels of this package."
        )
    return KERNELS


def kernel(operation: str) -> Any:
    """The kernel that runs on a device, imported where it is first asked for.

    Raises:
        ImportError: the installed nkilib has no such kernel.
    """
    if library() == "nki3d":
        return own_kernel(operation)
    package = importlib.import_module(_NKILIB[operation])
    found = getattr(package, operation, None)
    if callable(found):
        return found
    try:
        return getattr(importlib.import_module(f"{_NKILIB[operation]}.{operation}"), operation)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{operation}: the installed nkilib has no kernel {_NKILIB[operation]}.{operation}. Update nkilib, or unset the "
            f"environment variable {KERNELS_VARIABLE}."
        ) from error


def own_kernel(operation: str) -> Any:
    """This distribution's kernel, bound to the nki that `nki3d._nki` has found."""
    return getattr(importlib.import_module(f"nki3d.{operation}"), operation)


def activation_type(library: str) -> Any:
    """The enumeration of activations that the kernels of a library know."""
    module = "nki3d.activation" if library == "nki3d" else "nkilib.core.utils.common_types"
    return importlib.import_module(module).ActFnType


def is_installed(package: str) -> bool:
    """Whether a top-level package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def version(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers = []
    for part in version.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def cores(lnc_shard: bool) -> int:
    """Physical cores that share a call: 2 where that is asked for and the runtime joins two (NEURON_LOGICAL_NC_CONFIG=2).

    Without the variable a logical core is one physical core, and `lnc_shard` has no effect.
    """
    return 2 if lnc_shard and os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1") == "2" else 1


def device() -> Any:
    """A device of platform neuron that this process can use; None on a machine without one."""
    import jax

    try:
        return jax.local_devices(backend="neuron")[0]
    except RuntimeError:
        return None
