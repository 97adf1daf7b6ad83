# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The shapes that benchmarks run: layers of medical U-Nets, voxel GANs, video autoencoders and stems."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """One layer: [B, C_in -> C_out, D x H x W, K, stride, padding], the same on all axes except for `size` and `padding`."""

    operation: str  # "conv3d", "conv3d_transpose" or "avg_pooling_3d"
    batch: int
    c_in: int
    c_out: int
    size: tuple[int, int, int]
    kernel: int
    stride: int
    padding: tuple[int, int, int, int, int, int]  # front and back of D, H, W

    def __str__(self) -> str:
        name = {"conv3d": "conv", "conv3d_transpose": "convT", "avg_pooling_3d": "pool"}[self.operation]
        channels = f"{self.c_in}" if self.operation == "avg_pooling_3d" else f"{self.c_in}->{self.c_out}"
        size = "x".join(map(str, self.size)) if len(set(self.size)) > 1 else f"{self.size[0]}^3"
        pads = self.padding[0] if len(set(self.padding)) == 1 else ",".join(map(str, self.padding))
        return f"{name} {self.batch}, {channels}, {size}, k{self.kernel} s{self.stride} p{pads}"

    @property
    def zero_inserting(self) -> bool:
        """Whether plain lax inserts zeros in some direction: strided and transposed convolutions."""
        return self.operation == "conv3d_transpose" or (self.operation == "conv3d" and self.stride > 1)

    @property
    def directions(self) -> tuple[str, ...]:
        """What is measured: pooling has no filters."""
        return ("forward", "dx") if self.operation == "avg_pooling_3d" else ("forward", "dx", "dw")


def _layer(operation, batch, c_in, c_out, size, kernel, stride=1, padding=0) -> Workload:
    size = (size,) * 3 if isinstance(size, int) else size
    padding = (padding,) * 6 if isinstance(padding, int) else padding
    return Workload(operation, batch, c_in, c_out, size, kernel, stride, padding)


WORKLOADS = (
    _layer("conv3d_transpose", 1, 256, 128, 8, kernel=2, stride=2),
    _layer("conv3d_transpose", 1, 64, 32, (16, 32, 32), kernel=2, stride=2),
    _layer("conv3d_transpose", 1, 32, 32, 16, kernel=4, stride=2, padding=1),
    _layer("conv3d_transpose", 2, 128, 64, 8, kernel=3, stride=2, padding=1),
    _layer("conv3d_transpose", 1, 16, 1, 32, kernel=4, stride=2, padding=1),
    _layer("conv3d_transpose", 1, 64, 64, 16, kernel=3, stride=2, padding=1),
    _layer("conv3d", 1, 32, 32, (16, 32, 32), kernel=3, padding=1),
    _layer("conv3d", 2, 64, 64, (8, 16, 16), kernel=3, padding=1),
    _layer("conv3d", 1, 1, 16, (32, 48, 48), kernel=3, padding=1),
    _layer("conv3d", 1, 16, 32, 24, kernel=3, stride=2, padding=1),
    _layer("conv3d", 1, 3, 32, 24, kernel=7, stride=2, padding=3),
    _layer("conv3d", 1, 128, 64, 16, kernel=1),
    _layer("conv3d", 1, 32, 32, (12, 24, 24), kernel=3, padding=(2, 0, 1, 1, 1, 1)),
    _layer("avg_pooling_3d", 1, 32, 32, (32, 64, 64), kernel=2, stride=2),
    _layer("avg_pooling_3d", 1, 32, 32, (32, 64, 64), kernel=3, stride=2, padding=1),
    _layer("avg_pooling_3d", 1, 32, 32, (32, 64, 64), kernel=3, padding=1),
)
