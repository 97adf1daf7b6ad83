# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""A 3-D U-Net of the layers in `jax_nki3d.nn.flax_nnx`."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_nki3d.nn.flax_nnx import Conv3D, ConvTranspose3D, avg_pool3d


class Block(nnx.Module):
    """Twice a convolution, a layer norm over the channels and a ReLU.

    The norm looks at one voxel at a time, so that a network trained on patches is the same function on a whole volume.

    Args:
        c_in: channels of the input.
        c_out: channels of the output.
        rngs: random streams.
    """

    def __init__(self, c_in: int, c_out: int, *, rngs: nnx.Rngs):
        self.conv1 = Conv3D(c_in, c_out, (3, 3, 3), rngs=rngs)
        self.norm1 = nnx.LayerNorm(c_out, rngs=rngs)
        self.conv2 = Conv3D(c_out, c_out, (3, 3, 3), rngs=rngs)
        self.norm2 = nnx.LayerNorm(c_out, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """[B, D, H, W, c_in] -> [B, D, H, W, c_out]."""
        x = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(x)))


class UNet(nnx.Module):
    """Three resolutions: average pooling on the way down, transposed convolutions and skip connections on the way up.

    Args:
        classes: labels to tell apart.
        width: channels at full resolution; they double at each pooling.
        rngs: random streams.
    """

    def __init__(self, classes: int = 3, width: int = 8, *, rngs: nnx.Rngs):
        self.down1 = Block(1, width, rngs=rngs)
        self.down2 = Block(width, 2 * width, rngs=rngs)
        self.bottom = Block(2 * width, 4 * width, rngs=rngs)
        self.up2 = ConvTranspose3D(4 * width, 2 * width, (2, 2, 2), strides=2, rngs=rngs)
        self.join2 = Block(4 * width, 2 * width, rngs=rngs)
        self.up1 = ConvTranspose3D(2 * width, width, (2, 2, 2), strides=2, rngs=rngs)
        self.join1 = Block(2 * width, width, rngs=rngs)
        self.head = Conv3D(width, classes, (1, 1, 1), rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Logits [B, D, H, W, classes] for images [B, D, H, W, 1] whose sizes are multiples of 4."""
        fine = self.down1(5 * (x - 0.7))  # around 0: the tissues lie between 0.5 and 0.9
        middle = self.down2(avg_pool3d(fine, (2, 2, 2), strides=(2, 2, 2)))
        coarse = self.bottom(avg_pool3d(middle, (2, 2, 2), strides=(2, 2, 2)))
        middle = self.join2(jnp.concatenate([self.up2(coarse), middle], axis=-1))
        fine = self.join1(jnp.concatenate([self.up1(middle), fine], axis=-1))
        return self.head(fine)
