# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The operations as loops over taps in jnp: slow, plain, and differentiable, vmappable and jittable by JAX alone.

`oracle.py` says which values are right; this says which transformed functions are right, since JAX's own rules for slices, pads
and einsum transform it. `test_transformations.py` compares its values with the oracle before it trusts it.
"""

import itertools

import jax.numpy as jnp
import numpy as np


def _reads(kernel, stride, dilation, out):
    for tap in itertools.product(*map(range, kernel)):
        window = (slice(k * d, k * d + (o - 1) * s + 1, s) for k, s, d, o in zip(tap, stride, dilation, out, strict=True))
        yield tap, (slice(None), slice(None), *window)


def conv3d(x, filters, bias=None, *, stride, padding, dilation=(1, 1, 1)):
    """NCDHW, DHWIO, six pads."""
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    x = jnp.pad(x, [(0, 0), (0, 0), *pairs])
    kernel = filters.shape[:3]
    out = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    y = sum(jnp.einsum("bidhw,io->bodhw", x[w], filters[k]) for k, w in _reads(kernel, stride, dilation, out))
    return y if bias is None else y + bias[None, :, None, None, None]


def conv3d_transpose(x, filters, bias=None, *, stride, padding, dilation=(1, 1, 1), output_padding=(0, 0, 0)):
    """Flipped filters: tap k scatters through filters[K - 1 - k]."""
    kernel, n = filters.shape[:3], x.shape[2:]
    whole = [(n[a] - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1 + output_padding[a] for a in range(3)]
    y = jnp.zeros((x.shape[0], filters.shape[4], *whole), x.dtype)
    unflipped = filters[::-1, ::-1, ::-1]
    for k, window in _reads(kernel, stride, dilation, n):
        y = y.at[window].add(jnp.einsum("bidhw,io->bodhw", x, unflipped[k]))
    y = y[(slice(None), slice(None), *(slice(p, m - p) for p, m in zip(padding, whole, strict=True)))]
    return y if bias is None else y + bias[None, :, None, None, None]


def conv3d_bwd(dy, x, filters, *, stride, padding, dilation=(1, 1, 1)):
    """(dx, dw, db)."""
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    padded = jnp.pad(x, [(0, 0), (0, 0), *pairs])
    dx, dw = jnp.zeros_like(padded), jnp.zeros_like(filters)
    for k, window in _reads(filters.shape[:3], stride, dilation, dy.shape[2:]):
        dx = dx.at[window].add(jnp.einsum("bodhw,io->bidhw", dy, filters[k]))
        dw = dw.at[k].set(jnp.einsum("bidhw,bodhw->io", padded[window], dy))
    inside = (slice(f, f + n) for (f, _), n in zip(pairs, x.shape[2:], strict=True))
    return dx[(slice(None), slice(None), *inside)], dw, dy.sum((0, 2, 3, 4))


def avg_pooling_3d(x, *, kernel_size, stride, padding):
    """Padding counts in the divisor."""
    x = jnp.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    out = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], kernel_size, stride, strict=True)]
    return sum(x[w] for _, w in _reads(kernel_size, stride, (1, 1, 1), out)) / float(np.prod(kernel_size))


def avg_pooling_3d_backward(dy, *, size, kernel_size, stride, padding):
    """The gradient of the above."""
    extent = [
        max(n + 2 * p, (o - 1) * s + k) for n, p, o, s, k in zip(size, padding, dy.shape[2:], stride, kernel_size, strict=True)
    ]
    dx = jnp.zeros((*dy.shape[:2], *extent), dy.dtype)
    for _, window in _reads(kernel_size, stride, (1, 1, 1), dy.shape[2:]):
        dx = dx.at[window].add(dy / float(np.prod(kernel_size)))
    return dx[(slice(None), slice(None), *(slice(p, p + n) for p, n in zip(padding, size, strict=True)))]
