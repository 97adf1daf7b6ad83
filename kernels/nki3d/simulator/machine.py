# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The machine table: every number about a target that the simulator uses, with where it comes from.

Nothing else in this package holds a capacity, a clock or a cost. A row marked `assumed` has no public figure; it is a parameter to be set, not a
fact. To see what a figure does to an estimate, pass a changed machine as the target: `profile(kernel, target=trn2.replace(dma_fixed_ns=2000))`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

__all__ = ["MACHINES", "TABLE", "Machine", "Row", "machine_of"]


class Row(NamedTuple):
    """One figure: its name, its value on trn1, trn2 and trn3, its unit, and what it rests on."""

    name: str
    trn1: Any
    trn2: Any
    trn3: Any
    unit: str
    source: str


_ARCH = "architecture guides of NeuronCore-v2, v3 and v4"
_OLD = "cost notes of an earlier public stub of the instruction set (SDK 2.23 to 2.25)"
_BANDWIDTH = "DMA bandwidth guide"

TABLE: tuple[Row, ...] = (
    Row("nc_version", 2, 3, 4, "generation", "nki.isa.nc_version"),
    # Memories
    Row("partitions", 128, 128, 128, "partitions", _ARCH),
    Row("sbuf_physical_bytes", 192 * 1024, 224 * 1024, 256 * 1024, "bytes per partition", _ARCH),
    Row(
        "sbuf_usable_bytes",
        196608,
        212992,
        262144,
        "bytes per partition",
        "trn1: text of a compiler error in a public issue; trn2: 208 KiB in design notes of the public kernel library; "
        "trn3: the allocator example of the documentation",
    ),
    Row("sbuf_min_align", 32, 32, 32, "bytes", "assumed: the documentation names the attribute and gives no value"),
    Row("psum_banks", 8, 8, 8, "banks", _ARCH),
    Row("psum_bank_bytes", 2048, 2048, 2048, "bytes per partition", _ARCH),
    Row("psum_min_align", 4, 4, 4, "bytes", "assumed: accumulation is per element of 4 bytes"),
    # Access patterns and operand sizes
    Row("free_dims", 4, 4, 4, "dimensions", "access pattern guide; one partition and four free dimensions"),
    Row("dim_count", 65535, 65535, 65535, "elements", "architecture guide of v2: sizes are uint16"),
    Row("dim_stride", 32767, 32767, 32767, "elements", "architecture guide of v2: strides are int16"),
    Row(
        "sbuf_elements",
        65536,
        65536,
        65536,
        "elements per partition",
        "architecture guide of v2: Vector and Scalar operands in SBUF",
    ),
    Row(
        "psum_elements",
        4096,
        4096,
        4096,
        "elements per partition",
        "architecture guide of v2: Vector and Scalar operands in PSUM",
    ),
    Row("stationary_columns", 128, 128, 128, "elements", "nki.isa.nc_matmul"),
    Row("moving_float32", 512, 512, 4096, "elements", "nki.isa.nc_matmul, `dst` in float32"),
    Row("moving_bfloat16", 512, 512, 8192, "elements", "nki.isa.nc_matmul, `dst` in bfloat16 (16-bit transposes before trn3)"),
    Row("bn_stats_elements", 512, 512, 512, "elements per partition", "nki.isa.bn_stats"),
    Row("smallest_tile", 64, 32, 32, "rows or columns", "nki.isa.nc_matmul, tiling mode"),
    # Clocks
    Row("tensor_ghz", 2.8, 2.4, 2.4, "GHz", _ARCH),
    Row("vector_ghz", 1.12, 0.96, 1.2, "GHz", _ARCH),
    Row("scalar_ghz", 1.4, 1.2, 1.2, "GHz", _ARCH),
    Row("gpsimd_ghz", 1.4, 1.2, 1.2, "GHz", _ARCH),
    # Cycles. N is the number of elements per partition.
    Row("issue_cycles", 64, 64, 64, "cycles", f"{_OLD}: no instruction is shorter than its issue interval"),
    Row("float32_matmul_factor", 4, 4, 4, "times", f"{_OLD}, and the architecture guide of v2"),
    Row("float32_transpose_factor", 1, 1, 1, "times", f"{_OLD}: the cost of nc_transpose names no data type"),
    Row(
        "vector_fast_factor",
        1,
        4,
        4,
        "times",
        "architecture guide of v3: 16-bit copies in SBUF, innermost dimension contiguous",
    ),
    Row(
        "vector_medium_factor",
        1,
        2,
        2,
        "times",
        "architecture guide of v3: 16-bit copies with stride or one side in PSUM; tensor_tensor",
    ),
    Row("scalar_fast_factor", 1, 1, 2, "times", "architecture guide of v4: tensor_copy and tensor_scalar of 16-bit data"),
    Row("two_input_factor", 2, 2, 2, "times", f"{_OLD}: two operands in SBUF, not both 16-bit: 2N"),
    Row("accumulator_read_cycles", 64, 64, 64, "cycles", f"{_OLD}: reading the accumulators into `reduce_res`"),
    Row("reciprocal_factor", 8, 8, 8, "times", "operator page of the API: Vector needs 8N"),
    Row("exponential_rate", 1, 1, 4, "times", "nki.isa.exponential: four times Scalar's rate"),
    Row("gpsimd_rsqrt_factor", 4, 4, 4, "times", "operator page of the API: a quarter of Scalar's throughput"),
    Row("gpsimd_pattern_cycles", 150, 150, 150, "cycles", f"{_OLD}: iota and affine_select need 150 + N"),
    Row("bn_aggr_factor", 13 / 3, 13 / 3, 13 / 3, "times", _OLD),
    Row("scan_factor", 2, 2, 2, "times", f"{_OLD}: tensor_tensor_scan"),
    Row("memset_factor", 1, 1, 1, "times", "assumed: max(64, N) as for a copy in 32 bits"),
    Row("select_factor", 1, 1, 1, "times", "assumed: select_reduce as range_select, max(64, N)"),
    Row("partition_reduce_factor", 1, 1, 1, "times", "assumed: tensor_partition_reduce N cycles of GpSimd"),
    Row("gather_factor", 1, 1, 1, "times", "assumed: nc_n_gather N cycles of GpSimd"),
    Row("search_factor", 1, 1, 1, "times", "assumed: max8, nc_find_index8, nc_match_replace8, nonzero_with_count max(64, N)"),
    Row("barrier_cycles", 64, 64, 64, "cycles", "assumed: core_barrier, without the wait"),
    # DMA
    Row("dma_engines", 16, 16, 16, "engines per core", _BANDWIDTH),
    Row("dma_engine_bytes_per_ns", 17.0, 23.0, 33.0, "bytes per ns", _BANDWIDTH),
    Row("dma_partitions_per_engine", 8, 8, 8, "partitions", "architecture guide of v2: one engine serves 8 partitions"),
    Row("dma_fixed_ns", 1300.0, 1300.0, 1300.0, "ns per DMA", f"{_BANDWIDTH}: semaphore to start"),
    Row("dma_queues", 16, 16, 16, "queues", "DMA overview; fixed costs of DMAs on different queues overlap"),
    Row(
        "dma_transpose_hbm_rate",
        0.9,
        0.9,
        0.9,
        "share of the rate",
        "architecture guide of v3: dma_transpose from HBM, at best",
    ),
    Row("dma_transpose_sbuf_rate", 0.5, 0.5, 0.5, "share of the rate", "architecture guide of v3: dma_transpose from SBUF"),
    Row(
        "dma_descriptor_ns",
        16.0,
        16.0,
        16.0,
        "ns per descriptor",
        "assumed: fits the guide's curve (2 KiB near the peak, 256 B at 40%)",
    ),
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """One target; each attribute is a row of `TABLE`.

    Example:
        >>> from nki3d.simulator import MACHINES
        >>> MACHINES["trn2"].sbuf_usable_bytes
        212992
    """

    name: str
    nc_version: int
    partitions: int
    sbuf_physical_bytes: int
    sbuf_usable_bytes: int
    sbuf_min_align: int
    psum_banks: int
    psum_bank_bytes: int
    psum_min_align: int
    free_dims: int
    dim_count: int
    dim_stride: int
    sbuf_elements: int
    psum_elements: int
    stationary_columns: int
    moving_float32: int
    moving_bfloat16: int
    bn_stats_elements: int
    smallest_tile: int
    tensor_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    issue_cycles: int
    float32_matmul_factor: float
    float32_transpose_factor: float
    vector_fast_factor: float
    vector_medium_factor: float
    scalar_fast_factor: float
    two_input_factor: float
    accumulator_read_cycles: int
    reciprocal_factor: float
    exponential_rate: float
    gpsimd_rsqrt_factor: float
    gpsimd_pattern_cycles: int
    bn_aggr_factor: float
    scan_factor: float
    memset_factor: float
    select_factor: float
    partition_reduce_factor: float
    gather_factor: float
    search_factor: float
    barrier_cycles: int
    dma_engines: int
    dma_engine_bytes_per_ns: float
    dma_partitions_per_engine: int
    dma_fixed_ns: float
    dma_queues: int
    dma_transpose_hbm_rate: float
    dma_transpose_sbuf_rate: float
    dma_descriptor_ns: float

    @property
    def psum_bytes(self) -> int:
        """PSUM bytes per partition."""
        return self.psum_banks * self.psum_bank_bytes

    def replace(self, **figures: Any) -> Machine:
        """The same machine with other figures."""
        return dataclasses.replace(self, **figures)

    def ghz(self, engine: str) -> float:
        """The clock of an engine: "tensor", "vector", "scalar" or "gpsimd"."""
        clock: float = getattr(self, f"{engine}_ghz")
        return clock


MACHINES: dict[str, Machine] = {
    target: Machine(name=target, **{row.name: getattr(row, target) for row in TABLE}) for target in ("trn1", "trn2", "trn3")
}

# The spellings of NEURON_PLATFORM_TARGET_OVERRIDE.
_ALIASES = {"trn1": "trn1", "inf2": "trn1", "gen2": "trn1", "trn2": "trn2", "gen3": "trn2", "trn3": "trn3", "gen4": "trn3"}


def machine_of(target: str | Machine | None = None) -> Machine:
    """The machine of a target's name; without one, of `NEURON_PLATFORM_TARGET_OVERRIDE`, else trn2.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> from nki3d.simulator.machine import machine_of
        >>> machine_of("gen4").name
        'trn3'
    """
    if isinstance(target, Machine):
        return target
    name = target or os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn2"
    if name not in _ALIASES:
        raise ValueError(f"`target` is {name!r}, which is no machine. Choose one of {', '.join(_ALIASES)}.")
    return MACHINES[_ALIASES[name]]
