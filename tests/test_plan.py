# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic beneath the lax path: taps and phases, and the choice among formulations."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_nki3d._geometry import Geometry, convolved_size, transposed_size
from jax_nki3d._lax import plan

sizes = st.tuples(*(st.integers(1, 70) for _ in range(3)))
small = st.tuples(*(st.integers(1, 4) for _ in range(3)))


@st.composite
def geometries(draw):
    size, kernel, stride, dilation = draw(sizes), draw(small), draw(small), draw(small)
    front = draw(st.tuples(*(st.integers(0, 9) for _ in range(3))))
    out = [convolved_size(*axis, 0) for axis in zip(size, kernel, stride, dilation, front, strict=True)]
    return Geometry(size, tuple(max(1, n) for n in out), kernel, stride, dilation, front)


@given(geometries())
def test_taps_say_where_they_read(geometry):
    for axis in range(3):
        stride = geometry.stride[axis]
        for tap in geometry.taps(axis):
            assert 0 <= tap.phase < stride
            offset = tap.k * geometry.dilation[axis] - geometry.front[axis]
            assert tap.shift * stride + tap.phase == offset
        groups = geometry.taps_by_phase(axis)
        assert sorted(itertools.chain(*groups.values())) == sorted(geometry.taps(axis))
        for group in groups.values():  # filters are sliced with one step
            steps = {b.k - a.k for a, b in itertools.pairwise(group)}
            assert len(steps) <= 1


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 5),
    s=st.integers(1, 5),
    d=st.integers(1, 4),
    p=st.integers(0, 9),
    extra=st.integers(0, 4),
)
def test_a_transposed_size_is_one_that_the_convolution_maps_back(n, k, s, d, p, extra):
    extra = min(extra, s - 1)
    size = transposed_size(n, k, s, d, p, extra)
    if size >= 1:
        assert convolved_size(size, k, s, d, p, p) == n


@given(geometries(), st.integers(1, 5), st.integers(1, 300), st.integers(1, 300))
def test_plans_are_sound(geometry, batch, c_in, c_out):
    lengths = {
        plan.plan_correlate: geometry.out,
        plan.plan_filter_gradient: geometry.out,
        plan.plan_spread: tuple(-(-n // s) for n, s in zip(geometry.size, geometry.stride, strict=True)),
    }
    for make, length in lengths.items():
        chosen = make(geometry, batch, c_in, c_out, 4)
        assert chosen.summed in plan.CANDIDATES
        rows = length[chosen.slab_axis]
        assert rows == max(length)
        assert 1 <= chosen.slabs <= rows
        per_slab = -(-rows // chosen.slabs)
        assert (chosen.slabs - 1) * per_slab < rows <= chosen.slabs * per_slab  # no slab is empty
        assert chosen.slabs == 1 or per_slab >= 2
        if chosen.slabs == 1:
            assert chosen.workspace * 4 <= plan.SLAB_BYTES or rows < 4


@pytest.mark.parametrize(
    ("c_in", "c_out", "summed"),
    [(1, 64, ((), (0,))), (64, 1, ((0, 1, 2),)), (32, 32, ((0, 1), (0,)))],
)
def test_few_channels_decide(c_in, c_out, summed):
    """Few input channels: cheap patches. Few output channels: cheap sums. Equal ones: both, mixed."""
    geometry = Geometry((16,) * 3, (16,) * 3, (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)
    assert plan.plan_correlate(geometry, 1, c_in, c_out, 4).summed in summed
    assert plan.plan_spread(geometry, 1, c_out, c_in, 4).summed in summed


def test_an_upsampling_needs_no_copies():
    geometry = Geometry((16,) * 3, (8,) * 3, (2,) * 3, (2,) * 3, (1,) * 3, (0,) * 3)
    assert plan.plan_spread(geometry, 1, 32, 64, 4).summed == (0, 1, 2)


def test_a_plan_can_be_read():
    geometry = Geometry((256,) * 3, (256,) * 3, (3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)
    text = str(plan.plan_correlate(geometry, 1, 32, 32, 4))
    assert text.startswith("stack W, sum DH, ")
    assert text.endswith(" slabs along D")
