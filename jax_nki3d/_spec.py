# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments become a frozen, hashable spec, once, before any arithmetic. Every error that a user can cause is raised here.

ValueError: a value that no implementation can compute with. TypeError: a value of the wrong type or dtype.
NotImplementedError: right input that the implementation asked for cannot run; the text says which one can.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _neuron, _options
from ._activation import ActFnType
from ._geometry import Geometry, Triple, convolved_size, effective_kernel, transposed_size, triple

DATA_FORMATS = ("NCDHW", "NDHWC")
FILTER_SHAPES = ("KDHW_CI_CO", "KDHW_CO_CI")
DTYPES = ("bfloat16", "float16", "float32", "float64")
_AXIS_NAMES = ("D", "H", "W")

Sextuple = tuple[int, int, int, int, int, int]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Conv3dSpec:
    """A convolution x [B, C_in, D, H, W] -> y [B, C_out, D_out, H_out, W_out], for any batch size.

    `conv3d` and `conv3d_bwd` share it: the backward pass is described by the forward pass that it differentiates.
    """

    geometry: Geometry
    padding: Sextuple
    c_in: int
    c_out: int
    bias_dtype: str | None = None
    activation: ActFnType | None = None
    lnc_shard: bool = False
    implementation: str | None = None

    def input_shape(self, batch: int) -> Shape:
        return (batch, self.c_in, *self.geometry.size)

    def output_shape(self, batch: int) -> Shape:
        return (batch, self.c_out, *self.geometry.out)

    @property
    def filters_shape(self) -> Shape:
        return (*self.geometry.kernel, self.c_in, self.c_out)

    def linear(self) -> "Conv3dSpec":
        """The same convolution without bias and activation."""
        return dataclasses.replace(self, bias_dtype=None, activation=None)


@dataclasses.dataclass(frozen=True)
class ConvTranspose3dSpec:
    """A transposed convolution x [B, C_in, D, H, W] -> y [B, C_out, D_out, H_out, W_out], for any batch size.

    `geometry` is that of the convolution that it transposes: `geometry.out` is the extent of x, `geometry.size` that of y.
    """

    geometry: Geometry
    padding: Triple
    output_padding: Triple
    c_in: int
    c_out: int
    filter_shape: str = "KDHW_CI_CO"
    bias_dtype: str | None = None
    activation: ActFnType | None = None
    lnc_shard: bool = False
    implementation: str | None = None

    def input_shape(self, batch: int) -> Shape:
        return (batch, self.c_in, *self.geometry.out)

    def output_shape(self, batch: int) -> Shape:
        return (batch, self.c_out, *self.geometry.size)

    @property
    def filters_shape(self) -> Shape:
        channels = (self.c_in, self.c_out) if self.filter_shape == "KDHW_CI_CO" else (self.c_out, self.c_in)
        return (*self.geometry.kernel, *channels)

    def linear(self) -> "ConvTranspose3dSpec":
        """The same transposed convolution without bias and activation."""
        return dataclasses.replace(self, bias_dtype=None, activation=None)

    def adjoint(self) -> Conv3dSpec:
        """The convolution y -> x whose transpose this is, on the rows of y that its windows reach (see `reached`)."""
        reached = self.reached()
        back = (e - s - f for e, s, f in zip(self.geometry.extent, reached, self.geometry.front, strict=True))
        padding = tuple(n for pair in zip(self.geometry.front, back, strict=True) for n in pair)
        return Conv3dSpec(
            geometry=dataclasses.replace(self.geometry, size=reached),
            padding=padding,  # type: ignore[arg-type]
            c_in=self.c_out,
            c_out=self.c_in,
            lnc_shard=self.lnc_shard,
            implementation=self.implementation,
        )

    def reached(self) -> Triple:
        """The leading part of y that taps can reach; rows behind it (from output_padding) hold the bias alone."""
        g = self.geometry
        return triple(min(s, e - f) for s, e, f in zip(g.size, g.extent, g.front, strict=True))


@dataclasses.dataclass(frozen=True)
class AvgPooling3dSpec:
    """An average pooling of planes, for any batch size and number of channels.

    `data_format` is the layout of the pooling's input, `output_format` that of its output; the backward pass reads the
    latter and writes the former.
    """

    geometry: Geometry
    data_format: str
    output_format: str
    count_include_pad: bool
    implementation: str | None = None


# ---- one function per operation ------------------------------------------------------------------------------------


def conv3d_spec(
    operation: str, x_in, filters, bias, stride, padding, dilation, activation_fn, lnc_shard, data_format, implementation
) -> Conv3dSpec:
    """The spec of `conv3d`; `x_in` needs only a shape and a dtype."""
    _check_choice(operation, "data_format", data_format, DATA_FORMATS)
    x_shape = canonical_shape(_check_array(operation, "x_in", x_in, 5, _layout_hint(data_format)), data_format)
    _check_array(operation, "filters", filters, 5, "[K_d, K_h, K_w, C_in, C_out]")
    _check_same_dtype(operation, "filters", filters, "x_in", x_in)
    *kernel, c_in, c_out = filters.shape
    _check_sizes(operation, "filters", filters.shape)
    _check_sizes(operation, "x_in", x_shape[1:])
    if x_shape[1] != c_in:
        raise ValueError(
            f"{operation}: `filters` has C_in = {c_in} (shape {_sizes(filters.shape)}), but `x_in` has {x_shape[1]} channels "
            f"(shape {_sizes(x_in.shape)}, data_format={data_format!r}). Transpose the filters to [K_d, K_h, K_w, C_in, C_out], or "
            "choose the other data_format; groups are not supported."
        )
    _check_bias(operation, bias, c_out)
    size, kernel = triple(x_shape[2:]), triple(kernel)
    strides = _as_triple(operation, "stride", stride, 1)
    dilations = _as_triple(operation, "dilation", dilation, 1)
    pads = _as_padding(operation, padding, size, kernel, strides, dilations)
    out = []
    for axis, name in enumerate(_AXIS_NAMES):
        pad = pads[2 * axis : 2 * axis + 2]
        n = convolved_size(size[axis], kernel[axis], strides[axis], dilations[axis], *pad)
        if n < 1:
            window = effective_kernel(kernel[axis], dilations[axis])
            raise ValueError(
                f"{operation}: the window does not fit on axis {name}: `x_in` has {size[axis]} elements there and `padding` adds "
                f"{pad[0]} + {pad[1]}, but the effective kernel is {window} (kernel {kernel[axis]}, `dilation` {dilations[axis]}, "
                f"`stride` {strides[axis]}). Use a smaller kernel or dilation, or more padding."
            )
        out.append(n)
    return Conv3dSpec(
        geometry=Geometry(size, triple(out), kernel, strides, dilations, triple(pads[::2])),
        padding=pads,
        c_in=c_in,
        c_out=c_out,
        bias_dtype=None if bias is None else _dtype_name(bias),
        activation=_as_activation(operation, activation_fn),
        lnc_shard=_check_bool(operation, "lnc_shard", lnc_shard),
        implementation=_resolve_implementation(operation, implementation),
    )


def conv3d_bwd_spec(
    operation: str,
    dy,
    x_in,
    filters,
    stride,
    padding,
    dilation,
    compute_dx,
    compute_dw,
    compute_db,
    data_format,
    implementation,
) -> tuple[Conv3dSpec, tuple[bool, bool, bool]]:
    """The forward's spec and the wanted gradients (dx, dw, db)."""
    flags = {"compute_dx": compute_dx, "compute_dw": compute_dw, "compute_db": compute_db}
    for name, flag in flags.items():
        _check_bool(operation, name, flag)
    if not any(flags.values()):
        raise ValueError(
            f"{operation}: `compute_dx`, `compute_dw` and `compute_db` are all False, so there is nothing to compute. "
            "Set at least one of them."
        )
    spec = conv3d_spec(operation, x_in, filters, None, stride, padding, dilation, None, False, data_format, implementation)
    dy_shape = canonical_shape(_check_array(operation, "dy", dy, 5, _layout_hint(data_format)), data_format)
    _check_same_dtype(operation, "dy", dy, "x_in", x_in)
    expected = spec.output_shape(canonical_shape(x_in.shape, data_format)[0])
    if dy_shape != expected:
        raise ValueError(
            f"{operation}: `dy` has shape {_sizes(dy.shape)}, which is {dy_shape} as NCDHW, but the forward pass of `x_in` "
            f"{_sizes(x_in.shape)} ({data_format}) and `filters` {_sizes(filters.shape)} with stride={spec.geometry.stride}, "
            f"padding={spec.padding}, dilation={spec.geometry.dilation} gives {expected}. Pass the arguments of the forward pass."
        )
    return spec, (compute_dx, compute_dw, compute_db)


def conv3d_transpose_spec(
    operation: str,
    x_in,
    filters,
    bias,
    stride,
    padding,
    dilation,
    activation_fn,
    lnc_shard,
    filter_shape,
    output_padding,
    data_format,
    implementation,
) -> ConvTranspose3dSpec:
    """The spec of `conv3d_transpose`; `x_in` needs only a shape and a dtype."""
    _check_choice(operation, "data_format", data_format, DATA_FORMATS)
    _check_choice(operation, "filter_shape", filter_shape, FILTER_SHAPES)
    x_shape = canonical_shape(_check_array(operation, "x_in", x_in, 5, _layout_hint(data_format)), data_format)
    order = "C_in, C_out" if filter_shape == "KDHW_CI_CO" else "C_out, C_in"
    _check_array(operation, "filters", filters, 5, f"[K_d, K_h, K_w, {order}]")
    _check_same_dtype(operation, "filters", filters, "x_in", x_in)
    _check_sizes(operation, "filters", filters.shape)
    _check_sizes(operation, "x_in", x_shape[1:])
    kernel, channels = triple(filters.shape[:3]), filters.shape[3:]
    c_in, c_out = channels if filter_shape == "KDHW_CI_CO" else channels[::-1]
    if x_shape[1] != c_in:
        raise ValueError(
            f"{operation}: `filters` has C_in = {c_in} (shape {_sizes(filters.shape)} as {filter_shape}), but `x_in` has "
            f"{x_shape[1]} channels (shape {_sizes(x_in.shape)}, data_format={data_format!r}). Transpose the filters to [K_d, K_h, "
            f"K_w, {order}], or choose the other `filter_shape`; groups are not supported."
        )
    _check_bias(operation, bias, c_out)
    strides = _as_triple(operation, "stride", stride, 1)
    dilations = _as_triple(operation, "dilation", dilation, 1)
    pads = _as_triple(operation, "padding", padding, 0)
    extra = _as_triple(operation, "output_padding", output_padding, 0)
    in_size, out_size = triple(x_shape[2:]), []
    for axis, name in enumerate(_AXIS_NAMES):
        limit = max(strides[axis], dilations[axis])
        if extra[axis] >= limit:
            raise ValueError(
                f"{operation}: `output_padding` must be smaller than the stride or the dilation, but on axis {name} it is "
                f"{extra[axis]} with `stride` {strides[axis]} and `dilation` {dilations[axis]}. Make it smaller: it picks "
                "among the sizes that one convolution maps to the same; jnp.pad adds zeros to a result."
            )
        n = transposed_size(in_size[axis], kernel[axis], strides[axis], dilations[axis], pads[axis], extra[axis])
        window = effective_kernel(kernel[axis], dilations[axis])
        whole = (in_size[axis] - 1) * strides[axis] + window
        if n < 1 or whole <= pads[axis]:
            raise ValueError(
                f"{operation}: nothing is left on axis {name}: `x_in` has {in_size[axis]} elements there, which with `stride` "
                f"{strides[axis]} and an effective kernel of {window} (kernel {kernel[axis]}, `dilation` {dilations[axis]}) give "
                f"{whole}, and `padding` {pads[axis]} crops that many from both ends. Use less padding."
            )
        out_size.append(n)
    return ConvTranspose3dSpec(
        geometry=Geometry(triple(out_size), in_size, kernel, strides, dilations, pads),
        padding=pads,
        output_padding=extra,
        c_in=c_in,
        c_out=c_out,
        filter_shape=filter_shape,
        bias_dtype=None if bias is None else _dtype_name(bias),
        activation=_as_activation(operation, activation_fn),
        lnc_shard=_check_bool(operation, "lnc_shard", lnc_shard),
        implementation=_resolve_implementation(operation, implementation),
    )


def avg_pooling_3d_spec(
    operation: str,
    array,
    kernel_size,
    stride,
    padding,
    data_format,
    output_format,
    count_include_pad,
    implementation,
    array_name: str = "src_tensor",
) -> AvgPooling3dSpec:
    """The spec of `avg_pooling_3d` for an input with the shape of `array`."""
    _check_choice(operation, "data_format", data_format, DATA_FORMATS)
    output_format = data_format if output_format is None else output_format
    _check_choice(operation, "output_format", output_format, DATA_FORMATS)
    shape = canonical_shape(_check_array(operation, array_name, array, 5, _layout_hint(data_format)), data_format)
    _check_sizes(operation, array_name, shape[1:])
    kernel = _as_triple(operation, "kernel_size", kernel_size, 1)
    strides = kernel if stride is None else _as_triple(operation, "stride", stride, 1)
    pads = _as_triple(operation, "padding", padding, 0)
    size, out = triple(shape[2:]), []
    for axis, name in enumerate(_AXIS_NAMES):
        if pads[axis] >= kernel[axis]:
            raise ValueError(
                f"{operation}: `padding` must be smaller than `kernel_size`, but on axis {name} it is {pads[axis]} with a kernel of "
                f"{kernel[axis]}, so that a window would lie in the padding alone. Use less padding."
            )
        n = convolved_size(size[axis], kernel[axis], strides[axis], 1, pads[axis], pads[axis])
        if n < 1:
            raise ValueError(
                f"{operation}: the window does not fit on axis {name}: `{array_name}` has {size[axis]} elements there and `padding` "
                f"adds {pads[axis]} on both sides, but `kernel_size` is {kernel[axis]} (`stride` {strides[axis]}). Use a smaller window "
                "or more padding."
            )
        out.append(n)
    return AvgPooling3dSpec(
        geometry=Geometry(size, triple(out), kernel, strides, (1, 1, 1), pads),
        data_format=data_format,
        output_format=output_format,
        count_include_pad=_check_bool(operation, "count_include_pad", count_include_pad),
        implementation=_resolve_implementation(operation, implementation),
    )


def avg_pooling_3d_backward_spec(
    operation: str,
    grad_output,
    input_tensor,
    kernel_size,
    stride,
    padding,
    data_format,
    output_format,
    count_include_pad,
    implementation,
) -> AvgPooling3dSpec:
    """The spec of the pooling whose gradient is asked for."""
    spec = avg_pooling_3d_spec(
        operation,
        input_tensor,
        kernel_size,
        stride,
        padding,
        data_format,
        output_format,
        count_include_pad,
        implementation,
        array_name="input_tensor",
    )
    shape = canonical_shape(
        _check_array(operation, "grad_output", grad_output, 5, _layout_hint(spec.output_format)), spec.output_format
    )
    _check_same_dtype(operation, "grad_output", grad_output, "input_tensor", input_tensor)
    expected = (*canonical_shape(input_tensor.shape, data_format)[:2], *spec.geometry.out)
    if shape != expected:
        raise ValueError(
            f"{operation}: `grad_output` has shape {_sizes(grad_output.shape)} ({spec.output_format}), which is {shape} as NCDHW, but "
            f"pooling `input_tensor` {_sizes(input_tensor.shape)} ({data_format}) with kernel_size={spec.geometry.kernel}, "
            f"stride={spec.geometry.stride}, padding={spec.geometry.front} gives {expected}. Pass the arguments of the forward pass."
        )
    return spec


# ---- layouts ---------------------------------------------------------------------------------------------------------


def canonical_shape(shape: Sequence[int], data_format: str) -> Shape:
    """A shape in `data_format` as NCDHW."""
    return tuple(shape) if data_format == "NCDHW" else (shape[0], shape[4], *shape[1:4])


def to_canonical(x, data_format: str):
    """[B, ...] in `data_format` -> [B, C, D, H, W]."""
    return x if data_format == "NCDHW" else jnp.moveaxis(x, 4, 1)


def from_canonical(x, data_format: str):
    """[B, C, D, H, W] -> [B, ...] in `data_format`."""
    return x if data_format == "NCDHW" else jnp.moveaxis(x, 1, 4)


# ---- single arguments ------------------------------------------------------------------------------------------------


def _sizes(shape: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _layout_hint(data_format: str) -> str:
    return "[B, C, D, H, W]" if data_format == "NCDHW" else "[B, D, H, W, C]"


def _dtype_name(array: Any) -> str:
    """The name of the dtype that the array has inside JAX: NumPy's float64 is float32 there, unless x64 is enabled."""
    name = getattr(array.dtype, "name", str(array.dtype))  # keys have dtypes that are not NumPy's
    return jax.dtypes.canonicalize_dtype(name).name if name in DTYPES else name


def _check_array(operation: str, name: str, value, rank: int, layout: str) -> Shape:
    """The shape of an array argument, which must be floating and of the given rank."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(
            f"{operation}: `{name}` must be an array {layout}, got {type(value).__name__}. Convert it with jnp.asarray."
        )
    if _dtype_name(value) not in DTYPES:
        raise TypeError(
            f"{operation}: `{name}` must have one of the dtypes {', '.join(DTYPES)}, got {value.dtype}. Cast it with .astype first."
        )
    if len(value.shape) != rank:
        raise ValueError(
            f"{operation}: `{name}` must have {rank} dimensions {layout}, got shape {_sizes(value.shape)} with {len(value.shape)}. "
            "Add missing axes with jnp.expand_dims, or map over further ones with jax.vmap."
        )
    return tuple(value.shape)


def _check_sizes(operation: str, name: str, sizes: Sequence[int]) -> None:
    """Every size but the batch must be a positive int; the batch may also be a symbol of `jax.export`."""
    if not all(isinstance(n, int) for n in sizes):
        raise NotImplementedError(
            f"{operation}: every size of `{name}` except the batch must be known, got {_sizes(sizes)} (batch left out). "
            "Leave only the batch symbolic, and export once for each size of the volume."
        )
    if any(n < 1 for n in sizes):
        raise ValueError(
            f"{operation}: every size of `{name}` except the batch must be at least 1, got {_sizes(sizes)} (batch left out). "
            "Drop the empty axis, or leave the call out: only the batch may be empty."
        )


def _check_same_dtype(operation: str, name: str, value, other_name: str, other) -> None:
    if _dtype_name(value) != _dtype_name(other):
        raise TypeError(
            f"{operation}: `{name}` has dtype {value.dtype}, but `{other_name}` has {other.dtype}. Cast one of them, for example "
            f"{name}.astype({other_name}.dtype); the layers in jax_nki3d.nn promote for you."
        )


def _check_bias(operation: str, bias, c_out: int) -> None:
    if bias is not None and _check_array(operation, "bias", bias, 1, "[C_out]") != (c_out,):
        raise ValueError(
            f"{operation}: `bias` must have shape (C_out,) = ({c_out},), got {_sizes(bias.shape)}. Pass one value for each filter."
        )


def _check_choice(operation: str, name: str, value, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(
            f"{operation}: `{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}. Pass one of these strings."
        )


def _check_bool(operation: str, name: str, value) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operation}: `{name}` must be True or False, got {value!r}. Pass a Python bool.")
    return bool(value)


def _as_int(operation: str, name: str, value, whole, minimum: int) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{operation}: `{name}` must hold ints, got {whole!r}. Pass one int, or three (D, H, W).")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{operation}: `{name}` must hold ints known when the function is traced, got {whole!r}. "
            "Pass Python or NumPy ints; under jax.jit mark such arguments as static."
        ) from error
    if number < minimum:
        raise ValueError(
            f"{operation}: `{name}` must be at least {minimum} on each axis, got {whole!r}. Pass {minimum} or more."
        )
    return number


_TRIPLE_FORMS = "one int or three (D, H, W)"


def _is_single(value) -> bool:
    """One number, as far as can be told: no sequence, and no array but a 0-d one."""
    return getattr(value, "ndim", None) == 0 or not hasattr(value, "__iter__")


def _as_triple(operation: str, name: str, value, minimum: int) -> Triple:
    """An int, or three, as a tuple (D, H, W)."""
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{operation}: `{name}` must be {_TRIPLE_FORMS}, got {value!r}. Pass Python or NumPy ints.")
    if _is_single(value):
        return (_as_int(operation, name, value, value, minimum),) * 3
    if not isinstance(value, (Sequence, np.ndarray, jax.Array)) or getattr(value, "ndim", 1) != 1:
        raise TypeError(f"{operation}: `{name}` must be {_TRIPLE_FORMS}, got {value!r}. Pass a flat tuple or list.")
    if len(value) != 3:
        raise ValueError(
            f"{operation}: `{name}` must be {_TRIPLE_FORMS}, got {len(value)} values: {value!r}. "
            "Pass one value for each axis; batch and channels have none."
        )
    return triple(_as_int(operation, name, v, value, minimum) for v in value)


_PADDING_FORMS = (
    "one int, three (D, H, W), six (D front, D back, H top, H bottom, W left, W right), three pairs, 'SAME' or 'VALID'"
)


def _as_padding(operation: str, value, size: Triple, kernel: Triple, stride: Triple, dilation: Triple) -> Sextuple:
    """Any accepted form of a convolution's padding as six ints."""
    if isinstance(value, str):
        return _named_padding(operation, value, size, kernel, stride, dilation)
    if value is None:
        raise TypeError(f"{operation}: `padding` must be {_PADDING_FORMS}, got None. Pass 0 for no padding.")
    if _is_single(value):
        return (_as_int(operation, "padding", value, value, 0),) * 6
    if not isinstance(value, (Sequence, np.ndarray, jax.Array)) or isinstance(value, bytes):
        raise TypeError(f"{operation}: `padding` must be {_PADDING_FORMS}, got {value!r}. Pass a tuple or list.")
    pairs = [not _is_single(v) for v in value]
    if len(value) == 3 and all(pairs) and all(len(v) == 2 for v in value):
        flat = [v for pair in value for v in pair]
    elif any(pairs) or len(value) not in (3, 6):
        raise ValueError(f"{operation}: `padding` must be {_PADDING_FORMS}, got {value!r}. Pass one of these forms.")
    else:
        flat = list(value) if len(value) == 6 else [v for v in value for _ in range(2)]
    a, b, c, d, e, f = (_as_int(operation, "padding", v, value, 0) for v in flat)
    return (a, b, c, d, e, f)


def _named_padding(operation: str, name: str, size: Triple, kernel: Triple, stride: Triple, dilation: Triple) -> Sextuple:
    """'VALID': none. 'SAME' as in lax: ceil(size / stride) outputs, the odd element of padding behind."""
    if name == "VALID":
        return (0,) * 6
    if name != "SAME":
        raise ValueError(f"{operation}: `padding` must be {_PADDING_FORMS}, got {name!r}. Pass one of these forms.")
    flat: list[int] = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        total = max(0, (-(-n // s) - 1) * s + effective_kernel(k, d) - n)
        flat += [total // 2, total - total // 2]
    a, b, c, d, e, f = flat
    return (a, b, c, d, e, f)


def _as_activation(operation: str, value) -> ActFnType | None:
    """An activation by member or by name, whose case does not matter."""
    if value is None or isinstance(value, ActFnType):
        return value
    names = {member.name.lower(): member for member in ActFnType}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    error = ValueError if isinstance(value, str) else TypeError
    raise error(
        f"{operation}: `activation_fn` must be None, an ActFnType or one of {', '.join(m.name for m in ActFnType)}, got {value!r}. "
        "Apply other functions to the result."
    )


def _resolve_implementation(operation: str, argument: str | None) -> str | None:
    implementation = _options.resolve_implementation(operation, argument)
    if implementation in ("nki", "simulate"):
        reason = _neuron.why_unavailable(operation, implementation)
        if reason is not None:
            raise NotImplementedError(f"{operation}: `implementation` is {implementation!r}, but {reason}")
    return implementation
