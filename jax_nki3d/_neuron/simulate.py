# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`implementation="simulate"`: the kernel runs in the NKI interpreter, called back from the compiled program.

The callback sits inside the primitive, so that differentiation and batching never see it. It touches NumPy alone: JAX inside a
callback can wait for the very program that called it.
"""

from collections.abc import Callable

import jax
import numpy as np

from . import calls, installed


def simulated_call(operation: str, params: dict) -> Callable[..., list[jax.Array]]:
    """A function of the primitive's operands (and its parameters, by name) that interprets the kernel."""

    def run(call: calls.Call, *arguments):
        # slow to import, and needed here alone
        from jax.experimental.buffer_callback import buffer_callback

        kernel = installed.own_kernel(operation)
        if call.cores > 1:
            kernel = kernel[call.cores]

        def host(context, out, *buffers):
            del context
            values = iter(buffers)
            given = [a if isinstance(a, tuple) else np.asarray(next(values)) for a in arguments_or_shapes]
            results = kernel(*given, **call.static)
            for target, result in zip(out, results if isinstance(results, tuple) else (results,), strict=True):
                np.asarray(target)[...] = result

        arrays = [a for a in arguments if not isinstance(a, tuple)]
        arguments_or_shapes = [a if isinstance(a, tuple) else None for a in arguments]  # keeps no tracer alive
        types = [jax.ShapeDtypeStruct(shape, arrays[0].dtype) for shape in call.results]
        return buffer_callback(host, types)(*arrays)

    return calls.body_around(run, operation, params)
