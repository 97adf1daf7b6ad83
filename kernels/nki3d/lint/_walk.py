# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A visitor of kernel code that knows the scope it is in."""

import ast

from nki3d.lint._kernels import KernelCode
from nki3d.lint._names import FunctionNode, Scopes


class KernelVisitor(ast.NodeVisitor):
    """Visits the bodies of functions, with what kernel code evaluates of nested ones; `self.scope` is where a node stands."""

    def __init__(self, scopes: Scopes, code: KernelCode) -> None:
        self.scopes = scopes
        self.code = code
        self.scope = scopes.module

    def visit_outermost(self, function: FunctionNode) -> None:
        """Visits a function that no other one contains: its defaults and decorators are values of the host."""
        self._visit_body(function)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_nested(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_nested(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visits the methods: what else a class holds is evaluated once, by Python."""
        if node not in self.code.host:
            for child in node.body:
                if isinstance(child, FunctionNode) and child not in self.code.host:
                    self._visit_body(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def _visit_nested(self, function: FunctionNode) -> None:
        if function not in self.code.host:
            for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
                self.visit(default)
            self._visit_body(function)

    def _visit_body(self, function: FunctionNode) -> None:
        outside, self.scope = self.scope, self.scopes[function]
        for statement in function.body:
            self.visit(statement)
        self.scope = outside
