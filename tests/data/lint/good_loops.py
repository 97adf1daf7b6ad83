# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loops on the device, closures, fixed order, shards, and a kernel that a factory makes."""

import logging
import math
from math import gcd

from nki import collectives, jit
from nki.isa import engine, memset, oob_mode
from nki.language import fori_loop, no_reorder

from nki3d import _nki
from nki3d._nki import nisa, nl

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

logger = logging.getLogger(__name__)
options = {"debug": False}


def scale_rows(x, factor):
    """Multiplies in place, with a loop on the device."""

    def body(i):
        nisa.tensor_scalar(x[0:128, nl.ds(i, 1)], x[0:128, nl.ds(i, 1)], op0=nl.multiply, operand0=factor)

    fori_loop(0, x.shape[1], body)


def largest(values, key):
    best = values[0]
    for value in values:
        best = value if key(value) > key(best) else best
    return best


def width(tile):
    return tile.shape[1]


@jit
def shuffle(x, out_size=None, groups=((0, 1), (2, 3))):
    shard, shards = nl.program_id(axis=0), nl.num_programs(axes=0)
    assert shards in [1, 2], "shuffle: run it on one core or two."
    a, b = nl.ndarray((128, 64), nl.bfloat16), nl.ndarray((128, 32), nl.bfloat16, nl.sbuf)
    memset(a, 0.0, engine=engine.gpsimd)
    memset(b, value=0)
    kept = []

    def keep(tile):
        kept.append(tile)
        return len(kept)

    with no_reorder():
        for step in range(0, 64, 32):
            nisa.tensor_copy(a[:, step : step + 32], b)
            keep(b)
    with nl.no_reorder():

        def later(i):
            fori_loop(0, i, keep)

        nisa.dma_copy(dst=a, src=x, oob_mode=oob_mode.skip, dge_mode=nisa.dge_mode.none)
    later(2)
    scale_rows(a, 2.0)
    tile = largest((a, b), width)
    low = -2147483648 + gcd(4, 6) + math.floor(2.5) + int(math.sqrt(16.0))
    if -1 < low < 0 or not kept:
        low = ~low
    size = width(tile) ** 2 if out_size == None else out_size
    view = a.reshape((128, 8, 8)).permute((0, 2, 1)).ap([[64, 128], [1, 64]], offset=0)
    index = _nki.nl.ndarray((1, 1), _nki.nl.int32)
    nisa.iota(index, [[1, 1]], offset=shard)
    reg = nisa.register_alloc(1)
    nisa.register_load(reg, index)

    def count(r):
        nisa.register_move(r, 0)
        return r

    nl.while_loop(reg, count)
    for left, right in groups:
        size += left * right
    rank = collectives.rank_id()
    out = nl.zeros((128, 64), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    out[0:128, 0:64] = nl.load(view)
    print("done", rank, size, index.shape, None)
    pass
    return out, low


def make(options, factors):
    """Makes a kernel for the given options."""
    scales = tuple(float(f) for f in factors if f is not None)
    if ml_dtypes is None or not options:
        raise ImportError("ml_dtypes")

    def pick(i):
        return scales[i]

    @jit
    def scaled(x):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, x.dtype)
        nisa.dma_copy(tile, x)
        for i in range(len(scales)):
            nisa.tensor_scalar(tile, tile, nl.multiply, pick(i))
        nisa.dma_copy(out, tile)
        return out

    logger.info("made %s", {name: value for name, value in options.items() if value is not None})
    return scaled
