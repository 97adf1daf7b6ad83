# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs, and whether forward mode is on: argument, else `options(...)`, else environment, else default."""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

IMPLEMENTATIONS = ("lax", "nki", "simulate")
ENVIRONMENT_VARIABLE = "JAX_NKI3D_IMPLEMENTATION"
# Read once: a value that changed later could not reach functions that are already compiled.
_ENVIRONMENT = os.environ.get(ENVIRONMENT_VARIABLE) or None
CHECK_VARIABLE = "JAX_NKI3D_CHECK_KERNELS"
_CHECK = os.environ.get(CHECK_VARIABLE) != "0"


class _Options(NamedTuple):
    implementation: str | None = None
    forward_mode: bool | None = None
    check_kernels: bool | None = None


# A user context is part of the key of JAX's compilation caches, so that a jitted function is traced again under other options.
_context = jax.make_user_context(_Options())


@contextlib.contextmanager
def options(
    *, implementation: str | None = None, forward_mode: bool | None = None, check_kernels: bool | None = None
) -> Iterator[None]:
    """Sets the defaults of the operations called inside a `with` block.

    An option that is not given, or None, keeps the value of the surrounding block; an argument of a call wins over both.
    The choice is taken where the operation is called (traced): a gradient uses what its forward pass used. Blocks belong to
    one thread; do not await or yield inside one, since other tasks of the thread would see its options.

    Args:
        implementation: "lax", "nki" or "simulate"; see `conv3d`.
        forward_mode: whether `jax.jvp`, `jax.jacfwd` and `jax.linearize` work on the operations; see `conv3d`.
        check_kernels: whether the first use of each NKI kernel on a device compares it with lax on one small case, and raises
            a RuntimeError if they differ. True unless the environment variable JAX_NKI3D_CHECK_KERNELS is 0.

    Raises:
        ValueError: an unknown implementation.
        TypeError: `forward_mode` or `check_kernels` is not a bool.

    Example:
        >>> import jax, numpy as np, jax_nki3d
        >>> x, w = np.ones((1, 1, 2, 2, 2), np.float32), np.ones((1, 1, 1, 1, 1), np.float32)
        >>> with jax_nki3d.options(forward_mode=True):
        ...     y, tangent = jax.jvp(lambda x: jax_nki3d.conv3d(x, w), (x,), (2 * x,))
        >>> float(tangent.sum())
        16.0
    """
    check_implementation("options", implementation)
    check_forward_mode("options", forward_mode)
    check_switch("options", "check_kernels", check_kernels)
    outer = _context.value
    inner = _Options(
        outer.implementation if implementation is None else implementation,
        outer.forward_mode if forward_mode is None else forward_mode,
        outer.check_kernels if check_kernels is None else check_kernels,
    )
    with _context(inner):
        yield


def resolve_implementation(operation: str, argument: str | None) -> str | None:
    """The implementation to put into a spec; None leaves the choice to the platform of the lowering."""
    check_implementation(operation, argument)
    chosen = argument or _context.value.implementation
    if chosen is None and _ENVIRONMENT is not None:
        chosen = _ENVIRONMENT
        check_implementation(operation, chosen, f"the environment variable {ENVIRONMENT_VARIABLE}")
    return chosen


def resolve_forward_mode(operation: str, argument: bool | None) -> bool:
    """Whether the call binds its primitive without the custom_vjp."""
    check_forward_mode(operation, argument)
    return bool(_context.value.forward_mode if argument is None else argument)


def kernels_are_checked() -> bool:
    """Whether a kernel is compared with lax before its first use on a device."""
    chosen = _context.value.check_kernels
    return _CHECK if chosen is None else bool(chosen)


def check_implementation(operation: str, value, source: str = "`implementation`") -> None:
    if value is not None and (not isinstance(value, str) or value not in IMPLEMENTATIONS):
        raise ValueError(
            f"{operation}: {source} must be None or one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {value!r}. "
            "Pass None for the kernel on platform neuron, where it applies, and lax elsewhere."
        )


def check_forward_mode(operation: str, value) -> None:
    check_switch(operation, "forward_mode", value)


def check_switch(operation: str, name: str, value) -> None:
    if value is not None and not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operation}: `{name}` must be True, False or None, got {value!r}. Pass a Python bool.")
