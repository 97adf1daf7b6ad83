# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers from PyTorch: `from_torch` makes one of a `torch.nn` module or of entries of a state dict.

torch itself is not imported: its modules and tensors are read by their attributes. The result computes on its own, in torch's
layout [B, C, D, H, W], and knows its arguments and parameters in the terms of each library that has layers in `jax_nki3d.nn`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from .._activation import ActFnType
from .._arguments import as_triple, check_array, check_bool
from .._geometry import Triple, effective_kernel
from ..avg_pooling_3d import avg_pooling_3d
from ..conv3d import conv3d
from ..conv3d_transpose import conv3d_transpose
from ._arguments import Pairs, as_batch

__all__ = ["AvgPool3d", "Conv3d", "ConvTranspose3d", "from_torch"]

LIBRARIES = ("flax_nnx", "flax_linen", "haiku", "equinox")


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one truth value
class Conv3d:
    """A `torch.nn.Conv3d`: a function of [B, C_in, D, H, W] or [C_in, D, H, W], and a pytree of its parameters.

    Attributes:
        filters: [K_d, K_h, K_w, C_in, C_out], as `jax_nki3d.conv3d` takes them.
        bias: [C_out] or None.
        stride: (D, H, W).
        padding: three pairs (low, high).
        dilation: (D, H, W).

    Example:
        >>> import jax, numpy as np
        >>> from jax_nki3d.nn.torch import from_torch
        >>> entries = {"weight": np.ones((4, 3, 3, 3, 3), np.float32), "bias": np.zeros(4, np.float32)}
        >>> layer = from_torch(entries, kind="Conv3d", stride=2, padding=1)
        >>> layer(np.ones((2, 3, 8, 8, 8), np.float32)).shape
        (2, 4, 4, 4, 4)
        >>> layer.settings("flax_nnx")["strides"]
        (2, 2, 2)
    """

    filters: Array
    bias: Array | None
    stride: Triple
    padding: Pairs
    dilation: Triple

    def __call__(self, x: Array, *, activation_fn: ActFnType | str | None = None) -> Array:
        """What the torch module computes, and an activation within the same operation where one is given."""
        x, batch = as_batch("Conv3d", x, "NCDHW", self.filters.shape[3], most=1)
        y = conv3d(x, self.filters, self.bias, self.stride, self.padding, self.dilation, activation_fn)
        return y.reshape(batch + y.shape[1:])

    def settings(self, library: str) -> dict[str, Any]:
        """The arguments of the layer of that name in `jax_nki3d.nn.<library>`: "flax_nnx", "flax_linen", "haiku" or "equinox"."""
        *kernel, c_in, c_out = self.filters.shape
        return _convolution_settings("Conv3d", library, tuple(kernel), c_in, c_out, self, self.padding, self.dilation)

    def parameters(self, library: str) -> dict[str, Array]:
        """The parameters of that layer, under its names and in its shapes."""
        return _parameters("Conv3d", library, self.filters, self.bias, haiku=self.filters)


@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no one truth value
class ConvTranspose3d:
    """A `torch.nn.ConvTranspose3d`: a function of [B, C_in, D, H, W] or [C_in, D, H, W], and a pytree of its parameters.

    Attributes:
        filters: [K_d, K_h, K_w, C_in, C_out], flipped, as `jax_nki3d.conv3d_transpose` takes them.
        bias: [C_out] or None.
        stride: (D, H, W).
        padding: (D, H, W), elements cropped from both ends.
        output_padding: (D, H, W), elements added behind.
        dilation: (D, H, W).

    Example:
        >>> import numpy as np
        >>> from jax_nki3d.nn.torch import from_torch
        >>> entries = {"up.weight": np.float32([1, 10, 100]).reshape(1, 1, 1, 1, 3)}  # [C_in, C_out, K_d, K_h, K_w]
        >>> up = from_torch(entries, kind="ConvTranspose3d", prefix="up.", stride=(1, 1, 2), padding=(0, 0, 1))
        >>> up(np.float32([1, 2, 3]).reshape(1, 1, 1, 1, 3)).ravel().tolist()
        [10.0, 102.0, 20.0, 203.0, 30.0]
    """

    filters: Array
    bias: Array | None
    stride: Triple
    padding: Triple
    output_padding: Triple
    dilation: Triple

    def __call__(self, x: Array, *, activation_fn: ActFnType | str | None = None) -> Array:
        """What the torch module computes, and an activation within the same operation where one is given."""
        x, batch = as_batch("ConvTranspose3d", x, "NCDHW", self.filters.shape[3], most=1)
        y = conv3d_transpose(
            x,
            self.filters,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            activation_fn,
            output_padding=self.output_padding,
        )
        return y.reshape(batch + y.shape[1:])

    def settings(self, library: str) -> dict[str, Any]:
        """The arguments of the layer of that name in `jax_nki3d.nn.<library>`: "flax_nnx", "flax_linen", "haiku" or "equinox"."""
        *kernel, c_in, c_out = self.filters.shape
        if library == "equinox":
            padding: Any = self.padding
        else:  # zeros around the input with its zeros between
            axes = zip(kernel, self.dilation, self.padding, self.output_padding, strict=True)
            padding = tuple((effective_kernel(k, d) - 1 - p, effective_kernel(k, d) - 1 - p + extra) for k, d, p, extra in axes)
        if library == "equinox" and any(extra >= s for extra, s in zip(self.output_padding, self.stride, strict=True)):
            raise NotImplementedError(
                f"ConvTranspose3d: `output_padding` is {self.output_padding}, but Equinox takes less than the stride, {self.stride}, alone. "
                "Call this object instead."
            )
        if library == "haiku" and self.dilation != (1, 1, 1):
            raise NotImplementedError(
                f"ConvTranspose3d: `dilation` is {self.dilation}, but Haiku's transposed convolution has none. Call this object instead."
            )
        settings = _convolution_settings(
            "ConvTranspose3d", library, tuple(kernel), c_in, c_out, self, padding, None if library == "haiku" else self.dilation
        )
        return settings | ({"output_padding": self.output_padding} if library == "equinox" else {})

    def parameters(self, library: str) -> dict[str, Array]:
        """The parameters of that layer, under its names and in its shapes."""
        return _parameters("ConvTranspose3d", library, self.filters, self.bias, haiku=self.filters.swapaxes(3, 4))


@dataclasses.dataclass(frozen=True)
class AvgPool3d:
    """A `torch.nn.AvgPool3d`: a function of [B, C, D, H, W] or [C, D, H, W].

    Attributes:
        kernel_size: (D, H, W).
        stride: (D, H, W).
        padding: (D, H, W).
        count_include_pad: whether padding counts in the divisor.

    Example:
        >>> import numpy as np
        >>> from jax_nki3d.nn.torch import from_torch
        >>> from_torch(kind="AvgPool3d", kernel_size=2)(np.ones((3, 4, 4, 4), np.float32)).shape
        (3, 2, 2, 2)
    """

    kernel_size: Triple
    stride: Triple
    padding: Triple
    count_include_pad: bool

    def __call__(self, x: Array) -> Array:
        """What the torch module computes."""
        x, batch = as_batch("AvgPool3d", x, "NCDHW", None, most=1)
        y = avg_pooling_3d(x, self.kernel_size, self.stride, self.padding, count_include_pad=self.count_include_pad)
        return y.reshape(batch + y.shape[1:])

    def settings(self, library: str) -> dict[str, Any]:
        """The arguments of the pooling in `jax_nki3d.nn.<library>`: "flax_nnx", "flax_linen", "haiku" or "equinox"."""
        _check_library("AvgPool3d", library)
        pads = tuple((p, p) for p in self.padding)
        padded = self.padding != (0, 0, 0)
        if library == "equinox":
            if padded and not self.count_include_pad:
                raise NotImplementedError(
                    "AvgPool3d: `count_include_pad` is False, but Equinox's pooling always counts padding. Call this object instead."
                )
            return {"kernel_size": self.kernel_size, "stride": self.stride, "padding": pads}
        if library == "haiku":
            if padded:
                raise NotImplementedError(
                    f"AvgPool3d: `padding` is {self.padding}, but Haiku's pooling has 'SAME' and 'VALID' alone. Call this object instead."
                )
            return {"window_shape": self.kernel_size, "strides": self.stride, "padding": "VALID"}
        return {
            "window_shape": self.kernel_size,
            "strides": self.stride,
            "padding": pads,
            "count_include_pad": self.count_include_pad,
        }


for _layer in (Conv3d, ConvTranspose3d, AvgPool3d):
    _fields = [field.name for field in dataclasses.fields(_layer)]
    _data = [name for name in _fields if name in ("filters", "bias")]
    jax.tree_util.register_dataclass(_layer, _data, [name for name in _fields if name not in _data])


def from_torch(
    source: Any = None, *, kind: str | None = None, prefix: str = "", **arguments: Any
) -> Conv3d | ConvTranspose3d | AvgPool3d:
    """A layer that computes what a 3-D convolution, transposed convolution or average pooling of PyTorch does.

    Args:
        source: a `torch.nn.Conv3d`, `torch.nn.ConvTranspose3d` or `torch.nn.AvgPool3d`, or one of a class derived from them with their
            `forward`. A weight under `torch.nn.utils.parametrizations` is read as the module gives it: in training, spectral norm takes a
            step then. Or a mapping with the entries `weight` and, if there is one, `bias`, as tensors or arrays: a state dict. It knows nothing of
            strides, so they are given here. None for a pooling made of `arguments` alone.
        kind: "Conv3d", "ConvTranspose3d" or "AvgPool3d"; for a mapping or None only.
        prefix: what stands in front of `weight` and `bias` in the mapping, such as "encoder.0.".
        arguments: arguments of the torch class, by name, with its defaults: `stride`, `padding`, `dilation`, `output_padding`,
            `kernel_size`, `count_include_pad`; for a mapping or None only.

    Returns:
        `Conv3d`, `ConvTranspose3d` or `AvgPool3d` of this module, in the dtype of the weight (float64 needs `jax.enable_x64`). Weights are permuted to
        [K_d, K_h, K_w, C_in, C_out], and flipped where the convolution is transposed.

    Raises:
        TypeError: a module of another class, or arguments that do not belong together.
        ValueError: an entry that is missing or has a wrong shape, or a number out of its domain.
        NotImplementedError: a `forward` of its own, or hooks, which may compute something else; `groups` other than 1, a `padding_mode` other than "zeros" that has something to fill, `ceil_mode`,
            `divisor_override`. The text names the attribute.

    Example:
        >>> import jax, numpy as np
        >>> from jax_nki3d.nn.torch import from_torch
        >>> entries = {"weight": np.ones((3, 2, 2, 2, 2), np.float32), "bias": np.ones(2, np.float32)}
        >>> up = from_torch(entries, kind="ConvTranspose3d", stride=2)
        >>> x = np.ones((1, 3, 4, 4, 4), np.float32)
        >>> up(x).shape
        (1, 2, 8, 8, 8)
        >>> gradients = jax.grad(lambda up: up(x).sum())(up)
        >>> gradients.bias.tolist()
        [512.0, 512.0]
    """
    if source is None or isinstance(source, Mapping):
        if kind not in _MAKERS:
            raise TypeError(
                f"from_torch: `kind` must be one of {', '.join(map(repr, _MAKERS))} unless `source` is a module, got {kind!r}. A state dict "
                "does not say which layer it belongs to."
            )
        defaults = _DEFAULTS[kind]
        unknown = [name for name in arguments if name not in defaults]
        if unknown:
            raise TypeError(
                f"from_torch: `{unknown[0]}` is not an argument of {kind} here; those are {', '.join(map(repr, defaults))}. The sizes of a "
                "kernel come from the weight."
            )
        given = defaults | arguments
        entries = {} if source is None else source
        weight, bias = entries.get(f"{prefix}weight"), entries.get(f"{prefix}bias")
        if kind != "AvgPool3d" and weight is None:
            found = ", ".join(map(repr, entries)) or "none"
            raise ValueError(
                f"from_torch: there is no entry {prefix + 'weight'!r} in `source`; entries: {found}. Pass the `prefix` of the layer; remove a "
                "parametrization (weight norm and others) first, or pass the module."
            )
        return _MAKERS[kind](weight, bias, given)
    if kind is not None or prefix or arguments:
        raise TypeError("from_torch: `kind`, `prefix` and arguments go with a mapping; a module has its own. Leave them out.")
    base = next((c for c in type(source).__mro__ if c.__module__.startswith("torch.nn.") and c.__name__ in _MAKERS), None)
    kind = None if base is None else base.__name__
    if kind is None:
        raise TypeError(
            f"from_torch: `source` must be a torch.nn module {', '.join(_MAKERS)}, or a mapping with its entries, got {type(source).__name__}. "
            "Convert the layers of a model one by one: {name: from_torch(m) for name, m in model.named_modules() if ...}."
        )
    _check_plain(source, base)
    given = {name: getattr(source, name) for name in _DEFAULTS[kind]}
    return _MAKERS[kind](getattr(source, "weight", None), getattr(source, "bias", None), given)


# what a torch module of each kind has; the order and the defaults are those of its constructor
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Conv3d": {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "padding_mode": "zeros"},
    "ConvTranspose3d": {
        "stride": 1,
        "padding": 0,
        "output_padding": 0,
        "groups": 1,
        "dilation": 1,
        "padding_mode": "zeros",
    },
    "AvgPool3d": {
        "kernel_size": None,
        "stride": None,
        "padding": 0,
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
    },
}


def _conv3d(weight: Any, bias: Any, given: Mapping[str, Any]) -> Conv3d:
    operation = "from_torch (Conv3d)"
    _refuse(operation, given, "groups", 1, "Split the channels, and convert one convolution for each group.")
    filters = _array(operation, "weight", weight, 5, "[C_out, C_in, K_d, K_h, K_w]").transpose(2, 3, 4, 1, 0)
    dilation = as_triple(operation, "dilation", given["dilation"], 1)
    stride = as_triple(operation, "stride", given["stride"], 1)
    padding = given["padding"]
    if isinstance(padding, str) and padding not in ("same", "valid"):
        raise ValueError(
            f"{operation}: `padding` must be ints, 'same' or 'valid', got {padding!r}. Pass one of these, as in torch."
        )
    if isinstance(padding, str) and padding == "same":
        if stride != (1, 1, 1):
            raise ValueError(f"{operation}: `padding` 'same' goes with a stride of 1, got {stride}. As in torch; pass numbers.")
        totals = [effective_kernel(k, d) - 1 for k, d in zip(filters.shape, dilation, strict=False)]
        d, h, w = ((total // 2, total - total // 2) for total in totals)
    else:
        d, h, w = ((p, p) for p in as_triple(operation, "padding", 0 if isinstance(padding, str) else padding, 0))
    if (d, h, w) != ((0, 0),) * 3:
        _refuse(operation, given, "padding_mode", "zeros", "Pad the input with jnp.pad, and convert with a padding of 0.")
    return Conv3d(filters, _bias(operation, bias, filters.shape[4]), stride, (d, h, w), dilation)


def _conv_transpose3d(weight: Any, bias: Any, given: Mapping[str, Any]) -> ConvTranspose3d:
    operation = "from_torch (ConvTranspose3d)"
    _refuse(operation, given, "groups", 1, "Split the channels, and convert one convolution for each group.")
    _refuse(operation, given, "padding_mode", "zeros", "torch has no other mode either.")
    unflipped = _array(operation, "weight", weight, 5, "[C_in, C_out, K_d, K_h, K_w]").transpose(2, 3, 4, 0, 1)
    stride, dilation = (as_triple(operation, name, given[name], 1) for name in ("stride", "dilation"))
    padding, output_padding = (as_triple(operation, name, given[name], 0) for name in ("padding", "output_padding"))
    filters = unflipped[::-1, ::-1, ::-1]
    return ConvTranspose3d(filters, _bias(operation, bias, filters.shape[4]), stride, padding, output_padding, dilation)


def _avg_pool3d(weight: Any, bias: Any, given: Mapping[str, Any]) -> AvgPool3d:
    operation = "from_torch (AvgPool3d)"
    _refuse(
        operation, given, "ceil_mode", False, "Pad the input so that the last window fits, with `count_include_pad` in mind."
    )
    _refuse(operation, given, "divisor_override", None, "Multiply the result by the window's size over the divisor.")
    kernel = as_triple(operation, "kernel_size", given["kernel_size"], 1)
    stride = kernel if given["stride"] is None else as_triple(operation, "stride", given["stride"], 1)
    padding = as_triple(operation, "padding", given["padding"], 0)
    return AvgPool3d(kernel, stride, padding, check_bool(operation, "count_include_pad", given["count_include_pad"]))


_MAKERS: dict[str, Callable[[Any, Any, Mapping[str, Any]], Conv3d | ConvTranspose3d | AvgPool3d]] = {
    "Conv3d": _conv3d,
    "ConvTranspose3d": _conv_transpose3d,
    "AvgPool3d": _avg_pool3d,
}


def _check_plain(source: Any, base: Any) -> None:
    """Whether the module computes what its class does, from the weight that it shows."""
    for name, changed in (
        ("forward", type(source).forward is not base.forward),
        ("_forward_pre_hooks", bool(source._forward_pre_hooks)),
        ("_forward_hooks", bool(source._forward_hooks)),
    ):
        if changed:
            raise NotImplementedError(
                f"from_torch ({base.__name__}): `{name}` of this {type(source).__name__} is not that of {base.__name__}, so that it may compute "
                "something else, as under torch.nn.utils.weight_norm, spectral_norm and prune. Remove it (remove_weight_norm, prune.remove, "
                "...), or use torch.nn.utils.parametrizations, whose weight is read as it stands."
            )


def _refuse(operation: str, given: Mapping[str, Any], name: str, plain: Any, cure: str) -> None:
    if given[name] != plain:
        raise NotImplementedError(f"{operation}: `{name}` must be {plain!r}, got {given[name]!r}. {cure}")


def _array(operation: str, name: str, value: Any, rank: int, layout: str) -> Array:
    """A tensor, or an array, as an array of JAX."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        # NumPy has no bfloat16 of its own, so that torch does not hand it over
        wide = str(tensor.dtype) == "torch.bfloat16"
        value = tensor.float().numpy().astype(ml_dtypes.bfloat16) if wide else tensor.numpy()
    check_array(operation, name, value, rank, layout)
    own = np.array(value)  # a copy: torch updates its parameters in place
    return jnp.asarray(own.astype(own.dtype.newbyteorder("=")))


def _bias(operation: str, value: Any, channels: int) -> Array | None:
    if value is None:
        return None
    bias = _array(operation, "bias", value, 1, "[C_out]")
    if bias.shape != (channels,):
        raise ValueError(
            f"{operation}: `bias` must have shape ({channels},) for this weight, got {bias.shape}. Is it that of another layer?"
        )
    return bias


# ---- the same layer in other libraries -----------------------------------------------------------------------------------


def _check_library(layer: str, library: str) -> None:
    if library not in LIBRARIES:
        raise ValueError(f"{layer}: `library` must be one of {', '.join(map(repr, LIBRARIES))}, got {library!r}.")


def _convolution_settings(
    layer: str,
    library: str,
    kernel: tuple[int, ...],
    c_in: int,
    c_out: int,
    own: Conv3d | ConvTranspose3d,
    padding: Any,
    dilation: Triple | None,
) -> dict[str, Any]:
    _check_library(layer, library)
    names = {  # channels in and out, kernel, stride, dilation, bias
        "flax_nnx": ("in_features", "out_features", "kernel_size", "strides", "kernel_dilation", "use_bias"),
        "flax_linen": (None, "features", "kernel_size", "strides", "kernel_dilation", "use_bias"),
        "haiku": (None, "output_channels", "kernel_shape", "stride", "rate", "with_bias"),
        "equinox": ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "use_bias"),
    }[library]
    values = (c_in, c_out, kernel, own.stride, dilation, own.bias is not None)
    named = {name: value for name, value in zip(names, values, strict=True) if name is not None and value is not None}
    return named | {"padding": padding}


def _parameters(layer: str, library: str, filters: Array, bias: Array | None, *, haiku: Array) -> dict[str, Array]:
    """What slides over the input in all of them is our `filters`; the axes and the names differ."""
    _check_library(layer, library)
    if library == "haiku":
        return {"w": haiku} | ({} if bias is None else {"b": bias})
    if library == "equinox":
        return {"weight": filters.transpose(4, 3, 0, 1, 2)} | ({} if bias is None else {"bias": bias[:, None, None, None]})
    return {"kernel": filters} | ({} if bias is None else {"bias": bias})
