# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Operators on tensors, order of enums, loops on the device; NKI under names of its own."""

import enum
from typing import NamedTuple

import nki.isa
import nki.language as lang
from nki import isa as ops
from nki import jit
from nki.language import fori_loop, ndarray

GENERATION = 3


class Phase(enum.Enum):
    LOAD = 0
    STORE = 1


@jit
def operators(x: lang.NkiTensor, scale: float):
    a = lang.ndarray((128, 512), lang.float32)
    b, c = ndarray((128, 512), lang.float32), lang.zeros((128, 1), lang.float32)
    d = a + b  # expect: NKI026
    d = a[:, 0:4] * scale  # expect: NKI026
    a += b  # expect: NKI026
    d = -c  # expect: NKI026
    d = a @ b  # expect: NKI026
    d = 1.0 - x  # expect: NKI026
    d = a // 2  # expect: NKI026
    size = a.shape[0] * 2 + x.shape[1] // 2
    tiles = [a] * 2
    tiles += [b]

    def inner(i):
        return a - i  # expect: NKI026

    return d, size, tiles, inner


@jit
def enums(x, phase):
    version = ops.get_nc_version()
    if version >= ops.nc_version.gen3:  # expect: NKI027
        print("new")
    if ops.get_nc_version() < 3:  # expect: NKI027
        print("old")
    if phase > Phase.LOAD:  # expect: NKI027
        print("later")
    if version == nki.isa.nc_version.gen3 and phase != Phase.LOAD and GENERATION > 2:
        print("equal")
    return x


def rows(n):
    def step(i):
        print(i)

    fori_loop(0, n, step)


@jit
def loops(x, n):
    for i in lang.dynamic_range(n):  # expect: NKI030
        print(i)
    reg = ops.register_alloc(4)
    while reg:  # expect: NKI031
        print("again")
    while n > 0:
        n -= 1

    def body(i):
        print(i)

    with lang.no_reorder():
        for i in range(4):
            body(i)
        fori_loop(0, n, body)  # expect: NKI032
        lang.while_loop(reg, body)  # expect: NKI032
        rows(n)  # expect: NKI032
        while reg:  # expect: NKI031 NKI032
            print("again")
        for i in lang.dynamic_range(n):  # expect: NKI030 NKI032
            print(i)
        bare = lambda i: rows(i)  # expect: NKI002 NKI032
    fori_loop(0, n, body)
    return x, bare


class Shape(NamedTuple):
    rows: int
