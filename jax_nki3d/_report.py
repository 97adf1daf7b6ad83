# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`explain`: which operations a function contains, and what runs each of them."""

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from . import _neuron
from ._costs import cost
from ._lax import blocks, plan
from ._primitive import PRIMITIVES
from ._spec import AvgPooling3dSpec, Conv3dSpec, ConvTranspose3dSpec

_NAMES = {p.name for p in PRIMITIVES}
_BACKWARD = ("conv3d_bwd", "avg_pooling_3d_backward")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One operation as it stands in the traced function. What is said of kernels is computed: nothing runs.

    Attributes:
        operation: name of the primitive; `conv3d_bwd` also names the gradients that it computes.
        shapes: shapes of the operands.
        dtype: dtype of the first operand.
        implementation: what runs on the platform asked about, and why, if that is not the kernel.
        how: the formulation that lax uses.
        neuron: what runs on platform neuron, and why, if that is not the kernel.
        plans: the plan of each result that the kernel computes by a plan; where no kernel can run the operation, the reason.
        multiply_adds: those that touch elements of the volume.
        bytes: of operands and results, each moved once.
        microseconds: the least that these take on one NeuronCore of a trn2.
    """

    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    implementation: str
    how: str
    neuron: str
    plans: tuple[str, ...]
    multiply_adds: int | None
    bytes: int | None
    microseconds: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What `explain` found: each kind of operation, and how often it occurs. `str()` makes two tables of it.

    Attributes:
        platform: what `Entry.implementation` speaks of.
        counts: the operations in the function.
        gradient: those that its gradient adds, with respect to every floating-point argument.
    """

    platform: str
    counts: tuple[tuple[Entry, int], ...]
    gradient: tuple[tuple[Entry, int], ...] = ()

    def __str__(self) -> str:
        if not self.counts:
            return f"No operation of jax_nki3d on platform {self.platform}."
        found = [*self.counts, *self.gradient]
        rows = [("operation", "in", "count", "operands", "implementation", "formulation")]
        for number, (entry, count) in enumerate(found):
            operands = f"{entry.dtype} " + " ".join(str(list(shape)).replace(" ", "") for shape in entry.shapes)
            where = "function" if number < len(self.counts) else "gradient"
            rows.append((entry.operation, where, str(count), operands, entry.implementation, entry.how))
        lines = [f"Platform {self.platform}:", *table(rows), "", "Kernels on neuron (computed for one call; nothing was run):"]
        costs = [("operation", "multiply-adds", "bytes", "at least", "runs as")]
        for entry, _ in found:
            time = "?" if entry.microseconds is None else f"{entry.microseconds:.3g} us"
            costs.append((entry.operation, _grouped(entry.multiply_adds), _grouped(entry.bytes), time, entry.neuron))
        header, *priced = table(costs)
        lines.append(header)
        for row, (entry, _) in zip(priced, found, strict=True):
            lines.append(row)
            for line in entry.plans:
                lines += textwrap.wrap(line, 126, initial_indent="  ", subsequent_indent="      ")
        return "\n".join(lines)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, in columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _grouped(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def explain(function: Callable, *args: Any, platform: str | None = None, **kwargs: Any) -> Report:
    """Lists the operations of this library in a function and in its gradient, what runs each, and what the NKI kernels would do.

    The function is traced, not run: arguments may be arrays or of `jax.ShapeDtypeStruct`. The gradient is that with respect to
    every floating-point argument; to see which operations another one needs, give it: `explain(jax.grad(loss), params, batch)`.
    No gradient is listed of a function that already holds a backward pass, nor of one that JAX can't differentiate in reverse.

    Args:
        function: any function of JAX.
        args: its arguments.
        platform: "cpu", "gpu", "neuron" ...; None for the platform of the default device.
        kwargs: its keyword arguments.

    Returns:
        A `Report`; print it for two tables. The second one speaks of one NeuronCore of a trn2 and is computed: the plan of each
        kernel, and a time that multiply-adds and bytes take at least, at 16384 multiply-adds per cycle (a quarter of that in
        float32) of 2.4 GHz and 368 GB/s.

    Example:
        >>> import jax, numpy as np, jax_nki3d
        >>> x, w = np.ones((1, 8, 4, 4, 4), np.float32), np.ones((2, 2, 2, 8, 4), np.float32)
        >>> report = jax_nki3d.explain(lambda w: jax_nki3d.conv3d_transpose(x, w, stride=2), w, platform="cpu")
        >>> print(report)  # doctest: +ELLIPSIS
        Platform cpu:
        operation         in        count  operands                         implementation  formulation
        conv3d_transpose  function  1      float32 [1,8,4,4,4] [2,2,2,8,4]  lax             one product per block
        conv3d_bwd (dw)   gradient  1      ...
        <BLANKLINE>
        Kernels on neuron (computed for one call; nothing was run):
        operation         multiply-adds  bytes   at least   runs as
        conv3d_transpose  16,384         11,264  0.0306 us  ...
        conv3d_bwd (dw)   16,384         11,264  0.0306 us  ...
    """
    platform = jax.default_backend() if platform is None else platform

    def found(traced: Callable) -> Counter[Entry]:
        return Counter(_entry(eqn, platform) for eqn in _equations(jax.make_jaxpr(traced)(args, kwargs).jaxpr))

    def forward(args: tuple, kwargs: dict) -> Any:
        return function(*args, **kwargs)

    entries = found(forward)
    if any(entry.operation.startswith(_BACKWARD) for entry in entries):
        return Report(platform, tuple(entries.items()))
    try:
        added = found(_gradient(forward)) - entries
    except (TypeError, ValueError, NotImplementedError):
        # the function itself could be traced: it is its reverse mode that JAX refuses, as that of a while loop
        added = Counter()
    return Report(platform, tuple(entries.items()), tuple(added.items()))


def _gradient(function: Callable) -> Callable:
    """A function of the same arguments: the gradients of its floating-point results by its floating-point arguments."""

    def is_real(leaf: Any) -> bool:
        return jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.floating)

    def gradient(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        numbers = [i for i, leaf in enumerate(leaves) if is_real(leaf)]

        def of_numbers(values: list) -> list:
            given = dict(zip(numbers, values, strict=True))
            results = function(*jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))
            return [result for result in jax.tree.leaves(results) if is_real(result)]

        results, pullback = jax.vjp(of_numbers, [leaves[i] for i in numbers])
        return pullback([jnp.ones_like(result) for result in results])

    return gradient


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of our primitives, through every function that is called, scanned or differentiated."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _NAMES:
            yield eqn
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def _entry(eqn: Any, platform: str) -> Entry:
    name, params = eqn.primitive.name, eqn.params
    avals = [v.aval for v in eqn.invars]
    implementation, how = _implementation(name, params, avals, platform), ""
    if implementation.startswith("lax"):
        how = _formulation(name, avals, params) if platform == "cpu" else "lax convolution"
    neuron = implementation if platform == "neuron" else _implementation(name, params, avals, "neuron")
    plans = tuple(_neuron.describe_plans(name, params, avals))
    costs = cost(name, params, avals, [v.aval for v in eqn.outvars])
    if name == "conv3d_bwd":
        wanted = ", ".join(g for g, flag in zip(("dx", "dw", "db"), params["wanted"], strict=True) if flag)
        name = f"{name} ({wanted})"
    shapes = tuple(tuple(a.shape) for a in avals)
    return Entry(name, shapes, avals[0].dtype.name, implementation, how, neuron, plans, *costs)


def _implementation(name: str, params: dict, avals: list, platform: str) -> str:
    if params["spec"].implementation is not None:
        return f"{params['spec'].implementation} (asked for)"
    if platform != "neuron":
        return "lax"
    try:
        call, reason = _neuron.choose(name, params, avals)
    except (ImportError, ValueError) as error:  # the environment asks for kernels that are not there
        return f"an error: {error}"
    return f"lax: {reason}" if call is None else "nki"


def _formulation(name: str, avals: list, params: dict) -> str:
    """What `_lax` does with it on CPU."""
    spec, batch, itemsize = params["spec"], plan.known_batch(avals[0]), max(4, avals[0].dtype.itemsize)
    if not isinstance(spec, AvgPooling3dSpec) and blocks.applies(spec.geometry):
        return "one product per block"
    match spec:
        case AvgPooling3dSpec():
            return "sums per axis"
        case ConvTranspose3dSpec():
            return str(plan.plan_spread(spec.geometry, batch, spec.c_out, spec.c_in, itemsize))
        case Conv3dSpec() if name == "conv3d":
            return str(plan.plan_correlate(spec.geometry, batch, spec.c_in, spec.c_out, itemsize))
    arguments = (spec.geometry, batch, spec.c_in, spec.c_out, itemsize)
    on_dx, on_dw, on_db = params["wanted"]
    parts = [f"dx: {plan.plan_spread(*arguments)}"] if on_dx else []
    parts += [f"dw: {plan.plan_filter_gradient(*arguments)}"] if on_dw else []
    parts += ["db: sum"] if on_db else []
    return "; ".join(parts)
