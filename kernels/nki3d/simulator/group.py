# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two cores that run one kernel together (LNC 2): shared HBM, and the points at which they meet.

Each core is a thread, and only one of them runs at a time: core 0 until it must wait for core 1, then core 1, and so on. So a run is
reproducible, and a kernel that forgets a barrier reads poison rather than, sometimes, the right numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .errors import NkiValidationError
from .memory import Storage

__all__ = ["Group"]


class Group:
    """The cores of one logical core.

    Attributes:
        size: how many physical cores there are.
    """

    def __init__(self, size: int):
        self.size = size
        self._turn = 0
        self._changed = threading.Condition()
        self._ended: set[int] = set()
        self._waiting: dict[int, Any] = {}
        self._offers: dict[tuple[Any, int], list[Any]] = {}
        self._shared: list[tuple[tuple[Any, ...], Storage]] = []
        self._failed = False

    def begin(self, core: int) -> None:
        """Wait for this core's first turn."""
        with self._changed:
            self._wait_for_turn(core)

    def end(self, core: int, failed: bool) -> None:
        """This core has run to its end, or has raised."""
        with self._changed:
            self._ended.add(core)
            self._failed |= failed
            self._pass_on(core)

    def shared_storage(self, index: int, key: tuple[Any, ...], make: Callable[[], Storage]) -> Storage:
        """The storage of a core's `index`-th tensor in shared HBM: one for all cores.

        Raises:
            NkiValidationError: the cores disagree about that tensor.
        """
        if index == len(self._shared):
            self._shared.append((key, make()))
        found, storage = self._shared[index]
        if found != key:
            raise NkiValidationError(
                f"ndarray in shared_hbm: tensor {index} is {found} on one core and {key} on the other. Allocate shared tensors in the same order, "
                "with the same shape and dtype, on both cores."
            )
        return storage

    def meet(self, core: int, key: Any, offer: Any = None) -> list[Any]:
        """Wait until the other core arrives with the same key; what each of them offered, by core.

        Raises:
            NkiValidationError: the other core has ended, or waits for something else.
        """
        with self._changed:
            # cores go through the meetings with one key in order: the k-th of one meets the k-th of the other
            rank = 0
            while self._offers.get((key, rank), [None] * self.size)[core] is not None:
                rank += 1
            offers = self._offers.setdefault((key, rank), [None] * self.size)
            offers[core] = (offer,)
            self._waiting[core] = key
            if all(entry is not None for entry in offers):
                self._waiting.clear()
            else:
                self._pass_on(core)
                while any(entry is None for entry in offers):
                    self._wait_for_turn(core)
                    if any(entry is None for entry in offers):
                        raise self._alone(core, key)
            return [entry[0] for entry in offers]

    def _alone(self, core: int, key: Any) -> Exception:
        other = 1 - core
        what = "has ended" if other in self._ended else f"waits at {self._waiting.get(other)}"
        return NkiValidationError(
            f"{key}: core {core} waits for core {other}, which {what}. Both cores must issue it, in the same order."
        )

    def _wait_for_turn(self, core: int) -> None:
        while self._turn != core:
            self._changed.wait()

    def _pass_on(self, core: int) -> None:
        following = (core + 1) % self.size
        if following not in self._ended:
            self._turn = following
        self._changed.notify_all()
