# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The bridge to the NKI kernels: which kernel an operation has, when it applies, and why not.

- `choose` answers for platform neuron, where the platform is known: when a primitive is lowered.
- `check` answers when a primitive is bound whose implementation was asked for by name.
- `installed` finds the kernels, `calls` knows their arguments, `gate` tries each once on a device, `simulate` runs them on a CPU.

Nothing of `nki` or `nki3d` is imported before a kernel is asked for.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import installed

_logger = logging.getLogger("jax_nki3d")
_logged: set[tuple[str, str]] = set()


_CURES = {
    "nki": "Use implementation=None, which takes the kernel on platform neuron where it applies, or 'lax'.",
    "simulate": "Use implementation='lax', or None.",
}


class Choice(NamedTuple):
    """The kernel call that replaces the lax body, or None and the reason."""

    call: Callable | None
    reason: str


def choose(operation: str, params: dict, avals: Sequence[Any]) -> Choice:
    """Whether the kernel of `operation` can run, on platform neuron, what the static `params` and the operands' types describe.

    Raises:
        ImportError: JAX_NKI3D_KERNELS names a library that is not installed.
    """
    reason = installed.why_no_nki() or why_unsupported(operation, params, avals)
    if reason is not None:
        return Choice(None, reason)
    from . import calls

    return Choice(calls.kernel_call(operation, params), "")


def body(operation: str, platforms: Sequence[str], params: dict, avals: Sequence[Any]) -> Callable | None:
    """What is lowered in place of the lax body; None for the lax body.

    Raises:
        NotImplementedError: an implementation that was asked for by name cannot run on these platforms.
        RuntimeError: the kernel gives wrong results on this machine's device.
    """
    implementation = params["spec"].implementation
    if implementation == "lax" or any(aval.size == 0 for aval in avals if _is_known(aval)):
        return None  # a kernel has nothing to do for an empty batch
    platforms = tuple(platforms)
    if implementation == "simulate":
        if platforms != ("cpu",):
            raise _refusal(
                operation, implementation, f"a program for {', '.join(platforms)} cannot call back to the interpreter"
            )
        from . import simulate

        reason = why_unsupported(operation, params, avals)
        if reason is not None:
            raise _refusal(operation, implementation, reason)
        return simulate.simulated_call(operation, params)
    if platforms != ("neuron",):
        if implementation == "nki":
            raise _refusal(operation, implementation, f"the program is compiled for {', '.join(platforms)}, not for neuron")
        return None
    call, reason = choose(operation, params, avals)
    if call is None:
        if implementation == "nki":
            raise _refusal(operation, implementation, reason)
        log_fallback(operation, reason)
        return None
    from . import gate

    gate.check(operation)
    return call


def check(operation: str, params: dict, avals: Sequence[Any]) -> None:
    """Raises where an implementation that was asked for by name cannot run this geometry or dtype; also gradients come here.

    Raises:
        NotImplementedError: with the reason.
    """
    implementation = params["spec"].implementation
    if implementation in ("nki", "simulate") and not any(_is_known(aval) and aval.size == 0 for aval in avals):
        from . import calls

        reason = calls.why_unsupported(operation, params, avals, quickly=True)  # in full when it is lowered
        if reason is not None:
            raise _refusal(operation, implementation, reason)


def why_unsupported(operation: str, params: dict, avals: Sequence[Any]) -> str | None:
    """Why the kernel cannot run this geometry or dtype, wherever it may run; None if it can."""
    from . import calls

    return calls.why_unsupported(operation, params, avals)


def describe_plans(operation: str, params: dict, avals: Sequence[Any]) -> list[str]:
    """A line for each result that the kernel computes by a plan, or one that says why it cannot; none for kernels of others."""
    if installed.KERNELS != "nki3d":
        return []
    from nki3d.planning.supports import describe, plans

    from . import calls

    reason = why_unsupported(operation, params, avals)
    if reason is not None:
        return [f"no kernel: {reason}"]
    case = calls.case_of(operation, params, avals)
    return [] if case is None else [f"{result}: {describe(plan)}" for result, plan in plans(case).items()]


def why_unavailable(operation: str, implementation: str) -> str | None:
    """Why an implementation that was asked for by name cannot run on this machine at all, and the cure; None if it can."""
    del operation  # all kernels are there, or none
    reason = installed.why_no_nki() if implementation == "nki" else installed.why_no_simulator()
    if reason is None:
        return None
    if implementation == "nki":
        return (
            f"{reason}. Install what the extra jax-nki3d[neuron] names, from the index of the Neuron SDK, on a Trainium; or use "
            "implementation=None, which takes the kernel where it applies, or 'lax'."
        )
    return f"{reason}. {_CURES[implementation]}"


def log_fallback(operation: str, reason: str) -> None:
    """One line per operation and reason: the fallback is slower, and must not go unseen."""
    if (operation, reason) not in _logged:
        _logged.add((operation, reason))
        _logger.warning("%s runs as lax on platform neuron: %s.", operation, reason)


def _refusal(operation: str, implementation: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f"{operation}: `implementation` is {implementation!r}, but {reason}. {_CURES[implementation]}")


def _is_known(aval: Any) -> bool:
    """Whether every size is a number: the batch of a program to be exported may be a symbol."""
    return all(isinstance(n, int) for n in aval.shape)
