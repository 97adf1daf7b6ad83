# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A linter for the dialect of Python that NKI 0.6 kernels may be written in.

NKI 0.6 parses the source of a kernel, while the CPU simulator executes it as ordinary Python: a kernel that runs here may be refused by
the compiler. The linter reports what the parser is documented to refuse, what the tracer of NKI 0.7 does otherwise, and calls that do
not agree with the recorded public API (`nki_api.json`). Run it as `python -m nki3d.lint FILE...`; `--explain` prints the rules.

Kernel code is every function under `@nki.jit`, all functions of the file that these reach by name, and every subclass of NKIObject. In a
file without `@nki.jit` it is every function that uses `nki.language` or `nki.isa`, itself or through another function of the file. All
else is host code, where these rules do not hold. A comment `# nki: host` on the line of a `def` or `class` says that it is host code.
"""

import ast
import io
import os
import tokenize

from nki3d.lint import _api, _definitions, _dialect
from nki3d.lint._kernels import find_kernel_code
from nki3d.lint._names import Scopes
from nki3d.lint._rules import RULES, Finding, Report, Rule

__all__ = ["RULES", "Finding", "Rule", "lint_file", "lint_source"]


def lint_source(source: str, filename: str = "<string>") -> list[Finding]:
    """Lints the text of one Python file.

    Args:
        source: the text.
        filename: the path that the findings carry.

    Returns:
        The findings in the order of their places; empty if there are none.

    Raises:
        SyntaxError: if the text is not Python.

    Example:
        >>> source = '''
        ... import nki
        ... import nki.language as nl
        ...
        ... @nki.jit
        ... def kernel(x, bias=None):
        ...     if bias is None:
        ...         bias = nl.zeroes((128, 1), nl.float32)
        ...     return bias
        ... '''
        >>> for finding in lint_source(source, "kernel.py"):
        ...     print(f"{finding.line}:{finding.column} {finding.code} {finding.cure}")
        7:8 NKI001 Write == or !=, also for None.
        8:16 NKI060 Write nl.zeros.
    """
    tree = ast.parse(source, filename)
    scopes = Scopes(tree)
    code = find_kernel_code(tree, scopes, _host_lines(source))
    report = Report(filename)
    _definitions.check(tree, scopes, code, report)
    _dialect.check(scopes, code, report)
    _api.check(tree, scopes, code, report)
    return report.sorted()


def lint_file(path: str | os.PathLike[str]) -> list[Finding]:
    """Lints one file.

    Args:
        path: the file.

    Returns:
        The findings in the order of their places; empty if there are none.

    Raises:
        OSError: if the file cannot be read.
        SyntaxError: if it is not Python.
        ValueError: if it is not text.
    """
    with tokenize.open(path) as file:
        return lint_source(file.read(), os.fspath(path))


def _host_lines(source: str) -> frozenset[int]:
    """The lines with the comment `# nki: host`; a string that holds these words does not count."""
    if "nki:" not in source:
        return frozenset()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
    return frozenset(line for line, text in comments if text.lstrip("# ").startswith("nki: host"))
