# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Before a kernel is used on a device for the first time, it runs one small case there, and must agree with lax.

The kernels are written against the documents of one NKI release. A compiler that changes what a rule means would give wrong
numbers without an error: this check turns them into one. `options(check_kernels=False)` or JAX_NKI3D_CHECK_KERNELS=0 leaves it out.
"""

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import _options
from . import calls, installed

_verdicts: dict[tuple[str, str], str | None] = {}  # (library, operation) -> what is wrong, or None
_lock = threading.RLock()


def check(operation: str) -> None:
    """Runs the small case of a kernel, once per process, if there is a device and the options do not forbid it.

    Raises:
        RuntimeError: the kernel's results differ from lax's.
    """
    if not _options.kernels_are_checked():
        return
    device = installed.device()
    if device is None:
        return  # the program is lowered for another machine
    key = (installed.library(), operation)
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = None  # lax on that device asks for no kernel; nor does this thread ask twice
            try:
                _verdicts[key] = _difference(operation, device)
            except BaseException:
                del _verdicts[key]  # an error is no verdict
                raise
        verdict = _verdicts[key]
    if verdict is not None:
        raise RuntimeError(
            f"{operation}: the NKI kernel gives wrong results on {device}: {verdict} (nki {installed.version('nki')}, kernels of "
            f"{key[0]}). Use implementation='lax' and report this; options(check_kernels=False) or "
            f"{_options.CHECK_VARIABLE}=0 runs the kernel nevertheless."
        )


def _difference(operation: str, device: Any) -> str | None:
    """How the kernel's results differ from lax's on the small case; None if they do not."""
    operands, params = small_case(operation)
    with jax.ensure_compile_time_eval():  # we are called while another program is being lowered
        placed = [jax.device_put(o, device) for o in operands]
        actual = jax.jit(calls.kernel_call(operation, params))(*placed)
        expected = lax_results(operation, operands, params)
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        ours, theirs = (np.asarray(values, np.float64) for values in pair)
        if ours.shape != theirs.shape:
            return f"result {number} has shape {ours.shape}, not {theirs.shape}"
        error = np.abs(ours - theirs)
        # sums of small integers and shares of 1/8: exact in every precision that a matrix unit may choose
        wrong = ~(error <= 1e-6)
        if wrong.any():
            at = tuple(map(int, np.unravel_index(np.argmax(wrong), wrong.shape)))
            return f"{wrong.sum()} of {wrong.size} elements of result {number}, at {at} {ours[at]} and not {theirs[at]}"
    return None


def lax_results(operation: str, operands: Sequence[np.ndarray], params: dict) -> Sequence[jax.Array]:
    """What lax makes of the case, on a CPU."""
    from .._primitive import PRIMITIVES

    (primitive,) = (p for p in PRIMITIVES if p.name == operation)
    cpu = jax.local_devices(backend="cpu")[0]
    return primitive.bind(*(jax.device_put(o, cpu) for o in operands), **params)


def small_case(operation: str) -> tuple[list[np.ndarray], dict]:
    """Operands of small integers, and parameters with strides, uneven padding, a bias and more than one tap per axis."""
    from .. import _spec

    def integers(*shape: int) -> np.ndarray:
        return (np.arange(np.prod(shape)) * 5 % 7 - 3).astype(np.float32).reshape(shape)

    x, filters, bias = integers(2, 4, 4, 5, 6), integers(2, 3, 2, 4, 5), integers(5)
    window = ((2, 1, 2), (1, 0, 1, 1, 0, 1), (1, 1, 1))
    match operation:
        case "conv3d":
            spec: Any = _spec.conv3d_spec(operation, x, filters, bias, *window, "ReLU", False, "NCDHW", "lax")
            return [x, filters, bias], {"spec": spec}
        case "conv3d_bwd":
            forward = _spec.conv3d_spec(operation, x, filters, None, *window, None, False, "NCDHW", "lax")
            return [integers(*forward.output_shape(2)), x, filters], {"spec": forward, "wanted": (True, True, True)}
        case "conv3d_transpose":
            settings = ((2, 1, 2), (0, 1, 0), (1, 1, 1), "ReLU", False, "KDHW_CI_CO", 0, "NCDHW", "lax")
            return [x, filters, bias], {"spec": _spec.conv3d_transpose_spec(operation, x, filters, bias, *settings)}
    spec = _spec.avg_pooling_3d_spec(operation, x, 2, 2, 1, "NCDHW", None, True, "lax")
    if operation == "avg_pooling_3d":
        return [x], {"spec": spec}
    return [integers(2, 4, *spec.geometry.out)], {"spec": spec}
