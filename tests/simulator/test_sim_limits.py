# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every limit that the NKI interpreter must hold kernels to, with a kernel just outside it and one just inside.

A row of the table is one limit: a kernel with one parameter, a value that breaks the limit, a value that does not, and what the message must name:
the instruction, the operand, the value, the limit.
"""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from simkit import BF16, f32, i32, nisa, nki, nl, out, run, tile_of

BOTH = ("trn2", "trn3")
TRN2, TRN3 = ("trn2",), ("trn3",)
EMPTY = f32([0])
cmd, dge, eng, oob = nisa.reduce_cmd, nisa.dge_mode, nisa.engine, nisa.oob_mode


class Limit(NamedTuple):
    id: str
    kernel: Any  # kernel(value)
    outside: Any
    inside: Any
    instruction: str
    operand: str
    value: Any  # what the message must name of the value that was given
    limit: Any  # and of the limit
    targets: tuple = BOTH  # where it is broken
    legal_on: tuple | None = None  # where the value inside the limit runs
    lnc: int = 1


def sb(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def ps(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def hbm(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=nl.hbm)


def at(region, *shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype, buffer=region)


def typed(dtype, *shape):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf)


def index(rows=1, dtype=nl.uint32):
    tile = nl.ndarray((rows, 1), dtype, buffer=nl.sbuf)
    nisa.memset(tile, 0)
    return tile


def copy_of(view):
    """A copy to a new tile of the view's shape."""
    nisa.tensor_copy(nl.ndarray(view.shape, view.dtype, buffer=nl.sbuf), view)


def part(count, start):
    """Partitions start to start + count of a full tile, on Vector."""
    tile = sb(128, 4)
    nisa.memset(tile[start : start + count], 0.0)


def matmul(k=1, m=1, n=1, dst=None, s=None, x=None, kind=nl.float32, other=None, **options):
    nisa.nc_matmul(
        ps(m, n) if dst is None else dst,
        typed(kind, k, m) if s is None else s,
        typed(other or kind, k, n) if x is None else x,
        **options,
    )


def started_matmul(flag):
    dst, x = ps(1, 1), sb(1, 1)
    if not flag:
        nisa.nc_matmul(dst, x, x)
    nisa.nc_matmul(dst, x, x, accumulate=True)


def started_by(write):
    dst, x = ps(1, 1), sb(1, 1)
    write(dst, x)
    nisa.nc_matmul(dst, x, x, accumulate=True)


def double_row(kind=nl.float8_e4m3, rows=2, **options):
    x = nl.ones((1, 2, 1), kind)
    s = nl.ones((1, rows, 1), kind)
    matmul(s=s, x=x, perf_mode=nisa.matmul_perf_mode.double_row, **options)


def double_row_transpose(flag):
    """An identity of two rows in one partition as moving operand."""
    x = nl.zeros((1, 2, 2), nl.float8_e4m3)
    for row in (0, 1):
        nisa.memset(x[:, row, row : row + 1], 1.0)
    s = nl.ones((1, 2, 1), nl.float8_e4m3)
    matmul(n=2, s=s, x=x, perf_mode=nisa.matmul_perf_mode.double_row, is_transpose=flag)


def engine_of(instruction, engine, **buffers):
    b = {"dst": nl.sbuf, "src": nl.sbuf} | buffers
    if instruction == "tensor_copy":
        nisa.tensor_copy(at(b["dst"], 1, 1), at(b["src"], 1, 1), engine=engine)
    elif instruction == "memset":
        nisa.memset(at(b["dst"], 1, 1), 0.0, engine=engine)
    else:
        nisa.tensor_tensor(at(b["dst"], 1, 1), at(b["src"], 1, 1), sb(1, 1), nl.add, engine=engine)


def scalar(op0=nl.add, operand0=1.0, op1=None, operand1=None, dtype=nl.float32, engine=eng.unknown, **more):
    nisa.tensor_scalar(typed(dtype, 2, 2), typed(dtype, 2, 2), op0, operand0, op1=op1, operand1=operand1, engine=engine, **more)


def pair(op, dtype=nl.float32, one=nl.sbuf, two=nl.sbuf, dst=nl.sbuf, engine=eng.unknown):
    nisa.tensor_tensor(at(dst, 1, 4, dtype=dtype), at(one, 1, 4, dtype=dtype), at(two, 1, 4, dtype=dtype), op, engine=engine)


def gathered(mode=oob.error, dge_mode=dge.unknown, table=None, rows=1, **ap):
    table = hbm(4, 2) if table is None else table
    options = {"vector_offset": index(rows)} | ap
    nisa.dma_copy(sb(rows, 2), table.ap([[2, rows], [1, 2]], **options), oob_mode=mode, dge_mode=dge_mode)


def transposed(shape, axes, dtype=nl.bfloat16, **options):
    nisa.dma_transpose(
        nl.ndarray(tuple(shape[a] for a in axes), dtype, buffer=nl.sbuf), nl.ndarray(shape, dtype, buffer=nl.hbm), **options
    )


def gather_transposed(rows=16, kind=nl.bfloat16, offsets=nl.uint32, **options):
    table = nl.ndarray((32, 4), kind, buffer=nl.hbm)
    view = table.ap([[4, rows], [1, 4]], vector_offset=index(16, offsets))
    nisa.dma_transpose(typed(kind, 4, rows), view, **options)


HW = {"dge_mode": dge.hwdge}


def computed(count=2, op=nl.add, shape=(1, 4), **options):
    nisa.dma_compute(hbm(1, 4), [hbm(*shape)] + [hbm(1, 4)] * (count - 1), op, **options)


def activated(op=nl.copy, **options):
    nisa.activation(sb(2, 2), op, sb(2, 2), **options)


def activated2(op0=nl.multiply, op1=nl.add, **options):
    nisa.activate2(sb(2, 2), nl.copy, sb(2, 2), 1.0, 1.0, op0, op1, **options)


def reduced(axis, dst=(1, 2), op=nl.add, dtype=nl.float32):
    nisa.tensor_reduce(nl.ndarray(dst, dtype, buffer=nl.sbuf), op, typed(dtype, 1, 2, 3, 4), axis)


def predicated(predicate=nl.uint8, kinds=(nl.float32, nl.float32), where=(nl.sbuf, nl.sbuf), count=4):
    nisa.tensor_copy_predicated(
        typed(kinds[0], 1, 4), at(where[0], 1, 4, dtype=kinds[1]), at(where[1], 1, count, dtype=predicate)
    )


def selected(predicate=nl.uint8, kind=nl.float32, where=(nl.sbuf, nl.sbuf), result=nl.float32, **options):
    nisa.select_reduce(
        typed(kind, 1, 4),
        at(where[1], 1, 4, dtype=predicate),
        at(where[0], 1, 4, dtype=kind),
        0.0,
        reduce_res=typed(result, 1, 1),
        reduce_cmd=cmd.reset_reduce,
        **options,
    )


def ranged(kind=nl.float32, bound=nl.float32, **options):
    nisa.range_select(typed(kind, 1, 4), typed(kind, 1, 4), nl.greater, nl.less, typed(bound, 1, 1), sb(1, 1), **options)


def barrier(cores=(0, 1), region=nl.shared_hbm):
    nisa.core_barrier(nl.ndarray((2, 2), nl.float32, buffer=region), cores)


def exchange(send=None, receive=None, src=(2, 2), dst=(2, 2), kind=nl.float32, region=nl.sbuf, engine=nisa.dma_engine.dma):
    other = 1 - nl.program_id()
    nisa.sendrecv(
        nl.ndarray(src, kind, buffer=region),
        nl.ndarray(dst, kind, buffer=nl.sbuf),
        other if send is None else send,
        other if receive is None else receive,
        0,
        engine,
    )


def five_dims(count):
    """`count` free dimensions of 2 of 3, which do not merge."""
    tile = nl.ndarray((1,) + (3,) * count, nl.float32, buffer=nl.sbuf)
    view = tile[(slice(None),) + (slice(0, 2),) * count]
    nisa.memset(view, 0.0)


def placed(region, address, shape=(32, 4)):
    nisa.memset(nl.ndarray(shape, nl.float32, buffer=region, address=address), 0.0)


def named(second):
    sbuf_names = [nl.ndarray((1, 1), nl.float32, buffer=nl.sbuf, name=name) for name in ("x", second)]
    assert sbuf_names[0].name == "x"


def shuffled(mask=tuple(range(32)), kinds=(nl.float32, nl.float32), start=0):
    tile = typed(kinds[0], 128, 1)
    nisa.nc_stream_shuffle(tile[start : start + 32], typed(kinds[1], 32, 1), list(mask))


def two_dynamic(count):
    register = nisa.register_alloc(0)
    view = hbm(2, 2, 2)
    for _ in range(count):
        view = view.select(0, register)


def looped(step):
    nl.fori_loop(0, 4, lambda i: None, step)


ADD = (nl.add, 1.0)
# fmt: off
LIMITS = [
    # Memories: A1, B0, C2
    Limit("sbuf-partitions", lambda n: sb(n, 1), 129, 128, "ndarray", "shape", 129, 128),
    Limit("psum-partitions", lambda n: ps(n, 1), 129, 128, "ndarray", "shape", 129, 128),
    Limit("zeros-partitions", lambda n: nl.zeros((n, 1), nl.float32), 256, 128, "zeros", "shape", 256, 128),
    Limit("sbuf-tensor", lambda n: typed(nl.uint8, 1, n), 212993, 212992, "ndarray", "shape", 212993, 212992, TRN2),
    Limit("sbuf-tensor", lambda n: typed(nl.uint8, 1, n), 262145, 262144, "ndarray", "shape", 262145, 262144, TRN3),
    Limit("sbuf-tensor-fp32", lambda n: sb(128, n), 53249, 53248, "ndarray", "shape", 212996, 212992, TRN2),
    Limit("psum-tensor", lambda n: ps(1, n), 4097, 4096, "ndarray", "shape", 16388, 16384),
    Limit("two-dimensions", lambda s: sb(*s), (8,), (8, 1), "ndarray", "shape", r"\(8,\)", "two dimensions"),
    Limit("positive-size", lambda n: sb(1, n), 0, 1, "ndarray", "shape", r"\(1, 0\)", "positive"),
    Limit("buffer", lambda b: at(b, 1, 1), "sbuf", nl.sbuf, "ndarray", "buffer", "'sbuf'", "nl.sbuf"),
    Limit("name", named, "x", "y", "ndarray", "name", "'x'", "twice"),
    Limit("hbm-address", lambda b: placed(b, (0, 0)), nl.hbm, nl.sbuf, "ndarray", "address", r"\(0, 0\)", "private_hbm"),
    Limit("psum-bank-start", lambda b: placed(nl.psum, (0, b)), 1024, 2048, "ndarray", "address", 1024, 2048),
    Limit("psum-end", lambda b: placed(nl.psum, (0, b)), 16384, 14336, "ndarray", "address", 16400, 16384),
    Limit("sbuf-end", lambda b: placed(nl.sbuf, (0, b)), 212980, 212976, "ndarray", "address", 212996, 212992, TRN2),
    Limit("sbuf-end", lambda b: placed(nl.sbuf, (0, b)), 262132, 262128, "ndarray", "address", 262148, 262144, TRN3),
    Limit("address-16", lambda p: placed(nl.sbuf, (p, 0)), 16, 32, "ndarray", "address", 16, r"\(0, 32, 64, 96\)"),
    Limit("address-64", lambda p: placed(nl.sbuf, (p, 0), (64, 1)), 32, 64, "ndarray", "address", 32, r"\(0, 64\)"),
    Limit("address-65", lambda p: placed(nl.sbuf, (p, 0), (65, 1)), 32, 0, "ndarray", "address", 32, r"\(0,\)"),
    # Access patterns: A2
    *(
        Limit(f"start-{n}", lambda p, n=n: part(n, p), bad, good, "memset", "dst", bad, allowed)
        for n, bad, good, allowed in (
            (1, 1, 96, r"\(0, 32, 64, 96\)"),
            (32, 16, 32, r"\(0, 32, 64, 96\)"),
            (32, 95, 96, r"\(0, 32, 64, 96\)"),
            (33, 32, 64, r"\(0, 64\)"),
            (64, 32, 64, r"\(0, 64\)"),
            (65, 32, 0, r"\(0,\)"),
            (96, 32, 0, r"\(0,\)"),
        )
    ),
    Limit("start-of-address", lambda p: nisa.memset(nl.ndarray((64, 1), nl.float32, address=(64, 0))[p : p + 8], 0), 16, 32,
          "memset", "dst", 80, r"\(0, 32, 64, 96\)"),
    Limit("partition-step", lambda s: sb(128, 1)[0:64:s], 2, 1, "NkiTensor", "key", 2, 1),
    Limit("partition-step-slice", lambda s: sb(128, 1).slice(0, 0, 64, s), 2, 1, "NkiTensor", "key", 2, 1),
    Limit("partition-step-ap", lambda s: sb(8, 4).ap([[s, 4], [1, 4]]), 8, 4, "NkiTensor.ap", "pattern", 8, 4),
    Limit("free-dims", five_dims, 5, 4, "memset", "dst", 5, 4),
    Limit("count-uint16", lambda n: nisa.memset(typed(nl.uint8, 1, n), 0), 65536, 65535, "memset", "dst", 65536, 65535),
    Limit("stride-int16", lambda n: nisa.memset(typed(nl.uint8, 1, 2, n)[:, :, 0:1], 0), 32768, 32767, "memset", "dst", 32768,
          32767),
    Limit("sbuf-elements", lambda n: nisa.memset(typed(nl.uint8, 1, n, 256), 0), 257, 256, "memset", "dst", 65792, 65536),
    Limit("psum-elements", lambda n: nisa.memset(ps(1, n, dtype=nl.uint8), 0), 4097, 4096, "memset", "dst", 4097, 4096),
    Limit("sbuf-elements-activation",
          lambda n: nisa.activation(typed(nl.uint8, 1, n, 256), nl.copy, typed(nl.uint8, 1, n, 256)), 257, 256, "activation",
          "dst", 65792, 65536),
    # nc_matmul: A3, B1
    Limit("matmul-m", lambda n: matmul(dst=ps(128, 1), s=sb(1, n), x=sb(1, 1)), 129, 128, "nc_matmul", "stationary", 129, 128),
    Limit("matmul-n", lambda n: matmul(n=n), 513, 512, "nc_matmul", "moving", 513, 512, TRN2),
    Limit("matmul-n", lambda n: matmul(dst=ps(1, 4096), x=sb(1, n)), 4097, 4096, "nc_matmul", "moving", 4097, 4096, TRN3),
    Limit("matmul-n-bf16", lambda n: matmul(dst=ps(1, 8192, dtype=nl.bfloat16), x=sb(1, n)), 8193, 8192, "nc_matmul", "moving",
          8193, 8192, TRN3),
    Limit("matmul-k", lambda k: matmul(s=sb(2, 1), x=sb(k, 1)), 3, 2, "nc_matmul", "moving", 3, 2),
    Limit("matmul-dst-rows", lambda m: matmul(m=2, dst=ps(m, 1)), 3, 2, "nc_matmul", "dst", 3, 2),
    Limit("matmul-dst-count", lambda n: matmul(n=4, dst=ps(1, n)), 5, 4, "nc_matmul", "dst", 5, 4),
    Limit("matmul-bank", lambda a: matmul(n=512, dst=ps(1, 1024)[:, a : a + 512]), 256, 512, "nc_matmul", "dst", 1024, 2048,
          TRN2),
    Limit("matmul-bank-strided", lambda s: matmul(n=4, dst=ps(1, 1024)[:, 500 : 500 + 4 * s : s]), 4, 3, "nc_matmul", "dst",
          2000, 2048, TRN2),
    Limit("matmul-dst-memory", lambda b: matmul(dst=at(b, 1, 1)), nl.sbuf, nl.psum, "nc_matmul", "dst", "sbuf", "psum"),
    Limit("matmul-stationary-memory", lambda b: matmul(s=at(b, 1, 1)), nl.psum, nl.sbuf, "nc_matmul", "stationary", "psum",
          "sbuf"),
    Limit("matmul-moving-memory", lambda b: matmul(x=at(b, 1, 1)), nl.psum, nl.sbuf, "nc_matmul", "moving", "psum", "sbuf"),
    Limit("matmul-moving-hbm", lambda b: matmul(x=at(b, 1, 1)), nl.hbm, nl.sbuf, "nc_matmul", "moving", "private_hbm", "sbuf"),
    Limit("matmul-integers", lambda d: matmul(kind=d), nl.int8, nl.bfloat16, "nc_matmul", "stationary", "int8", "bfloat16"),
    Limit("matmul-mix-fp32-bf16", lambda d: matmul(kind=nl.float32, other=d), nl.bfloat16, nl.tfloat32, "nc_matmul", "moving",
          "bfloat16", "float32"),
    Limit("matmul-mix-bf16-fp32", lambda d: matmul(kind=nl.bfloat16, other=d), nl.float32, nl.float8_e5m2, "nc_matmul",
          "moving", "float32", "bfloat16"),
    Limit("matmul-ocp-fp8", lambda d: matmul(kind=d), nl.float8_e4m3fn, nl.float8_e4m3fn, "nc_matmul", "stationary",
          "float8_e4m3fn", "v4", TRN2, TRN3),
    Limit("matmul-two-fp8", lambda d: matmul(kind=nl.float8_e4m3fn, other=d), nl.float8_e4m3, nl.float8_e5m2, "nc_matmul",
          "moving", "float8_e4m3", "float8_e4m3fn", TRN3),
    Limit("matmul-dst-bf16", lambda d: matmul(dst=ps(1, 1, dtype=d)), nl.bfloat16, nl.float32, "nc_matmul", "dst", "bfloat16",
          "float32", TRN2),
    Limit("matmul-dst-bf16-target", lambda d: matmul(dst=ps(1, 1, dtype=d)), nl.bfloat16, nl.bfloat16, "nc_matmul", "dst",
          "bfloat16", "float32", TRN2, TRN3),
    Limit("matmul-dst-fp16", lambda d: matmul(dst=ps(1, 1, dtype=d)), nl.float16, nl.bfloat16, "nc_matmul", "dst", "float16",
          "bfloat16", TRN3),
    Limit("matmul-accumulate", started_matmul, True, False, "nc_matmul", "accumulate", "True", "started"),
    Limit("matmul-accumulate-memset", started_by, lambda d, x: nisa.memset(d, 0.0), lambda d, x: nisa.nc_matmul(d, x, x),
          "nc_matmul", "accumulate", "True", "started", TRN2),
    Limit("matmul-accumulate-copy", started_by, lambda d, x: nisa.tensor_copy(d, x), lambda d, x: nisa.nc_matmul(d, x, x),
          "nc_matmul", "accumulate", "True", "started", TRN2),
    Limit("double-row-type", lambda d: double_row(d), nl.bfloat16, nl.float8_e5m2,
          "nc_matmul", "perf_mode", "bfloat16", "fp8"),
    Limit("double-row-shape", lambda n: double_row(rows=n), 3, 2, "nc_matmul", "stationary",
          r"\(1, 3, 1\)", "2"),
    Limit("double-row-columns", lambda c: double_row(tile_size=(128, c), tile_position=(0, 0)), 64, 128, "nc_matmul",
          "tile_size", 64, "column"),
    Limit("double-row-transpose",
          double_row_transpose, True,
          False, "nc_matmul", "is_transpose|perf_mode", "double_row", "transpose"),
    Limit("tile-both", lambda t: matmul(tile_size=(128, 128), tile_position=t), (), (0, 0), "nc_matmul",
          "tile_position, tile_size", r"\(128, 128\)", "both"),
    Limit("tile-size", lambda n: matmul(tile_size=(n, 128), tile_position=(0, 0)), 16, 32, "nc_matmul", "tile_size", 16,
          r"\(32, 64, 128\)"),
    Limit("tile-column-size", lambda n: matmul(tile_size=(128, n), tile_position=(0, 0)), 48, 64, "nc_matmul", "tile_size", 48,
          r"\(32, 64, 128\)"),
    Limit("tile-position", lambda n: matmul(tile_size=(64, 128), tile_position=(n, 0)), 32, 0, "nc_matmul", "tile_position",
          32, 64),
    Limit("tile-rows", lambda k: matmul(k=k, tile_size=(32, 128), tile_position=(0, 0)), 33, 32, "nc_matmul", "stationary", 33,
          32),
    Limit("tile-columns", lambda m: matmul(m=m, tile_size=(128, 32), tile_position=(0, 0)), 33, 32, "nc_matmul", "stationary",
          33, 32),
    Limit("tile-dst",
          lambda p: matmul(m=32, dst=ps(128, 1)[p : p + 32], s=sb(1, 32), x=sb(1, 1), tile_size=(128, 32), tile_position=(0, 64)),
          32, 64, "nc_matmul", "dst", 32, 64),
    # nc_transpose: B2
    Limit("transpose-vector-columns", lambda n: nisa.nc_transpose(sb(n, 32), sb(32, n)), 33, 32, "nc_transpose", "data", 33,
          32),
    Limit("transpose-vector-rows", lambda n: nisa.nc_transpose(sb(32, n), sb(n, 32), eng.vector), 33, 32, "nc_transpose",
          "data", 33, 32),
    Limit("transpose-tensor", lambda n: nisa.nc_transpose(ps(128, 1), sb(1, n)), 129, 128, "nc_transpose", "data", 129, 128),
    Limit("transpose-dst", lambda n: nisa.nc_transpose(ps(2, n), sb(3, 2)), 2, 3, "nc_transpose", "dst", r"\(2, 2\)",
          r"\(2, 3\)"),
    Limit("transpose-type", lambda d: nisa.nc_transpose(ps(2, 2, dtype=d), typed(nl.bfloat16, 2, 2)), nl.float32, nl.bfloat16,
          "nc_transpose", "dst", "float32", "bfloat16"),
    Limit("transpose-tensor-dst", lambda b: nisa.nc_transpose(at(b, 2, 2), sb(2, 2), eng.tensor), nl.sbuf, nl.psum,
          "nc_transpose", "dst", "sbuf", "psum"),
    Limit("transpose-tensor-data", lambda b: nisa.nc_transpose(ps(2, 2), at(b, 2, 2), eng.tensor), nl.psum, nl.sbuf,
          "nc_transpose", "data", "psum", "sbuf"),
    Limit("transpose-engine", lambda e: nisa.nc_transpose(ps(2, 2), sb(2, 2), e), eng.scalar, eng.vector, "nc_transpose",
          "engine", "scalar", "vector"),
    # DMA: A5, B3, B4, B15
    Limit("dma-dst", lambda b: nisa.dma_copy(at(b, 1, 1), hbm(1, 1)), nl.psum, nl.sbuf, "dma_copy", "dst", "psum", "SBUF"),
    Limit("dma-src", lambda b: nisa.dma_copy(hbm(1, 1), at(b, 1, 1)), nl.psum, nl.sbuf, "dma_copy", "src", "psum", "SBUF"),
    Limit("dma-count", lambda n: nisa.dma_copy(hbm(2, 2), hbm(n)), 5, 4, "dma_copy", "src", 5, 4),
    Limit("dma-priority", lambda p: nisa.dma_copy(hbm(1), hbm(1), priority=p), 0, None, "dma_copy", "priority", 0, "v4", TRN2),
    Limit("dma-priority-range", lambda p: nisa.dma_copy(hbm(1), hbm(1), priority=p), 4, 3, "dma_copy", "priority", 4, 3, TRN3),
    Limit("dma-priority-negative", lambda p: nisa.dma_copy(hbm(1), hbm(1), priority=p), -1, 0, "dma_copy", "priority", -1, 0,
          TRN3),
    Limit("dma-engine-mode", lambda m: nisa.dma_copy(hbm(1), hbm(1), engine=eng.sync, dge_mode=m), dge.unknown, dge.hwdge,
          "dma_copy", "engine", "sync", "hwdge"),
    Limit("dma-engine", lambda e: nisa.dma_copy(hbm(1), hbm(1), engine=e, dge_mode=dge.hwdge), eng.vector, eng.scalar,
          "dma_copy", "engine", "vector", "sync or scalar"),
    Limit("hwdge-type", lambda d: nisa.dma_copy(hbm(1), hbm(1, dtype=d), dge_mode=dge.hwdge), nl.bfloat16, nl.float32,
          "dma_copy", "dge_mode", "bfloat16", "data type"),
    Limit("hwdge-gather", lambda m: gathered(dge_mode=m), dge.hwdge, dge.swdge, "dma_copy", "dge_mode", "hwdge", "gather"),
    Limit("none-gather", lambda m: gathered(dge_mode=m), dge.none, dge.unknown, "dma_copy", "dge_mode", "none", "gather"),
    Limit("none-dynamic",
          lambda m: nisa.dma_copy(sb(1, 2), hbm(4, 2).ap([[2, 1], [1, 2]], scalar_offset=nisa.register_alloc(0)), dge_mode=m),
          dge.none, dge.hwdge, "dma_copy", "dge_mode", "none", "before the kernel runs"),
    Limit("gather-memory", lambda b: gathered(table=at(b, 4, 2)), nl.sbuf, nl.hbm, "NkiTensor.ap", "vector_offset", "sbuf",
          "HBM"),
    Limit("gather-dim", lambda d: gathered(indirect_dim=d), 1, 0, "NkiTensor.ap", "indirect_dim", 1, 0),
    Limit("gather-and-offset", lambda r: gathered(scalar_offset=r and nisa.register_alloc(0)), True, None, "NkiTensor.ap",
          "scalar_offset, vector_offset", "both", "one"),
    Limit("gather-index", lambda d: gathered(vector_offset=typed(d, 1, 1) if d == nl.float32 else index(1, d)), nl.float32,
          nl.int32, "NkiTensor.ap", "vector_offset", "float32", "integer"),
    Limit("dma-transpose-dst", lambda b: nisa.dma_transpose(at(b, 2, 2), hbm(2, 2)), nl.hbm, nl.sbuf, "dma_transpose", "dst",
          "private_hbm", "sbuf"),
    Limit("dma-transpose-psum", lambda b: nisa.dma_transpose(at(b, 2, 2), hbm(2, 2)), nl.psum, nl.sbuf, "dma_transpose", "dst",
          "psum", "SBUF"),
    Limit("dma-transpose-type", lambda d: nisa.dma_transpose(typed(d, 2, 2), hbm(2, 2)), nl.bfloat16, nl.float32,
          "dma_transpose", "dst", "bfloat16", "float32"),
    Limit("dma-transpose-shape", lambda s: nisa.dma_transpose(sb(*s), hbm(2, 3)), (3, 2, 1), (3, 2), "dma_transpose", "dst",
          r"\(3, 2, 1\)", r"\(3, 2\)"),
    Limit("dma-transpose-axes", lambda a: nisa.dma_transpose(sb(2, 2), hbm(2, 2), a), (0, 1), (1, 0), "dma_transpose", "axes",
          r"\(0, 1\)", r"\(1, 0\)"),
    Limit("dma-transpose-mode", lambda m: nisa.dma_transpose(sb(2, 2), hbm(2, 2), dge_mode=m), dge.swdge, dge.unknown,
          "dma_transpose", "dge_mode", "swdge", "hwdge"),
    Limit("dma-transpose-oob", lambda m: nisa.dma_transpose(sb(2, 2), hbm(2, 2), oob_mode=m), oob.skip, oob.error,
          "dma_transpose", "oob_mode", "skip", "gathered"),
    Limit("dma-transpose-priority", lambda p: nisa.dma_transpose(sb(2, 2), hbm(2, 2), priority=p), 0, None, "dma_transpose",
          "priority", 0, "v4", TRN2),
    Limit("hw-transpose-rows", lambda n: transposed((n, 8), (1, 0), **HW), 32, 16, "dma_transpose", "src", 32, 16),
    Limit("hw-transpose-type", lambda d: transposed((16, 8), (1, 0), d, **HW), nl.float32, nl.bfloat16, "dma_transpose", "src",
          "float32", "2 bytes"),
    Limit("hw-transpose-3d-rows", lambda n: transposed((n, 16, 8), (2, 1, 0), **HW), 3, 4, "dma_transpose", "src",
          r"\(3, 16, 8\)", "1, 2, 4, 8 or 16"),
    Limit("hw-transpose-3d-16", lambda n: transposed((4, n, 8), (2, 1, 0), **HW), 3, 4, "dma_transpose", "src", r"\(4, 3, 8\)",
          16),
    Limit("hw-transpose-4d-16", lambda n: transposed((2, 16, n, 8), (3, 1, 2, 0), **HW), 4, 8, "dma_transpose", "src",
          r"\(2, 16, 4, 8\)", 16),
    Limit("gather-transpose-rows", gather_transposed, 8, 16, "dma_transpose", "src", 8, 16),
    Limit("gather-transpose-type", lambda d: gather_transposed(kind=d), nl.float32, nl.bfloat16, "dma_transpose", "src", "float32",
          "2 bytes"),
    Limit("gather-transpose-index", lambda d: gather_transposed(offsets=d), nl.int32, nl.uint32, "dma_transpose", "vector_offset",
          "int32", "uint32"),
    Limit("gather-transpose-mode", lambda m: gather_transposed(dge_mode=m), dge.hwdge, dge.swdge, "dma_transpose", "dge_mode",
          "hwdge", "gather"),
    Limit("dma-compute-sources", lambda n: computed(n), 17, 16, "dma_compute", "srcs", 17, 16),
    Limit("dma-compute-op", lambda op: computed(op=op), nl.multiply, nl.add, "dma_compute", "reduce_op", "multiply", "nl.add"),
    Limit("dma-compute-scales", lambda s: computed(scales=[1.0, s]), 2.0, 1.0, "dma_compute", "scales", "2.0", "1.0"),
    Limit("dma-compute-count", lambda n: computed(shape=(1, n)), 5, 4, "dma_compute", r"srcs\[0\]", 5, 4),
    Limit("dma-compute-unique", lambda u: computed(unique_indices=u), False, True, "dma_compute", "unique_indices", "False",
          "not"),
    Limit("dma-compute-psum", lambda b: nisa.dma_compute(at(b, 1, 1), [hbm(1, 1)], nl.add), nl.psum, nl.sbuf, "dma_compute",
          "dst", "psum", "SBUF"),
    # Engines: A1, B5 to B8
    *(
        Limit(
            f"gpsimd-psum-{name}-{operand}",
            lambda b, n=name, o=operand: engine_of(n, eng.gpsimd, **{o: b}),
            nl.psum,
            nl.sbuf,
            name,
            label,
            "psum",
            "gpsimd",
        )
        for name, operand, label in (
            ("tensor_copy", "dst", "dst"),
            ("tensor_copy", "src", "src"),
            ("memset", "dst", "dst"),
            ("tensor_tensor", "dst", "dst"),
            ("tensor_tensor", "src", "data1"),
        )
    ),
    Limit("copy-engine", lambda e: engine_of("tensor_copy", e), eng.tensor, eng.scalar, "tensor_copy", "engine", "tensor",
          "vector, scalar, gpsimd"),
    Limit("memset-engine", lambda e: engine_of("memset", e), eng.scalar, eng.gpsimd, "memset", "engine", "scalar",
          "vector, gpsimd"),
    Limit("tensor-tensor-engine", lambda e: engine_of("tensor_tensor", e), eng.scalar, eng.gpsimd, "tensor_tensor", "engine",
          "scalar", "vector, gpsimd"),
    Limit("copy-hbm", lambda b: nisa.tensor_copy(sb(1, 1), at(b, 1, 1)), nl.hbm, nl.psum, "tensor_copy", "src", "private_hbm",
          "sbuf or psum"),
    Limit("copy-partitions", lambda n: nisa.tensor_copy(sb(2, 1), sb(n, 1)), 3, 2, "tensor_copy", "src", 3, 2),
    Limit("copy-count", lambda n: nisa.tensor_copy(sb(1, 4), sb(1, n)), 5, 4, "tensor_copy", "src", 5, 4),
    Limit("memset-float-in-int", lambda v: nisa.memset(typed(nl.int32, 1, 1), v), 1.0, 1, "memset", "value", "1.0", "int32"),
    Limit("memset-range", lambda v: nisa.memset(typed(nl.uint8, 1, 1), v), 256, 255, "memset", "value", 256, 255),
    Limit("memset-packed", lambda v: nisa.memset(typed(nl.float8_e5m2_x4, 1, 1), v), 1, 0, "memset", "value", 1, 0),
    Limit("two-psum", lambda b: pair(nl.add, one=nl.psum, two=b), nl.psum, nl.sbuf, "tensor_tensor", "data2", "psum", "sbuf"),
    Limit("power-psum", lambda b: pair(nl.power, one=b), nl.psum, nl.sbuf, "tensor_tensor", "data1", "psum", "gpsimd"),
    Limit("power-engine", lambda e: pair(nl.power, engine=e), eng.vector, eng.gpsimd, "tensor_tensor", "engine", "vector",
          "gpsimd"),
    Limit("tensor-bits-float", lambda d: pair(nl.bitwise_and, d), nl.float32, nl.int32, "tensor_tensor", "dst", "float32",
          "integer"),
    Limit("tensor-bits-width",
          lambda d: nisa.tensor_tensor(typed(nl.int32, 1, 1), typed(d, 1, 1), typed(d, 1, 1), nl.bitwise_or), nl.int16,
          nl.uint32, "tensor_tensor", "data1", "int16", "int32"),
    Limit("tensor-bits-engine", lambda e: pair(nl.bitwise_and, nl.int32, engine=e), eng.gpsimd, eng.vector, "tensor_tensor",
          "engine", "gpsimd", "vector"),
    Limit("tensor-partitions", lambda n: nisa.tensor_tensor(sb(2, 2), sb(2, 2), sb(n, 2), nl.add), 1, 2, "tensor_tensor",
          "data2", 1, 2),
    Limit("no-broadcast", lambda n: nisa.tensor_tensor(sb(2, 2), sb(2, 2), sb(2, n), nl.add), 1, 2, "tensor_tensor", "data2",
          1, 2),
    Limit("op-string", lambda op: pair(op), "add", nl.add, "tensor_tensor", "op", "'add'", "nl.add"),
    Limit("op-numpy", lambda op: pair(op), np.add, nl.add, "tensor_tensor", "op", "ufunc 'add'", "nl.add"),
    Limit("op-activation", lambda op: pair(op), nl.exp, nl.add, "tensor_tensor", "op", "exp", "nl.add"),
    Limit("abs-max", lambda op: pair(op), nl.abs_max, nl.abs_max, "tensor_tensor", "op", "abs_max", "v4", TRN2, TRN3),
    Limit("abs-min", lambda op: pair(op), nl.abs_min, nl.abs_min, "tensor_tensor", "op", "abs_min", "v4", TRN2, TRN3),
    Limit("scalar-abs-max", lambda op: scalar(op, 1.0), nl.abs_max, nl.abs_max, "tensor_scalar", "op0", "abs_max", "v4", TRN2,
          TRN3),
    Limit("scalar-square", lambda op: scalar(op, 0), nl.square, nl.square, "tensor_scalar", "op0", "square", "v4", TRN2, TRN3),
    Limit("scalar-relu", lambda op: scalar(op, 0), nl.relu, nl.relu, "tensor_scalar", "op0", "relu", "v4", TRN2, TRN3),
    Limit("scalar-operand-type", lambda d: scalar(nl.add, typed(d, 2, 1)), nl.bfloat16, nl.float32, "tensor_scalar",
          "operand0", "bfloat16", "float32"),
    Limit("scalar-operand-int", lambda d: scalar(nl.add, typed(d, 2, 1)), nl.int32, nl.float32, "tensor_scalar", "operand0",
          "int32", "float32"),
    Limit("scalar-operand1-type", lambda d: scalar(*ADD, nl.add, typed(d, 2, 1)), nl.float16, nl.float32, "tensor_scalar",
          "operand1", "float16", "float32"),
    Limit("scalar-operand-shape", lambda n: scalar(nl.add, sb(2, n)), 2, 1, "tensor_scalar", "operand0", r"\(2, 2\)",
          r"\(2, 1\)"),
    Limit("scalar-operand-rows", lambda n: scalar(nl.add, sb(n, 1)), 1, 2, "tensor_scalar", "operand0", r"\(1, 1\)",
          r"\(2, 1\)"),
    Limit("scalar-mix", lambda op: scalar(nl.bitwise_and, 1, op, 1, nl.int32), nl.add, nl.bitwise_or, "tensor_scalar", "op1",
          "add", "bitwise"),
    Limit("scalar-unary", lambda v: scalar(nl.abs, v), 1.0, 0, "tensor_scalar", "operand0", "1.0", 0),
    Limit("scalar-operand1-alone", lambda v: scalar(*ADD, None, v), 1.0, None, "tensor_scalar", "operand1", "1.0", "op1"),
    Limit("scalar-operand-missing", lambda v: scalar(nl.add, v), None, 1.0, "tensor_scalar", "operand0", "None",
          "two operands"),
    Limit("scalar-bits-float", lambda d: scalar(nl.bitwise_and, 1, dtype=d), nl.float32, nl.uint16, "tensor_scalar", "dst",
          "float32", "integer"),
    *(
        Limit(
            f"scalar-bits-{e.name}",
            lambda e: scalar(nl.bitwise_and, 1, dtype=nl.int32, engine=e),
            e,
            eng.vector,
            "tensor_scalar",
            "engine",
            e.name,
            "vector",
        )
        for e in (eng.scalar,)
    ),
    Limit("scalar-gpsimd", lambda op: scalar(op, 0.0, engine=eng.gpsimd), nl.add, nl.rsqrt, "tensor_scalar", "engine",
          "gpsimd", "rsqrt"),
    *(
        Limit(
            f"scalar-engine-{name}",
            lambda ops: scalar(*ops, engine=eng.scalar),
            ops,
            ops,
            "tensor_scalar",
            "engine",
            named_op,
            r"\(multiply, add\)",
            TRN2,
            TRN3,
        )
        for name, ops, named_op in (
            ("subtract", (nl.subtract, 1.0), "subtract"),
            ("maximum", (nl.maximum, 1.0), "maximum"),
            ("add-multiply", (nl.add, 1.0, nl.multiply, 1.0), "multiply"),
            ("multiply-subtract", (nl.multiply, 1.0, nl.subtract, 1.0), "subtract"),
            ("multiply-multiply", (nl.multiply, 1.0, nl.multiply, 1.0), "multiply"),
        )
    ),
    Limit("scalar-engine-subset", lambda op: scalar(op, 1.0, engine=eng.scalar), nl.minimum, nl.multiply, "tensor_scalar",
          "engine", "minimum", r"\(multiply, add\)", TRN2),
    Limit("stt-psum", lambda b: nisa.scalar_tensor_tensor(sb(1, 1), ps(1, 1), nl.add, 1.0, nl.add, at(b, 1, 1)), nl.psum,
          nl.sbuf, "scalar_tensor_tensor", "operand1", "psum", "sbuf"),
    Limit("stt-bits", lambda op: nisa.scalar_tensor_tensor(sb(1, 1), sb(1, 1), op, 1, nl.add, sb(1, 1)), nl.bitwise_and,
          nl.add, "scalar_tensor_tensor", "op0", "bitwise_and", "arithmetic"),
    Limit("stt-count", lambda n: nisa.scalar_tensor_tensor(sb(1, 4), sb(1, 4), nl.add, 1, nl.add, sb(1, n)), 5, 4,
          "scalar_tensor_tensor", "operand1", 5, 4),
    # Reductions: B10, B11, B16
    Limit("reduce-axis-0", lambda a: reduced(a, (1, 1)), (0, 1, 2, 3), (1, 2, 3), "tensor_reduce", "axis", r"\(0, 1, 2, 3\)",
          "last"),
    Limit("reduce-axis-first", lambda a: reduced(a, (1, 6)), 1, 3, "tensor_reduce", "axis", 1, "last"),
    Limit("reduce-axis-gap", lambda a: reduced(a), (1, 3), (2, 3), "tensor_reduce", "axis", r"\(1, 3\)", "last"),
    Limit("reduce-dst", lambda n: reduced((2, 3), (1, n)), 3, 2, "tensor_reduce", "dst", 3, 2),
    Limit("reduce-op", lambda op: reduced(3, (1, 6), op), nl.power, nl.maximum, "tensor_reduce", "op", "power", "nl.maximum"),
    Limit("reduce-bits", lambda d: reduced(3, (1, 6), nl.bitwise_or, d), nl.float32, nl.uint8, "tensor_reduce", "data",
          "float32", "integer"),
    Limit("partition-reduce-op", lambda op: nisa.tensor_partition_reduce(sb(1, 2), op, sb(2, 2)), nl.minimum, nl.maximum,
          "tensor_partition_reduce", "op", "minimum", "maximum"),
    Limit("partition-reduce-psum", lambda b: nisa.tensor_partition_reduce(sb(1, 2), nl.add, at(b, 2, 2)), nl.psum, nl.sbuf,
          "tensor_partition_reduce", "data", "psum", "sbuf"),
    Limit("partition-reduce-dst", lambda n: nisa.tensor_partition_reduce(sb(n, 2), nl.add, sb(2, 2)), 2, 1,
          "tensor_partition_reduce", "dst", r"\(2, 2\)", 1),
    Limit("bn-stats", lambda n: nisa.bn_stats(sb(1, 6), sb(1, n)), 513, 512, "bn_stats", "data", 513, 512),
    Limit("bn-stats-dst", lambda n: nisa.bn_stats(sb(1, n), sb(1, 4)), 5, 6, "bn_stats", "dst", r"\(1, 5\)", 6),
    Limit("bn-aggr", lambda n: nisa.bn_aggr(sb(1, 2), sb(1, n)), 7, 6, "bn_aggr", "data", 7, 3),
    Limit("scan-psum", lambda b: nisa.tensor_tensor_scan(sb(1, 1), ps(1, 1), at(b, 1, 1), 0.0, nl.add, nl.add), nl.psum,
          nl.sbuf, "tensor_tensor_scan", "data1", "psum", "sbuf"),
    Limit("scan-op", lambda op: nisa.tensor_tensor_scan(sb(1, 1), sb(1, 1), sb(1, 1), 0.0, op, nl.add), nl.bitwise_and,
          nl.minimum, "tensor_tensor_scan", "op0", "bitwise_and", "arithmetic"),
    Limit("scalar-reduce-op", lambda op: nisa.tensor_scalar_reduce(sb(1, 2), sb(1, 2), *ADD, op, sb(1, 1)), nl.subtract,
          nl.minimum, "tensor_scalar_reduce", "reduce_op", "subtract", "minimum"),
    Limit("scalar-reduce-init",
          lambda c: nisa.tensor_scalar_reduce(sb(1, 2), sb(1, 2), *ADD, nl.add, reduce_init=0.5, reduce_cmd=c),
          cmd.reset_reduce, cmd.load_reduce, "tensor_scalar_reduce", "reduce_init", "0.5", "load_reduce"),
    Limit("scalar-reduce-unary", lambda v: nisa.tensor_scalar_reduce(sb(1, 2), sb(1, 2), nl.abs, v, nl.add, sb(1, 1)), 3.0, 0,
          "tensor_scalar_reduce", "operand0", "3.0", 0),
    Limit("cumulative-type", lambda d: nisa.tensor_scalar_cumulative(sb(1, 2), typed(d, 1, 2), nl.add, nl.add, 0.0), nl.int32,
          nl.int16, "tensor_scalar_cumulative", "src", "int32", "supported"),
    Limit("max8-small", lambda n: nisa.max8(sb(1, 8), sb(1, n)), 7, 8, "max8", "src", 7, 8),
    Limit("max8-large", lambda n: nisa.max8(sb(1, 8), sb(1, n)), 16385, 16384, "max8", "src", 16385, 16384),
    Limit("find-index8-type", lambda d: nisa.nc_find_index8(typed(d, 1, 8), sb(1, 8), sb(1, 8)), nl.int32, nl.uint32,
          "nc_find_index8", "dst", "int32", "uint32"),
    # The Scalar Engine: B12
    Limit("activation-op", lambda op: activated(op), nl.add, nl.exp, "activation", "op", "add", "nl.exp"),
    Limit("activation-prelu", lambda op: activated(op), nl.prelu, nl.relu, "activation", "op", "prelu", "nl.relu"),
    Limit("activation-reduce-op", lambda op: activated(reduce_op=op, reduce_cmd=cmd.reset_reduce), nl.maximum, nl.add,
          "activation", "reduce_op", "max", "nl.add"),
    Limit("activation-scale-type", lambda d: activated(scale=typed(d, 2, 1)), nl.bfloat16, nl.float32, "activation", "scale",
          "bfloat16", "float32"),
    Limit("activation-scale-shape", lambda n: activated(scale=sb(2, n)), 2, 1, "activation", "scale", r"\(2, 2\)",
          r"\(2, 1\)"),
    Limit("activation-bias-type", lambda d: activated(bias=typed(d, 2, 1)), nl.tfloat32, nl.bfloat16, "activation", "bias",
          "tfloat32", "supported"),
    Limit("activation-bias-rows", lambda n: activated(bias=sb(n, 1)), 1, 2, "activation", "bias", r"\(1, 1\)", r"\(2, 1\)"),
    Limit("activation-result", lambda n: activated(reduce_op=nl.add, reduce_res=sb(2, n), reduce_cmd=cmd.reduce), 2, 1,
          "activation", "reduce_res", r"\(2, 2\)", r"\(2, 1\)"),
    Limit("activation-count", lambda n: nisa.activation(sb(2, n), nl.copy, sb(2, 2)), 3, 2, "activation", "data", 2, 3),
    Limit("activation-reduce-op-2", lambda op: nisa.activation_reduce(sb(1, 1), nl.copy, sb(1, 1), op, sb(1, 1)), nl.minimum,
          nl.add, "activation_reduce", "reduce_op", "min", "nl.add"),
    Limit("activate2", lambda op: activated2(op), nl.multiply, nl.multiply, "activate2", "dst", "trn2", "v4", TRN2, TRN3),
    Limit("activate2-pair", lambda op: activated2(nl.add, op), nl.multiply, nl.bypass, "activate2", "op0, op1",
          "'add', 'multiply'", "bypass", TRN3),
    Limit("exponential", lambda n: nisa.exponential(sb(1, n), sb(1, n)), 1, 1, "exponential", "dst", "trn2", "v4", TRN2, TRN3),
    # Selection: B13
    Limit("predicate-type", lambda d: predicated(d), nl.int8, nl.uint32, "tensor_copy_predicated", "predicate", "int8",
          "uint8"),
    Limit("predicate-float", lambda d: predicated(d), nl.float32, nl.uint16, "tensor_copy_predicated", "predicate", "float32",
          "uint8"),
    Limit("predicated-type", lambda d: predicated(kinds=(nl.float32, d)), nl.bfloat16, nl.float32, "tensor_copy_predicated",
          "src", "bfloat16", "float32"),
    Limit("predicated-psum", lambda b: predicated(where=(nl.psum, b)), nl.psum, nl.sbuf, "tensor_copy_predicated", "predicate",
          "psum", "sbuf"),
    Limit("predicated-count", lambda n: predicated(count=n), 5, 4, "tensor_copy_predicated", "predicate", 5, 4),
    Limit("select-predicate", lambda d: selected(d), nl.uint32, nl.int16, "select_reduce", "predicate", "uint32", "uint16"),
    Limit("select-type", lambda d: selected(kind=d), nl.int32, nl.int16, "select_reduce", "on_true", "int32", "supported"),
    Limit("select-tfloat32", lambda d: selected(kind=d), nl.tfloat32, nl.float32, "select_reduce", "on_true", "tfloat32",
          "supported"),
    Limit("select-psum", lambda b: selected(where=(nl.psum, b)), nl.psum, nl.sbuf, "select_reduce", "predicate", "psum",
          "sbuf"),
    Limit("select-op", lambda op: selected(reduce_op=op), nl.add, nl.maximum, "select_reduce", "reduce_op", "add",
          "nl.maximum"),
    Limit("select-result", lambda d: selected(result=d), nl.int32, nl.bfloat16, "select_reduce", "reduce_res", "int32",
          "floating-point"),
    Limit("range-type", lambda d: ranged(kind=d), nl.int32, nl.bfloat16, "range_select", "on_true_tile", "int32",
          "floating-point"),
    Limit("range-bound", lambda d: ranged(bound=d), nl.bfloat16, nl.float32, "range_select", "bound0", "bfloat16", "float32"),
    Limit("range-false", lambda v: ranged(on_false_value=v), 0.0, -3.4028235e38, "range_select", "on_false_value", "0.0",
          r"3\.4028234663852886e\+38"),
    # Patterns: B14, B16
    Limit("iota-memory", lambda b: nisa.iota(at(b, 1, 4, dtype=nl.int32), [[1, 4]]), nl.psum, nl.sbuf, "iota", "dst", "psum",
          "sbuf"),
    Limit("iota-dims", lambda n: nisa.iota(typed(nl.int32, 1, 2**n), [[1, 2]] * n), 5, 4, "iota", "pattern", 5, 4),
    Limit("iota-count", lambda n: nisa.iota(typed(nl.int32, 1, 4), [[1, n]]), 5, 4, "iota", "pattern", 5, 4),
    Limit("affine-memory", lambda b: nisa.affine_select(sb(1, 4), [[1, 4]], 0, at(b, 1, 4), 0.0), nl.psum, nl.sbuf,
          "affine_select", "on_true_tile", "psum", "sbuf"),
    Limit("affine-count", lambda n: nisa.affine_select(sb(1, 4), [[1, n]], 0, sb(1, 4), 0.0), 5, 4, "affine_select", "pattern",
          5, 4),
    Limit("affine-op", lambda op: nisa.affine_select(sb(1, 4), [[1, 4]], 0, sb(1, 4), 0.0, op), nl.add, nl.less,
          "affine_select", "cmp_op", "add", "comparison"),
    Limit("shuffle-mask", lambda v: shuffled((v, *range(1, 32))), 32, 31, "nc_stream_shuffle", "shuffle_mask", 32, 31),
    Limit("shuffle-length", lambda n: shuffled(range(n)), 31, 32, "nc_stream_shuffle", "shuffle_mask", 30, 32),
    Limit("shuffle-type", lambda d: shuffled(kinds=(nl.float32, d)), nl.int32, nl.float32, "nc_stream_shuffle", "src", "int32",
          "float32"),
    Limit("shuffle-start", lambda p: shuffled(start=p), 16, 32, "nc_stream_shuffle", "dst", 16, r"\(0, 32, 64, 96\)"),
    Limit("gather-index-type", lambda d: nisa.nc_n_gather(sb(1, 1), sb(1, 4), index(1, d)), nl.int32, nl.uint32, "nc_n_gather",
          "indices", "int32", "uint32"),
    # Two cores: A6, B15
    Limit("barrier-alone", lambda _: barrier(), None, None, "core_barrier", "cores", 1, 2, BOTH, ()),
    Limit("barrier-cores", lambda c: barrier(c), (0, 2), (0, 1), "core_barrier", "cores", r"\(0, 2\)", r"\(0, 1\)", lnc=2),
    Limit("barrier-memory", lambda b: barrier(region=b), nl.hbm, nl.shared_hbm, "core_barrier", "data", "private_hbm",
          "shared_hbm", lnc=2),
    Limit("sendrecv-alone", lambda _: nisa.sendrecv(sb(1, 1), sb(1, 1), 0, 0, 0), None, None, "sendrecv", "cores", 1, 2, BOTH,
          ()),
    Limit("sendrecv-rank", lambda r: exchange(send=r), 2, None, "sendrecv", "send_to_rank", 2, "0 or 1", lnc=2),
    Limit("sendrecv-from", lambda r: exchange(receive=r), 2, None, "sendrecv", "recv_from_rank", 2, "0 or 1", lnc=2),
    Limit("sendrecv-memory", lambda b: exchange(region=b), nl.psum, nl.sbuf, "sendrecv", "src", "psum", "sbuf", lnc=2),
    Limit("sendrecv-shape", lambda s: exchange(dst=s), (2, 3), (2, 2), "sendrecv", "dst", r"\(2, 3\)", r"\(2, 2\)", lnc=2),
    *(
        Limit(
            f"sendrecv-gpsimd-{kind}",
            lambda n, k=kind: exchange(src=(2, n), dst=(2, n), kind=k, engine=nisa.dma_engine.gpsimd_dma),
            257,
            256,
            "sendrecv",
            "src",
            257 * size,
            256 * size,
            lnc=2,
        )
        for kind, size in ((nl.float32, 4), (nl.bfloat16, 2), (nl.uint8, 1))
    ),
    # Views: C3
    Limit("slice-end", lambda n: sb(1, 4)[:, 0:n], 5, 4, "NkiTensor", "key", "0:5", 4),
    Limit("slice-empty", lambda n: sb(1, 4)[:, n:2], 2, 1, "NkiTensor", "key", "2:2", "start < stop"),
    Limit("slice-step", lambda n: sb(1, 4)[:, 0:4:n], 0, 1, "NkiTensor", "key", "0:4:0", "step >= 1"),
    Limit("slice-method", lambda n: sb(1, 4).slice(1, 0, n), 5, 4, "NkiTensor.slice", "start, end, step", 5, 4),
    Limit("ds-end", lambda n: sb(1, 4)[:, nl.ds(2, n)], 3, 2, "NkiTensor", "key", "2:5", 4),
    Limit("index", lambda n: sb(1, 4)[:, n], 4, 3, "NkiTensor", "key", 4, 4),
    Limit("index-negative", lambda n: sb(1, 4)[:, n], -5, -4, "NkiTensor", "key", -5, 4),
    Limit("select-partition", lambda d: sb(2, 4).select(d, 0), 0, 1, "NkiTensor.select", "dim", 0, "partition"),
    Limit("select-index", lambda n: sb(2, 4).select(1, n), 4, 3, "NkiTensor.select", "index", 4, 4),
    Limit("select-twice", two_dynamic, 2, 1, "NkiTensor", "index", 0, "one per view"),
    Limit("permute-partition", lambda d: sb(2, 3, 4).permute(d), (1, 0, 2), (0, 2, 1), "NkiTensor.permute", "dims",
          r"\(1, 0, 2\)", "start with 0"),
    Limit("broadcast-size", lambda d: sb(2, 3, 1).broadcast(d, 4), 1, 2, "NkiTensor.broadcast", "dim", 3, 1),
    Limit("broadcast-partition", lambda d: sb(1, 1).broadcast(d, 4), 0, 1, "NkiTensor.broadcast", "dim", 0, "partition"),
    Limit("expand-partition", lambda d: sb(2, 2).expand_dim(d), 0, 1, "NkiTensor.expand_dim", "dim", 0, "partition"),
    Limit("squeeze-size", lambda d: sb(2, 3, 1).squeeze_dim(d), 1, 2, "NkiTensor.squeeze_dim", "dim", 3, 1),
    Limit("squeeze-partition", lambda d: sb(1, 1, 1).squeeze_dim(d), 0, 1, "NkiTensor.squeeze_dim", "dim", 0, "partition"),
    Limit("reshape-dim-partition", lambda d: sb(4, 4).reshape_dim(d, (2, 2)), 0, 1, "NkiTensor.reshape_dim", "dim", 0,
          "partition"),
    Limit("reshape-dim-count", lambda n: sb(4, 4).reshape_dim(1, (2, n)), 3, 2, "NkiTensor.reshape_dim", "shape", r"\(2, 3\)",
          4),
    Limit("flatten-partition", lambda d: sb(4, 4, 4).flatten_dims(d, 2), 0, 1, "NkiTensor.flatten_dims", "start_dim", 0,
          "partition"),
    Limit("flatten-contiguous", lambda n: sb(1, 4, 4)[:, :, 0:n].flatten_dims(1, 2), 3, 4, "NkiTensor.flatten_dims",
          "start_dim, end_dim", r"\(1, 4, 3\)", "follow each other"),
    Limit("reshape-partition", lambda s: sb(4, 4).reshape(s), (2, 8), (4, 2, 2), "NkiTensor.reshape", "shape", r"\(2, 8\)", 4),
    Limit("reshape-count", lambda s: sb(4, 4).reshape(s), (4, 5), (4, 4, 1), "NkiTensor.reshape", "shape", r"\(4, 5\)", 16),
    Limit("reshape-layout", lambda n: sb(1, 4, 4)[:, :, 0:n].reshape((1, 4 * n)), 3, 4, "NkiTensor.reshape", "shape",
          r"\(1, 4, 3\)", "copy"),
    Limit("view-size", lambda n: typed(nl.uint8, 1, n).view(nl.float32), 6, 8, "NkiTensor.view", "dtype", r"\(1, 6\)", 4),
    Limit("view-contiguous", lambda s: sb(1, 8)[:, 0:8:s].view(nl.uint8), 2, 1, "NkiTensor.view", "dtype", 2, "contiguous"),
    Limit("ap-end", lambda n: sb(2, 4).ap([[4, 2], [1, n]]), 5, 4, "NkiTensor.ap", "pattern", r"\[1, 5\]",
          r"4 elements|the 8"),
    Limit("ap-hbm-end", lambda n: hbm(8).ap([[1, n]]), 9, 8, "NkiTensor.ap", "pattern", 8, 8),
    Limit("vector-select-memory", lambda b: at(b, 4, 2).vector_select(0, index(2)), nl.sbuf, nl.hbm, "NkiTensor.vector_select",
          "vector_offset", "sbuf", "HBM"),
    Limit("vector-select-dim", lambda d: hbm(4, 2).vector_select(d, index(2)), 1, 0, "NkiTensor.vector_select", "dim", 1, 0),
    Limit("indirect", lambda _: sb(32, 4).indirect(index(32)), None, None, "NkiTensor.indirect", "self", "sbuf", "v4", TRN2,
          TRN3),
    # Loops and programs: C4
    Limit("loop-step", looped, 0, 1, "fori_loop", "step", 0, "positive"),
    Limit("program-id-axis", lambda a: nl.program_id(a), 1, 0, "program_id", "axis", 1, 0),
    Limit("num-programs-axis", lambda a: nl.num_programs(a), 1, 0, "num_programs", "axes", 1, 0),
]
# fmt: on


def described(limit, target):
    return f"{limit.id}-{target}"


BROKEN = [pytest.param(row, target, id=described(row, target)) for row in LIMITS for target in row.targets]
LEGAL = [
    pytest.param(row, target, id=described(row, target))
    for row in LIMITS
    for target in (row.targets if row.legal_on is None else row.legal_on)
]


def names(message, what):
    """Whether the message holds a number as a word of its own, or matches a pattern."""
    pattern = rf"(?<![\w.]){what}(?![\w])" if isinstance(what, int) else what
    return re.search(pattern, message) is not None


def attempt(row, value, target):
    def kernel(_):
        row.kernel(value)

    run(kernel, EMPTY, target=target, lnc=row.lnc)


@pytest.mark.parametrize(("row", "target"), BROKEN)
def test_a_kernel_outside_a_limit_is_told_what_it_broke(row, target):
    with pytest.raises(nki.NkiValidationError) as caught:
        attempt(row, row.outside, target)
    message = str(caught.value)
    assert re.search(rf"\b{re.escape(row.instruction)}\b", message), message
    assert re.search(rf"`({row.operand})`", message), message
    assert names(message, row.value), message
    assert names(message, row.limit), message


@pytest.mark.parametrize(("row", "target"), LEGAL)
def test_its_neighbour_inside_the_limit_runs(row, target):
    attempt(row, row.inside, target)


def test_rows_have_names_of_their_own():
    ids = [described(row, target) for row in LIMITS for target in row.targets]
    doubled = sorted({name for name in ids if ids.count(name) > 1})
    assert doubled in ([], ["start-32-trn2", "start-32-trn3"])


# What is legal next to those limits


def test_dimensions_that_merge_count_as_one():
    def kernel(_):
        nisa.memset(nl.ndarray((1, 2, 2, 2, 2, 2, 2), nl.float32, buffer=nl.sbuf), 0.0)

    run(kernel, EMPTY)


def test_a_pattern_of_64k_elements_in_two_dimensions_is_legal():
    run(lambda _: nisa.memset(nl.ndarray((1, 256, 256), nl.uint8, buffer=nl.sbuf), 0), EMPTY)


def test_trn3_writes_several_banks_with_one_matmul():
    run(lambda _: matmul(n=513), EMPTY, target="trn3")
    run(lambda _: matmul(n=512, dst=ps(1, 1024)[:, 256:768]), EMPTY, target="trn3")


def test_dma_reaches_any_partition_which_engines_do_not():
    def kernel(a):
        tile = sb(128, 1)
        nisa.dma_copy(tile[5:6], a)

    run(kernel, EMPTY)


# Memory that is live at one time


def filled(shape, dtype=nl.float32, buffer=nl.sbuf, **options):
    tile = nl.ndarray(shape, dtype, buffer=buffer, **options)
    nisa.memset(tile, 0)
    return tile


@pytest.mark.parametrize(("target", "capacity"), [("trn2", 212992), ("trn3", 262144)])
@pytest.mark.parametrize("extra", [0, 1], ids=["fits", "too-much"])
def test_the_sum_of_live_sbuf_tensors_is_limited(target, capacity, extra):
    half = capacity // 8

    def kernel(_):
        one, two = filled((1, half)), filled((1, half + extra))
        return out(one), out(two)

    if not extra:
        run(kernel, EMPTY, target=target)
        return
    with pytest.raises(nki.NkiValidationError) as caught:
        run(kernel, EMPTY, target=target)
    message = str(caught.value)
    assert f"SBUF of {target}" in message
    assert f"{capacity + 4} B" in message
    assert str(capacity) in message


def test_sbuf_tensors_with_addresses_count_once_per_byte():
    def kernel(_):
        tiles = [filled((32, 20000), address=(32 * i, 0)) for i in range(4)]
        return tuple(out(tile) for tile in tiles)

    run(kernel, EMPTY)


def test_a_tensor_that_was_read_for_the_last_time_makes_room():
    def kernel(_):
        results = []
        for _i in range(3):
            results.append(out(filled((1, 50000))))
        return tuple(results)

    run(kernel, EMPTY)


@pytest.mark.parametrize("count", [8, 9])
@pytest.mark.parametrize("width", [512, 1], ids=["bank", "element"])
def test_eight_psum_banks_are_live_at_one_time(count, width):
    def kernel(_):
        tiles = [filled((1, width), buffer=nl.psum) for _ in range(count)]
        return tuple(out(tile) for tile in tiles)

    if count == 8:
        run(kernel, EMPTY)
        return
    with pytest.raises(nki.NkiValidationError) as caught:
        run(kernel, EMPTY)
    message = str(caught.value)
    assert "PSUM of trn2" in message
    assert "9 banks" in message
    assert "exceeds 8" in message


def test_psum_banks_are_free_again_after_the_last_read():
    run(lambda _: tuple(out(filled((1, 512), buffer=nl.psum)) for _ in range(20)), EMPTY)


def overlapping(first, second, reuse=False, shape=(32, 64), buffer=nl.sbuf):
    def kernel(_):
        one = filled(shape, buffer=buffer, address=first)
        early = (out(one),) if reuse else ()
        two = filled(shape, buffer=buffer, address=second)
        late = () if reuse else (out(one),)
        return (*early, *late, out(two))

    return kernel


# 64 float32 are 256 B
@pytest.mark.parametrize("second", [(0, 0), (0, 252)], ids=["same", "by-4-bytes"])
def test_live_tensors_must_not_share_bytes(second):
    with pytest.raises(nki.NkiValidationError) as caught:
        run(overlapping((0, 0), second), EMPTY)
    message = str(caught.value)
    assert "ndarray `address`" in message
    assert "(0, 0)" in message
    assert str(second) in message
    assert "overlaps" in message


@pytest.mark.parametrize("second", [(0, 256), (32, 0)], ids=["next-bytes", "next-partitions"])
def test_live_tensors_may_be_neighbours(second):
    run(overlapping((0, 0), second), EMPTY)
    run(overlapping(second, (0, 0)), EMPTY)


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum], ids=["sbuf", "psum"])
def test_tensors_may_share_an_address_one_after_the_other(buffer):
    run(overlapping((0, 0), (0, 0), reuse=True, buffer=buffer), EMPTY)


def test_live_psum_tensors_must_not_share_a_bank():
    with pytest.raises(nki.NkiValidationError, match=r"ndarray `address`.*overlaps"):
        run(overlapping((0, 2048), (0, 2048), buffer=nl.psum), EMPTY)


# Arguments and results


@pytest.mark.parametrize("region", ["sbuf", "psum", "hbm"])
def test_outputs_must_be_in_shared_hbm(region):
    def kernel(a):
        tile = nl.ndarray(a.shape, a.dtype, buffer=getattr(nl, region), name="result")
        if region == "hbm":
            nisa.dma_copy(tile, a)
        else:
            nisa.memset(tile, 0.0)
        return tile

    with pytest.raises(nki.NkiValidationError) as caught:
        run(kernel, EMPTY)
    message = str(caught.value)
    assert "`return`" in message
    assert "'result'" in message
    assert ("private_hbm" if region == "hbm" else region) in message
    assert "shared_hbm" in message


def test_an_output_in_shared_hbm_or_an_argument_may_be_returned():
    assert run(lambda a: (out(tile_of(a)), a), EMPTY)[1].tolist() == [[0]]


@pytest.mark.parametrize("kind", [np.float64, np.int64, np.uint64, np.complex64])
def test_arguments_of_types_that_nki_lacks_are_refused(kind):
    with pytest.raises(ValueError, match=re.escape(np.dtype(kind).name)) as caught:
        run(lambda a: None, np.zeros((1, 1), kind))
    assert "argument 0" in str(caught.value)


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.uint32, BF16, np.float16, np.bool_])
def test_arguments_of_32_bits_and_less_are_taken(kind):
    run(lambda a: None, np.zeros((1, 1), kind))


def test_ndarray_of_64_bits_is_refused():
    with pytest.raises(ValueError, match=r"ndarray `dtype`.*float64"):
        run(lambda _: sb(1, 1, dtype="float64"), EMPTY)


@pytest.mark.parametrize("value", [[1, 2], [np.zeros((1, 1), np.float32)]], ids=["numbers", "arrays"])
def test_lists_are_no_arguments_and_tuples_are(value):
    with pytest.raises((TypeError, nki.NkiValidationError), match=r"`argument 1`.*list"):
        run(lambda a, b: None, EMPTY, value)
    run(lambda a, b: None, EMPTY, tuple(value))


def test_a_list_by_keyword_is_no_argument():
    with pytest.raises((TypeError, nki.NkiValidationError), match=r"`sizes`.*list"):
        run(lambda a, sizes: None, EMPTY, sizes=[1])


def test_jit_takes_no_keyword_of_older_releases():
    with pytest.raises(TypeError, match="platform_target"):
        nki.jit(platform_target="trn2")


def test_a_logical_core_has_one_or_two_physical_ones():
    kernel = nki.jit(lambda a: None)
    with pytest.raises(ValueError, match="3"):
        kernel[3]
    with pytest.raises(ValueError, match="trn9"):
        nki.profile(kernel, target="trn9")


def test_instructions_outside_a_kernel_are_refused():
    with pytest.raises(RuntimeError, match="outside a kernel"):
        nl.ndarray((1, 1), nl.float32)


def test_registers_have_no_value_in_python():
    def kernel(how):
        register = nisa.register_alloc(3)
        return how(register)

    for how in (range, int, lambda r: [0][r]):
        with pytest.raises(TypeError, match="register"):
            run(lambda _, how=how: kernel(how), EMPTY)


def test_tensors_cannot_be_iterated_and_have_no_arithmetic():
    for how in (list, lambda t: t + t, lambda t: t * 2.0, lambda t: -t):
        with pytest.raises(TypeError):
            run(lambda _, how=how: how(sb(1, 1)), EMPTY)


def test_a_loop_on_the_device_is_not_allowed_in_no_reorder():
    def kernel(_, inside):
        if inside:
            with nl.no_reorder():
                nl.fori_loop(0, 1, lambda i: None)
        else:
            nl.fori_loop(0, 1, lambda i: None)

    with pytest.raises(nki.NkiValidationError, match=r"fori_loop .*no_reorder"):
        run(kernel, EMPTY, inside=True)
    run(kernel, EMPTY, inside=False)


def test_a_loop_without_a_register_is_refused():
    with pytest.raises(nki.NkiValidationError, match=r"while_loop `init` 3"):
        run(lambda _: nl.while_loop(3, lambda r: r), EMPTY)


def test_register_instructions_want_registers_and_single_elements():
    register_of = nisa.register_alloc
    cases = {
        r"register_load `dst`": lambda: nisa.register_load(1, index()),
        r"register_load `src`": lambda: nisa.register_load(register_of(), typed(nl.int32, 1, 2)),
        r"register_load `src` .*psum": lambda: nisa.register_load(register_of(), ps(1, 1, dtype=nl.int32)),
        r"register_store `src`": lambda: nisa.register_store(index(), 3),
        r"register_store `dst`": lambda: nisa.register_store(typed(nl.int32, 2, 1), register_of(3)),
        r"register_move `dst`": lambda: nisa.register_move(3, 4),
        r"register_move `src`": lambda: nisa.register_move(register_of(), 0.5),
        r"register_alloc `x`": lambda: register_of("3"),
    }
    for pattern, body in cases.items():
        with pytest.raises(nki.NkiValidationError, match=pattern):
            run(lambda _, body=body: body(), EMPTY)


def test_run_time_rows_out_of_bounds_name_the_row_and_the_bound():
    def kernel(a, i, rows):
        nisa.dma_copy(sb(1, 2), a.ap([[2, 1], [1, 2]], vector_offset=tile_of(i)))

    table = np.zeros((4, 2), np.float32)
    with pytest.raises(nki.NkiValidationError) as caught:
        run(kernel, table, i32([4]), rows=4)
    assert re.search(r"dma_copy `vector_offset`.*\b4\b.*\[0, 4\)", str(caught.value))
    run(kernel, table, i32([3]), rows=4)
