# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m nki3d.lint FILE...`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from nki3d.lint import RULES, lint_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Lints files and folders; returns the exit status: 2 if a file cannot be read or parsed, else 1 if anything is found, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m nki3d.lint", description="Reports what NKI 0.6 does not accept in the source of a kernel."
    )
    parser.add_argument("paths", metavar="FILE", nargs="*", type=pathlib.Path, help="a file, or a folder with all its *.py")
    parser.add_argument("--explain", action="store_true", help="print the table of rules")
    options = parser.parse_args(arguments)
    if options.explain:
        for rule in RULES.values():
            print(f"{rule.code}  {rule.construct}\n        {rule.cure}")
        return 0
    if not options.paths:
        parser.error("name a file or a folder")
    status = 0
    for path in _files(options.paths):
        try:
            findings = lint_file(path)
        except SyntaxError as error:
            print(f"{path}:{error.lineno or 1}:{error.offset or 1}: cannot be parsed: {error.msg}", file=sys.stderr)
            status = 2
        except (OSError, ValueError) as error:
            print(f"{path}: cannot be read: {error}", file=sys.stderr)
            status = 2
        else:
            for finding in findings:
                print(finding)
            if findings:
                status = max(status, 1)
    return status


def _files(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for path in paths:
        if path.is_dir():
            found = path.rglob("*.py")
            files += sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
        else:
            files.append(path)
    return files


if __name__ == "__main__":
    sys.exit(main())
