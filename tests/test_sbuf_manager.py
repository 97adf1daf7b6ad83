# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Addresses that `SbufManager` gives, and that kernels which use them pass the simulator's check for overlaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nki3d.simulator as nki
from nki3d.sbuf import BufferManager, SbufManager, Scope, align_to, create_auto_alloc_manager, num_elts, sizeinbytes

nl, nisa = nki.language, nki.isa
INPUT = np.zeros((1, 1), np.float32)


def in_kernel(function, *arguments, target="trn2"):
    """The result of host code that needs a running kernel, to allocate tensors."""
    found = []

    def kernel(x):
        found.append(function(*arguments))
        return x

    nki.profile(kernel, target=target)(INPUT)
    return found[0]


def address(tensor):
    return tensor.storage.allocation.address


def test_helpers():
    assert [sizeinbytes(dtype) for dtype in (nl.float32, nl.bfloat16, nl.float16, nl.int8, nl.uint16, nl.int32)] == [
        4,
        2,
        2,
        1,
        2,
        4,
    ]
    with pytest.raises(AssertionError, match="float64"):
        sizeinbytes("float64")
    assert [align_to(n, 32) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert num_elts((2, 3, 5)) == 30
    assert num_elts(()) == 1
    assert BufferManager is SbufManager


def test_the_layout_of_the_documentation():
    """A heap at the top, scopes that reuse what an inner one freed."""

    def body():
        manager = SbufManager(0, nl.tile_size.total_available_sbuf_size)
        weights = manager.alloc_heap((128, 256), nl.bfloat16, name="weights")
        manager.open_scope(name="outer")
        one = manager.alloc_stack((128, 512), nl.bfloat16, name="one")
        manager.open_scope(name="inner")
        two = manager.alloc_stack((128, 256), nl.bfloat16, name="two")
        three = manager.alloc_stack((128, 256), nl.bfloat16, name="three")
        manager.close_scope()
        four = manager.alloc_stack((128, 512), nl.bfloat16, name="four")
        manager.close_scope()
        manager.pop_heap()
        assert manager.get_used_space() == 0
        return [address(t)[1] for t in (weights, one, two, three, four)]

    assert in_kernel(body, target="trn3") == [261_632, 0, 1024, 1536, 1024]


def test_sections_rotate():
    def body():
        manager = SbufManager(64, 65_536)
        manager.open_scope(interleave_degree=3, name="loop")
        found = []
        for _ in range(7):
            found.append(address(manager.alloc((128, 100), nl.float32))[1])
            found.append(address(manager.alloc((128, 10), nl.float32))[1])
            manager.increment_section()
        manager.close_scope()
        assert manager.get_stack_curr_addr() == 64
        return found

    firsts = [64, 504, 944, 64, 504, 944, 64]
    assert in_kernel(body) == [n for first in firsts for n in (first, first + 400)]


def test_a_section_starts_behind_what_the_ones_before_it_ever_used():
    def body():
        manager = SbufManager(0, 65_536)
        manager.open_scope(interleave_degree=2)
        found = []
        for elements in (100, 50, 40, 50, 200, 50):
            manager.open_scope()
            found.append(address(manager.alloc_stack((4, elements), nl.float32))[1])
            manager.close_scope()
            manager.increment_section()
        return found, manager.get_free_space()

    # section 0 shrinks in the second round, which moves nothing, and grows in the third
    assert in_kernel(body) == ([0, 400, 0, 400, 0, 800], 65_536 - 1000)


def test_free_space_counts_every_section():
    def body():
        manager = SbufManager(0, 4096)
        manager.open_scope(interleave_degree=2)
        for _ in range(2):
            manager.alloc_stack((8, 256), nl.float32)
            manager.increment_section()
        # back in section 0, whose neighbour is still in use
        assert manager.get_stack_curr_addr() == 0
        assert (manager.get_total_space(), manager.get_used_space(), manager.get_free_space()) == (4096, 2048, 2048)
        with pytest.raises(AssertionError, match=r"Heap out of memory.*needs 2052 B.*4 B are missing"):
            manager.alloc_heap((8, 513), nl.float32)
        return address(manager.alloc_heap((8, 512), nl.float32))[1]

    assert in_kernel(body) == 2048


def test_out_of_memory_counts_the_alignment():
    """64 B fit behind address 1, but not behind 96, the next multiple: what is checked is where the tensor would lie."""

    def body():
        manager = SbufManager(0, 128)
        manager.open_scope()
        manager.alloc_stack((1, 1), nl.int8)
        with pytest.raises(
            AssertionError, match=r"Stack out of memory: \(unnamed\) .* needs 64 B at address 96.* 32 B are missing"
        ):
            manager.alloc_stack((1, 64), nl.int8, align=96)
        assert manager.get_stack_curr_addr() == 1
        assert address(manager.alloc_stack((1, 64), nl.int8, align=64))[1] == 64
        with pytest.raises(AssertionError, match="Stack out of memory"):
            manager.alloc_stack((1, 1), nl.int8)
        with pytest.raises(AssertionError, match="Stack out of memory"):
            manager.align_stack_curr_addr(96)
        manager.close_scope()
        # the heap's start is rounded down: 100 B need 104 with 8
        manager.open_scope()
        manager.alloc_stack((1, 25), nl.int8)
        with pytest.raises(AssertionError, match="Heap out of memory"):
            manager.alloc_heap((1, 100), nl.int8, align=8)
        assert manager.get_heap_curr_addr() == 128
        return address(manager.alloc_heap((1, 100), nl.int8))[1]

    assert in_kernel(body) == 28


def test_the_heap_is_last_in_first_out():
    def body():
        manager = SbufManager(0, 1000, default_stack_alloc=False)
        assert manager.is_default_heap_alloc()
        assert not manager.is_default_stack_alloc()
        found = [address(manager.alloc((2, n), nl.bfloat16))[1] for n in (5, 7)]
        found.append(address(manager.alloc_heap((2, 8), nl.bfloat16, align=64))[1])
        for _ in range(3):
            manager.pop_heap()
            found.append(manager.get_heap_curr_addr())
        with pytest.raises(AssertionError, match="Heap underflow"):
            manager.pop_heap()
        return found

    assert in_kernel(body) == [988, 972, 896, 972, 988, 1000]


def test_misuse_is_refused():
    def body():
        manager = SbufManager(0, 1000)
        with pytest.raises(AssertionError, match="Cannot allocate in stack without an open scope"):
            manager.alloc_stack((1, 1), nl.float32)
        for method in (manager.close_scope, manager.increment_section):
            with pytest.raises(AssertionError, match="without"):
                method()
        with pytest.raises(AssertionError, match="interleave_degree"):
            manager.open_scope(interleave_degree=0)
        with pytest.raises(AssertionError, match="`buffer`"):
            manager.alloc_heap((1, 1), nl.float32, buffer=nl.shared_hbm)
        with pytest.raises(AssertionError, match="is above"):
            SbufManager(2, 1)
        with pytest.raises(AssertionError, match="is negative"):
            SbufManager(-1, 1)

    in_kernel(body)


def test_auto_allocation_gives_no_addresses():
    def body():
        manager = create_auto_alloc_manager()
        assert manager.is_auto_alloc()
        assert manager.get_free_space() == manager.get_total_space() == nl.tile_size.total_available_sbuf_size
        manager.open_scope(interleave_degree=2)
        tensors = [manager.alloc_stack((128, 4), nl.float32), manager.alloc_heap((128, 4), nl.float32)]
        manager.increment_section()
        tensors.append(manager.alloc((128, 4), nl.float32, name="auto"))
        manager.pop_heap()
        with pytest.raises(AssertionError, match="Heap underflow"):
            manager.pop_heap()
        manager.close_scope()
        for method in (manager.get_stack_curr_addr, manager.get_heap_curr_addr, manager.align_stack_curr_addr):
            with pytest.raises(AssertionError, match="auto allocation"):
                method()
        manager.set_auto_alloc(False)
        assert manager.get_stack_curr_addr() == 0
        return [address(t) for t in tensors]

    assert in_kernel(body) == [None, None, None]


def test_names_partitions_and_hbm():
    def body():
        manager = SbufManager(0, 1000)
        manager.set_name_prefix("layer0_")
        assert manager.get_name_prefix() == "layer0_"
        manager.open_scope()
        tensor = manager.alloc((32, 4), nl.float32, name="x", base_partition=64)
        there = manager.alloc((3, 4), nl.float32, buffer=nl.shared_hbm, name="y")
        unnamed = manager.alloc_hbm((3, 4), nl.float32)
        assert there.buffer == unnamed.buffer == nl.shared_hbm
        return tensor.name, address(tensor), there.name, manager.get_used_space()

    assert in_kernel(body) == ("layer0_x", (64, 0), "layer0_y", 16)


class Logger:
    def __init__(self):
        self.texts = []

    def info(self, text):
        self.texts.append(text)


def test_the_log_is_written_when_the_last_scope_closes(capsys):
    def body():
        logger = Logger()
        manager = SbufManager(0, 4096, logger=logger)
        manager.open_scope(interleave_degree=2, name="ping-pong")
        manager.open_scope()
        manager.alloc((8, 16), nl.bfloat16, name="a")
        manager.close_scope()
        manager.increment_section()
        manager.alloc((8, 16), nl.bfloat16)
        assert not logger.texts
        manager.close_scope()
        return logger.texts

    (text,) = in_kernel(body)
    lines = text.splitlines()
    assert len(lines) == 8
    for line, words in zip(
        lines[1:], ("ping-pong", "scope", "a: 32 B @ 0", "freed=32", "1/2 @ 32", "32 B @ 32", "freed=64"), strict=True
    ):
        assert words in line
    manager = SbufManager(0, 8)
    manager.open_scope(name="quiet")
    manager.close_scope()
    manager.flush_logs()
    manager.flush_logs()
    assert capsys.readouterr().out.count("quiet") == 2


def test_scope_is_a_record():
    scope = Scope(8, 2, "name")
    assert (scope.starting_addr, scope.num_sections, scope.name, scope.cur_section_id) == (8, 2, "name", 0)


@given(
    st.lists(st.tuples(st.sampled_from(["open", "next", "close", "stack", "heap", "pop"]), st.integers(1, 300)), max_size=40)
)
def test_what_is_live_never_overlaps(actions):
    """A model: every scope keeps the tensors of its sections, and a section that starts again drops its own."""

    def body():
        manager = SbufManager(0, 4096)
        scopes, heap = [], []

        def live():
            return heap + [span for sections, _ in scopes for section in sections for span in section]

        for action, n in actions:
            if action == "open":
                degree = n % 3 + 1
                manager.open_scope(degree)
                scopes.append(([[] for _ in range(degree)], [0]))
            elif action == "next" and scopes:
                manager.increment_section()
                sections, current = scopes[-1]
                current[0] = (current[0] + 1) % len(sections)
                # rounds that differ may reach into later sections: these are dropped, too
                for section in range(current[0], len(sections)):
                    sections[section] = []
            elif action == "close" and scopes:
                manager.close_scope()
                scopes.pop()
            elif action == "pop" and heap:
                manager.pop_heap()
                heap.pop()
            elif action == "heap" or (action == "stack" and scopes):
                before = manager.get_free_space()
                try:
                    tensor = manager.alloc_heap((8, n), nl.int8) if action == "heap" else manager.alloc_stack((8, n), nl.int8)
                except AssertionError as error:
                    assert "out of memory" in str(error)  # noqa: PT017
                    assert before < n + 4 or action == "stack"
                    continue
                start = address(tensor)[1]
                assert start % 4 == 0
                assert start >= 0
                assert start + n <= 4096
                assert all(start + n <= first or end <= start for first, end in live())
                (heap if action == "heap" else scopes[-1][0][scopes[-1][1][0]]).append((start, start + n))

    in_kernel(body)


# ---- in a kernel -----------------------------------------------------------------------------------------------------


@nki.jit
def doubled_sums(x, degree):
    """out[i] = x[i] + x[i - 1]: the tile of the round before is still needed, so the loop rotates between buffers."""
    manager = SbufManager(0, 4 * 512 * 4)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    before = manager.alloc_heap((128, 512), x.dtype)
    nisa.memset(before, 0.0)
    manager.open_scope(interleave_degree=degree)
    for i in range(x.shape[0]):
        tile = manager.alloc_stack((128, 512), x.dtype)
        nisa.dma_copy(dst=tile, src=x[i])
        nisa.tensor_tensor(dst=before, data1=before, data2=tile, op=nl.add)
        nisa.dma_copy(dst=out[i], src=before)
        before = tile
        manager.increment_section()
    manager.close_scope()
    return out


@pytest.mark.parametrize("degree", [2, 3])
def test_interleaved_buffers_pass_the_check_for_overlaps(degree, rng):
    x = rng.integers(-9, 9, (5, 128, 512)).astype(np.float32)
    out, cost = nki.profile(doubled_sums)(x, degree)
    np.testing.assert_array_equal(out, x + np.concatenate([np.zeros_like(x[:1]), x[:-1]]))
    assert cost.sbuf_peak_bytes <= (degree + 1) * 2048


def test_the_check_finds_a_buffer_too_few(rng):
    with pytest.raises(nki.NkiValidationError, match="overlaps"):
        nki.profile(doubled_sums)(np.ones((5, 128, 512), np.float32), 1)
