# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The U-Net of `torch_model.py` as a function of JAX, with the layers that `from_torch` makes of its modules."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jax_nki3d.nn.torch import from_torch


def convert(model: Any) -> dict[str, Any]:
    """{name: layer, or the slope of a PReLU} for the modules of a `torch_model.UNet`."""
    parameters: dict[str, Any] = {}
    for name, module in model.named_modules():
        match type(module).__name__:
            case "Conv3d" | "ConvTranspose3d" | "AvgPool3d":
                parameters[name] = from_torch(module)
            case "PReLU":
                parameters[name.removesuffix(".1")] = jnp.asarray(module.weight.detach().cpu().numpy().copy())
    return parameters


def unet(p: dict[str, Any], x: Array) -> Array:
    """Logits [B, classes, D, H, W] for images [B, c_in, D, H, W] whose sizes are multiples of 4."""
    fine = _residual_unit(p, "down1", p["pool"](x))
    middle = _residual_unit(p, "down2", fine)
    y = jnp.concatenate([middle, _residual_unit(p, "bottom", middle)], axis=1)
    y = jnp.concatenate([fine, _norm_and_slope(p["up2_act"], p["up2"](y))], axis=1)
    return p["head"](p["up1"](y))


def _residual_unit(p: dict[str, Any], name: str, x: Array) -> Array:
    y = _norm_and_slope(p[f"{name}.first_act"], p[f"{name}.first"](x))
    return _norm_and_slope(p[f"{name}.second_act"], p[f"{name}.second"](y)) + p[f"{name}.shortcut"](x)


def _norm_and_slope(slope: Array, x: Array) -> Array:
    """Instance norm with torch's epsilon, and PReLU."""
    mean = x.mean((2, 3, 4), keepdims=True)
    variance = x.var((2, 3, 4), keepdims=True)
    y = (x - mean) * lax.rsqrt(variance + 1e-5)
    return jnp.where(y > 0, y, slope.reshape(1, -1, 1, 1, 1) * y)
