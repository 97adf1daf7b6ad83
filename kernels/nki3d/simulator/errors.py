# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The error of a kernel that the hardware would not run."""

from __future__ import annotations

__all__ = ["NkiValidationError", "broken"]


class NkiValidationError(ValueError, AssertionError):
    """A limit of the machine or a rule of an instruction is broken.

    The message names the instruction, the operand in backticks, the value and the limit. The class carries the name that NKI documents in
    `nki.isa`; it is an `AssertionError`, too, because that is what the vendor's own simulator raises.
    """


def broken(instruction: str, operand: str, found: object, limit: str, cure: str = "") -> NkiValidationError:
    """The error for one broken limit; the caller raises it.

    Args:
        instruction: the instruction or function, as the user wrote it: "nc_matmul".
        operand: the name of the parameter: "moving".
        found: what was given, with its unit: "partition dimension 256".
        limit: what is allowed: "exceeds maximum 128".
        cure: what to write instead; starts with a verb.
    """
    text = f"{instruction} `{operand}` {found} {limit}"
    return NkiValidationError(f"{text}. {cure}" if cure else text)
