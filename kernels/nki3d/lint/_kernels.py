# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which functions and classes of a file are kernel code."""

import ast
import dataclasses
from collections.abc import Iterator, Set

from nki3d.lint._names import FunctionNode, Scope, Scopes, find_classes, find_functions, own_nodes


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """The kernel code of one file.

    Attributes:
        entries: the functions under nki.jit.
        compiled: the names that are bound to what nki.jit returns, each with the scope that binds it.
        functions: all functions that are kernel code, but for those inside another one of them.
        classes: the classes that kernel code uses, and all that derive from NKIObject.
        host: the functions and classes that the author marked as host code.
    """

    entries: frozenset[FunctionNode]
    compiled: frozenset[tuple[Scope, str]]
    functions: tuple[FunctionNode, ...]
    classes: tuple[ast.ClassDef, ...]
    host: frozenset[ast.AST]


def find_kernel_code(tree: ast.Module, scopes: Scopes, host_lines: frozenset[int]) -> KernelCode:
    """Finds the kernel code of a file, whose lines `host_lines` mark functions and classes as host code."""
    host = frozenset(node for node in (*scopes.functions(), *scopes.classes()) if _is_marked(node, host_lines))
    entries, compiled = _find_entries(scopes)
    reach = _Reach(scopes, host)
    if entries or compiled:
        for function in entries:
            reach.add_function(function)
    else:
        for function in _users_of_nki(scopes, host):
            reach.add_function(function)
    for node in scopes.classes():
        if scopes.is_nki_object(node):
            reach.add_class(node)
    reach.run()
    inner = {function for function in reach.functions if _has_ancestor(scopes[function], reach.functions)}
    functions = sorted(reach.functions - inner, key=lambda node: node.lineno)
    classes = sorted(reach.classes, key=lambda node: node.lineno)
    return KernelCode(frozenset(entries - host), frozenset(compiled), tuple(functions), tuple(classes), host)


def is_jit(node: ast.expr, scope: Scope) -> bool:
    """Whether an expression is nki.jit, with arguments or without."""
    if isinstance(node, ast.Call):
        if scope.origin(node.func) == "functools.partial":
            return bool(node.args) and is_jit(node.args[0], scope)
        return is_jit(node.func, scope)
    return scope.origin(node) == "nki.jit"


def kernel_nodes(function: FunctionNode, scopes: Scopes, host: frozenset[ast.AST]) -> Iterator[tuple[ast.AST, Scope]]:
    """The nodes of a function's body with the scope of each, nested functions included; what only host code sees is left out."""
    pending: list[tuple[ast.AST, Scope]] = [(node, scopes[function]) for node in reversed(function.body)]
    while pending:
        node, scope = pending.pop()
        if node in host or isinstance(node, ast.Raise):
            continue
        yield node, scope
        children: list[tuple[ast.AST, Scope]]
        if isinstance(node, FunctionNode | ast.ClassDef):
            children = [(child, scopes[node]) for child in node.body]
        elif isinstance(node, ast.AnnAssign):
            children = [(child, scope) for child in (node.target, node.value) if child is not None]
        elif isinstance(node, ast.ExceptHandler):
            children = [(child, scope) for child in node.body]
        else:
            children = [(child, scope) for child in ast.iter_child_nodes(node)]
        pending.extend(reversed(children))


class _Reach:
    """The closure of a set of functions and classes under use by name."""

    def __init__(self, scopes: Scopes, host: frozenset[ast.AST]) -> None:
        self._scopes = scopes
        self._host = host
        self._pending: list[FunctionNode] = []
        self._attributes: set[str] = set()
        self.functions: set[FunctionNode] = set()
        self.classes: set[ast.ClassDef] = set()

    def add_function(self, function: FunctionNode) -> None:
        if function not in self.functions and function not in self._host:
            self.functions.add(function)
            self._pending.append(function)

    def add_class(self, node: ast.ClassDef) -> None:
        if node not in self.classes and node not in self._host:
            self.classes.add(node)
            if self._scopes.is_nki_object(node):
                for method in node.body:
                    if isinstance(method, FunctionNode):
                        self.add_function(method)

    def run(self) -> None:
        while self._pending:
            for node, scope in kernel_nodes(self._pending.pop(), self._scopes, self._host):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    self._add_name(node, scope)
                elif isinstance(node, ast.Attribute):
                    self._attributes.add(node.attr)
            # What kernel code calls of an enum is kernel code; the rest of the enum serves the host.
            for node in self.classes:
                for method in node.body:
                    if isinstance(method, FunctionNode) and method.name in self._attributes:
                        self.add_function(method)

    def _add_name(self, name: ast.Name, scope: Scope) -> None:
        for function in find_functions(name, scope):
            self.add_function(function)
        for node in find_classes(name, scope):
            self.add_class(node)
        found = scope.lookup(name.id)
        if found is not None and isinstance(found.node, ast.Module):
            for value in found.values.get(name.id, []):
                # A table of functions, or another name for one.
                parts = value.elts if isinstance(value, ast.Tuple | ast.List) else [value]
                for part in parts:
                    for function in find_functions(part, found) if isinstance(part, ast.Name) else []:
                        self.add_function(function)


def _find_entries(scopes: Scopes) -> tuple[set[FunctionNode], set[tuple[Scope, str]]]:
    entries: set[FunctionNode] = set()
    compiled: set[tuple[Scope, str]] = set()
    for function in scopes.functions():
        scope = scopes[function].parent
        assert scope is not None
        if any(is_jit(decorator, scope) for decorator in function.decorator_list):
            entries.add(function)
            compiled.add((scope, function.name))
    for scope in scopes:
        for node in own_nodes(scope.node):
            if isinstance(node, ast.Call) and is_jit(node, scope):
                for argument in node.args:
                    entries.update(find_functions(argument, scope))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and is_jit(node.value, scope):
                compiled.update((scope, target.id) for target in node.targets if isinstance(target, ast.Name))
    return entries, compiled


def _users_of_nki(scopes: Scopes, host: frozenset[ast.AST]) -> set[FunctionNode]:
    """The functions that use nki.language or nki.isa, or a function of the file that does."""
    calls: dict[FunctionNode, set[FunctionNode]] = {}
    users: set[FunctionNode] = set()
    for function in scopes.functions():
        if function in host or _has_ancestor(scopes[function], host) or function.name.startswith("test_"):
            continue
        nodes = [*kernel_nodes(function, scopes, host)]
        outside = scopes[function].parent
        assert outside is not None
        nodes += [(node, outside) for node in ast.walk(function.args)]
        origins = {scope.origin(node) or "" for node, scope in nodes if isinstance(node, ast.Name | ast.Attribute)}
        if "nki.simulate" in origins:
            continue  # what runs a kernel is not part of it
        if any(origin.startswith(("nki.language", "nki.isa")) for origin in origins):
            users.add(function)
        calls[function] = {
            found for node, scope in nodes if isinstance(node, ast.Name) for found in find_functions(node, scope)
        }
    size = -1
    while size != len(users):
        size = len(users)
        users.update(function for function, called in calls.items() if called & users)
    return users


def _has_ancestor(scope: Scope, nodes: Set[ast.AST]) -> bool:
    while scope.parent is not None:
        scope = scope.parent
        if scope.node in nodes:
            return True
    return False


def _is_marked(node: FunctionNode | ast.ClassDef, host_lines: frozenset[int]) -> bool:
    """Whether a line of the header, from `def` to the line before the body, carries the mark."""
    return not host_lines.isdisjoint(range(node.lineno, max(node.lineno + 1, node.body[0].lineno)))
