# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of rules, and what a violation of one is reported as."""

import ast
import dataclasses


@dataclasses.dataclass(frozen=True)
class Rule:
    """A construct that kernel code must not contain, and what to write in its place."""

    code: str
    construct: str
    cure: str


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A violation of a rule. Lines and columns count from 1."""

    path: str
    line: int
    column: int
    code: str
    message: str
    cure: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.code} {self.message} {self.cure}"


_TABLE = (
    # The language.
    Rule("NKI001", "`is` and `is not`", "Write == or !=, also for None."),
    Rule("NKI002", "lambda", "Define a nested function with def."),
    Rule("NKI003", "comprehension or generator expression", "Write a for loop that appends to a list."),
    Rule("NKI004", "try", "Check the condition beforehand with if or assert."),
    Rule("NKI005", "raise", "Use assert, or move the check to host code."),
    Rule("NKI006", "yield", "Return a tuple or a list."),
    Rule("NKI007", "assignment expression `:=`", "Assign in a statement of its own."),
    Rule("NKI008", "match", "Write if, elif and else."),
    Rule("NKI009", "async and await", "Write a plain function."),
    Rule("NKI010", "global and nonlocal", "Pass the value as an argument and return the new one."),
    Rule("NKI011", "del", "Leave the name alone, or bind it to None."),
    Rule("NKI012", "set", "Use a tuple or a list."),
    Rule("NKI013", "dict key that is not a string", "Use string keys, or a list."),
    Rule("NKI014", "with, other than `with nl.no_reorder():`", "Write the statements without the context manager."),
    Rule("NKI015", "import inside a function", "Move the import to the top of the file."),
    Rule(
        "NKI016", "built-in or math function that kernels are not known to have", "Write it out with a loop, if and operators."
    ),
    Rule("NKI017", "NumPy, JAX or PyTorch", "Use nki.language, or compute the value in host code and pass it in."),
    Rule("NKI018", "host module of the standard library", "Compute the value in host code and pass it in."),
    Rule("NKI019", "`in` on a dict", "Look the key up in a tuple or list of keys."),
    Rule("NKI020", "list method", "Use append, extend, index, remove or reverse."),
    Rule("NKI021", "dict method", "Use keys, items, pop, setdefault or indexing."),
    Rule("NKI022", "else of a loop", "Set a flag in the loop and test it afterwards."),
    Rule("NKI023", "for over a dict or a string", "Loop over a range, a tuple or a list."),
    Rule("NKI024", "assignment to a slice of a list", "Assign the elements one by one in a loop."),
    Rule("NKI025", "number that does not fit in 32 bits", "Keep trace-time numbers and products below 2**31."),
    Rule("NKI026", "operator on a tensor", "Call nisa.tensor_tensor, or nisa.tensor_scalar for a scalar operand."),
    Rule("NKI027", "order of enum members", "Compare members with == or !=."),
    Rule("NKI028", "mutable global", "Make it a tuple, or pass it as an argument."),
    # Loops on the device.
    Rule("NKI030", "nl.dynamic_range", "Call nl.fori_loop with the body as a nested function."),
    Rule("NKI031", "while on a register", "Call nl.while_loop with the body as a nested function."),
    Rule("NKI032", "device loop inside nl.no_reorder()", "Move the loop out of the block, or unroll it with range."),
    # Definitions.
    Rule("NKI040", "*args and **kwargs", "Name every parameter; pass many values as one tuple."),
    Rule("NKI041", "unpacking with * or **", "Write out every argument or element."),
    Rule("NKI042", "keyword-only parameters after `*`", "Remove the `*`."),
    Rule("NKI043", "list as an argument of a kernel", "Use a tuple."),
    Rule("NKI044", "decorator other than nki.jit, dataclass and staticmethod", "Remove the decorator."),
    Rule("NKI045", "class that derives from neither NKIObject nor Enum", "Derive it from nl.NKIObject."),
    Rule("NKI046", "multiple inheritance", "Keep one base class and turn the other into a field."),
    Rule("NKI047", "integer enum", "Derive it from enum.Enum."),
    Rule("NKI048", "kernel under nki.jit used in another kernel", "Move the shared code to a plain helper that both call."),
    Rule("NKI049", "`mode=` or `platform_target=` in nki.jit", "Remove the argument; the target comes from the environment."),
    Rule("NKI050", "import of neuronxcc.nki", "Import nki."),
    # The API.
    Rule("NKI060", "name that the API does not have", "Look the name up in nki_api.json."),
    Rule("NKI061", "keyword that the function does not have", "Remove the argument."),
    Rule("NKI062", "too many arguments", "Remove the surplus argument."),
    Rule("NKI063", "missing argument", "Add the argument."),
    Rule("NKI064", "operation given as a string or a NumPy function", "Pass the function of nki.language, such as nl.add."),
    Rule("NKI065", "buffer given as a string", "Pass the object, such as nl.sbuf."),
    Rule("NKI066", "`mask=`", "Slice the operands to the valid region."),
)

RULES: dict[str, Rule] = {rule.code: rule for rule in _TABLE}


class Report:
    """Collects the findings of one file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._findings: dict[tuple[int, int, str], Finding] = {}

    def add(self, code: str, node: ast.expr | ast.stmt | ast.arg | ast.alias, message: str, cure: str | None = None) -> None:
        """Adds a finding at a node; a second one of the same rule at the same place is dropped."""
        line, column = node.lineno, node.col_offset + 1
        finding = Finding(self._path, line, column, code, message, cure or RULES[code].cure)
        self._findings.setdefault((line, column, code), finding)

    def sorted(self) -> list[Finding]:
        """The findings in the order of their places."""
        # `op=np.add` is one mistake, and the rule on operations has the better cure.
        doubled = {(line, column, "NKI017") for line, column, code in self._findings if code == "NKI064"}
        return sorted(finding for place, finding in self._findings.items() if place not in doubled)
