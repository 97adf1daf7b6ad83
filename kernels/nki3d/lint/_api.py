# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules on calls of NKI, checked against the recorded public API."""

import ast
import difflib
import functools
import importlib.resources
import json
import re

from nki3d.lint._kernels import KernelCode
from nki3d.lint._names import FunctionNode, Scope, Scopes, imported_names
from nki3d.lint._rules import Report
from nki3d.lint._walk import KernelVisitor

_SHORT = {"nki": "nki", "nki.isa": "nisa", "nki.language": "nl", "nki.collectives": "nki.collectives"}
_SUBMODULES = frozenset({"isa", "language", "collectives"})
_OPERATION = re.compile(r"(.*_)?op\d?")


class Api:
    """The recorded names and signatures."""

    def __init__(self) -> None:
        modules = json.loads(importlib.resources.files("nki3d").joinpath("nki_api.json").read_text())["modules"]
        # The names in each namespace: a module, an enum, or the object nl.tile_size.
        self.names: dict[str, frozenset[str]] = {}
        self.signatures: dict[str, list[tuple[str, str | None]]] = {}
        for module, recorded in modules.items():
            names = {*recorded["functions"], *recorded["constants"], *recorded["enums"], *recorded["classes"]}
            self.names[module] = frozenset(names | _SUBMODULES if module == "nki" else names)
            for name, parameters in recorded["functions"].items():
                self.signatures[f"{module}.{name}"] = [(parameter, default) for parameter, default in parameters]
            for name, members in recorded["enums"].items():
                self.names[f"{module}.{name}"] = frozenset(members)
        tile_size = modules["nki.language"]["classes"]["_TileSize"]
        self.names["nki.language.tile_size"] = frozenset([*tile_size["attributes"], *tile_size["properties"]])

    def cure(self, namespace: str, name: str) -> str | None:
        """What to write in place of a name that a namespace does not have; None if nothing is like it."""
        for module, short in _SHORT.items():
            if namespace in _SHORT and name in self.names[module]:
                return f"Write {short}.{name}."
        if name == "range":
            return "Write range."
        near = difflib.get_close_matches(name, sorted(self.names[namespace]), n=1, cutoff=0.75)
        return f"Write {short_name(namespace)}.{near[0]}." if near else None


@functools.cache
def load_api() -> Api:
    """Reads the record; once, as it does not change."""
    return Api()


def short_name(origin: str) -> str:
    """A dotted name as kernels write it."""
    module = max((module for module in _SHORT if origin == module or origin.startswith(f"{module}.")), key=len)
    return _SHORT[module] + origin.removeprefix(module)


def check(tree: ast.Module, scopes: Scopes, code: KernelCode, report: Report) -> None:
    """Checks the uses of NKI in kernel code, in the constants of the module, and in its imports."""
    visitor = _Uses(scopes, code, report)
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            visitor.visit(statement)
        elif isinstance(statement, ast.ImportFrom):
            _check_import(statement, report)
    for function in code.functions:
        visitor.visit_outermost(function)


def _check_import(node: ast.ImportFrom, report: Report) -> None:
    for alias, (_, origin) in zip(node.names, imported_names(node), strict=True):
        namespace, _, name = origin.rpartition(".")
        if namespace in _SHORT and namespace != "nki" and name != "*":
            api = load_api()
            if name not in api.names[namespace]:
                report.add("NKI060", alias, f"{namespace} has no `{alias.name}`.", api.cure(namespace, name))


class _Uses(KernelVisitor):
    def __init__(self, scopes: Scopes, code: KernelCode, report: Report) -> None:
        super().__init__(scopes, code)
        self._api = load_api()
        self._report = report.add

    def visit_outermost(self, function: FunctionNode) -> None:
        outside = self.scopes[function].parent
        assert outside is not None
        self.scope = outside
        self.visit(function.args)
        if function.returns is not None:
            self.visit(function.returns)
        super().visit_outermost(function)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        super().visit_AnnAssign(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        namespace = self.scope.origin(node.value)
        if namespace in self._api.names and node.attr not in self._api.names[namespace] and not node.attr.startswith("__"):
            cure = self._api.cure(namespace, node.attr)
            # The package itself has more than its functions, such as modules that the record leaves out.
            if cure is not None or namespace != "nki":
                self._report("NKI060", node, f"{short_name(namespace)} has no `{node.attr}`.", cure)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        origin = self.scope.origin(node.func)
        if origin in self._api.signatures:
            self._check_call(node, short_name(origin), self._api.signatures[origin])
        self.generic_visit(node)

    def _check_call(self, node: ast.Call, function: str, signature: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in signature if not name.startswith("*")]
        is_open = len(names) < len(signature)
        unpacks = any(isinstance(argument, ast.Starred) for argument in node.args) or any(k.arg is None for k in node.keywords)
        given = dict(zip(names, node.args, strict=False)) if not unpacks else {}
        if len(node.args) > len(names) and not is_open and not unpacks:
            self._report("NKI062", node.args[len(names)], f"{function} takes {len(names)} arguments, not {len(node.args)}.")
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            if keyword.arg in given:
                self._report("NKI062", keyword.value, f"{function} is given `{keyword.arg}` twice.")
            elif keyword.arg == "mask":
                self._report("NKI066", keyword.value, f"{function} has no argument `mask`.")
            elif keyword.arg not in names and not is_open:
                near = difflib.get_close_matches(keyword.arg, names, n=1)
                cure = f"Write {near[0]}=." if near else None
                self._report("NKI061", keyword.value, f"{function} has no argument `{keyword.arg}`.", cure)
            given[keyword.arg] = keyword.value
        missing = [name for name, default in signature if default is None and name in names and name not in given]
        if missing and not unpacks:
            listed = ", ".join(f"`{name}`" for name in missing)
            self._report("NKI063", node, f"{function} is called without {listed}.", f"Add {listed}.")
        for name, value in given.items():
            self._check_value(function, name, value, self.scope)

    def _check_value(self, function: str, name: str, value: ast.expr, scope: Scope) -> None:
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if name == "buffer" and is_text:
            self._report("NKI065", value, f"{function} is given the buffer as a string.", _cure_of_buffer(value))
        elif _OPERATION.fullmatch(name):
            if is_text:
                self._report("NKI064", value, f"{function} is given `{name}` as a string.")
            elif (scope.origin(value) or "").split(".")[0] in ("numpy", "jax"):
                self._report("NKI064", value, f"{function} is given `{name}` as a function of another library.")


def _cure_of_buffer(value: ast.expr) -> str | None:
    assert isinstance(value, ast.Constant)
    name = str(value.value)
    return f"Pass nl.{name}." if name in ("sbuf", "psum", "hbm", "shared_hbm", "private_hbm") else None
