# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Constructs of Python that the parser does not take, and code of the host that may use them all."""

import dataclasses
import enum
import functools
import math
from math import log2

import jax.numpy as jnp
import numpy as np

from nki3d._nki import nisa, nki, nl

_TABLE = {"relu": 1}
_TAPS = [1, 2, 3]
_PAIR = (1, 2)
_COUNT = 0
_HUGE = 1 << 40
_FLOAT = np.float32


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def label(self):
        return [part for part in self.name]  # expect: NKI003

    def host_label(self):
        return [part for part in self.name]


def count_up():
    global _COUNT
    _COUNT += 1
    return {i: i for i in range(3)}


@nki.jit
def expressions(x, bias=None, flag=False):
    if bias is None:  # expect: NKI001
        bias = x
    if flag is not False and bias != None:  # expect: NKI001
        bias = x
    double = lambda v: v * 2  # expect: NKI002
    sizes = [n for n in range(3)]  # expect: NKI003
    table = {str(n): n for n in range(3)}  # expect: NKI003
    unique = {n for n in range(3)}  # expect: NKI003
    first = tuple(n for n in range(3))  # expect: NKI003
    if (n := len(sizes)) > 2:  # expect: NKI007
        print(n, *sizes)  # expect: NKI041
    both = [*sizes, 1]  # expect: NKI041
    head, *tail = sizes  # expect: NKI041
    choice = {1, 2}  # expect: NKI012
    others = set()  # expect: NKI012
    return helper(x, **table), Color.RED.label()  # expect: NKI041


def helper(x, **options):  # expect: NKI040
    try:  # expect: NKI004
        y = x
    except ValueError:
        y = options
    finally:
        print("done")
    if y == None:
        raise ValueError(f"no {sorted(options)}")  # expect: NKI005
    match y:  # expect: NKI008
        case 1:
            y = x is x  # expect: NKI001
    del y  # expect: NKI011
    import os  # expect: NKI015

    with open("file") as file:  # expect: NKI014 NKI016
        pass
    with nl.no_reorder:  # expect: NKI014
        pass
    return x


def generator(x):
    yield x  # expect: NKI006
    yield from x  # expect: NKI006


async def waiting(x):  # expect: NKI009
    await x  # expect: NKI009
    async with x:  # expect: NKI009
        pass
    async for part in x:  # expect: NKI009
        pass


@nki.jit
def names(x, dtype=np.float32):
    global _COUNT  # expect: NKI010
    for part in generator(x):
        print(part)
    print(waiting(x), _COUNT)  # expect: NKI028
    total = 0

    def body(i):
        nonlocal total  # expect: NKI010
        total = i

    for i, tap in enumerate(_TAPS):  # expect: NKI016 NKI028
        body(i)
    for a, b in zip(_PAIR, _PAIR):  # expect: NKI016
        print(a, b, abs(a))  # expect: NKI016
    print(sum(_PAIR), any(_PAIR), all(_PAIR))  # expect: NKI016
    print(map(body, _PAIR), filter(body, _PAIR), sorted(_PAIR), reversed(_PAIR))  # expect: NKI016
    setattr(x, "name", eval("1"))  # expect: NKI016
    if hasattr(x, "name") or getattr(x, "other", None) or exec("1"):  # expect: NKI016
        print(math.log(2.0), log2(3), math.ceil(2.5), math.pi)  # expect: NKI016
    _TABLE["gelu"] = 2  # expect: NKI028
    act = _TABLE["relu"]  # expect: NKI028
    zeros = np.zeros((2, 2))  # expect: NKI017
    ones = jnp.ones((2, 2), dtype)  # expect: NKI017
    fields = dataclasses.replace(x)  # expect: NKI018
    product = functools.reduce(body, _PAIR)  # expect: NKI018
    return x.astype(_FLOAT), act, zeros, ones, fields, product


@nki.jit
def containers(x, names: dict):
    keyed = {"a": 1, 2: 2, (1, 2): 3, None: 4}  # expect: NKI013
    keyed["b"] = 5
    keyed[7] = 6  # expect: NKI013
    spread = {**keyed}  # expect: NKI041
    if "a" in keyed:  # expect: NKI019
        print("found")
    if "a" not in names:  # expect: NKI019
        print("absent")
    if 1 in (1, 2) or 2 in [1, 2]:
        print("fine")
    a = keyed.get("a")  # expect: NKI021
    keyed.update(spread)  # expect: NKI021
    pairs = keyed.items()
    rows = [False] * 4
    rows.sort()  # expect: NKI020
    rows.insert(0, 1)  # expect: NKI020
    last = rows.pop()  # expect: NKI020
    rows[1] = True
    rows[0:2] = (1, 2)  # expect: NKI024
    x[0:2] = [1, 2]  # expect: NKI024
    for row in rows:  # expect: NKI022
        print(row)
    else:
        print("end")
    while len(rows) < 8:  # expect: NKI022
        rows.append(a)
    else:
        print("end")
    for key in keyed:  # expect: NKI023
        print(key)
    for letter in "KDHW":  # expect: NKI023
        print(letter)
    return x, last, pairs


@nki.jit
def numbers(x):
    limit = 2147483648  # expect: NKI025
    least = -2147483648
    most = 2**31 - 1  # expect: NKI025
    product = 65536 * 65536 * 2  # expect: NKI025
    side = 65536
    area = side * side  # expect: NKI025
    far = 3.5e38  # expect: NKI025
    near = -1e38 + float("inf")
    return limit + least + most + product + area + far + near + _HUGE  # expect: NKI025


def host(x):
    if x is None:
        raise ValueError
    return [count_up() for _ in {1, 2}], (lambda: x)()
