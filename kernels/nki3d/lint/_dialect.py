# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rules on what kernel bodies may contain."""

import ast
import builtins

from nki3d.lint._kernels import KernelCode, kernel_nodes
from nki3d.lint._names import FunctionNode, Scopes, find_functions
from nki3d.lint._rules import Report
from nki3d.lint._walk import KernelVisitor

# What the kernels of nkilib use.
_BUILTINS = {"range", "len", "min", "max", "divmod", "isinstance", "print"} | {
    "bool",
    "int",
    "float",
    "str",
    "tuple",
    "list",
    "dict",
}
_MATH = {"ceil", "floor", "gcd", "sqrt", "pi", "e", "inf", "nan"}
_LIST_METHODS = {"append", "extend", "index", "remove", "reverse"}
_DICT_METHODS = {"keys", "items", "pop", "setdefault"}

_ARRAY_LIBRARIES = {"numpy", "jax", "jaxlib", "torch", "scipy", "ml_dtypes"}
_HOST_MODULES = {"collections", "copy", "dataclasses", "functools", "itertools", "json", "operator", "os", "pathlib"}
_HOST_MODULES |= {"random", "re", "sys", "time", "warnings"}

_DEVICE_LOOPS = {"nki.language.fori_loop", "nki.language.while_loop", "nki.language.dynamic_range"}
_MUTABLE_CALLS = {"list", "dict", "set", "bytearray"}
_MUTABLE_ORIGINS = {f"collections.{name}" for name in ("defaultdict", "deque", "OrderedDict", "Counter")}

_OPERATIONS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.Mod: "mod",
    ast.Pow: "power",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "left_shift",
    ast.RShift: "right_shift",
}
_ORDERINGS = ast.Lt | ast.LtE | ast.Gt | ast.GtE
_FLOAT32_MAX = 3.4028235677973366e38


def check(scopes: Scopes, code: KernelCode, report: Report) -> None:
    """Checks the bodies of all kernel code of a file."""
    visitor = _Dialect(scopes, code, report)
    for function in code.functions:
        visitor.visit_outermost(function)


class _Dialect(KernelVisitor):
    def __init__(self, scopes: Scopes, code: KernelCode, report: Report) -> None:
        super().__init__(scopes, code)
        self._report = report.add
        self._no_reorder = 0
        self._declared = {name for scope in scopes for name in scope.globals}
        self._looping: dict[FunctionNode, bool] = {}

    # Constructs that are refused wherever they stand.

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._report("NKI002", node, "Kernel code contains a lambda.")
        self.visit(node.body)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        what = "generator expression" if isinstance(node, ast.GeneratorExp) else "comprehension"
        self._report("NKI003", node, f"Kernel code contains a {what}.")
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _visit_try(self, node: ast.Try | ast.TryStar) -> None:
        self._report("NKI004", node, "Kernel code contains try.")
        self.generic_visit(node)

    visit_Try = visit_TryStar = _visit_try

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._report("NKI005", node, "Kernel code raises an exception.")

    def _visit_yield(self, node: ast.Yield | ast.YieldFrom) -> None:
        self._report("NKI006", node, "Kernel code yields: it is a generator.")
        self.generic_visit(node)

    visit_Yield = visit_YieldFrom = _visit_yield

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._report("NKI007", node, f"`{node.target.id}` is assigned within an expression.")
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        self._report("NKI008", node, "Kernel code contains match.")
        self.visit(node.subject)
        for case in node.cases:
            for statement in case.body:
                self.visit(statement)

    def visit_outermost(self, function: FunctionNode) -> None:
        self._check_async(function)
        super().visit_outermost(function)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._check_async(node)
        self._visit_apart(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_apart(node)

    def _check_async(self, node: FunctionNode) -> None:
        if isinstance(node, ast.AsyncFunctionDef):
            self._report("NKI009", node, f"`{node.name}` is asynchronous.")

    def _visit_apart(self, node: FunctionNode) -> None:
        # A function that is defined in a no_reorder block does not run there.
        depth, self._no_reorder = self._no_reorder, 0
        self._visit_nested(node)
        self._no_reorder = depth

    def visit_Await(self, node: ast.Await) -> None:
        self._report("NKI009", node, "Kernel code awaits.")
        self.generic_visit(node)

    def _visit_declaration(self, node: ast.Global | ast.Nonlocal) -> None:
        word = "global" if isinstance(node, ast.Global) else "nonlocal"
        self._report("NKI010", node, f"Kernel code declares {', '.join(f'`{name}`' for name in node.names)} {word}.")

    visit_Global = visit_Nonlocal = _visit_declaration

    def visit_Delete(self, node: ast.Delete) -> None:
        self._report("NKI011", node, "Kernel code contains del.")
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        self._report("NKI012", node, "Kernel code contains a set.")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self._report("NKI041", value, "A dict is unpacked with `**`.")
            else:
                self._check_key(key)
        self.generic_visit(node)

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        self._report("NKI015", node, "Kernel code contains an import.")

    visit_Import = visit_ImportFrom = _visit_import

    def visit_Starred(self, node: ast.Starred) -> None:
        self._report("NKI041", node, "A sequence is unpacked with `*`.")
        self.generic_visit(node)

    # Blocks and loops.

    def visit_With(self, node: ast.With) -> None:
        inner = 0
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and self.scope.origin(call.func) == "nki.language.no_reorder":
                inner += 1
            else:
                self._report("NKI014", call, f"`with {ast.unparse(call)}` is not `with nl.no_reorder()`.")
        self._no_reorder += inner
        self.generic_visit(node)
        self._no_reorder -= inner

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self._report("NKI009", node, "Kernel code contains async with.")
        self.generic_visit(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._report("NKI009", node, "Kernel code contains async for.")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._check_else(node)
        text = isinstance(node.iter, ast.JoinedStr | ast.Constant)
        if text or self.scope.kind(node.iter) == "dict":
            self._report("NKI023", node.iter, f"The loop is over a {'string' if text else 'dict'}.")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._check_else(node)
        if any(isinstance(part, ast.Name) and self.scope.kind(part) == "register" for part in ast.walk(node.test)):
            self._report("NKI031", node, "A while loop on a register is gone in NKI 0.7.")
            if self._no_reorder:
                self._report("NKI032", node, "A device loop stands inside nl.no_reorder().")
        self.generic_visit(node)

    def _check_else(self, node: ast.For | ast.While) -> None:
        if node.orelse:
            self._report("NKI022", node, "The loop has an else.")

    # Comparisons and arithmetic.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            if isinstance(operator, ast.Is | ast.IsNot):
                word = "is" if isinstance(operator, ast.Is) else "is not"
                self._report("NKI001", left, f"Kernel code compares with `{word}`.")
            elif isinstance(operator, ast.In | ast.NotIn) and self.scope.kind(right) == "dict":
                self._report("NKI019", left, f"A key is looked up in the dict `{ast.unparse(right)}` with `in`.")
            elif isinstance(operator, _ORDERINGS) and "enum" in (self.scope.kind(left), self.scope.kind(right)):
                self._report("NKI027", left, f"Members of an enum have no order: `{ast.unparse(node)}`.")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._check_operator(node, node.op, (node.left, node.right))
        self._check_size(node, (node.left, node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._check_operator(node, node.op, (node.target, node.value))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.Not) and self.scope.kind(node.operand) == "tile":
            self._report("NKI026", node, f"`{ast.unparse(node)}` is an operator on a tensor.", "Call nisa.activation.")
        self._check_size(node, ())
        # -2**31 fits, and 2**31 does not.
        if not (isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int)):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, float) and _FLOAT32_MAX <= abs(node.value) < float("inf"):
            self._report("NKI025", node, f"{node.value} does not fit in a 32-bit float.")
        self._check_size(node, ())

    def _check_operator(self, node: ast.BinOp | ast.AugAssign, operator: ast.operator, operands: tuple[ast.expr, ...]) -> None:
        tiles = [operand for operand in operands if self.scope.kind(operand) == "tile"]
        if not tiles or any(self.scope.kind(operand) == "list" for operand in operands):
            return
        cure: str | None
        if isinstance(operator, ast.MatMult):
            cure = "Call nisa.nc_matmul."
        else:
            operation = _OPERATIONS.get(type(operator))
            both = len(tiles) == 2
            call = "nisa.tensor_tensor(dst, a, b, op" if both else "nisa.tensor_scalar(dst, data, op0"
            cure = f"Call {call}=nl.{operation}{'' if both else ', operand0=value'})." if operation else None
        self._report("NKI026", node, f"`{ast.unparse(node)}` is an operator on a tensor.", cure)

    def _check_size(self, node: ast.expr, operands: tuple[ast.expr, ...]) -> None:
        """Reports a constant beyond 32 bits, once: at the innermost expression that leaves the range."""
        value = self.scope.integer(node)
        if value is not None and not _fits(value) and all(_fits(self.scope.integer(operand)) for operand in operands):
            self._report("NKI025", node, f"{value} does not fit in a 32-bit integer.")

    # Assignments.

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Slice):
                continue
            if "list" in (self.scope.kind(target.value), self.scope.kind(node.value)):
                self._report("NKI024", target, f"A slice of a list is assigned to: `{ast.unparse(target)}`.")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self.scope.kind(node.value) == "dict":
            self._check_key(node.slice)
        if not isinstance(node.ctx, ast.Load):
            self._check_write(node)
        self.generic_visit(node)

    def _check_key(self, key: ast.expr) -> None:
        literal = isinstance(key, ast.Constant) and not isinstance(key.value, str)
        if literal or isinstance(key, ast.Tuple) or self.scope.integer(key) is not None:
            self._report("NKI013", key, f"The key `{ast.unparse(key)}` of a dict is not a string.")

    def _check_write(self, node: ast.Subscript | ast.Attribute) -> None:
        base = node.value
        if isinstance(base, ast.Name) and self.scope.lookup(base.id) is self.scopes.module:
            self._report("NKI028", base, f"Kernel code changes the global `{base.id}`.")

    # Names and calls.

    def visit_Name(self, node: ast.Name) -> None:
        name, found = node.id, self.scope.lookup(node.id)
        if isinstance(node.ctx, ast.Load):
            if found is None:
                self._check_builtin(node)
            elif name in found.imports:
                self._check_module(node, found.imports[name])
            elif (found, name) in self.code.compiled:
                self._report("NKI048", node, f"Kernel code uses the kernel `{name}`.")
            elif found is self.scopes.module:
                self._check_global(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        origin = self.scope.origin(node)
        if origin is not None and origin.startswith("math."):
            self._check_math(node, origin)
        if not isinstance(node.ctx, ast.Load):
            self._check_write(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg is None:
                self._report("NKI041", keyword.value, "A dict is unpacked with `**`.")
        if isinstance(node.func, ast.Attribute):
            self._check_method(node, node.func)
        origin = self.scope.origin(node.func)
        if origin == "nki.language.dynamic_range":
            self._report("NKI030", node, "nl.dynamic_range is gone in NKI 0.7.")
        if self._no_reorder:
            called = find_functions(node.func, self.scope)
            if origin in _DEVICE_LOOPS or any(self._has_device_loop(function) for function in called):
                self._report("NKI032", node, "A device loop stands inside nl.no_reorder().")
        self.generic_visit(node)

    def _check_builtin(self, node: ast.Name) -> None:
        if node.id in ("set", "frozenset"):
            self._report("NKI012", node, f"Kernel code uses `{node.id}`.")
            return
        # A star import may bind any name.
        value = getattr(builtins, node.id, None) if "*" not in self.scopes.module.imports else None
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        if callable(value) and not is_exception and node.id not in _BUILTINS:
            self._report("NKI016", node, f"`{node.id}` is not among the built-ins that kernels are known to have.")

    def _check_module(self, node: ast.Name, origin: str) -> None:
        top = origin.split(".")[0]
        if top in _ARRAY_LIBRARIES:
            self._report("NKI017", node, f"Kernel code uses `{origin}`.")
        elif top in _HOST_MODULES:
            self._report("NKI018", node, f"Kernel code uses `{origin}`.")
        elif origin.startswith("math."):
            self._check_math(node, origin)

    def _check_math(self, node: ast.Name | ast.Attribute, origin: str) -> None:
        if origin.removeprefix("math.") not in _MATH:
            self._report("NKI016", node, f"`{origin}` is not among the functions that kernels are known to have.")

    def _check_global(self, node: ast.Name) -> None:
        module = self.scopes.module
        values = module.values.get(node.id, [])
        declared = node.id in self._declared
        if declared or any(_is_mutable(value, self.scopes) for value in values):
            what = "the global, which the file changes," if declared else "the mutable global"
            self._report("NKI028", node, f"Kernel code reads {what} `{node.id}`.")
        value = module.integer(node)
        if value is not None and not _fits(value):
            self._report("NKI025", node, f"`{node.id}` is {value}, which does not fit in a 32-bit integer.")

    def _check_method(self, node: ast.Call, func: ast.Attribute) -> None:
        kind = self.scope.kind(func.value)
        if kind == "list" and func.attr not in _LIST_METHODS:
            self._report("NKI020", node, f"Lists have no method `{func.attr}` in kernels.")
        elif kind == "dict" and func.attr not in _DICT_METHODS:
            self._report("NKI021", node, f"Dicts have no method `{func.attr}` in kernels.")

    def _has_device_loop(self, function: FunctionNode) -> bool:
        if function not in self._looping:
            self._looping[function] = False  # for functions that call each other
            self._looping[function] = any(
                isinstance(node, ast.Call)
                and (
                    scope.origin(node.func) in _DEVICE_LOOPS
                    or any(self._has_device_loop(called) for called in find_functions(node.func, scope))
                )
                for node, scope in kernel_nodes(function, self.scopes, self.code.host)
            )
        return self._looping[function]


def _fits(value: int | None) -> bool:
    return value is None or -(2**31) <= value < 2**31


def _is_mutable(value: ast.expr | None, scopes: Scopes) -> bool:
    module = scopes.module
    if isinstance(value, ast.Call):
        named = isinstance(value.func, ast.Name) and value.func.id in _MUTABLE_CALLS and module.lookup(value.func.id) is None
        return named or module.origin(value.func) in _MUTABLE_ORIGINS
    return isinstance(value, ast.Set | ast.SetComp) or module.kind(value) in ("list", "dict")
