# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the vendor's `nki` on a machine without one, as far as JAX sees it.

A kernel that is called with JAX arrays binds one primitive without rules for differentiation or batching. For platform neuron it
is lowered to the custom call that NKI makes, with the kernel's name and flags in the backend_config; on a CPU, which plays the device
in the tests of the version gate, it runs in the interpreter. The shapes of its results are what the kernel's body, run in the interpreter,
returns: so that a wrong argument is an error here, too.
"""

import importlib.machinery
import re
import sys
import types
from collections import Counter

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

import nki3d  # noqa: F401 -- every kernel, bound to the simulator, before the stand-in takes its place
from nki3d import simulator
from nki3d.simulator.kernel import run
from nki3d.simulator.machine import machine_of

TARGET = "AwsNeuronCustomNativeKernel"
REBOUND = re.compile(r"nki3d(\.(?!planning|simulator|lint)\w+)?$")


class FakeKernel:
    """What the stand-in's `jit` makes of a function."""

    def __init__(self, function, fake, lnc=1, label=""):
        self.function, self.fake, self.lnc = function, fake, lnc
        self.name = label or function.__name__

    def __getitem__(self, lnc):
        return FakeKernel(self.function, self.fake, lnc, self.name)

    def __call__(self, *args, **kwargs):
        assert all(isinstance(v, tuple | str | bool | int | None) or hasattr(v, "name") for v in kwargs.values()), kwargs
        arrays = [a for a in args if not isinstance(a, tuple)]
        given = tuple(a if isinstance(a, tuple) else None for a in args)
        results = nki_call_p.bind(*arrays, kernel=self, given=given, static=tuple(kwargs.items()))
        return results[0] if len(results) == 1 else tuple(results)

    def label(self, static):
        flags = "".join(str(int(v)) for name, v in static if name.startswith("compute_"))
        cores = f"[{self.lnc}]" if self.lnc > 1 else ""
        return f"{self.name}{cores} {flags}".strip()

    def interpret(self, arrays, given, static):
        """The results as NumPy arrays, always a tuple."""
        rest = iter(arrays)
        args = tuple(next(rest) if a is None else a for a in given)
        results, _ = run(self.function, self.lnc, machine_of(), args, dict(static))
        return results if isinstance(results, tuple) else (results,)


def _types(*avals, kernel, given, static):
    # broadcast: no memory for the zeros
    zeros = [np.broadcast_to(np.zeros((), a.dtype), a.shape) for a in avals]
    results = kernel.interpret(zeros, given, static)
    like = jax.make_jaxpr(lambda: [jax.numpy.zeros(r.shape, r.dtype) for r in results])()
    return like.out_avals


def _lower(ctx, *operands, kernel, given, static):
    if tuple(ctx.platforms or ctx.module_context.platforms) == ("neuron",):
        config = f"nki {kernel.label(static)}"
        return jax.ffi.ffi_lowering(TARGET, backend_config=config, api_version=2)(ctx, *operands)

    def host(context, out, *buffers):
        kernel.fake.runs[kernel.name] += 1
        results = kernel.interpret([np.asarray(b) for b in buffers], given, static)
        for target, result in zip(out, results, strict=True):
            np.asarray(target)[...] = result
            if kernel.name in kernel.fake.corrupt:
                np.asarray(target).ravel()[3] += 1

    def on_cpu(*arrays):
        return buffer_callback(host, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out])(*arrays)

    return mlir.lower_fun(on_cpu, multiple_results=True)(ctx, *operands)


nki_call_p = Primitive("nki_call")
nki_call_p.multiple_results = True
nki_call_p.def_impl(lambda *a, **k: xla.apply_primitive(nki_call_p, *a, **k))
nki_call_p.def_abstract_eval(_types)
mlir.register_lowering(nki_call_p, _lower)


class FakeNki:
    """The installed stand-in.

    Attributes:
        runs: how often each kernel has run on the "device".
        corrupt: names of kernels that give a wrong number there.
    """

    def __init__(self, monkeypatch):
        self.runs: Counter = Counter()
        self.corrupt: set[str] = set()
        self.monkeypatch = monkeypatch
        for name in [name for name in sys.modules if REBOUND.match(name)]:
            monkeypatch.delitem(sys.modules, name)
        self.add_module("nki", jit=lambda function: FakeKernel(function, self), language=simulator.language, isa=simulator.isa)
        self.add_module("nki.language", **vars(simulator.language))
        self.add_module("nki.isa", **vars(simulator.isa))

    def add_module(self, name, **contents):
        module = types.ModuleType(name)
        vars(module).update({key: value for key, value in contents.items() if not key.startswith("__")})
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        self.monkeypatch.setitem(sys.modules, name, module)


def kernels_in(text: str) -> Counter:
    """The kernel calls of a StableHLO module by name and flags, as often as a run of @main makes them (a loop's body counts once)."""
    bodies = dict(re.findall(r"func\.func (?:public|private) @([\w.]+)\((.*?)(?=func\.func|\Z)", text, re.DOTALL))

    def count(name):
        body = bodies[name]
        found = Counter(re.findall(rf'custom_call @{TARGET}\(.*?backend_config = "nki ([^"]*)"', body))
        assert found.total() == body.count(f"@{TARGET}("), "a kernel call without a name"
        for callee in re.findall(r"call @([\w.]+)\(", body):
            if callee in bodies:
                found += count(callee)
        return found

    return count("main")
