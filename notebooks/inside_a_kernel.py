# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inside a kernel
#
# What this notebook shows, in about 10 seconds on two CPU cores:
#
# - how the NKI kernel of `conv3d_transpose` avoids the zeros: stride³ phases, each with taps of its own;
# - how a PSUM bank adds up taps and channels, matmul by matmul, and how the banks take turns;
# - what each engine does when (computed), and what the kernel would cost;
# - a short kernel of your own, and what it looks like when it breaks a limit of the machine;
# - the plans that the planner chooses among, with their cycles and bytes beside the least possible;
# - the same kernel inside JAX: `implementation="simulate"`.
#
# How this is known: the kernels run in `nki3d.simulator`, an interpreter that was written from the public documents of NKI 0.6. Values are
# simulated; cycles and times are *computed* from published figures. The interpreter has never been compared with a device, and nothing
# here has run on a Trainium. `docs/simulator.md` says what is modelled and what is not.

# %%
import itertools
import re
import sys
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

import jax_nki3d
import nki3d
import nki3d.simulator as nki
from nki3d.planning.axis import transposed_axis
from nki3d.planning.conv import conv3d_transpose_plan

nl, nisa = nki.language, nki.isa
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})
BLUE, ORANGE, GREEN, INK = "#0072b2", "#e69f00", "#009e73", "#333333"  # told apart with any kind of colour vision
TRN2 = nki.MACHINES["trn2"]
rng = np.random.default_rng(0)

# %% [markdown]
# ## The machine in five lines
#
# - **HBM**: large and slow. The input, the filters and the result live there; DMA moves them.
# - **SBUF**: 128 partitions, each a memory of its own. What engines read lies there.
# - **Tensor engine**: multiplies a *stationary* matrix [K ≤ 128, M ≤ 128] with a *moving* one [K, N ≤ 512].
# - **PSUM**: where products land. 8 banks, each [128 partitions, 512 float32], that can add up the products of many matmuls.
# - **Vector, Scalar, GpSimd**: work on tiles. Here Scalar brings the sums from PSUM back to SBUF.

# %% [markdown]
# ## A layer, and its phases
#
# One layer of a decoder: 160 → 128 channels, 12³ → 23³ voxels, 3³ taps, stride 2, padding 1. On each axis input `i` adds to the outputs
# `2 * i + tap - 1`. So an even output hears of tap 1 alone, an odd one of taps 0 and 2.

# %%
SIZE, TAPS, STRIDE, PADDING, C_IN, C_OUT = 12, 3, 2, 1, 160, 128
OUT = (SIZE - 1) * STRIDE + TAPS - 2 * PADDING
axis = transposed_axis(SIZE, TAPS, STRIDE, dilation=1, padding=PADDING, out=OUT)

for phase, reads in enumerate(axis.reads):
    print(f"outputs {axis.block}·j + {phase} read: {', '.join(f'tap {tap} of input j{offset:+d}' for tap, offset in reads)}")

# %%
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
shown = 5
for output in range(shown * STRIDE - 1):
    for tap, offset in axis.reads[output % STRIDE]:
        place = output // STRIDE + offset
        color = (BLUE, ORANGE)[output % STRIDE]
        axes.plot([place * STRIDE, output], [1, 0], color=color, linewidth=1.5, zorder=1)
        along = 0.3
        axes.text(
            output + along * (place * STRIDE - output), along, tap, color=color, ha="center", va="center", backgroundcolor="w"
        )
axes.scatter(np.arange(shown) * STRIDE, np.ones(shown), 320, color=INK, zorder=2)
outputs = np.arange(shown * STRIDE - 1)
axes.scatter(outputs, 0 * outputs, 320, color=[(BLUE, ORANGE)[o % STRIDE] for o in outputs], zorder=2)
for i in range(shown):
    axes.text(i * STRIDE, 1, i, color="white", ha="center", va="center")
for o in outputs:
    axes.text(o, 0, o, color="white", ha="center", va="center")
axes.set_yticks([0, 1], ["outputs", "inputs"])
axes.tick_params(length=0)
axes.set(ylim=(-0.3, 1.3), xticks=[])
axes.spines[["left", "bottom"]].set_visible(False)
axes.set_title("One axis: even outputs (blue) read tap 1, odd ones (orange) taps 0 and 2", loc="left", fontsize=11)
plt.show()

# %% [markdown]
# With three axes there are 2³ = 8 phases. The kernel's plan says which taps each of them multiplies. Every tap belongs to exactly one phase:
# nothing is multiplied twice, and no inserted zero is multiplied at all. (Filters are stored flipped, hence the order of the taps.)

# %%
plan = conv3d_transpose_plan(
    (SIZE,) * 3,
    (TAPS,) * 3,
    (STRIDE,) * 3,
    (PADDING,) * 3,
    (1, 1, 1),
    (OUT,) * 3,
    (C_IN, C_OUT),
    itemsize=2,
    budget=TRN2.sbuf_usable_bytes,
    packed=False,
)
taps_of = {(*column.elements[0], column.phase): sorted(group.tap for group in column.groups) for column in plan.columns}

assert len(taps_of) == STRIDE**3
assert sorted(itertools.chain(*taps_of.values())) == list(range(TAPS**3))

# %%
phases = sorted(taps_of, key=lambda phase: len(taps_of[phase]))
figure, axes = plt.subplots(figsize=(8.5, 2.9), layout="constrained")
COLORS = dict(zip((1, 2, 4, 8), plt.colormaps["viridis"]([0.9, 0.65, 0.4, 0.1]), strict=True))
for row, phase in enumerate(phases):
    taps = taps_of[phase]
    axes.scatter(taps, [row] * len(taps), 110, marker="s", color=COLORS[len(taps)])
names = {1: "1 tap", 2: "2 taps", 4: "4 taps", 8: "8 taps"}
axes.set_yticks(range(8), [f"{phase[0]}, {phase[1]}, {phase[2]}   ({names[len(taps_of[phase])]})" for phase in phases])
axes.set_xticks(range(0, 27, 3))
axes.set_xticks(range(27), minor=True)
axes.grid(which="both", axis="x", alpha=0.2)
axes.invert_yaxis()
axes.set(xlabel="tap of the stored filters, counted in depth, height, width", ylabel="phase: D, H, W")
axes.set_title("Each of the 27 taps belongs to one of the 8 phases", loc="left", fontsize=11)
plt.show()

# %% [markdown]
# ## Run it
#
# `nki.profile` runs a kernel in the interpreter and returns its outputs and its cost. The input is a ball, so that pictures of it are easy to
# read, and everything is a small integer, so that float32 sums are exact.

# %%
distance = np.linalg.norm(np.stack(np.meshgrid(*[np.arange(SIZE) - 5.5] * 3, indexing="ij")), axis=0)
x = ((distance < 4.5) * rng.integers(1, 3, (1, C_IN, 1, 1, 1))).astype(ml_dtypes.bfloat16)
filters = rng.integers(0, 2, (TAPS, TAPS, TAPS, C_IN, C_OUT)).astype(ml_dtypes.bfloat16)
geometry = {"stride": (STRIDE,) * 3, "padding": (PADDING,) * 3}

y, cost = nki.profile(nki3d.conv3d_transpose, record=True)(x, filters, **geometry)
expected = np.asarray(jax_nki3d.conv3d_transpose(x, filters, **geometry, implementation="lax"))
assert y.shape == (1, C_OUT, OUT, OUT, OUT)
assert bool((y == expected).all())
print("The kernel, simulated, equals lax on the CPU: bit for bit.")
print()
print(cost)

# %% [markdown]
# ## A PSUM bank adds up
#
# The interpreter runs a kernel as plain Python, so that one can look over its shoulder: here every `nc_matmul` is followed by a copy of the PSUM
# tile that it wrote. The first matmul that reaches an element overwrites it, later ones add to it.

# %%
history = {}  # name of a PSUM tile -> its values after each matmul
tiles = {}
multiply = nisa.nc_matmul


def watched(dst, stationary, moving, **options):
    multiply(dst=dst, stationary=stationary, moving=moving, **options)
    tile = tiles.setdefault(dst.name, dst)
    history.setdefault(dst.name, []).append((stationary.shape[0], tile.array.copy()))


with mock.patch.object(nisa, "nc_matmul", watched):
    nki3d.conv3d_transpose(x, filters, **geometry)

counts = sorted({len(steps) for steps in history.values()})
print(f"{len(history)} PSUM tiles; matmuls per tile: {counts}")
assert counts == [2 * n for n in (1, 2, 4, 8)]  # the taps of the phase, for each of two tiles of input channels: 128 + 32

# %% [markdown]
# One tile of the phase with 8 taps, one plane of one output channel: first the 8 taps of input channels 0 to 127, then the 8 taps of channels 128 to
# 159. Only then is it rounded to bfloat16 and leaves PSUM.

# %%
eight = [steps for steps in history.values() if len(steps) == 16]
steps = eight[1]
channel, plane = 0, 1
final = steps[-1][1][channel, plane]
figure = plt.figure(figsize=(9, 4.4), layout="constrained")
upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.05))
panels = upper.subplots(1, 6)
for panel, number in zip(panels, (1, 2, 4, 8, 12, 16), strict=True):
    image = panel.imshow(steps[number - 1][1][channel, plane], vmin=0, vmax=final.max(), cmap="viridis", origin="lower")
    panel.set_title(f"after {number}", fontsize=10)
    panel.set(xticks=[], yticks=[])
upper.colorbar(image, ax=panels, shrink=0.8, label="sum")
upper.suptitle(f"A plane of one PSUM tile, after 1 to 16 matmuls ({final.shape[0]} x {final.shape[1]} positions)", fontsize=11)

axes = lower.subplots()
totals = np.array([values[channel].sum() for _, values in steps])
added = np.diff(totals, prepend=0)
colors = [BLUE if rows == 128 else ORANGE for rows, _ in steps]
axes.bar(np.arange(1, 17), totals - added, color="#d9d9d9", label="already there")
axes.bar(np.arange(1, 17), added, bottom=totals - added, color=colors)
axes.bar(0, 0, color=BLUE, label="added, input channels 0 to 127")
axes.bar(0, 0, color=ORANGE, label="added, input channels 128 to 159")
axes.set(xlabel="matmul", ylabel="sum over the tile", xticks=range(1, 17), xlim=(0.4, 16.6))
axes.ticklabel_format(axis="y", style="plain")
axes.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()

assert bool((added > 0).all())
assert [rows for rows, _ in steps] == [128] * 8 + [32] * 8

# %% [markdown]
# ## Banks take turns
#
# A recording keeps every instruction with the time at which it could start: as soon as its engine is free and what it reads is written. From
# it: which PSUM tile is in use when. A phase has four tiles of positions here, and the kernel goes through all four with the first tile of input
# channels, then with the second: hence the wait between. While one tile is evicted by Scalar (black), the tensor engine works on the next.

# %%
uses = {}
for instruction in cost.recording:
    for tile in re.findall(r"psum_\d+", instruction.operands):
        uses.setdefault(tile, []).append(instruction)

lanes = []  # when each bank is free again
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
for instructions in sorted(uses.values(), key=lambda used: used[0].start_us):
    *matmuls, eviction = instructions
    start, end = matmuls[0].start_us, eviction.start_us + eviction.us
    lane = next((i for i, free in enumerate(lanes) if free <= start + 1e-9), len(lanes))
    lanes[lane : lane + 1] = [end]
    axes.broken_barh([(start, end - start)], (lane - 0.4, 0.8), color="#e6e6e6")
    spans = [(matmul.start_us, matmul.us) for matmul in matmuls]
    axes.broken_barh(spans, (lane - 0.4, 0.8), color=COLORS[len(matmuls) // 2], edgecolor="white", linewidth=0.3)
    axes.broken_barh([(eviction.start_us, eviction.us)], (lane - 0.4, 0.8), color="black")
    assert eviction.engine == "scalar"
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (*COLORS.values(), "#e6e6e6", "black")]
labels = [*(f"matmuls, {name}" for name in names.values()), "waits", "evicted"]
axes.legend(handles, labels, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
axes.set_yticks(range(len(lanes)), [f"bank {i}" for i in range(len(lanes))])
axes.set(xlabel="us (computed)")
axes.set_title(f"{len(uses)} PSUM tiles, a bank each while they are needed", loc="left", fontsize=11)
plt.show()

assert len(lanes) <= TRN2.psum_banks

# %% [markdown]
# ## What each engine does when
#
# `cost.plot()` draws the same recording by engine, over the memory in use; the red lines are what the machine has. The weights and the window
# arrive first, 8 phases are computed, then the result leaves in one DMA.

# %%
cost.plot()

# %% [markdown]
# Two numbers bound the time. If all engines overlapped perfectly, the busiest one would decide (`overlapped_us`); if nothing overlapped, the sum
# (`serial_us`). The schedule in the picture lies between. It knows no contention, and buffers without limit: it is optimistic, too.

# %%
print(
    f"overlapped {cost.overlapped_us:.1f} us ≤ scheduled {cost.scheduled_us:.1f} us ≤ one by one {cost.serial_us:.1f} us (computed)"
)
assert cost.overlapped_us <= cost.scheduled_us <= cost.serial_us

# %% [markdown]
# ## A kernel of your own
#
# aᵀ b for any number of rows: tiles of rows add up in PSUM, tiles of columns get a bank each.


# %%
@nki.jit
def matmul(a, b, rows=128, columns=512):
    """a [K, M], b [K, N] in HBM -> a^T b [M, N]."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for n in range(0, b.shape[1], columns):
        product = nl.ndarray((a.shape[1], columns), dtype=nl.float32, buffer=nl.psum)
        for k in range(0, a.shape[0], rows):
            stationary = nl.ndarray((rows, a.shape[1]), dtype=a.dtype, buffer=nl.sbuf)
            moving = nl.ndarray((rows, columns), dtype=b.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=stationary, src=a[k : k + rows, :])
            nisa.dma_copy(dst=moving, src=b[k : k + rows, n : n + columns])
            nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
        staged = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=staged, src=product)
        nisa.dma_copy(dst=out[:, n : n + columns], src=staged)
    return out


a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((256, 64), (256, 8192)))
product, own_cost = nki.profile(matmul)(a, b)
assert bool((product == a.T @ b).all())
print(own_cost)

# %% [markdown]
# ## Break a limit
#
# The interpreter checks what the machine can do, instruction by instruction. Each message names the instruction, the operand, the value and
# the limit.

# %%
for what, tiles in {
    "256 rows on 128 partitions": {"rows": 256},
    "a moving matrix of 1024 columns": {"columns": 1024},
    "a PSUM tile of all 8192 columns": {"columns": 8192},
}.items():
    try:
        matmul(a, b, **tiles)
    except nki.NkiValidationError as error:
        print(f"{what}:\n    {error}\n")
    else:
        raise AssertionError(f"{what}: nothing was said")


# %% [markdown]
# Some limits show only in the end. Nine banks at one time are one too many: the interpreter adds up what is needed at each moment.


# %%
@nki.jit
def nine_banks(x):
    tile = nl.load(x)
    products = [nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(9)]
    for product in products:
        nisa.nc_matmul(dst=product, stationary=tile[:, 0:64], moving=tile)
    out = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    for product in products:
        nl.store(out, product)
    return out


try:
    nine_banks(np.ones((128, 512), np.float32))
except nki.NkiValidationError as error:
    message = str(error)
print(message.partition(" The largest")[0])
assert "9 banks, which exceeds 8" in message

# %% [markdown]
# ## Plans
#
# A layer with few channels leaves most of the 128 × 128 array idle. So a plan may *pack*: neighbouring outputs become further columns of the
# stationary matrix, and shifted copies of the input become further rows. The planner estimates several plans for a layer and takes the
# cheapest. Below, its choice (which may pack) and the plan without packing, both run in the interpreter. The values must be equal.

# %%
LAYERS = {  # channels, input size, taps; stride 2, padding 1
    "16 → 1, 16³, 4³ taps": (16, 1, 16, 4),
    "32 → 32, 16³, 4³ taps": (32, 32, 16, 4),
    "128 → 64, 8³, 3³ taps": (128, 64, 8, 3),
    "160 → 128, 12³, 3³ taps": (160, 128, 12, 3),
}
kernel_module = sys.modules["nki3d.conv3d_transpose"]  # in the package, the kernel has taken the name of its module


def run_both(c_in, c_out, size, taps):
    """The profile of the planner's choice, that of the plan without packing, and what the layer takes at least."""
    x = rng.integers(-2, 3, (1, c_in, size, size, size)).astype(ml_dtypes.bfloat16)
    filters = rng.integers(-2, 3, (taps, taps, taps, c_in, c_out)).astype(ml_dtypes.bfloat16)
    profiled = nki.profile(nki3d.conv3d_transpose, record=True)
    chosen, with_choice = profiled(x, filters, **geometry)
    with mock.patch.object(kernel_module, "conv3d_transpose_plan", partial(conv3d_transpose_plan, packed=False)):
        plain, without_packing = profiled(x, filters, **geometry)
    assert bool((chosen == plain).all())
    least = jax_nki3d.explain(partial(jax_nki3d.conv3d_transpose, **geometry), x, filters).counts[0][0]
    return with_choice, without_packing, least


results = {name: run_both(*layer) for name, layer in LAYERS.items()}

# %%
print(f"{'layer':<26}{'plan':<12}{'matmuls':>9}{'cycles':>10}{'HBM bytes':>12}{'all DMA bytes':>15}{'busiest engine':>17}")
for name, (chosen, plain, least) in results.items():
    for label, profile in (("chosen", chosen), ("unpacked", plain)):
        tensor, hbm = profile.engines["tensor"], profile.hbm_read_bytes + profile.hbm_write_bytes
        moved = sum(instruction.bytes for instruction in profile.recording)
        print(
            f"{name:<26}{label:<12}{tensor.instructions:>9,}{tensor.cycles:>10,.0f}{hbm:>12,}{moved:>15,}{profile.overlapped_us:>14.1f} us"
        )
        assert hbm >= least.bytes
    cycles = least.multiply_adds / (TRN2.partitions * TRN2.stationary_columns)
    print(f"{'':<26}{'at least':<12}{'':>9}{cycles:>10,.0f}{least.bytes:>12,}{'':>15}{least.microseconds:>14.1f} us\n")
    assert cycles <= chosen.engines["tensor"].cycles <= plain.engines["tensor"].cycles

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), layout="constrained", sharey=True)
places = np.arange(len(results))
for shift, which, label, color in ((-0.2, 0, "chosen", BLUE), (0.2, 1, "unpacked", ORANGE)):
    cycles = [
        r[which].engines["tensor"].cycles * TRN2.partitions * TRN2.stationary_columns / r[2].multiply_adds
        for r in results.values()
    ]
    bars = left.barh(places + shift, cycles, 0.36, color=color, label=label)
    left.bar_label(bars, [f"{c:.1f}" for c in cycles], padding=3)
    times = [r[which].overlapped_us for r in results.values()]
    bars = right.barh(places + shift, times, 0.36, color=color, label=label)
    right.bar_label(bars, [f"{t:.0f}" for t in times], padding=3)
left.set_yticks(places, results)
left.invert_yaxis()
left.set(xscale="log", xlim=(0.8, 4000), xlabel="tensor cycles over the least possible, logarithmic")
right.set(xlabel="us of the busiest engine, or of the DMA (computed)", xlim=(0, 125))
left.axvline(1, color=INK, linewidth=0.8, linestyle=":")
handles, labels = right.get_legend_handles_labels()
figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %% [markdown]
# How to read it:
#
# - Packing saves matmul cycles where channels are few. The price is DMA: copies of the input in SBUF, and shorter pieces.
# - HBM bytes are the least possible in all of these runs: every element is read once and written once.
# - Where both plans agree, the planner found no packing that it expects to pay.
# - The planner compares *estimates*: its choice need not be the one that the interpreter finds shorter.

# %%
for chosen, plain, least in results.values():
    assert chosen.hbm_read_bytes + chosen.hbm_write_bytes == least.bytes
    assert plain.hbm_read_bytes + plain.hbm_write_bytes == least.bytes

# %% [markdown]
# ## The same kernel inside JAX
#
# `implementation="simulate"` puts the kernel, in the interpreter, behind the operation of JAX. So its values and its gradients are those that the
# kernels compute, under `jit`, `grad` and the others. It is slow, and meant for small volumes.

# %%
tiny = jnp.asarray(rng.integers(-2, 3, (1, 3, 4, 4, 4)), jnp.float32)
weights = jnp.asarray(rng.integers(-2, 3, (3, 3, 3, 3, 5)), jnp.float32)


def value_and_gradients(implementation):
    def energy(x, w):
        return (jax_nki3d.conv3d_transpose(x, w, stride=2, padding=1, implementation=implementation) ** 2).sum()

    return jax.jit(jax.value_and_grad(energy, (0, 1)))(tiny, weights)


simulated, by_lax = value_and_gradients("simulate"), value_and_gradients("lax")
for ours, theirs in zip(jax.tree.leaves(simulated), jax.tree.leaves(by_lax), strict=True):
    assert bool((ours == theirs).all())
print("value, dx and dw: the kernels (simulated) and lax (CPU) agree, bit for bit")

# %% [markdown]
# ## What this proves, and what it does not
#
# - **Values** are simulated: the kernel's instructions, with the rounding and the accumulation that the documents describe. That lax agrees shows
#   that the algorithm is right; that the hardware does what the documents say is taken for granted.
# - **Limits** are those in the documents. What the compiler refuses is another matter: a kernel runs as plain Python here.
#   `python -m nki3d.lint` checks the dialect.
# - **Times** are computed from published figures: bounds to compare plans with, not predictions.
# - Nothing was ever compared with a device.
