# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A small residual 3-D U-Net in PyTorch, of the kind that medical imaging frameworks such as MONAI build."""

import torch
from torch import nn


def norm_and_slope(channels: int) -> nn.Sequential:
    """An instance norm without parameters, and a PReLU with one slope."""
    return nn.Sequential(nn.InstanceNorm3d(channels), nn.PReLU())


class ResidualUnit(nn.Module):
    """Two convolutions with norm and PReLU, beside a convolution that brings the input to their shape."""

    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.first = nn.Conv3d(c_in, c_out, 3, stride=stride, padding=1)
        self.first_act = norm_and_slope(c_out)
        self.second = nn.Conv3d(c_out, c_out, 3, padding=1)
        self.second_act = norm_and_slope(c_out)
        self.shortcut = nn.Conv3d(c_in, c_out, 3, stride=stride, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, c_in, D, H, W] -> [B, c_out, D / stride, H / stride, W / stride]."""
        y = self.first_act(self.first(x))
        return self.second_act(self.second(y)) + self.shortcut(x)


class UNet(nn.Module):
    """Strided residual units on the way down, transposed convolutions and skip connections on the way up."""

    def __init__(self, c_in: int = 1, classes: int = 3, widths: tuple[int, ...] = (8, 16, 32)):
        super().__init__()
        fine, middle, coarse = widths
        self.pool = nn.AvgPool3d(3, stride=1, padding=1, count_include_pad=False)
        self.down1 = ResidualUnit(c_in, fine, stride=2)
        self.down2 = ResidualUnit(fine, middle, stride=2)
        self.bottom = ResidualUnit(middle, coarse, stride=1)
        self.up2 = nn.ConvTranspose3d(coarse + middle, fine, 3, stride=2, padding=1, output_padding=1)
        self.up2_act = norm_and_slope(fine)
        self.up1 = nn.ConvTranspose3d(fine + fine, classes, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Conv3d(classes, classes, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes, D, H, W] for images [B, c_in, D, H, W] whose sizes are multiples of 4."""
        fine = self.down1(self.pool(x))
        middle = self.down2(fine)
        y = torch.cat([middle, self.bottom(middle)], dim=1)
        y = torch.cat([fine, self.up2_act(self.up2(y))], dim=1)
        return self.head(self.up1(y))
