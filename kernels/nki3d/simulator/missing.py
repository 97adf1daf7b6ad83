# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What NKI 0.6 has and this simulator does not: it raises with its name; nothing is a silent no-op."""

from __future__ import annotations

import difflib
import functools
import json
from importlib import resources
from typing import Any

__all__ = ["missing", "recorded_api"]


@functools.cache
def recorded_api() -> dict[str, Any]:
    """The public API of NKI 0.6.0: modules, functions with [parameter, default], classes, constants."""
    text = resources.files("nki3d").joinpath("nki_api.json").read_text(encoding="utf-8")
    modules: dict[str, Any] = json.loads(text)["modules"]
    return modules


def missing(module: str, alias: str, name: str) -> Any:
    """A function that raises NotImplementedError, for a name of the recorded API.

    Raises:
        AttributeError: NKI 0.6 has no such name either.
    """
    if name.startswith("__"):
        # the import system asks for these, often
        raise AttributeError(name)
    known = recorded_api()[module]
    names = [*known["functions"], *known["classes"], *known["enums"], *known["constants"]]
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {alias}.{close[0]}?" if close else ""
        raise AttributeError(f"{module} of NKI 0.6 has no {name!r}.{hint}")

    def function(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{alias}.{name} is part of NKI 0.6 and not implemented in this simulator.")

    function.__name__ = name
    return function
