# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The Scalar Engine: activation, activation_reduce, activate2."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..alu import OPERATORS, activation_of, name_of, shown
from ..core import Core, current
from ..errors import broken
from ..objects import NkiInstruction
from ..tensor import NkiTensor
from ._common import destination, free, member, operand, same_size, store, vector
from ._enums import reduce_cmd as reduce_cmds
from ._reduce import check_result, fold

__all__ = ["activate2", "activation", "activation_reduce"]


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmds = reduce_cmds.idle,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op(data * scale + bias) in float32; optionally its sum over the free dimensions into the engine's 128 registers.

    Args:
        dst: in SBUF or PSUM.
        op: an activation function such as nl.silu.
        data: in SBUF or PSUM.
        bias: a tensor [P, 1] of any type but tfloat32, or (from trn2) a number.
        scale: a number or a float32 tensor [P, 1].
        reduce_op: nl.add.
        reduce_res: [P, 1], takes the registers; one instruction more.
        reduce_cmd: idle leaves the registers, reset sets them to 0, reduce adds to them, reset_reduce does both.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("activation")
    return _activate(core, "activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """`activation` with reduce_cmd.reset_reduce: dst = op(data * scale + bias), and its sum in `reduce_res` [P, 1].

    Args:
        dst: in SBUF or PSUM.
        op: an activation function.
        data: in SBUF or PSUM.
        reduce_op: nl.add.
        reduce_res: [P, 1]; None leaves the sum in the registers.
        bias: as for `activation`.
        scale: as for `activation`.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("activation_reduce")
    return _activate(core, "activation_reduce", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmds.reset_reduce)


def _activate(
    core: Core,
    where: str,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    command: reduce_cmds,
) -> NkiInstruction:
    member(where, "reduce_cmd", command, reduce_cmds)
    destination(core, where, "dst", dst)
    operand(core, where, "data", data)
    same_size(where, dst, data=data)
    label, function = activation_of(op, where, "op")
    values = data.float32()
    if not (isinstance(scale, int | float) and scale == 1.0):
        factor = vector(core, where, "scale", scale, data)
        values = values * (factor if isinstance(factor, np.ndarray) else np.float32(factor))
    if bias is not None:
        values = values + _bias(core, where, bias, data)
    if label == "reciprocal" and bias is not None and core.machine.nc_version < 3:
        raise broken(where, "bias", "with nl.reciprocal", "needs NeuronCore-v3 (trn2)")
    if reduce_op is not None and name_of(reduce_op) != "add":
        raise broken(where, "reduce_op", shown(reduce_op), "must be nl.add")
    if command in (reduce_cmds.reduce, reduce_cmds.reset_reduce) and reduce_op is None:
        raise broken(where, "reduce_op", "None", f"is missing with reduce_cmd.{command.name}", "Pass nl.add.")
    values = np.asarray(function(values), np.float32)
    # before the store: the values may be a view of what it overwrites
    _reduce(core, where, "add", command, values, data)
    store(dst, values)
    _read_out(core, where, data, reduce_res)
    return _issue(core, where, dst, data, reduce_res, scale, bias)


def _bias(core: Core, where: str, bias: Any, data: NkiTensor) -> Any:
    if isinstance(bias, NkiTensor):
        if bias.dtype == "tfloat32":
            raise broken(where, "bias", "dtype tfloat32", "is not supported")
        return vector(core, where, "bias", bias, data, dtypes=None).astype(np.float32)
    if core.machine.nc_version < 3:
        raise broken(where, "bias", repr(bias), "must be a tensor (partitions, 1) on NeuronCore-v2")
    return np.float32(vector(core, where, "bias", bias, data))


def _reduce(core: Core, where: str, operator: str, command: reduce_cmds, values: np.ndarray, data: NkiTensor) -> None:
    """Update the registers of the lanes that `data` uses."""
    lanes = slice(data.start_partition, data.start_partition + data.shape[0])
    registers = core.scalar_accumulator
    reducer = OPERATORS[operator]
    if command in (reduce_cmds.reset, reduce_cmds.reset_reduce):
        registers[lanes] = reducer.identity
    elif command is reduce_cmds.load_reduce:
        raise broken(where, "reduce_cmd", "load_reduce", "is not supported by the Scalar Engine")
    if command in (reduce_cmds.reduce, reduce_cmds.reset_reduce):
        registers[lanes] = fold(reducer, values.reshape(values.shape[0], -1), -1, registers[lanes].copy())


def _read_out(core: Core, where: str, data: NkiTensor, result: NkiTensor | None) -> None:
    """Copy the registers to `result`, after `dst`, which may be the same memory."""
    if result is not None:
        check_result(core, where, result, data)
        store(result, core.scalar_accumulator[data.start_partition : data.start_partition + data.shape[0]])


def _issue(core: Core, where: str, dst: NkiTensor, data: NkiTensor, result: NkiTensor | None, *others: Any) -> NkiInstruction:
    cycles = free(core, data.free_size) + (core.machine.accumulator_read_cycles if result is not None else 0)
    return core.issue(
        where, "scalar", cycles, (dst, result), (data, *(t if isinstance(t, NkiTensor) else None for t in others))
    )


_PAIRS = {
    ("multiply", "add"),
    ("multiply", "subtract"),
    ("multiply", "bypass"),
    ("add", "bypass"),
    ("subtract", "bypass"),
    ("bypass", "bypass"),
}


def activate2(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmds = reduce_cmds.idle,
    name: str | None = None,
) -> NkiInstruction:
    """dst = op((data <op0> imm0) <op1> imm1) with any of six operator pairs; optionally a reduction of it (trn3 only).

    Args:
        dst: in SBUF or PSUM.
        op: an activation function, or nl.prelu with its slope in `relu_param`.
        data: in SBUF or PSUM.
        imm0: a number or a tensor [P, 1].
        imm1: a number or a tensor [P, 1].
        op0: multiply, add, subtract or bypass.
        op1: add or subtract after multiply, else bypass.
        relu_param: the slope of nl.prelu for negative inputs.
        reverse0: compute imm0 <op0> data.
        reverse1: compute imm1 <op1> (...).
        reduce_op: add, maximum, minimum, abs_max or abs_min.
        reduce_res: [P, 1], takes the registers.
        reduce_cmd: as for `activation`.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("activate2")
    if core.machine.nc_version < 4:
        raise broken("activate2", "dst", core.machine.name, "needs NeuronCore-v4 (trn3)")
    member("activate2", "reduce_cmd", reduce_cmd, reduce_cmds)
    destination(core, "activate2", "dst", dst)
    operand(core, "activate2", "data", data)
    same_size("activate2", dst, data=data)
    pair = (name_of(op0), name_of(op1))
    if pair not in _PAIRS:
        raise broken("activate2", "op0, op1", str(pair), f"must be one of {sorted(_PAIRS)}")
    values = data.float32()
    for label, which, imm, reverse in (("imm0", pair[0], imm0, reverse0), ("imm1", pair[1], imm1, reverse1)):
        if which == "bypass" or which is None:
            continue
        other = np.asarray(vector(core, "activate2", label, imm, data, dtypes=None), np.float32)
        values = OPERATORS[which].function(other, values) if reverse else OPERATORS[which].function(values, other)
    if name_of(op) == "prelu":
        slope = np.asarray(vector(core, "activate2", "relu_param", relu_param, data, dtypes=None), np.float32)
        values = np.where(values >= 0, values, slope * values)
    else:
        values = activation_of(op, "activate2", "op")[1](values)
    reducer = name_of(reduce_op)
    if reduce_cmd in (reduce_cmds.reduce, reduce_cmds.reset_reduce) and reducer not in (
        "add",
        "maximum",
        "minimum",
        "abs_max",
        "abs_min",
    ):
        raise broken("activate2", "reduce_op", shown(reduce_op), "must be nl.add, maximum, minimum, abs_max or abs_min")
    values = np.asarray(values, np.float32)
    _reduce(core, "activate2", reducer or "add", reduce_cmd, values, data)
    store(dst, values)
    _read_out(core, "activate2", data, reduce_res)
    return _issue(core, "activate2", dst, data, reduce_res, imm0, imm1, relu_param)
