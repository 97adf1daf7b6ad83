# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reductions, scans and statistics, and the accumulators of the Vector Engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..alu import OPERATORS, Operator, name_of, operator_of, shown
from ..core import Core, current
from ..dtypes import is_float, is_integer
from ..errors import broken
from ..objects import NkiInstruction
from ..operators import maximum
from ..tensor import NkiTensor
from ._common import (
    SBUF,
    destination,
    free,
    member,
    not_both_psum,
    operand,
    read_like,
    same_size,
    store,
    vector,
    written,
)
from ._enums import reduce_cmd as reduce_cmds

__all__ = [
    "bn_aggr",
    "bn_stats",
    "exponential",
    "range_select",
    "select_reduce",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor_scan",
]


def fold(operator: Operator, values: np.ndarray, axis: Any = -1, initial: Any = None) -> np.ndarray:
    """Reduce float32 values along axes; a subtraction takes all from 0, as an accumulator that starts there."""
    if operator.name == "subtract":
        total = values.sum(axis=axis, dtype=np.float32)
        return (np.float32(0) if initial is None else initial) - total
    if operator.name in ("logical_and", "logical_or", "logical_xor"):
        truth = values != 0
        reducers: dict[str, Any] = {"logical_and": np.all, "logical_or": np.any, "logical_xor": np.logical_xor.reduce}
        result = reducers[operator.name](truth, axis=axis)
        return result.astype(np.float32)
    function: Any = operator.function
    if operator.name in ("abs_max", "abs_min"):
        # the element whose magnitude is largest (smallest), with its sign; `values` is [P, n]
        chosen = np.argmax(np.abs(values), axis=-1) if operator.name == "abs_max" else np.argmin(np.abs(values), axis=-1)
        found = np.take_along_axis(values, chosen[..., None], axis=-1)[..., 0]
        return found if initial is None else operator.function(initial, found)
    result = function.reduce(values, axis=axis)
    return result if initial is None else function(initial, result)


def tensor_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, axis: Any, negate: bool = False, keepdims: bool = False, name: str | None = None
) -> NkiInstruction:
    """Reduce the last free dimensions of `data` on Vector, in float32 (bitwise operators: on integers).

    Args:
        dst: in SBUF or PSUM, with one element per partition and remaining index.
        op: add, subtract, multiply, maximum, minimum, a logical or a bitwise operator.
        data: in SBUF or PSUM.
        axis: an int or several: the last dimensions, without gap; never 0.
        negate: multiply the result by -1.
        keepdims: whether `dst` keeps the reduced dimensions with size 1; either shape is accepted, since counts decide.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: other axes, another operator, or a `dst` of another size.
    """
    core = current("tensor_reduce")
    destination(core, "tensor_reduce", "dst", dst)
    operand(core, "tensor_reduce", "data", data)
    operator = operator_of(op, "tensor_reduce", "op", core.machine.nc_version)
    if not operator.reduces:
        legal = ", ".join(f"nl.{known.name}" for known in OPERATORS.values() if known.reduces)
        raise broken("tensor_reduce", "op", f"nl.{operator.name}", "cannot reduce", f"Use one of {legal}.")
    axes = _axes(axis, len(data.shape))
    kept = data.shape[: len(data.shape) - len(axes)]
    if dst.shape[0] != data.shape[0]:
        raise broken(
            "tensor_reduce", "dst", f"partition dimension {dst.shape[0]}", f"differs from that of `data`, {data.shape[0]}"
        )
    remaining = int(np.prod(kept[1:]))
    if dst.free_size != remaining:
        raise broken(
            "tensor_reduce",
            "dst",
            f"{dst.free_size} elements per partition {dst.shape}",
            f"must be {remaining}: {data.shape} without axes {axes}",
        )
    if operator.kind == "bitvec":
        if negate:
            raise broken("tensor_reduce", "negate", "True", f"is not possible with nl.{operator.name}")
        if not is_integer(data.dtype) or data.dtype != dst.dtype:
            raise broken(
                "tensor_reduce", "data", f"dtype {data.dtype} to {dst.dtype}", "must be one integer type for a bitwise operator"
            )
        function: Any = operator.function
        dst.write(function.reduce(data.read(), axis=axes))
        written(dst)
    else:
        result = fold(operator, data.float32(), axes)
        store(dst, -result if negate else result)
    halved = dst.dtype == data.dtype == "bfloat16" and operator.name in ("add", "maximum")
    return core.issue("tensor_reduce", "vector", free(core, data.free_size, 0.5 if halved else 1), (dst,), (data,))


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    given = (axis,) if isinstance(axis, int | np.integer) else tuple(axis)
    axes = tuple(sorted(a + rank if a < 0 else a for a in given))
    if not axes or axes != tuple(range(rank - len(axes), rank)) or axes[0] < 1:
        raise broken(
            "tensor_reduce",
            "axis",
            str(axis),
            f"must be the last free dimensions of {rank}, without gap and without 0",
            "Permute the view so that they are last.",
        )
    return axes


def tensor_partition_reduce(dst: NkiTensor, op: Any, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Reduce across partitions on GpSimd: dst [1, ...] from data [P, ...].

    Args:
        dst: in SBUF, one partition.
        op: nl.add, nl.average, nl.maximum (nl.max), nl.bitwise_or or nl.bitwise_and.
        data: in SBUF.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: another operator, memory or size.
    """
    core = current("tensor_partition_reduce")
    destination(core, "tensor_partition_reduce", "dst", dst, SBUF)
    operand(core, "tensor_partition_reduce", "data", data, SBUF)
    if dst.shape[0] != 1 or dst.free_size != data.free_size:
        raise broken(
            "tensor_partition_reduce", "dst", f"shape {dst.shape}", f"must have 1 partition and {data.free_size} elements"
        )
    which = name_of(op)
    if which in ("bitwise_or", "bitwise_and"):
        if not is_integer(data.dtype) or data.dtype != dst.dtype:
            raise broken(
                "tensor_partition_reduce",
                "data",
                f"dtype {data.dtype} to {dst.dtype}",
                "must be one integer type for a bitwise operator",
            )
        function: Any = OPERATORS[which].function
        dst.write(function.reduce(data.read(), axis=0))
    elif which in ("add", "average", "maximum"):
        values = data.float32()
        result = values.max(axis=0) if which == "maximum" else values.sum(axis=0, dtype=np.float32)
        store(dst, result / np.float32(data.shape[0]) if which == "average" else result)
    else:
        raise broken(
            "tensor_partition_reduce",
            "op",
            repr(op if which is None else which),
            "must be nl.add, average, maximum, bitwise_or or bitwise_and",
        )
    cycles = free(core, data.free_size, core.machine.partition_reduce_factor)
    return core.issue("tensor_partition_reduce", "gpsimd", cycles, (dst,), (data,))


def _accumulate(
    core: Core,
    instruction: str,
    operator: Operator,
    command: reduce_cmds,
    values: np.ndarray,
    like: NkiTensor,
    initial: Any = None,
) -> np.ndarray | None:
    """Reduce `values` [P, n] into Vector's accumulators; None if the command leaves them alone (then their state is unknown)."""
    member(instruction, "reduce_cmd", command, reduce_cmds)
    first = like.start_partition
    lanes = slice(first, first + values.shape[0])
    registers = core.vector_accumulator
    if command is reduce_cmds.idle:
        registers[lanes] = np.nan
        return None
    if command is reduce_cmds.reset_reduce:
        registers[lanes] = operator.identity
    elif command is reduce_cmds.load_reduce:
        if initial is None:
            raise broken(instruction, "reduce_init", "None", "is missing with reduce_cmd.load_reduce")
        registers[lanes] = np.reshape(initial, -1)
    elif command is not reduce_cmds.reduce:
        raise broken(instruction, "reduce_cmd", getattr(command, "name", repr(command)), "is not supported here")
    registers[lanes] = fold(operator, values.reshape(values.shape[0], -1), -1, registers[lanes].copy())
    return registers[lanes]


def check_result(core: Core, instruction: str, result: NkiTensor, like: NkiTensor) -> None:
    """Check a `reduce_res` operand: one element per partition."""
    destination(core, instruction, "reduce_res", result)
    if result.shape[0] != like.shape[0] or result.free_size != 1:
        raise broken(instruction, "reduce_res", f"shape {result.shape}", f"must be ({like.shape[0]}, 1)")


def _unknown(like: NkiTensor) -> np.ndarray:
    return np.full(like.shape[0], np.nan, np.float32)


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: reduce_cmds = reduce_cmds.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = data <op0> operand0 on Vector, and a reduction of it over the free dimensions into the accumulators.

    Args:
        dst: in SBUF or PSUM.
        data: in SBUF or PSUM.
        op0: an arithmetic operator.
        operand0: a number or a float32 tensor [P, 1].
        reduce_op: add, multiply, maximum or minimum.
        reduce_res: [P, 1], takes the accumulators; None leaves them in the engine.
        reverse0: not supported by NKI 0.6.
        reduce_cmd: reset_reduce, reduce or load_reduce.
        reduce_init: what load_reduce loads.
        reduce_res_negate: store -1 times the accumulators.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_scalar_reduce")
    where = "tensor_scalar_reduce"
    destination(core, where, "dst", dst)
    operand(core, where, "data", data)
    same_size(where, dst, data=data)
    if reverse0:
        raise broken(where, "reverse0", "True", "is not supported by NKI 0.6")
    operator = operator_of(op0, where, "op0", core.machine.nc_version)
    if operator.kind == "bitvec":
        raise broken(where, "op0", f"nl.{operator.name}", "must be an arithmetic operator")
    reducer = operator_of(reduce_op, where, "reduce_op", core.machine.nc_version)
    if reducer.name not in ("add", "multiply", "maximum", "minimum"):
        raise broken(where, "reduce_op", f"nl.{reducer.name}", "must be nl.add, multiply, maximum or minimum")
    if reduce_cmd is reduce_cmds.idle:
        raise broken(where, "reduce_cmd", "idle", "must be reset_reduce, reduce or load_reduce")
    if reduce_init is not None and reduce_cmd is not reduce_cmds.load_reduce:
        raise broken(where, "reduce_init", repr(reduce_init), "is allowed with reduce_cmd.load_reduce only")
    values = data.float32()
    if operator.kind == "unary":
        if operand0 is not None and (isinstance(operand0, NkiTensor) or operand0 != 0):
            raise broken(where, "operand0", repr(operand0), f"must be None or 0: nl.{operator.name} takes one operand")
        values = operator.function(values)
    else:
        other = vector(core, where, "operand0", operand0, data)
        values = operator.function(values, other if isinstance(other, np.ndarray) else np.float32(other))
    initial = None if reduce_init is None else vector(core, where, "reduce_init", reduce_init, data)
    store(dst, values)
    total = _accumulate(core, where, reducer, reduce_cmd, np.asarray(values, np.float32), data, initial)
    if reduce_res is not None:
        check_result(core, where, reduce_res, data)
        assert total is not None
        store(reduce_res, -total if reduce_res_negate else total)
    reads = (data, *(t if isinstance(t, NkiTensor) else None for t in (operand0, reduce_init)))
    return core.issue(
        where, "vector", free(core, data.free_size) + core.machine.accumulator_read_cycles, (dst, reduce_res), reads
    )


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: reduce_cmds = reduce_cmds.reset_reduce,
    name: str | None = None,
) -> NkiInstruction:
    """dst[i] = register = (src[i] <op0> imm0) <op1> register, along the free dimensions, on Vector.

    Args:
        dst: in SBUF or PSUM, not 32-bit integers.
        src: in SBUF or PSUM, not 32-bit integers.
        op0: an arithmetic operator.
        op1: add, subtract, multiply, maximum or minimum.
        imm0: a number or a float32 tensor [P, 1].
        imm1: what load_reduce loads into the register.
        reduce_cmd: reset_reduce (from the identity of `op1`), reduce or load_reduce.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_scalar_cumulative")
    where = "tensor_scalar_cumulative"
    destination(core, where, "dst", dst)
    operand(core, where, "src", src)
    same_size(where, dst, src=src)
    for label, tensor in (("dst", dst), ("src", src)):
        if tensor.dtype in ("int32", "uint32"):
            raise broken(where, label, f"dtype {tensor.dtype}", "is not supported")
    first = operator_of(op0, where, "op0", core.machine.nc_version)
    second = operator_of(op1, where, "op1", core.machine.nc_version)
    if first.kind != "arithmetic":
        raise broken(where, "op0", f"nl.{first.name}", "must be an arithmetic operator of two operands")
    if second.name not in ("add", "subtract", "multiply", "maximum", "minimum"):
        raise broken(where, "op1", f"nl.{second.name}", "must be nl.add, subtract, multiply, maximum or minimum")
    scalar = vector(core, where, "imm0", imm0, src)
    values = np.asarray(
        first.function(src.float32(), scalar if isinstance(scalar, np.ndarray) else np.float32(scalar)), np.float32
    )
    values = values.reshape(src.shape[0], -1)
    lanes = slice(src.start_partition, src.start_partition + src.shape[0])
    if reduce_cmd is reduce_cmds.reset_reduce:
        register = np.full(src.shape[0], second.identity, np.float32)
    elif reduce_cmd is reduce_cmds.load_reduce:
        if imm1 is None:
            raise broken(where, "imm1", "None", "is missing with reduce_cmd.load_reduce")
        register = np.broadcast_to(np.reshape(vector(core, where, "imm1", imm1, src), -1), src.shape[0]).astype(np.float32)
    elif reduce_cmd is reduce_cmds.reduce:
        register = core.vector_accumulator[lanes].copy()
    else:
        raise broken(
            where, "reduce_cmd", getattr(reduce_cmd, "name", repr(reduce_cmd)), "must be reset_reduce, reduce or load_reduce"
        )
    result = np.empty_like(values)
    for i in range(values.shape[1]):
        register = second.function(values[:, i], register)
        result[:, i] = register
    core.vector_accumulator[lanes] = register
    store(dst, result)
    reads = (src, *(t if isinstance(t, NkiTensor) else None for t in (imm0, imm1)))
    return core.issue(where, "vector", free(core, src.free_size), (dst,), reads)


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmds = reduce_cmds.idle,
    reduce_op: Any = maximum,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = on_true where the predicate is not 0, else on_false; optionally the maximum of it into the accumulators. On Vector.

    Args:
        dst: in SBUF or PSUM.
        predicate: int8, uint8, int16 or uint16.
        on_true: a tile, not tfloat32, int32 or uint32; not in PSUM together with `predicate`.
        on_false: a number or a tensor [P, 1].
        reduce_res: [P, 1] of a floating-point type.
        reduce_cmd: idle, reset_reduce or reduce.
        reduce_op: nl.maximum.
        reverse_pred: exchange true and false.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("select_reduce")
    where = "select_reduce"
    destination(core, where, "dst", dst)
    operand(core, where, "predicate", predicate)
    operand(core, where, "on_true", on_true)
    same_size(where, dst, predicate=predicate, on_true=on_true)
    not_both_psum(where, on_true=on_true, predicate=predicate)
    if predicate.dtype not in ("int8", "uint8", "int16", "uint16"):
        raise broken(where, "predicate", f"dtype {predicate.dtype}", "must be int8, uint8, int16 or uint16")
    if on_true.dtype in ("tfloat32", "int32", "uint32"):
        raise broken(where, "on_true", f"dtype {on_true.dtype}", "is not supported")
    if name_of(reduce_op) != "maximum":
        raise broken(where, "reduce_op", shown(reduce_op), "must be nl.maximum")
    mask = predicate.read().reshape(dst.shape) != 0
    otherwise = vector(core, where, "on_false", on_false, dst, dtypes=None)
    otherwise = otherwise.astype(np.float32) if isinstance(otherwise, np.ndarray) else np.float32(otherwise)
    values = np.where(~mask if reverse_pred else mask, read_like(on_true, dst), otherwise)
    store(dst, values)
    total = _accumulate(core, where, OPERATORS["maximum"], reduce_cmd, values, dst)
    if reduce_res is not None:
        check_result(core, where, reduce_res, dst)
        if not is_float(reduce_res.dtype):
            raise broken(where, "reduce_res", f"dtype {reduce_res.dtype}", "must be a floating-point type")
        store(reduce_res, _unknown(dst) if total is None else total)
    cycles = free(core, dst.free_size, core.machine.select_factor)
    cycles += core.machine.accumulator_read_cycles if reduce_res is not None else 0
    return core.issue(
        where, "vector", cycles, (dst, reduce_res), (predicate, on_true, on_false if isinstance(on_false, NkiTensor) else None)
    )


_LOWEST = np.float32(np.finfo(np.float32).min)


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Any,
    comp_op1: Any,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: reduce_cmds = reduce_cmds.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = maximum,
    range_start: int = 0,
    on_false_value: Any = ...,
    name: str | None = None,
) -> NkiInstruction:
    """Keep the elements whose free index i + range_start satisfies both comparisons with the bounds; others become the lowest float32.

    Args:
        dst: in SBUF or PSUM.
        on_true_tile: a floating-point tile.
        comp_op0: equal, less, less_equal, greater or greater_equal.
        comp_op1: the second comparison.
        bound0: float32 [P, 1].
        bound1: float32 [P, 1].
        reduce_cmd: what happens to the accumulators.
        reduce_res: [P, 1], takes the maximum.
        reduce_op: nl.maximum.
        range_start: added to the index.
        on_false_value: the lowest float32, -3.4028235e38, and nothing else.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("range_select")
    where = "range_select"
    if core.machine.nc_version < 3:
        raise broken(where, "dst", core.machine.name, "needs NeuronCore-v3 (trn2)")
    destination(core, where, "dst", dst)
    operand(core, where, "on_true_tile", on_true_tile)
    same_size(where, dst, on_true_tile=on_true_tile)
    if not is_float(on_true_tile.dtype):
        raise broken(where, "on_true_tile", f"dtype {on_true_tile.dtype}", "must be a floating-point type")
    if on_false_value is not ... and np.float32(on_false_value) != _LOWEST:
        raise broken(where, "on_false_value", repr(on_false_value), f"must be {float(_LOWEST)!r}")
    if name_of(reduce_op) != "maximum":
        raise broken(where, "reduce_op", shown(reduce_op), "must be nl.maximum")
    index = (range_start + np.arange(dst.free_size)).astype(np.float32)[None]
    mask = np.ones((dst.shape[0], dst.free_size), bool)
    for label, op, bound in (("0", comp_op0, bound0), ("1", comp_op1, bound1)):
        operator = operator_of(op, where, f"comp_op{label}", core.machine.nc_version)
        if operator.name not in ("equal", "less", "less_equal", "greater", "greater_equal"):
            raise broken(where, f"comp_op{label}", f"nl.{operator.name}", "must be a comparison")
        limit = vector(core, where, f"bound{label}", bound, dst)
        mask &= operator.function(index, np.reshape(limit, (-1, 1))) != 0
    values = np.where(mask, on_true_tile.float32().reshape(mask.shape), _LOWEST)
    store(dst, values)
    total = _accumulate(core, where, OPERATORS["maximum"], reduce_cmd, values, dst)
    if reduce_res is not None:
        check_result(core, where, reduce_res, dst)
        store(reduce_res, _unknown(dst) if total is None else total)
    return core.issue(where, "vector", free(core, dst.free_size), (dst, reduce_res), (on_true_tile, bound0, bound1))


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmds = reduce_cmds.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> NkiInstruction:
    """dst = exp(src - max_value) on Vector, optionally its sum into the accumulators (trn3 only).

    Args:
        dst: in SBUF or PSUM.
        src: in SBUF or PSUM.
        max_value: a number or a float32 tensor [P, 1].
        reduce_res: [P, 1], takes the sum.
        reduce_cmd: idle, reset_reduce, reduce or load_reduce.
        reduce_init: what load_reduce loads.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("exponential")
    where = "exponential"
    if core.machine.nc_version < 4:
        raise broken(where, "dst", core.machine.name, "needs NeuronCore-v4 (trn3)")
    destination(core, where, "dst", dst)
    operand(core, where, "src", src)
    same_size(where, dst, src=src)
    largest = vector(core, where, "max_value", max_value, src)
    values = np.exp(src.float32() - (largest if isinstance(largest, np.ndarray) else np.float32(largest)))
    store(dst, values)
    initial = vector(core, where, "reduce_init", reduce_init, src)
    total = _accumulate(core, where, OPERATORS["add"], reduce_cmd, values, src, initial)
    if reduce_res is not None:
        check_result(core, where, reduce_res, src)
        store(reduce_res, _unknown(src) if total is None else total)
    reads = (src, *(t if isinstance(t, NkiTensor) else None for t in (max_value, reduce_init)))
    return core.issue(where, "vector", free(core, src.free_size, 1 / core.machine.exponential_rate), (dst, reduce_res), reads)


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst[i] = (data0[i] <op0> dst[i-1]) <op1> data1[i] along the free dimensions, from `initial`, on Vector in float32.

    Args:
        dst: in SBUF or PSUM.
        data0: in SBUF or PSUM.
        data1: in SBUF or PSUM, but not both in PSUM.
        initial: a number or a tensor [P, 1].
        op0: an arithmetic operator of two operands.
        op1: an arithmetic operator of two operands.
        reverse0: compute dst[i-1] <op0> data0[i].
        reverse1: compute data1[i] <op1> (...).
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_tensor_scan")
    where = "tensor_tensor_scan"
    destination(core, where, "dst", dst)
    operand(core, where, "data0", data0)
    operand(core, where, "data1", data1)
    same_size(where, dst, data0=data0, data1=data1)
    not_both_psum(where, data0=data0, data1=data1)
    operators = []
    for label, op in (("op0", op0), ("op1", op1)):
        operator = operator_of(op, where, label, core.machine.nc_version)
        if operator.kind != "arithmetic":
            raise broken(where, label, f"nl.{operator.name}", "must be an arithmetic operator of two operands")
        operators.append(operator.function)
    first, second = operators
    partitions = dst.shape[0]
    one, two = data0.float32().reshape(partitions, -1), data1.float32().reshape(partitions, -1)
    start = vector(core, where, "initial", initial, dst, dtypes=None)
    state = np.broadcast_to(np.reshape(start, -1), partitions).astype(np.float32)
    result = np.empty(one.shape, np.float32)
    for i in range(one.shape[1]):
        state = first(state, one[:, i]) if reverse0 else first(one[:, i], state)
        state = second(two[:, i], state) if reverse1 else second(state, two[:, i])
        result[:, i] = state
    store(dst, result)
    cycles = free(core, dst.free_size, core.machine.scan_factor)
    return core.issue(where, "vector", cycles, (dst,), (data0, data1, initial if isinstance(initial, NkiTensor) else None))


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Per partition: count, mean and variance x count of the even elements, then of the odd ones. On Vector.

    Args:
        dst: 6 elements per partition.
        data: up to 512 elements per partition.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("bn_stats")
    destination(core, "bn_stats", "dst", dst)
    operand(core, "bn_stats", "data", data)
    if data.free_size > core.machine.bn_stats_elements:
        raise broken(
            "bn_stats", "data", f"{data.free_size} elements per partition", f"exceed maximum {core.machine.bn_stats_elements}"
        )
    if dst.shape[0] != data.shape[0] or dst.free_size != 6:
        raise broken("bn_stats", "dst", f"shape {dst.shape}", f"must be ({data.shape[0]}, 6)")
    values = data.float32().reshape(data.shape[0], -1)
    result = np.zeros((data.shape[0], 6), np.float32)
    for half in (0, 1):
        part = values[:, half::2]
        count = part.shape[1]
        result[:, 3 * half] = count
        if count:
            mean = part.mean(axis=1, dtype=np.float32)
            result[:, 3 * half + 1] = mean
            result[:, 3 * half + 2] = np.square(part - mean[:, None]).sum(axis=1, dtype=np.float32)
    store(dst, result)
    return core.issue("bn_stats", "vector", free(core, data.free_size), (dst,), (data,))


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Mean and variance per partition from (count, mean, variance x count) triples of bn_stats. On Vector.

    Args:
        dst: 2 elements per partition.
        data: a multiple of 3 elements per partition.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("bn_aggr")
    destination(core, "bn_aggr", "dst", dst)
    operand(core, "bn_aggr", "data", data)
    if data.free_size % 3:
        raise broken("bn_aggr", "data", f"{data.free_size} elements per partition", "are no multiple of 3")
    if dst.shape[0] != data.shape[0] or dst.free_size != 2:
        raise broken("bn_aggr", "dst", f"shape {dst.shape}", f"must be ({data.shape[0]}, 2)")
    count, mean, spread = np.moveaxis(data.float32().reshape(data.shape[0], -1, 3), -1, 0)
    total = count.sum(axis=1, dtype=np.float32)
    average = (count * mean).sum(axis=1, dtype=np.float32) / total
    variance = (spread + count * np.square(mean - average[:, None])).sum(axis=1, dtype=np.float32) / total
    store(dst, np.stack([average, variance], axis=1))
    return core.issue("bn_aggr", "vector", free(core, data.free_size, core.machine.bn_aggr_factor), (dst,), (data,))
