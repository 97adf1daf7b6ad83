# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Running a kernel: nki.jit, nki.simulate, and the passage of arrays in and out."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .core import Core, active, running
from .dtypes import canonical, numpy_dtype
from .errors import NkiValidationError
from .group import Group
from .machine import Machine, machine_of
from .memory import Storage
from .objects import MemoryRegion, NKIObject
from .tensor import NkiTensor

__all__ = ["Kernel", "jit", "run", "simulate"]


class Kernel:
    """A function that runs in the simulator when it is called with arrays, and as a plain function when another kernel calls it.

    `kernel[2](...)` runs it on two cores (LNC 2).
    """

    def __init__(self, function: Callable[..., Any], lnc: int = 1):
        self.function = function
        self.lnc = lnc
        functools.update_wrapper(self, function)

    def __getitem__(self, lnc: Any) -> Kernel:
        """The kernel on `lnc` cores: 1 or 2.

        Raises:
            ValueError: another number.
        """
        cores = lnc[0] if isinstance(lnc, tuple) and len(lnc) == 1 else lnc
        if isinstance(cores, bool) or cores not in (1, 2):
            raise ValueError(f"`kernel[{lnc!r}]`: a logical core has 1 or 2 physical cores. Use kernel[1] or kernel[2].")
        return Kernel(self.function, int(cores))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel; arrays become tensors in HBM, other values stay as they are."""
        if active() is not None:
            return self.function(*args, **kwargs)
        return run(self.function, self.lnc, machine_of(), args, kwargs)[0]

    def __repr__(self) -> str:
        return f"Kernel({getattr(self.function, '__name__', self.function)!r}, lnc={self.lnc})"


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a function a kernel. Called with NumPy arrays, it runs in this simulator.

    Args:
        fn: the function; without it, a decorator is returned.
        **kwargs: NKI documents none; what older releases took (`mode`, `platform_target`) is an error since 0.3.

    Raises:
        TypeError: any keyword.

    Example:
        >>> import numpy as np
        >>> import nki3d.simulator as nki
        >>> nl, nisa = nki.language, nki.isa
        >>> @nki.jit
        ... def double(x):
        ...     tile = nl.load(x)
        ...     nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        ...     out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ...     nisa.dma_copy(dst=out, src=tile)
        ...     return out
        >>> double(np.float32([[1, 2, 3]]))
        array([[2., 4., 6.]], dtype=float32)
    """
    if kwargs:
        names = ", ".join(f"`{name}`" for name in kwargs)
        raise TypeError(
            f"nki.jit {names}: NKI 0.6 takes no such keyword. Leave it out; the target is NEURON_PLATFORM_TARGET_OVERRIDE."
        )
    if fn is None:
        return jit
    return fn if isinstance(fn, Kernel) else Kernel(fn)


def simulate(kernel: Any) -> Kernel:
    """The kernel, to be run in the simulator; a plain function is wrapped. `nki.simulate(kernel[2])` runs it on two cores."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


def run(
    function: Callable[..., Any],
    lnc: int,
    machine: Machine,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record: bool = False,
) -> tuple[Any, list[Core]]:
    """Run a kernel's function on `lnc` cores; its results as arrays, and the cores with their accounts.

    Raises:
        NkiValidationError: the kernel breaks a limit of the machine.
    """
    group = Group(lnc) if lnc > 1 else None
    arguments = _Arguments(MemoryRegion.shared_hbm if lnc > 1 else MemoryRegion.private_hbm)
    tensors = [arguments.wrap(value, f"argument {i}") for i, value in enumerate(args)]
    named = {name: arguments.wrap(value, name) for name, value in kwargs.items()}
    cores = [Core(machine, number, group, record) for number in range(lnc)]
    results: list[Any] = [None] * lnc
    errors: list[BaseException | None] = [None] * lnc

    def body(number: int) -> None:
        try:
            if group is not None:
                group.begin(number)
            with running(cores[number]):
                results[number] = function(*tensors, **named)
                cores[number].memory.check()
                if number == 0:
                    _check_results(results[0])
        except BaseException as error:
            errors[number] = error
        finally:
            if group is not None:
                group.end(number, errors[number] is not None)

    if group is None:
        body(0)
    else:
        threads = [threading.Thread(target=body, args=(number,), name=f"nki core {number}") for number in range(lnc)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # a core that waits for one that failed fails, too: the cause comes first
    failures = [error for error in errors if error is not None]
    for error in sorted(failures, key=lambda e: isinstance(e, NkiValidationError) and "waits for core" in str(e)):
        raise error
    # only now: the other core may write what the first one returns
    outputs = _results(results[0])
    arguments.copy_back()
    return outputs, cores


class _Arguments:
    """The arrays of a call as tensors in HBM."""

    def __init__(self, region: MemoryRegion):
        self.region = region
        self.copies: list[tuple[np.ndarray, Storage]] = []

    def wrap(self, value: Any, name: str) -> Any:
        """Arrays as tensors that share their memory; tuples and dicts of arrays likewise; other values unchanged."""
        if isinstance(value, list):
            raise TypeError(f"kernel `{name}`: NKI takes no lists as arguments. Pass a tuple.")
        if isinstance(value, tuple):
            return _same_tuple(value, [self.wrap(entry, f"{name}[{i}]") for i, entry in enumerate(value)])
        if isinstance(value, dict):
            return {key: self.wrap(entry, f"{name}[{key!r}]") for key, entry in value.items()}
        if isinstance(value, NKIObject) and not isinstance(value, NkiTensor):
            fields = {key: self.wrap(entry, f"{name}.{key}") for key, entry in vars(value).items()}
            if all(fields[key] is entry for key, entry in vars(value).items()):
                return value
            wrapped = copy.copy(value)
            for key, entry in fields.items():
                object.__setattr__(wrapped, key, entry)
            return wrapped
        if isinstance(value, np.ndarray) or (
            hasattr(value, "__array__") and hasattr(value, "shape") and not np.isscalar(value)
        ):
            return self._tensor(np.asarray(value), name)
        return value

    def _tensor(self, array: np.ndarray, name: str) -> NkiTensor:
        kind = canonical(array.dtype, f"kernel `{name}`")
        if array.size == 0:
            raise ValueError(
                f"kernel `{name}`: shape {array.shape} has no elements. Return an empty result without calling the kernel."
            )
        stored = array.view(np.uint8) if array.dtype == np.bool_ else array
        if stored.flags.c_contiguous and stored.flags.writeable:
            raw = stored.reshape(-1)
            storage = Storage(raw, self.region.value, name)
        else:
            storage = Storage(np.array(stored, numpy_dtype(kind), order="C").reshape(-1), self.region.value, name)
            if stored.flags.writeable:
                self.copies.append((stored, storage))
        storage.is_input = True
        return NkiTensor(array.shape or (1,), kind, storage, self.region)

    def copy_back(self) -> None:
        """What the kernel wrote to its inputs, in arrays that could not share their memory."""
        for array, storage in self.copies:
            array[...] = storage.raw.reshape(array.shape)


def _same_tuple(value: tuple[Any, ...], entries: list[Any]) -> Any:
    """A tuple of the type of `value`, named or not."""
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


def _check_results(value: Any) -> None:
    """Check that the host can read what a kernel returns.

    Raises:
        NkiValidationError: a tensor in another memory than shared HBM.
    """
    if isinstance(value, NkiTensor):
        if value.buffer is not MemoryRegion.shared_hbm and not value.storage.is_input:
            raise NkiValidationError(
                f"kernel `return`: {value.name!r} {value.shape} is in {value.buffer.name} and must be in shared_hbm. "
                "Allocate outputs with buffer=nl.shared_hbm and copy to them."
            )
    elif isinstance(value, tuple | list):
        for entry in value:
            _check_results(entry)
    elif isinstance(value, dict):
        _check_results(list(value.values()))


def _results(value: Any) -> Any:
    """The returned tensors as arrays."""
    if isinstance(value, NkiTensor):
        return value.array != 0 if value.dtype == "bool" else value.array.copy()
    if isinstance(value, tuple):
        return _same_tuple(value, [_results(entry) for entry in value])
    if isinstance(value, list):
        return [_results(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _results(entry) for key, entry in value.items()}
    return value
