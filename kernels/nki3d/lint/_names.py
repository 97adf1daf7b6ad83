# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a name means where it stands: an import, a function or class of the file, or a value of a kind that can be told."""

import ast
from collections.abc import Iterator
from typing import Literal

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ScopeNode = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["list", "dict", "tile", "register", "enum"]

_SHORT_NAMES = {"nki": "nki", "nl": "nki.language", "nisa": "nki.isa", "NKIObject": "nki.language.NKIObject"}
_ALLOCATORS = {f"nki.language.{name}" for name in ("ndarray", "zeros", "ones", "full", "zeros_like", "empty_like", "load")}
_NKI_ENUMS = {f"nki.isa.{name}" for name in ("engine", "reduce_cmd", "dge_mode", "oob_mode", "matmul_perf_mode", "nc_version")}
_NKI_ENUMS |= {"nki.isa.dma_engine", "nki.language.MemoryRegion"}
# Under its bare name where a star import may have brought it.
_NKI_OBJECT = {"nki.language.NKIObject", "nl.NKIObject", "NKIObject"}
_PYTHON_ENUMS = {"enum.Enum", "enum.StrEnum", "enum.IntEnum", "enum.Flag", "enum.IntFlag"}


class Scope:
    """The names that one module, class or function binds."""

    def __init__(self, node: ScopeNode, parent: "Scope | None") -> None:
        self.node = node
        self.parent = parent
        self.imports: dict[str, str] = {}
        self.functions: dict[str, list[FunctionNode]] = {}
        self.classes: dict[str, list[ast.ClassDef]] = {}
        # None stands for a value that is not told by the source, such as the target of a loop.
        self.values: dict[str, list[ast.expr | None]] = {}
        self.parameters: dict[str, ast.expr | None] = {}
        self.augmented: set[str] = set()
        self.declared: set[str] = set()
        self.globals: set[str] = set()
        self._kinds: dict[str, Kind | None] = {}
        self._integers: dict[str, int | None] = {}

    def binds(self, name: str) -> bool:
        """Whether the name is bound here."""
        tables = (self.imports, self.functions, self.classes, self.values, self.parameters)
        return name not in self.declared and any(name in table for table in tables)

    def lookup(self, name: str) -> "Scope | None":
        """The scope that binds the name; None for a built-in and for a name from elsewhere."""
        scope: Scope | None = self
        while scope is not None:
            # The body of a class is no scope for its methods.
            if (scope is self or not isinstance(scope.node, ast.ClassDef)) and scope.binds(name):
                return scope
            scope = scope.parent
        return None

    def origin(self, node: ast.expr, depth: int = 8) -> str | None:
        """The dotted name of what an expression refers to, from the import that brought it in; None if it is no import."""
        if isinstance(node, ast.Attribute):
            base = self.origin(node.value, depth)
            return None if base is None else _canonical(f"{base}.{node.attr}")
        if not isinstance(node, ast.Name) or depth == 0:
            return None
        scope = self.lookup(node.id)
        if scope is None or node.id in scope.parameters:
            return None
        if node.id in scope.imports:
            return scope.imports[node.id]
        values = scope.values.get(node.id, [])
        value = values[0] if len(values) == 1 else None
        return scope.origin(value, depth - 1) if isinstance(value, ast.Name | ast.Attribute) else None

    def is_builtin(self, node: ast.expr, name: str) -> bool:
        """Whether an expression is the built-in of this name."""
        return isinstance(node, ast.Name) and node.id == name and self.lookup(name) is None

    def kind(self, node: ast.expr | None) -> Kind | None:
        """The kind of an expression's value; None if the source does not tell."""
        match node:
            case ast.List() | ast.ListComp():
                return "list"
            case ast.Dict() | ast.DictComp():
                return "dict"
            case ast.Name(id=name):
                scope = self.lookup(name)
                return scope._kind_of_name(name) if scope is not None else None
            case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
                return "list" if "list" in (self.kind(left), self.kind(right)) else None
            case ast.Subscript(value=value):
                return "tile" if self.kind(value) == "tile" else None
            case ast.Attribute(value=value):
                return "enum" if self._is_enum(value) else None
            case ast.Call(func=func):
                return self._kind_of_call(func)
        return None

    def _kind_of_name(self, name: str) -> Kind | None:
        if name not in self._kinds:
            self._kinds[name] = None  # for names that are bound to each other
            kinds = {self.kind(value) for value in self.values.get(name, [])}
            if name in self.parameters:
                kinds.add(self._kind_of_annotation(self.parameters[name]))
            self._kinds[name] = kinds.pop() if len(kinds) == 1 and name not in self.functions else None
        return self._kinds[name]

    def _kind_of_call(self, func: ast.expr) -> Kind | None:
        if self.is_builtin(func, "list"):
            return "list"
        if self.is_builtin(func, "dict"):
            return "dict"
        origin = self.origin(func)
        if origin in _ALLOCATORS:
            return "tile"
        if origin == "nki.isa.register_alloc":
            return "register"
        return "enum" if origin == "nki.isa.get_nc_version" else None

    def _kind_of_annotation(self, node: ast.expr | None) -> Kind | None:
        if node is None:
            return None
        if isinstance(node, ast.Subscript):
            node = node.value
        if self.is_builtin(node, "list"):
            return "list"
        if self.is_builtin(node, "dict"):
            return "dict"
        return "tile" if self.origin(node) in ("nki.language.NkiTensor", "nki.language.ndarray") else None

    def _is_enum(self, node: ast.expr) -> bool:
        origin = self.origin(node)
        if origin is not None:
            return origin in _NKI_ENUMS
        scope = self.lookup(node.id) if isinstance(node, ast.Name) else None
        if scope is None:
            return False
        assert isinstance(node, ast.Name)
        return any(scope.origin(base) in _PYTHON_ENUMS for found in scope.classes.get(node.id, []) for base in found.bases)

    def integer(self, node: ast.expr | None) -> int | None:
        """The value of an expression of integer constants, also through names that are bound once; None if it is none."""
        match node:
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int(constant)):
                return constant
            case ast.Name(id=name):
                scope = self.lookup(name)
                return scope._integer_of_name(name) if scope is not None else None
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.integer(operand)
                return None if value is None else -value
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.integer(left), self.integer(right)
                return None if a is None or b is None else _arithmetic(a, op, b)
        return None

    def _integer_of_name(self, name: str) -> int | None:
        if name not in self._integers:
            self._integers[name] = None  # for names that are bound to each other
            values = self.values.get(name, [])
            if len(values) == 1 and name not in self.parameters and name not in self.augmented:
                self._integers[name] = self.integer(values[0])
        return self._integers[name]


class Scopes:
    """The scopes of one file, by the node that opens each."""

    def __init__(self, tree: ast.Module) -> None:
        self._scopes: dict[ast.AST, Scope] = {}
        self._open(tree, None)
        self.module = self._scopes[tree]
        for scope in list(self._scopes.values()):
            # A name that an inner function rebinds has no value that the source tells.
            for name in scope.declared:
                outer = scope.parent.lookup(name) if name not in scope.globals and scope.parent is not None else None
                (outer or self.module).values.setdefault(name, []).append(None)

    def __getitem__(self, node: ScopeNode) -> Scope:
        return self._scopes[node]

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._scopes.values())

    def functions(self) -> list[FunctionNode]:
        """Every function of the file, methods and nested ones included."""
        return [scope.node for scope in self if isinstance(scope.node, FunctionNode)]

    def classes(self) -> list[ast.ClassDef]:
        """Every class of the file."""
        return [scope.node for scope in self if isinstance(scope.node, ast.ClassDef)]

    def is_nki_object(self, node: ast.ClassDef, below: tuple[ast.ClassDef, ...] = ()) -> bool:
        """Whether a class derives from NKIObject, itself or through classes of the file."""
        scope = self._scopes[node].parent
        assert scope is not None
        for base in node.bases:
            found = find_classes(base, scope)
            if found:
                below = (*below, node)  # a name that is bound twice can make a circle
                if any(cls not in below and self.is_nki_object(cls, below) for cls in found):
                    return True
            elif (scope.origin(base) or ast.unparse(base)) in _NKI_OBJECT:
                return True
        return False

    def _open(self, node: ScopeNode, parent: Scope | None) -> None:
        scope = self._scopes[node] = Scope(node, parent)
        if isinstance(node, FunctionNode):
            a = node.args
            for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))):
                scope.parameters[arg.arg] = arg.annotation
        told: set[ast.AST] = set()
        for child in own_nodes(node):
            _bind(scope, child, told)
            if isinstance(child, FunctionNode | ast.ClassDef):
                self._open(child, scope)


def find_classes(node: ast.expr, scope: Scope) -> list[ast.ClassDef]:
    """The classes of the file that a name refers to."""
    found = scope.lookup(node.id) if isinstance(node, ast.Name) else None
    return found.classes.get(node.id, []) if found is not None and isinstance(node, ast.Name) else []


def find_functions(node: ast.expr, scope: Scope) -> list[FunctionNode]:
    """The functions of the file that a name refers to."""
    found = scope.lookup(node.id) if isinstance(node, ast.Name) else None
    return found.functions.get(node.id, []) if found is not None and isinstance(node, ast.Name) else []


def own_nodes(scope: ScopeNode) -> Iterator[ast.AST]:
    """The nodes that are evaluated in a scope: nested functions and classes without their bodies."""
    pending: list[ast.AST] = list(reversed(scope.body))
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, FunctionNode):
            children: list[ast.AST] = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        elif isinstance(node, ast.ClassDef):
            children = [*node.decorator_list, *node.bases, *node.keywords]
        else:
            children = list(ast.iter_child_nodes(node))
        pending.extend(reversed(children))


def _bind(scope: Scope, node: ast.AST, told: set[ast.AST]) -> None:
    """Records what a node binds. `told` holds the targets whose values are recorded already: own_nodes gives parents first."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            scope.functions.setdefault(name, []).append(node)
        case ast.ClassDef(name=name):
            scope.classes.setdefault(name, []).append(node)
        case ast.Import() | ast.ImportFrom():
            for name, origin in imported_names(node):
                # Where an import has a fallback, the one of NKI says what the name is meant to be.
                if not is_nki(scope.imports.get(name)):
                    scope.imports[name] = origin
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                _bind_target(scope, target, value, told)
        case ast.AnnAssign(target=ast.Name() as target, value=value):
            told.add(target)
            if value is not None:
                scope.values.setdefault(target.id, []).append(value)
        case ast.NamedExpr(target=target, value=value):
            _bind_target(scope, target, value, told)
        case ast.AugAssign(target=ast.Name() as target):
            told.add(target)
            scope.augmented.add(target.id)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            scope.declared.update(names)
            if isinstance(node, ast.Global):
                scope.globals.update(names)
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if node not in told:
            scope.values.setdefault(name, []).append(None)
        case ast.arg(arg=name):  # of a lambda
            scope.values.setdefault(name, []).append(None)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            scope.values.setdefault(name, []).append(None)
        case ast.MatchMapping(rest=str(name)):
            scope.values.setdefault(name, []).append(None)


def _bind_target(scope: Scope, target: ast.expr, value: ast.expr, told: set[ast.AST]) -> None:
    if isinstance(target, ast.Name):
        told.add(target)
        scope.values.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        starred = any(isinstance(element, ast.Starred) for element in (*target.elts, *value.elts))
        if len(target.elts) == len(value.elts) and not starred:
            for element, part in zip(target.elts, value.elts, strict=True):
                _bind_target(scope, element, part, told)


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Pairs of a name that an import binds and the dotted name of what it is bound to."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            module = "." * bool(node.level) + f"{node.module}." * bool(node.module)
            yield alias.asname or alias.name, _canonical(module + alias.name)
        elif alias.asname:
            yield alias.asname, _canonical(alias.name)
        else:
            top = alias.name.split(".")[0]
            yield top, top


def is_nki(origin: str | None) -> bool:
    """Whether a dotted name is of the package nki."""
    return origin is not None and (origin == "nki" or origin.startswith("nki."))


def is_old_nki(origin: str) -> bool:
    """Whether a dotted name is of NKI as it was, within the compiler's package."""
    return origin == "neuronxcc.nki" or origin.startswith("neuronxcc.nki.")


def _canonical(origin: str) -> str:
    if is_old_nki(origin):
        return origin.removeprefix("neuronxcc.")
    parts = origin.split(".")
    # Our kernels take nki, nl and nisa from a module _nki, which binds the real ones or the simulator's.
    if "_nki" in parts[:-1]:
        name, *rest = parts[parts.index("_nki") + 1 :]
        if name in _SHORT_NAMES:
            return ".".join([_SHORT_NAMES[name], *rest])
    return origin


def _arithmetic(a: int, op: ast.operator, b: int) -> int | None:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv() if b:
            return a // b
        case ast.Mod() if b:
            return a % b
        # Bounded, as a typing error must not make the linter compute for ever.
        case ast.Pow() if 0 <= b <= 64 and abs(a) < 2**64:
            return a**b
        case ast.LShift() if 0 <= b <= 64 and abs(a) < 2**64:
            return a << b
        case ast.RShift() if 0 <= b <= 64:
            return a >> b
    return None
