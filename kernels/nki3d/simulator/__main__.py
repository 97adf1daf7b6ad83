# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m nki3d.simulator`: the machine table as Markdown, as docs/simulator.md has it."""

from __future__ import annotations

from .machine import TABLE

__all__ = ["table"]


def table() -> str:
    """The machine table as Markdown."""

    def shown(value: object) -> str:
        return (
            f"{value:.4g}"
            if isinstance(value, float)
            else f"{value:,}"
            if isinstance(value, int) and value > 9999
            else str(value)
        )

    lines = ["| figure | trn1 | trn2 | trn3 | unit | rests on |", "|---|---|---|---|---|---|"]
    lines += [f"| `{r.name}` | {shown(r.trn1)} | {shown(r.trn2)} | {shown(r.trn3)} | {r.unit} | {r.source} |" for r in TABLE]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
