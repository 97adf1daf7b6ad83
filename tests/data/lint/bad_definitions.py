# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Signatures, decorators, classes, options of jit, and the old package."""

import abc
import enum
import functools
from dataclasses import dataclass
from typing import NamedTuple, Optional

import neuronxcc.nki.language as nl  # expect: NKI050
from neuronxcc import nki  # expect: NKI050
from neuronxcc.nki import isa as nisa  # expect: NKI050


@nki.jit
def star(x, *rest):  # expect: NKI040
    return x, rest


@nki.jit()
def keyword_only(x, *, scale=1.0):  # expect: NKI042
    return x, scale


@nki.jit
def lists(
    x,
    taps: list,  # expect: NKI043
    sizes: "list[int]",  # expect: NKI043
    pads: Optional[list[int]] = None,  # expect: NKI043
    stride=[1, 1, 1],  # expect: NKI043
    dilation: tuple[int, int, int] = (1, 1, 1),
):
    return helper(x, list(taps)), sizes, pads, stride, dilation


def helper(x, taps: list):
    return x, taps


@functools.cache  # expect: NKI044
@nki.jit(mode="jax", platform_target="trn2", debug=True)  # expect: NKI049
def decorated(x):
    return cached(x)


@functools.lru_cache(maxsize=None)  # expect: NKI044
def cached(x):
    return star(x)  # expect: NKI048


@functools.partial(nki.jit, mode="simulation")  # expect: NKI049
def through_partial(x):
    run = keyword_only  # expect: NKI048
    return run(x)


def plain(x):
    return by_call(x), as_attribute.size  # expect: NKI048 NKI028


compiled = nki.jit(plain)
compiled_for = nki.jit(platform_target="trn1")(plain)  # expect: NKI049
as_attribute = {}


@nki.jit
def by_call(x):
    return compiled(x), plain(x)  # expect: NKI048


class NoBase:  # expect: NKI045
    def host_only(self):
        return [1 for _ in "a"]


@dataclass
class Data(object):  # expect: NKI045
    size: int


class Named(NamedTuple):  # expect: NKI045
    size: int


class Abstract(abc.ABC):  # expect: NKI045
    pass


class Derived(NoBase):  # expect: NKI045
    pass


class Mixed(nl.NKIObject, Abstract):  # expect: NKI046
    pass


class Level(enum.IntEnum):  # expect: NKI047
    LOW = 0


class Depth(int, enum.Enum):  # expect: NKI047
    SHALLOW = 0


class Word(str, enum.Enum):  # expect: NKI046
    ONE = "one"


@dataclass(frozen=True)
class Config(nl.NKIObject):
    size: int = 1

    @property  # expect: NKI044
    def area(self):
        return self.size * self.size

    @staticmethod
    def zero():
        return Config(0)

    def tiles(self):
        return [i for i in range(self.size)]  # expect: NKI003


@functools.total_ordering  # expect: NKI044
class Wide(Config):
    def __post_init__(self):
        assert self.size != None
        self.check(lambda: 1)  # expect: NKI002


class Unused:
    def host(self):
        return {i for i in range(3)}


class Failure(Exception):
    pass


@nki.jit
def classes(x: Unused):
    class Local:  # expect: NKI045
        def method(self):
            return x is None  # expect: NKI001

    if x == None:
        raise Failure("none")  # expect: NKI005
    low = Level.LOW, Depth.SHALLOW, Word.ONE
    return NoBase(), Data(1), Named(1), Abstract(), Derived(), Mixed(), low, Local(), nisa.nc_version.gen3
