# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The activations that a convolution fuses, as functions of the Scalar Engine."""

from enum import Enum

from ._nki import nl

__all__ = ["ActFnType", "activation_function"]


class ActFnType(Enum):
    """Activation functions. The first four bear the names and numbers of the NKI library's enumeration.

    Members:
        SiLU: x * sigmoid(x).
        GELU: the exact form.
        GELU_Tanh_Approx: the tanh form.
        Swish: x * sigmoid(1.702 x), the engine's sigmoid form of GELU.
        ReLU: max(x, 0).
    """

    SiLU = 0
    GELU = 1
    GELU_Tanh_Approx = 2
    Swish = 3
    ReLU = 4


def activation_function(activation):
    """The function of nl for a member of `ActFnType`, or of another enumeration with the same names; None for None."""
    if activation == None:  # noqa: E711
        return None
    name = activation.name
    if name == "SiLU":
        return nl.silu
    if name == "GELU":
        return nl.gelu
    if name == "GELU_Tanh_Approx":
        return nl.gelu_apprx_tanh
    if name == "Swish":
        return nl.gelu_apprx_sigmoid
    assert name == "ReLU", f"`activation_fn` {activation} is no member of ActFnType"
    return nl.relu
