# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The network of `model.py` in Flax Linen, with Flax's own convolutions and pooling: the reference for speed and values."""

import jax.numpy as jnp
from flax import linen as nn
from jax import Array


class Block(nn.Module):
    """Twice a convolution, a layer norm over the channels and a ReLU.

    Attributes:
        c_out: channels of the output.
    """

    c_out: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[B, D, H, W, C] -> [B, D, H, W, c_out]."""
        for i in ("1", "2"):
            x = nn.Conv(self.c_out, (3, 3, 3), name=f"conv{i}")(x)
            x = nn.relu(nn.LayerNorm(name=f"norm{i}")(x))
        return x


class UNet(nn.Module):
    """`model.UNet` with the same names for the same parameters.

    Attributes:
        classes: labels to tell apart.
        width: channels at full resolution.
    """

    classes: int = 3
    width: int = 8

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Logits [B, D, H, W, classes] for images [B, D, H, W, 1] whose sizes are multiples of 4."""
        w = self.width
        fine = Block(w, name="down1")(5 * (x - 0.7))
        middle = Block(2 * w, name="down2")(nn.avg_pool(fine, (2, 2, 2), strides=(2, 2, 2)))
        coarse = Block(4 * w, name="bottom")(nn.avg_pool(middle, (2, 2, 2), strides=(2, 2, 2)))
        up = nn.ConvTranspose(2 * w, (2, 2, 2), strides=(2, 2, 2), name="up2")(coarse)
        middle = Block(2 * w, name="join2")(jnp.concatenate([up, middle], axis=-1))
        up = nn.ConvTranspose(w, (2, 2, 2), strides=(2, 2, 2), name="up1")(middle)
        fine = Block(w, name="join1")(jnp.concatenate([up, fine], axis=-1))
        return nn.Conv(self.classes, (1, 1, 1), name="head")(fine)
