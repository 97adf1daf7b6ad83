# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The enumerations of nki.isa, with the values of the public API."""

from __future__ import annotations

from enum import Enum

__all__ = ["dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd"]


class engine(Enum):
    """The engines of a core."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What an instruction does with the accumulators of its engine."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who makes the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a DMA does with a dynamic address outside the tensor."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Performance modes of nc_matmul."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    """The generations of the core."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Which DMA engine moves the data of sendrecv."""

    dma = 1
    gpsimd_dma = 2
