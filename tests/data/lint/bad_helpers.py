# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A file of helpers without a kernel: what uses NKI is kernel code, directly or through another function."""

import nki
import nki.isa as nisa
import nki.language as nl
from nki.language import NKIObject


def copies(x):
    assert x.shape[0] <= nl.tile_size.pmax, f"{x.shape[0]} partitions"
    return small(x, lambda: 1)  # expect: NKI002


def small(x, f):
    return x is f  # expect: NKI001


def calls_copies(x):
    return [copies(x) for _ in range(2)]  # expect: NKI003


def annotated(x: nl.NkiTensor):
    return x * 2  # expect: NKI026


def plan(shape):
    return [n for n in shape if n is not None]


def show(x):  # nki: host
    return [nl.float32 for _ in x]


def make():  # nki: host
    def inner(x):
        return [nl.float32 for _ in x]

    return inner


def run(x):
    return [nki.simulate(copies)(part) for part in x]


def main():
    return [run(part) for part in plan((1, 2))]


def test_copies():
    assert [copies(x) for x in (1, 2)] is not None


def text():
    return "# nki: host", nisa.engine.vector, {1}  # expect: NKI012


class Config(NKIObject):
    def helper(self):
        return self is None  # expect: NKI001

    def planner(
        self,
    ):  # nki: host, runs before the kernel is compiled
        return self is None


class Planner(NKIObject):  # nki: host
    def helper(self):
        return self is None
