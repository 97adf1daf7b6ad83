# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""One workload in three libraries: a function without arguments per direction, which blocks until its result is there."""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax

import jax_nki3d

from .workloads import Workload

Run = Callable[[], object]


def operands(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """x [B, C_in, D, H, W] and filters [K, K, K, C_in, C_out], flipped where the operation is transposed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((workload.batch, workload.c_in, *workload.size), np.float32)
    filters = rng.standard_normal((workload.kernel,) * 3 + (workload.c_in, workload.c_out), np.float32)
    return x, filters


def ours(workload: Workload) -> dict[str, Run]:
    """jax_nki3d through jax.vjp, as in a model."""
    kernel, stride, padding = workload.kernel, workload.stride, workload.padding
    if workload.operation == "conv3d":
        return _jax_runs(workload, lambda x, w: jax_nki3d.conv3d(x, w, stride=stride, padding=padding))
    if workload.operation == "conv3d_transpose":
        return _jax_runs(workload, lambda x, w: jax_nki3d.conv3d_transpose(x, w, stride=stride, padding=padding[::2]))
    return _jax_runs(workload, lambda x, w: jax_nki3d.avg_pooling_3d(x, kernel, stride, padding[::2]))


def plain_lax(workload: Workload) -> dict[str, Run]:
    """What a thin wrapper of lax does: conv_general_dilated, reduce_window and their vjps."""
    kernel, stride = workload.kernel, workload.stride
    layout = ("NCDHW", "DHWIO", "NCDHW")
    pads = list(zip(workload.padding[::2], workload.padding[1::2], strict=True))
    if workload.operation == "conv3d":
        return _jax_runs(workload, lambda x, w: lax.conv_general_dilated(x, w, (stride,) * 3, pads, dimension_numbers=layout))
    if workload.operation == "conv3d_transpose":
        pads = [(kernel - 1 - p, kernel - 1 - p) for p in workload.padding[::2]]
        return _jax_runs(
            workload,
            lambda x, w: lax.conv_general_dilated(x, w, (1,) * 3, pads, lhs_dilation=(stride,) * 3, dimension_numbers=layout),
        )
    window, strides = (1, 1, *(kernel,) * 3), (1, 1, *(stride,) * 3)
    pads = [(0, 0), (0, 0), *pads]
    return _jax_runs(workload, lambda x, w: lax.reduce_window(x, 0.0, lax.add, window, strides, pads) / kernel**3)


def _jax_runs(workload: Workload, operation: Callable) -> dict[str, Run]:
    x, filters = map(jax.device_put, operands(workload))
    y = jax.jit(operation)(x, filters)
    dy = jax.device_put(np.random.default_rng(1).standard_normal(y.shape, np.float32))
    calls = {
        "forward": (jax.jit(operation), x, filters),
        "dx": (jax.jit(lambda x, w, dy: jax.vjp(lambda x: operation(x, w), x)[1](dy)[0]), x, filters, dy),
        "dw": (jax.jit(lambda x, w, dy: jax.vjp(lambda w: operation(x, w), w)[1](dy)[0]), x, filters, dy),
    }

    def run(function, *arguments):
        return lambda: jax.block_until_ready(function(*arguments))

    return {direction: run(*calls[direction]) for direction in workload.directions}


def torch_cpu(workload: Workload) -> dict[str, Run] | None:
    """torch with as many threads as there are cores; None where torch is not installed."""
    try:
        import torch
        from torch.nn import functional
    except ImportError:
        return None
    x_np, filters_np = operands(workload)
    x, stride, pads = torch.from_numpy(x_np), workload.stride, workload.padding
    symmetric = pads[::2] == pads[1::2]
    if workload.operation == "avg_pooling_3d":
        arguments = ([workload.kernel] * 3, [stride] * 3, list(pads[::2]), False, True, None)
        dy = torch.randn_like(functional.avg_pool3d(x, *arguments))
        return {
            "forward": lambda: functional.avg_pool3d(x, *arguments),
            "dx": lambda: torch.ops.aten.avg_pool3d_backward(dy, x, *arguments),
        }
    transposed = workload.operation == "conv3d_transpose"
    if transposed:
        weight = torch.from_numpy(filters_np[::-1, ::-1, ::-1].transpose(3, 4, 0, 1, 2).copy())
    else:
        weight = torch.from_numpy(filters_np.transpose(4, 3, 0, 1, 2).copy())
    padding = list(pads[::2]) if symmetric else [0, 0, 0]
    around = [pads[4], pads[5], pads[2], pads[3], pads[0], pads[1]]

    def padded():
        return x if symmetric else functional.pad(x, around)

    def forward():
        convolve = functional.conv_transpose3d if transposed else functional.conv3d
        return convolve(padded(), weight, stride=stride, padding=padding)

    dy = torch.randn_like(forward())

    def backward(mask):
        return torch.ops.aten.convolution_backward(
            dy, padded(), weight, None, [stride] * 3, padding, [1] * 3, transposed, [0] * 3, 1, mask
        )

    return {
        "forward": forward,
        "dx": lambda: backward([True, False, False]),
        "dw": lambda: backward([False, True, False]),
    }


def check(workload: Workload) -> None:
    """All contenders compute the same forward result, or the comparison means nothing."""
    results = {f.__name__: f(workload) for f in (ours, plain_lax, torch_cpu)}
    values = {name: np.asarray(runs["forward"]()) for name, runs in results.items() if runs}
    expected = values.pop("plain_lax")
    for name, value in values.items():
        np.testing.assert_allclose(value, expected, atol=1e-4 * np.abs(expected).max(), err_msg=f"{workload}: {name}")
