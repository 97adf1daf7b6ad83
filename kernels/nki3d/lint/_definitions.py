# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules on what stands around kernel bodies: imports, decorators, signatures and classes."""

import ast
import builtins

from nki3d.lint._kernels import KernelCode, is_jit, kernel_nodes
from nki3d.lint._names import FunctionNode, Scope, Scopes, find_classes, is_old_nki, own_nodes
from nki3d.lint._rules import Report

_DECORATORS = {"dataclasses.dataclass"}
_INTEGER_ENUMS = {"enum.IntEnum", "enum.IntFlag"}


def check(tree: ast.Module, scopes: Scopes, code: KernelCode, report: Report) -> None:
    """Checks the definitions of a file."""
    _check_imports(tree, report)
    _check_jit_options(scopes, report)
    for outer in code.functions:
        for node in (outer, *(node for node, _ in kernel_nodes(outer, scopes, code.host))):
            if isinstance(node, FunctionNode):
                _check_signature(node, report)
                _check_decorators(node, scopes[node].parent, report)
    for function in code.entries:
        _check_lists(function, scopes[function], report)
    for cls in code.classes:
        _check_decorators(cls, scopes[cls].parent, report)
        _check_class(cls, scopes, report)


def _check_imports(tree: ast.Module, report: Report) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if any(is_old_nki(name) for name in names):
            assert isinstance(node, ast.stmt)
            report.add("NKI050", node, "neuronxcc.nki is an error since NKI 0.4.")


def _check_jit_options(scopes: Scopes, report: Report) -> None:
    for scope in scopes:
        for node in own_nodes(scope.node):
            if isinstance(node, ast.Call) and is_jit(node, scope):
                for keyword in node.keywords:
                    if keyword.arg in ("mode", "platform_target"):
                        report.add("NKI049", keyword.value, f"nki.jit has no argument `{keyword.arg}`.")


def _check_signature(function: FunctionNode, report: Report) -> None:
    arguments = function.args
    if arguments.vararg is not None:
        report.add("NKI040", arguments.vararg, f"The signature of `{function.name}` has `*{arguments.vararg.arg}`.")
    elif arguments.kwonlyargs:
        report.add("NKI042", arguments.kwonlyargs[0], f"The signature of `{function.name}` has keyword-only parameters.")
    if arguments.kwarg is not None:
        report.add("NKI040", arguments.kwarg, f"The signature of `{function.name}` has `**{arguments.kwarg.arg}`.")


def _check_decorators(node: FunctionNode | ast.ClassDef, scope: Scope | None, report: Report) -> None:
    assert scope is not None
    for decorator in node.decorator_list:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if scope.origin(name) in _DECORATORS or scope.is_builtin(name, "staticmethod") or is_jit(decorator, scope):
            continue
        report.add("NKI044", decorator, f"`{node.name}` is decorated with `{ast.unparse(name)}`.")


def _check_lists(function: FunctionNode, scope: Scope, report: Report) -> None:
    arguments = function.args
    for default in (*arguments.defaults, *arguments.kw_defaults):
        if scope.kind(default) == "list":
            assert default is not None
            report.add("NKI043", default, f"A default of the kernel `{function.name}` is a list.")
    for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if arg.annotation is not None and _mentions_list(arg.annotation):
            report.add("NKI043", arg, f"The argument `{arg.arg}` of the kernel `{function.name}` is declared to be a list.")


def _mentions_list(annotation: ast.expr) -> bool:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name | ast.Attribute):
            if (node.id if isinstance(node, ast.Name) else node.attr) in ("list", "List"):
                return True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                quoted = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                continue
            if not isinstance(quoted, ast.Constant) and _mentions_list(quoted):
                return True
    return False


def _check_class(node: ast.ClassDef, scopes: Scopes, report: Report) -> None:
    scope = scopes[node].parent
    assert scope is not None
    origins = [scope.origin(base) for base in node.bases]
    is_enum = any(origin is not None and origin.startswith("enum.") for origin in origins)
    is_integer = any(origin in _INTEGER_ENUMS for origin in origins) or any(
        scope.is_builtin(base, "int") for base in node.bases
    )
    if is_enum and is_integer:
        report.add("NKI047", node, f"`{node.name}` is an integer enum.")
    elif len(node.bases) > 1:
        report.add("NKI046", node, f"`{node.name}` has {len(node.bases)} base classes.")
    elif not _may_be_nki_object(node, scope, scopes):
        report.add("NKI045", node, f"Kernel code uses `{node.name}`, which derives from neither NKIObject nor Enum.")


def _may_be_nki_object(node: ast.ClassDef, scope: Scope, scopes: Scopes, below: tuple[ast.ClassDef, ...] = ()) -> bool:
    """Whether a class derives from NKIObject or Enum, or from a class of another file, which may."""
    if not node.bases:
        return False
    base = node.bases[0]
    bases = find_classes(base, scope)
    if bases:
        below = (*below, node)
        return any(
            found not in below and _may_be_nki_object(found, scopes[found].parent or scope, scopes, below) for found in bases
        )
    if isinstance(base, ast.Name) and scope.lookup(base.id) is None and hasattr(builtins, base.id):
        return False
    return not (scope.origin(base) or "").startswith(("typing.", "abc.", "collections."))
