# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""nki.isa: the instructions. Each checks its operands, computes, and adds its cost to the core that runs the kernel."""

from __future__ import annotations

from typing import Any

from ..errors import NkiValidationError
from ..objects import NkiInstruction, VirtualRegister
from ._activation import activate2, activation, activation_reduce
from ._cores import (
    core_barrier,
    get_nc_sub_version,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from ._dma import dma_compute, dma_copy, dma_transpose
from ._elementwise import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from ._enums import dge_mode, dma_engine, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from ._matmul import nc_matmul, nc_transpose
from ._pattern import (
    affine_select,
    iota,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nc_stream_shuffle,
    nonzero_with_count,
)
from ._reduce import (
    bn_aggr,
    bn_stats,
    exponential,
    range_select,
    select_reduce,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)

# the deprecated spellings of the engines
tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]


def __getattr__(name: str) -> Any:
    """Instructions of NKI 0.6 that this simulator does not have raise when they are called."""
    from ..missing import missing

    return missing("nki.isa", "nisa", name)
