# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies, constants and element-wise operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..alu import Operator, name_of, operator_of
from ..core import Core, current
from ..dtypes import PACKED, from_float32, is_integer, numpy_dtype
from ..errors import broken
from ..objects import MemoryRegion, NkiInstruction
from ..tensor import NkiTensor
from ._common import (
    ON_CHIP,
    PSUM,
    check_free_size,
    check_tile,
    choose,
    copy_cycles,
    destination,
    free,
    no_psum_on_gpsimd,
    not_both_psum,
    operand,
    read_like,
    same_size,
    store,
    two_bytes,
    vector,
    written,
)
from ._enums import engine as engines

__all__ = [
    "memset",
    "reciprocal",
    "scalar_tensor_tensor",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_scalar",
    "tensor_tensor",
]


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engines = engines.unknown, name: str | None = None) -> NkiInstruction:
    """dst = src on chip: bit for bit between equal types, else through float32 with one rounding.

    Args:
        dst: in SBUF or PSUM.
        src: in SBUF or PSUM, with the partitions and elements per partition of `dst`.
        engine: vector (default), scalar (not on trn1) or gpsimd (not with PSUM).
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_copy")
    check_tile(core, "tensor_copy", "dst", dst, ON_CHIP)
    check_tile(core, "tensor_copy", "src", src, ON_CHIP)
    check_free_size(core, "tensor_copy", "dst", dst)
    check_free_size(core, "tensor_copy", "src", src)
    same_size("tensor_copy", dst, src=src)
    allowed = ("vector", "gpsimd") if core.machine.nc_version < 3 else ("vector", "scalar", "gpsimd")
    chosen = choose("tensor_copy", engine, allowed, "vector")
    no_psum_on_gpsimd("tensor_copy", chosen, dst=dst, src=src)
    if 0 in dst.strides and dst.repeats_elements():
        raise broken("tensor_copy", "dst", f"shape {dst.shape} with strides {dst.strides}", "writes an element more than once")
    if src.dtype == dst.dtype:
        dst.write(src.read())
        written(dst)
    elif src.dtype in PACKED or dst.dtype in PACKED:
        raise broken("tensor_copy", "src", f"dtype {src.dtype} to {dst.dtype}", "cannot convert packed values")
    else:
        store(dst, src.float32())
    return core.issue("tensor_copy", chosen, copy_cycles(core, chosen, dst, src), (dst,), (src,))


def memset(dst: NkiTensor, value: float, engine: engines = engines.unknown, name: str | None = None) -> NkiInstruction:
    """Fill `dst` with a constant.

    Args:
        dst: in SBUF or PSUM.
        value: an integer, or a float for a floating-point `dst`; 0 only for packed types.
        engine: vector (default) or gpsimd (not with PSUM).
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a float for an integer tensor, or a value that the type cannot hold.
    """
    core = current("memset")
    check_tile(core, "memset", "dst", dst, ON_CHIP)
    check_free_size(core, "memset", "dst", dst)
    chosen = choose("memset", engine, ("vector", "gpsimd"), "vector")
    no_psum_on_gpsimd("memset", chosen, dst=dst)
    if isinstance(value, NkiTensor) or not isinstance(value, int | float | np.generic):
        raise broken("memset", "value", repr(value), "must be a number")
    if dst.dtype in PACKED and value != 0:
        raise broken("memset", "value", f"{value} for {dst.dtype}", "must be 0")
    if is_integer(dst.dtype):
        if isinstance(value, float | np.floating):
            raise broken(
                "memset", "value", f"{value!r} for {dst.dtype}", "is a float in an integer tensor", "Write an integer."
            )
        info = np.iinfo(numpy_dtype(dst.dtype))
        if not info.min <= int(value) <= info.max:
            raise broken("memset", "value", f"{value} for {dst.dtype}", f"is outside [{info.min}, {info.max}]")
    if is_integer(dst.dtype) or dst.dtype in PACKED:
        dst.array[...] = numpy_dtype(dst.dtype).type(value != 0 if dst.dtype == "bool" else value)
    else:
        dst.array[...] = from_float32(np.asarray(value, np.float32), dst.dtype)
    written(dst)
    return core.issue("memset", chosen, free(core, dst.free_size, core.machine.memset_factor), (dst,), ())


def _operate(operator: Operator, left: Any, right: Any, reverse: bool) -> Any:
    """One arithmetic operator on float32 values; a unary one ignores `right`."""
    if operator.kind == "unary":
        return operator.function(left)
    return operator.function(right, left) if reverse else operator.function(left, right)


def _check_integers(instruction: str, **operands: Any) -> None:
    for name, tensor in operands.items():
        if isinstance(tensor, NkiTensor) and not is_integer(tensor.dtype):
            raise broken(
                instruction,
                name,
                f"dtype {tensor.dtype}",
                "must be an integer type for a bitwise operator",
                "View it as integers: t.view(nl.uint32).",
            )


def tensor_tensor(
    dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Any, engine: engines = engines.unknown, name: str | None = None
) -> NkiInstruction:
    """dst = data1 <op> data2, element by element, in float32; all int32 or uint32 in SBUF: exact integers on GpSimd.

    Args:
        dst: in SBUF or PSUM.
        data1: in SBUF or PSUM.
        data2: in SBUF or PSUM, but not both in PSUM.
        op: a binary operator such as nl.add.
        engine: vector or gpsimd; by default gpsimd for nl.power and for 32-bit integers in SBUF, else vector.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_tensor")
    destination(core, "tensor_tensor", "dst", dst)
    operand(core, "tensor_tensor", "data1", data1)
    operand(core, "tensor_tensor", "data2", data2)
    same_size("tensor_tensor", dst, data1=data1, data2=data2)
    not_both_psum("tensor_tensor", data1=data1, data2=data2)
    operator = operator_of(op, "tensor_tensor", "op", core.machine.nc_version)
    if operator.kind == "unary" or operator.name == "invert":
        raise broken("tensor_tensor", "op", f"nl.{operator.name}", "takes one operand", "Use tensor_scalar or activation.")
    in_psum = any(tensor.buffer is MemoryRegion.psum for tensor in (dst, data1, data2))
    exact = operator.kind == "arithmetic" and all(t.dtype in ("int32", "uint32") for t in (dst, data1, data2))
    default = "gpsimd" if operator.name == "power" or (exact and not in_psum) else "vector"
    chosen = choose("tensor_tensor", engine, ("vector", "gpsimd"), default)
    if operator.name == "power" and chosen != "gpsimd":
        raise broken("tensor_tensor", "engine", chosen, "cannot run nl.power, which is on gpsimd")
    no_psum_on_gpsimd("tensor_tensor", chosen, dst=dst, data1=data1, data2=data2)
    if operator.kind == "bitvec":
        if chosen == "gpsimd":
            raise broken("tensor_tensor", "engine", "gpsimd", "cannot run bitwise operators, which are on vector")
        _bitwise("tensor_tensor", dst, operator, data1.read(), data2.read(), data1=data1, data2=data2)
    elif exact and chosen == "gpsimd":
        _exact(dst, operator, data1, data2)
    else:
        store(dst, _operate(operator, read_like(data1, dst), read_like(data2, dst), False))
    return core.issue(
        "tensor_tensor", chosen, _two_input_cycles(core, chosen, operator, dst, data1, data2), (dst,), (data1, data2)
    )


def _exact(dst: NkiTensor, operator: Operator, data1: NkiTensor, data2: NkiTensor) -> None:
    """GpSimd's integer arithmetic: exact, and modulo 2**32."""
    one, two = (data.array.astype(np.int64).reshape(dst.shape) for data in (data1, data2))
    exact = np.asarray(operator.function(one, two)).astype(np.int64)
    dst.write((exact & 0xFFFFFFFF).astype(np.uint32).view(numpy_dtype(dst.dtype)))


def _bitwise(instruction: str, dst: NkiTensor, operator: Operator, left: Any, right: Any, **tensors: NkiTensor) -> None:
    """A bitwise operator on bit patterns, which must have one width."""
    _check_integers(instruction, dst=dst, **tensors)
    for name, tensor in tensors.items():
        if tensor.itemsize != dst.itemsize:
            raise broken(
                instruction, name, f"dtype {tensor.dtype}", f"must be as wide as `dst`, {dst.dtype}: bits are not converted"
            )
    if left.shape != dst.shape:
        left = left.reshape(dst.shape)
    if isinstance(right, np.ndarray) and right.size == dst.size:
        right = right.reshape(dst.shape)
    result = operator.function(left) if operator.name == "invert" else operator.function(left, right)
    dst.write(np.ascontiguousarray(result).view(numpy_dtype(dst.dtype)))
    written(dst)


def _two_input_cycles(core: Core, engine: str, operator: Operator, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> float:
    machine = core.machine
    if engine != "vector":
        return free(core, dst.free_size, machine.two_input_factor)  # the fast modes are Vector's
    if data1.buffer in PSUM or data2.buffer in PSUM:
        return free(core, dst.free_size)
    if two_bytes(dst, data1, data2):
        if machine.vector_medium_factor > 1:
            return free(core, dst.free_size, 1 / machine.vector_medium_factor)
        quick = operator.name in ("add", "multiply", "subtract") and all(t.is_contiguous() for t in (dst, data1, data2))
        if quick and all(t.dtype == "bfloat16" for t in (dst, data1, data2)):
            return free(core, dst.free_size)
    return free(core, dst.free_size, machine.two_input_factor)


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: engines = engines.unknown,
    name: str | None = None,
) -> NkiInstruction:
    """dst = (data <op0> operand0) <op1> operand1, in float32; operands are numbers or one float32 per partition.

    Args:
        dst: in SBUF or PSUM.
        data: in SBUF or PSUM.
        op0: an operator such as nl.multiply.
        operand0: a number or a tensor [P, 1]; None or 0 for a unary `op0`.
        reverse0: compute operand0 <op0> data.
        op1: a second operator, of the same kind (arithmetic or bitwise).
        operand1: its operand.
        reverse1: compute operand1 <op1> (...).
        engine: vector (default), scalar (on trn2: multiply+add, multiply, add) or gpsimd (rsqrt, which is its default).
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_scalar")
    destination(core, "tensor_scalar", "dst", dst)
    operand(core, "tensor_scalar", "data", data)
    same_size("tensor_scalar", dst, data=data)
    first = operator_of(op0, "tensor_scalar", "op0", core.machine.nc_version)
    second = None if op1 is None else operator_of(op1, "tensor_scalar", "op1", core.machine.nc_version)
    if second is None and operand1 is not None:
        raise broken("tensor_scalar", "operand1", repr(operand1), "is given without `op1`")
    bitwise = first.kind == "bitvec"
    if second is not None and (second.kind == "bitvec") != bitwise:
        raise broken(
            "tensor_scalar", "op1", f"nl.{second.name} after nl.{first.name}", "mixes bitwise and arithmetic operators"
        )
    for label, operator, given in (("operand0", first, operand0), ("operand1", second, operand1)):
        if operator is not None and (operator.kind == "unary" or operator.name == "invert"):
            if given is not None and (isinstance(given, NkiTensor) or given != 0):
                raise broken("tensor_scalar", label, repr(given), f"must be None or 0: nl.{operator.name} takes one operand")
        elif operator is not None and given is None:
            raise broken("tensor_scalar", label, "None", f"is missing: nl.{operator.name} takes two operands")
    chosen = _scalar_engine(core, engine, first, second)
    no_psum_on_gpsimd("tensor_scalar", chosen, dst=dst, data=data, operand0=operand0, operand1=operand1)

    steps = ((first, operand0, reverse0, "operand0"), (second, operand1, reverse1, "operand1"))
    if bitwise:
        _bitwise_steps(core, dst, data, steps)
    else:
        values = data.float32()
        for operator, given, reverse, label in steps:
            if operator is None:
                continue
            other = None if operator.kind == "unary" else vector(core, "tensor_scalar", label, given, data)
            if other is not None and not isinstance(other, np.ndarray):
                other = np.float32(other)
            values = _operate(operator, values, other, reverse)
        store(dst, values)
    reads = (data, operand0 if isinstance(operand0, NkiTensor) else None, operand1 if isinstance(operand1, NkiTensor) else None)
    if chosen == "gpsimd":
        cycles = free(core, data.free_size, core.machine.gpsimd_rsqrt_factor)
    else:
        cycles = copy_cycles(core, chosen, dst, data)
        if "reciprocal" in (first.name, second.name if second is not None else ""):
            cycles = max(cycles, free(core, data.free_size, core.machine.reciprocal_factor))
    return core.issue("tensor_scalar", chosen, cycles, (dst,), reads)


def _scalar_engine(core: Core, engine: engines, first: Operator, second: Operator | None) -> str:
    is_rsqrt = first.name == "rsqrt" or (second is not None and second.name == "rsqrt")
    chosen = choose("tensor_scalar", engine, ("vector", "scalar", "gpsimd"), "gpsimd" if is_rsqrt else "vector")
    names = (first.name, None if second is None else second.name)
    if chosen == "gpsimd" and not is_rsqrt:
        raise broken("tensor_scalar", "engine", "gpsimd", "runs nl.rsqrt only")
    if chosen != "gpsimd" and is_rsqrt:
        raise broken(
            "tensor_scalar", "engine", chosen, "cannot run nl.rsqrt, which is on gpsimd", "Or use activation(op=nl.rsqrt)."
        )
    if first.kind == "bitvec" and chosen != "vector":
        raise broken("tensor_scalar", "engine", chosen, "cannot run bitwise operators, which are on vector")
    if chosen == "scalar" and core.machine.nc_version < 4:
        if core.machine.nc_version < 3:
            raise broken("tensor_scalar", "engine", "scalar", "needs NeuronCore-v3 (trn2)")
        if names not in (("multiply", "add"), ("multiply", None), ("add", None)):
            raise broken(
                "tensor_scalar",
                "engine",
                f"scalar with nl.{first.name}" + (f" and nl.{second.name}" if second else ""),
                "runs (multiply, add), (multiply) and (add) only on trn2",
            )
    return chosen


def _bitwise_steps(core: Core, dst: NkiTensor, data: NkiTensor, steps: Any) -> None:
    _check_integers("tensor_scalar", dst=dst, data=data)
    values = data.read()
    for operator, given, reverse, label in steps:
        if operator is None:
            continue
        if operator.name == "invert":
            values = operator.function(values)
            continue
        other = vector(core, "tensor_scalar", label, given, data, dtypes=None)
        if isinstance(other, np.ndarray):
            _check_integers("tensor_scalar", **{label: given})
            if other.dtype.itemsize != values.dtype.itemsize:
                raise broken(
                    "tensor_scalar",
                    label,
                    f"dtype {given.dtype}",
                    f"must be as wide as `data`, {data.dtype}: bits are not converted",
                )
        elif isinstance(other, float | np.floating):
            raise broken("tensor_scalar", label, repr(given), "must be an integer for a bitwise operator")
        width = 8 * values.dtype.itemsize
        # a Python integer as the bit pattern that it has in this width
        bits = (
            other
            if isinstance(other, np.ndarray)
            else np.array(int(other) & ((1 << width) - 1), f"uint{width}").view(values.dtype)
        )
        bits = np.broadcast_to(bits.astype(values.dtype), values.shape)
        values = operator.function(bits, values) if reverse else operator.function(values, bits)
    if data.itemsize != dst.itemsize:
        raise broken(
            "tensor_scalar", "data", f"dtype {data.dtype}", f"must be as wide as `dst`, {dst.dtype}: bits are not converted"
        )
    dst.write(np.ascontiguousarray(values).view(numpy_dtype(dst.dtype)))
    written(dst)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """dst = (data <op0> operand0) <op1> operand1 on Vector, in float32: `operand0` is a number or [P, 1], `operand1` a tile like `data`.

    Args:
        dst: in SBUF or PSUM.
        data: in SBUF or PSUM.
        op0: an arithmetic operator.
        operand0: a number or a tensor [P, 1].
        op1: an arithmetic operator.
        operand1: in SBUF or PSUM, but not in PSUM together with `data`.
        reverse0: compute operand0 <op0> data.
        reverse1: compute operand1 <op1> (...).
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("scalar_tensor_tensor")
    destination(core, "scalar_tensor_tensor", "dst", dst)
    operand(core, "scalar_tensor_tensor", "data", data)
    operand(core, "scalar_tensor_tensor", "operand1", operand1)
    same_size("scalar_tensor_tensor", dst, data=data, operand1=operand1)
    not_both_psum("scalar_tensor_tensor", data=data, operand1=operand1)
    operators = []
    for label, op in (("op0", op0), ("op1", op1)):
        operator = operator_of(op, "scalar_tensor_tensor", label, core.machine.nc_version)
        if operator.kind == "bitvec" or (operator.kind == "unary" and label == "op1"):
            raise broken("scalar_tensor_tensor", label, f"nl.{operator.name}", "must be an arithmetic operator of two operands")
        operators.append(operator)
    scalar = None
    if operators[0].kind != "unary":
        scalar = vector(core, "scalar_tensor_tensor", "operand0", operand0, dst, dtypes=None)
        scalar = scalar.astype(np.float32) if isinstance(scalar, np.ndarray) else np.float32(scalar)
    values = _operate(operators[0], read_like(data, dst), scalar, reverse0)
    store(dst, _operate(operators[1], values, read_like(operand1, dst), reverse1))
    fused = two_bytes(data, operand1) and name_of(op0) == "subtract" and name_of(op1) == "multiply" and dst.free_size % 2 == 0
    cycles = free(core, dst.free_size, 1 if fused else core.machine.two_input_factor)
    return core.issue(
        "scalar_tensor_tensor",
        "vector",
        cycles,
        (dst,),
        (data, operand1, operand0 if isinstance(operand0, NkiTensor) else None),
    )


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> NkiInstruction:
    """dst = 1 / data on Vector, in float32.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("reciprocal")
    destination(core, "reciprocal", "dst", dst)
    operand(core, "reciprocal", "data", data)
    same_size("reciprocal", dst, data=data)
    store(dst, np.float32(1) / data.float32())
    return core.issue("reciprocal", "vector", free(core, data.free_size, core.machine.reciprocal_factor), (dst,), (data,))


def tensor_copy_predicated(
    dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> NkiInstruction:
    """Copy `src`, a tile or a number, to the elements of `dst` whose `predicate` is not 0 (or is 0, with `reverse_pred`).

    Args:
        dst: in SBUF or PSUM.
        src: of the type of `dst`, or a number.
        predicate: uint8, uint16 or uint32; not in PSUM together with `src`.
        reverse_pred: copy where the predicate is 0.
        name: for messages of the compiler.

    Raises:
        NkiValidationError: a broken limit of the machine.
    """
    core = current("tensor_copy_predicated")
    destination(core, "tensor_copy_predicated", "dst", dst)
    operand(core, "tensor_copy_predicated", "predicate", predicate)
    same_size("tensor_copy_predicated", dst, predicate=predicate)
    if predicate.dtype not in ("uint8", "uint16", "uint32"):
        raise broken("tensor_copy_predicated", "predicate", f"dtype {predicate.dtype}", "must be uint8, uint16 or uint32")
    mask = predicate.read().reshape(dst.shape) != 0
    if reverse_pred:
        mask = ~mask
    if isinstance(src, NkiTensor):
        operand(core, "tensor_copy_predicated", "src", src)
        same_size("tensor_copy_predicated", dst, src=src)
        not_both_psum("tensor_copy_predicated", src=src, predicate=predicate)
        if src.dtype != dst.dtype:
            raise broken("tensor_copy_predicated", "src", f"dtype {src.dtype}", f"must be that of `dst`, {dst.dtype}")
        values: Any = src.read().reshape(dst.shape)
    elif isinstance(src, int | float | np.generic):
        values = numpy_dtype(dst.dtype).type(src)
    else:
        raise broken("tensor_copy_predicated", "src", repr(src), "is neither a number nor a tensor")
    dst.write(np.where(mask, values, dst.read()))
    written(dst)
    reads = (src if isinstance(src, NkiTensor) else None, predicate, dst)
    mixed = any(t is not None and t.buffer in PSUM for t in (dst, *reads))
    cycles = free(core, dst.free_size, 1 if mixed else core.machine.two_input_factor)
    return core.issue("tensor_copy_predicated", "vector", cycles, (dst,), reads)
