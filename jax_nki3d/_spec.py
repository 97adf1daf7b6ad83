# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments become a frozen, hashable spec, once, before any arithmetic. Every error that a user can cause is raised here.

ValueError: a value that no implementation can compute with. TypeError: a value of the wrong type or dtype.
NotImplementedError: right input that the implementation asked for cannot run; the text says which one can.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from . import _neuron, _options
from ._activation import ActFnType
from ._arguments import (
    Sextuple,
    Shape,
    as_activation,
    as_padding,
    as_triple,
    check_array,
    check_bias,
    check_bool,
    check_choice,
    check_same_dtype,
    check_sizes,
    dtype_name,
    layout_hint,
    shape_text,
)
from ._geometry import Geometry, Triple, convolved_size, effective_kernel, transposed_size, triple

DATA_FORMATS = ("NCDHW", "NDHWC")
FILTER_SHAPES = ("KDHW_CI_CO", "KDHW_CO_CI")
_AXIS_NAMES = ("D", "H", "W")


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
    check_choice(operation, "data_format", data_format, DATA_FORMATS)
    x_shape = canonical_shape(check_array(operation, "x_in", x_in, 5, layout_hint(data_format)), data_format)
    check_array(operation, "filters", filters, 5, "[K_d, K_h, K_w, C_in, C_out]")
    check_same_dtype(operation, "filters", filters, "x_in", x_in)
    *kernel, c_in, c_out = filters.shape
    check_sizes(operation, "filters", filters.shape)
    check_sizes(operation, "x_in", x_shape[1:])
    if x_shape[1] != c_in:
        raise ValueError(
            f"{operation}: `filters` has C_in = {c_in} (shape {shape_text(filters.shape)}), but `x_in` has {x_shape[1]} channels "
            f"(shape {shape_text(x_in.shape)}, data_format={data_format!r}). Transpose the filters to [K_d, K_h, K_w, C_in, C_out], or "
            "choose the other data_format; groups are not supported."
        )
    check_bias(operation, bias, c_out)
    size, kernel = triple(x_shape[2:]), triple(kernel)
    strides = as_triple(operation, "stride", stride, 1)
    dilations = as_triple(operation, "dilation", dilation, 1)
    pads = as_padding(operation, padding, size, kernel, strides, dilations)
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
        bias_dtype=None if bias is None else dtype_name(bias),
        activation=as_activation(operation, activation_fn),
        lnc_shard=check_bool(operation, "lnc_shard", lnc_shard),
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
        check_bool(operation, name, flag)
    if not any(flags.values()):
        raise ValueError(
            f"{operation}: `compute_dx`, `compute_dw` and `compute_db` are all False, so there is nothing to compute. "
            "Set at least one of them."
        )
    spec = conv3d_spec(operation, x_in, filters, None, stride, padding, dilation, None, False, data_format, implementation)
    dy_shape = canonical_shape(check_array(operation, "dy", dy, 5, layout_hint(data_format)), data_format)
    check_same_dtype(operation, "dy", dy, "x_in", x_in)
    expected = spec.output_shape(canonical_shape(x_in.shape, data_format)[0])
    if dy_shape != expected:
        raise ValueError(
            f"{operation}: `dy` has shape {shape_text(dy.shape)}, which is {dy_shape} as NCDHW, but the forward pass of `x_in` "
            f"{shape_text(x_in.shape)} ({data_format}) and `filters` {shape_text(filters.shape)} with stride={spec.geometry.stride}, "
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
    check_choice(operation, "data_format", data_format, DATA_FORMATS)
    check_choice(operation, "filter_shape", filter_shape, FILTER_SHAPES)
    x_shape = canonical_shape(check_array(operation, "x_in", x_in, 5, layout_hint(data_format)), data_format)
    order = "C_in, C_out" if filter_shape == "KDHW_CI_CO" else "C_out, C_in"
    check_array(operation, "filters", filters, 5, f"[K_d, K_h, K_w, {order}]")
    check_same_dtype(operation, "filters", filters, "x_in", x_in)
    check_sizes(operation, "filters", filters.shape)
    check_sizes(operation, "x_in", x_shape[1:])
    kernel, channels = triple(filters.shape[:3]), filters.shape[3:]
    c_in, c_out = channels if filter_shape == "KDHW_CI_CO" else channels[::-1]
    if x_shape[1] != c_in:
        raise ValueError(
            f"{operation}: `filters` has C_in = {c_in} (shape {shape_text(filters.shape)} as {filter_shape}), but `x_in` has "
            f"{x_shape[1]} channels (shape {shape_text(x_in.shape)}, data_format={data_format!r}). Transpose the filters to [K_d, K_h, "
            f"K_w, {order}], or choose the other `filter_shape`; groups are not supported."
        )
    check_bias(operation, bias, c_out)
    strides = as_triple(operation, "stride", stride, 1)
    dilations = as_triple(operation, "dilation", dilation, 1)
    pads = as_triple(operation, "padding", padding, 0)
    extra = as_triple(operation, "output_padding", output_padding, 0)
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
        bias_dtype=None if bias is None else dtype_name(bias),
        activation=as_activation(operation, activation_fn),
        lnc_shard=check_bool(operation, "lnc_shard", lnc_shard),
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
    check_choice(operation, "data_format", data_format, DATA_FORMATS)
    output_format = data_format if output_format is None else output_format
    check_choice(operation, "output_format", output_format, DATA_FORMATS)
    shape = canonical_shape(check_array(operation, array_name, array, 5, layout_hint(data_format)), data_format)
    check_sizes(operation, array_name, shape[1:])
    kernel = as_triple(operation, "kernel_size", kernel_size, 1)
    strides = kernel if stride is None else as_triple(operation, "stride", stride, 1)
    pads = as_triple(operation, "padding", padding, 0)
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
        count_include_pad=check_bool(operation, "count_include_pad", count_include_pad),
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
        check_array(operation, "grad_output", grad_output, 5, layout_hint(spec.output_format)), spec.output_format
    )
    check_same_dtype(operation, "grad_output", grad_output, "input_tensor", input_tensor)
    expected = (*canonical_shape(input_tensor.shape, data_format)[:2], *spec.geometry.out)
    if shape != expected:
        raise ValueError(
            f"{operation}: `grad_output` has shape {shape_text(grad_output.shape)} ({spec.output_format}), which is {shape} as NCDHW, but "
            f"pooling `input_tensor` {shape_text(input_tensor.shape)} ({data_format}) with kernel_size={spec.geometry.kernel}, "
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


def _resolve_implementation(operation: str, argument: str | None) -> str | None:
    implementation = _options.resolve_implementation(operation, argument)
    if implementation in ("nki", "simulate"):
        reason = _neuron.why_unavailable(operation, implementation)
        if reason is not None:
            raise NotImplementedError(f"{operation}: `implementation` is {implementation!r}, but {reason}")
    return implementation
