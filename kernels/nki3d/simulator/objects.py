# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Small values of the NKI language: memory regions, slices of run-time start, registers, and the base of kernel classes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["DynamicSlice", "MemoryRegion", "NKIObject", "NkiInstruction", "VirtualRegister"]


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


class NKIObject:
    """The base of the classes that a kernel may use.

    A class without an `__init__` of its own gets the one of a dataclass, with or without the decorator: the language guide promises that.
    """

    __slots__ = ("__dict__",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = [name for base in reversed(type(self).__mro__) for name in inspect.get_annotations(base)]
        if len(args) > len(fields):
            raise TypeError(f"{type(self).__name__} has {len(fields)} fields, and {len(args)} values were given.")
        given = dict(zip(fields, args, strict=False))
        for name in kwargs:
            if name in given:
                raise TypeError(f"{type(self).__name__} got two values for `{name}`.")
        given |= kwargs
        for name in fields:
            setattr(self, name, given.pop(name, getattr(type(self), name, None)))
        for name, value in given.items():
            setattr(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Called after the fields are set."""


@dataclass(frozen=True, slots=True)
class DynamicSlice:
    """`nl.ds(start, size)`: `size` elements from `start`, which may be a register."""

    start: Any
    size: int


class VirtualRegister(NKIObject):
    """A 32-bit register of an engine's sequencer, with a value that exists at run time.

    Attributes:
        value: what it holds now.
        frozen: whether it is a loop's counter, which the body cannot write.
    """

    __slots__ = ("_value", "frozen")

    def __init__(self, state: int | None = None, frozen: bool = False):
        self._value = state
        self.frozen = frozen

    @property
    def value(self) -> int:
        """The number in the register.

        Raises:
            RuntimeError: nothing was moved or loaded into it.
        """
        if self._value is None:
            raise RuntimeError("a register is read before register_alloc, register_move or register_load gave it a value.")
        return self._value

    def assign(self, value: int) -> None:
        """Store a number.

        Raises:
            RuntimeError: the register is a loop's counter.
        """
        if self.frozen:
            raise RuntimeError("the counter of a loop cannot be written. Copy it with register_move to a register of your own.")
        self._value = value

    def __bool__(self) -> bool:
        # `while register:` is a loop of the 0.6 parser
        return self.value != 0

    def __index__(self) -> int:
        raise TypeError(
            "a register has no value while a kernel is built: range(), int() and Python arithmetic cannot use it. Use nl.fori_loop for a loop, "
            "nl.ds(register, size) or .ap(..., scalar_offset=register) for an address."
        )

    __int__ = __index__

    def _no_arithmetic(self, *_: Any) -> Any:
        raise TypeError(
            "a register cannot be compared or used in arithmetic while a kernel is built. Store it with nisa.register_store and compute with "
            "instructions."
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no_arithmetic
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __mod__ = __neg__ = (
        _no_arithmetic
    )
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"VirtualRegister({self._value})"


class NkiInstruction(NKIObject):
    """What an instruction returns: a handle to say that it must run after others. Instructions run in order here, so that it always does."""

    __slots__ = ("handle",)

    def __init__(self, handle: int):
        self.handle = handle

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """This instruction runs after each of `producers`; returns itself.

        Raises:
            ValueError: a producer comes later in the kernel.
        """
        for producer in producers:
            if producer.handle >= self.handle:
                raise ValueError(
                    f"instruction {self.handle} cannot depend on instruction {producer.handle}, which is not issued before it."
                )
        return self

    def __repr__(self) -> str:
        return f"NkiInstruction({self.handle})"
