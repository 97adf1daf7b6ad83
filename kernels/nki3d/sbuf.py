# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Addresses in SBUF: a stack that grows up from the lower bound, in scopes, and a heap that grows down from the upper one.

    lower bound                                                        upper bound
    | scope | scope, section 0 | section 1 | ...  free  ... | heap 1 | heap 0 |

A scope frees what was allocated in it when it closes. A scope of several sections rotates among them: what is allocated in one section stays
untouched while the next ones are filled, so that a loop can load one buffer while it computes on another.

Sizes are bytes per partition; which partitions a tensor takes does not matter.
"""

from dataclasses import dataclass, field

from ._nki import nl

__all__ = ["BufferManager", "SbufManager", "Scope", "align_to", "create_auto_alloc_manager", "num_elts", "sizeinbytes"]

# an address is a multiple of this
WORD = 4

_SIZES = (
    ("bool", 1),
    ("bool_", 1),
    ("int8", 1),
    ("uint8", 1),
    ("float8_e4m3", 1),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("float8_e8m0fnu", 1),
    ("int16", 2),
    ("uint16", 2),
    ("float16", 2),
    ("bfloat16", 2),
    ("float4_e2m1fn_x4", 2),
    ("int32", 4),
    ("uint32", 4),
    ("float32", 4),
    ("tfloat32", 4),
    ("float8_e4m3fn_x4", 4),
    ("float8_e5m2_x4", 4),
)


def sizeinbytes(dtype):
    """Bytes of one element.

    Example:
        >>> sizeinbytes("bfloat16")
        2
    """
    name = str(dtype)
    found = 0
    for known, size in _SIZES:
        if name == known:
            found = size
    assert found > 0, f"sizeinbytes: `dtype` {name} is no type of an on-chip tensor"
    return found


def align_to(value, alignment):
    """The smallest multiple of `alignment` that is not below `value`.

    Example:
        >>> align_to(33, 32)
        64
    """
    return (value + alignment - 1) // alignment * alignment


def num_elts(shape):
    """The number of elements of a shape.

    Example:
        >>> num_elts((2, 3, 4))
        24
    """
    count = 1
    for size in shape:
        count = count * size
    return count


@dataclass
class Scope(nl.NKIObject):
    """A part of the stack that is freed together.

    Attributes:
        starting_addr: the stack's address when it was opened.
        num_sections: how many sections it rotates among.
        name: for messages.
        cur_section_id: the section that allocations go to.
        min_independent_addr: the first address that the current section and those before it have never used.
        section_ends: per section, the first address behind everything that was ever allocated in it.
    """

    starting_addr: int
    num_sections: int = 1
    name: str = ""
    cur_section_id: int = 0
    min_independent_addr: int = 0
    section_ends: list = field(default_factory=list)


class SbufManager(nl.NKIObject):
    """Hands out addresses in SBUF.

    Args:
        sb_lower_bound: first byte of each partition that it may use.
        sb_upper_bound: the byte behind the last one.
        logger: an object with an `info` method for the log of allocations; None to print it.
        use_auto_alloc: give no addresses and leave the places to the compiler; scopes, sections and the heap then are bookkeeping only.
        default_stack_alloc: whether `alloc` uses the stack, else the heap.

    Example:
        >>> manager = SbufManager(0, 65536)
        >>> manager.open_scope(name="outer")
        >>> manager.align_stack_curr_addr(32)
        >>> manager.get_stack_curr_addr(), manager.get_free_space()
        (0, 65536)
        >>> manager.close_scope()
    """

    def __init__(self, sb_lower_bound, sb_upper_bound, logger=None, use_auto_alloc=False, default_stack_alloc=True):
        assert sb_lower_bound >= 0, f"SbufManager: `sb_lower_bound` {sb_lower_bound} is negative"
        assert sb_lower_bound <= sb_upper_bound, (
            f"SbufManager: `sb_lower_bound` {sb_lower_bound} is above `sb_upper_bound` {sb_upper_bound}"
        )
        self.lower = sb_lower_bound
        self.upper = sb_upper_bound
        self.logger = logger
        self.auto = use_auto_alloc
        self.stack_by_default = default_stack_alloc
        self.stack_addr = sb_lower_bound
        self.heap_addr = sb_upper_bound
        self.scopes = []
        self.heap = []
        self.prefix = ""
        self.logs = []

    # --- allocation

    def alloc(self, shape, dtype, buffer=nl.sbuf, name=None, base_partition=0, align=None):
        """A tensor on the stack or the heap, whichever is the default; in HBM if `buffer` says so.

        Args:
            shape: the shape; the first dimension counts partitions.
            dtype: the type of its elements.
            buffer: nl.sbuf, or a kind of HBM.
            name: a unique name; the prefix is put before it.
            base_partition: the first partition.
            align: bytes that the address is a multiple of; by default the size of an element, at least 4.
        """
        if buffer != nl.sbuf:
            return self.alloc_hbm(shape, dtype, buffer, name)
        if self.stack_by_default:
            return self.alloc_stack(shape, dtype, buffer, name, base_partition, align)
        return self.alloc_heap(shape, dtype, buffer, name, base_partition, align)

    def alloc_stack(self, shape, dtype, buffer=nl.sbuf, name=None, base_partition=0, align=None):
        """A tensor on the stack, freed when the innermost scope closes. Arguments as for `alloc`."""
        assert buffer == nl.sbuf, f"alloc_stack: `buffer` {buffer} must be nl.sbuf; use alloc_hbm for HBM"
        if self.auto:
            return self._tensor(shape, dtype, name, None)
        assert len(self.scopes) > 0, "Cannot allocate in stack without an open scope: call open_scope first"
        size = self._size(shape, dtype)
        start = align_to(self.stack_addr, self._alignment(dtype, align))
        assert start + size <= self.heap_addr, (
            f"Stack out of memory: {self._label(name)} {tuple(shape)} of {dtype} needs {size} B at address {start}, and the heap starts "
            f"at {self.heap_addr}: {start + size - self.heap_addr} B are missing. Use a smaller tile or fewer sections"
        )
        self.stack_addr = start + size
        scope = self.scopes[len(self.scopes) - 1]
        self._touched(scope)
        self._log(len(self.scopes), f"{self._label(name)}: {size} B @ {start} {tuple(shape)} {dtype}")
        return self._tensor(shape, dtype, name, (base_partition, start))

    def alloc_heap(self, shape, dtype, buffer=nl.sbuf, name=None, base_partition=0, align=None):
        """A tensor on the heap, freed by `pop_heap`. Arguments as for `alloc`."""
        assert buffer == nl.sbuf, f"alloc_heap: `buffer` {buffer} must be nl.sbuf; use alloc_hbm for HBM"
        if self.auto:
            self.heap.append(0)
            return self._tensor(shape, dtype, name, None)
        size = self._size(shape, dtype)
        alignment = self._alignment(dtype, align)
        start = (self.heap_addr - size) // alignment * alignment
        top = self._stack_top()
        assert start >= top, (
            f"Heap out of memory: {self._label(name)} {tuple(shape)} of {dtype} needs {size} B below address {self.heap_addr}, and the "
            f"stack ends at {top}: {top - start} B are missing. Use a smaller tile, or pop_heap first"
        )
        # what pop_heap goes back to
        self.heap.append(self.heap_addr)
        self.heap_addr = start
        self._log(len(self.scopes), f"heap {self._label(name)}: {size} B @ {start} {tuple(shape)} {dtype}")
        return self._tensor(shape, dtype, name, (base_partition, start))

    def pop_heap(self):
        """Free the youngest tensor of the heap."""
        assert len(self.heap) > 0, "Heap underflow: pop_heap was called more often than alloc_heap"
        last = self.heap[len(self.heap) - 1]
        self.heap = self.heap[0 : len(self.heap) - 1]
        if not self.auto:
            self._log(len(self.scopes), f"heap freed={last - self.heap_addr} B")
            self.heap_addr = last

    def alloc_hbm(self, shape, dtype, buffer=nl.shared_hbm, name=None):
        """A tensor in HBM, which needs no address."""
        if name == None:  # noqa: E711
            return nl.ndarray(shape, dtype=dtype, buffer=buffer)
        return nl.ndarray(shape, dtype=dtype, buffer=buffer, name=self.prefix + name)

    # --- scopes

    def open_scope(self, interleave_degree=1, name=""):
        """Open a scope of `interleave_degree` sections; allocations go to the first."""
        assert interleave_degree >= 1, f"open_scope: `interleave_degree` {interleave_degree} must be at least 1"
        ends = []
        for _ in range(interleave_degree):
            ends.append(self.stack_addr)
        scope = Scope(
            starting_addr=self.stack_addr,
            num_sections=interleave_degree,
            name=name,
            cur_section_id=0,
            min_independent_addr=self.stack_addr,
            section_ends=ends,
        )
        self._log(len(self.scopes), f"scope {name!r} of {interleave_degree} @ {self.stack_addr}")
        self.scopes.append(scope)

    def increment_section(self):
        """Go on to the next section of the innermost scope; after the last one, to the first, whose memory is used again.

        A section starts where the sections before it never allocated. Rounds should allocate the same: a section that grows reaches into
        the place that the next one had in the round before.
        """
        assert len(self.scopes) > 0, "increment_section was called without an open scope: call open_scope first"
        scope = self.scopes[len(self.scopes) - 1]
        scope.cur_section_id = (scope.cur_section_id + 1) % scope.num_sections
        start = scope.starting_addr
        for i in range(scope.cur_section_id):
            start = max(start, scope.section_ends[i])
        self.stack_addr = start
        scope.min_independent_addr = max(start, scope.section_ends[scope.cur_section_id])
        self._log(len(self.scopes), f"section {scope.cur_section_id}/{scope.num_sections} @ {start}")

    def close_scope(self):
        """Free what was allocated in the innermost scope; the log is printed when the last one closes."""
        assert len(self.scopes) > 0, "close_scope was called without an open scope"
        scope = self.scopes[len(self.scopes) - 1]
        freed = self._scope_end(scope) - scope.starting_addr
        self.scopes = self.scopes[0 : len(self.scopes) - 1]
        self.stack_addr = scope.starting_addr
        self._log(len(self.scopes), f"end {scope.name!r} freed={freed} B")
        if len(self.scopes) == 0 and self.logger != None:  # noqa: E711
            self.flush_logs()

    # --- state

    def is_auto_alloc(self):
        """Whether the compiler chooses the addresses."""
        return self.auto

    def set_auto_alloc(self, use_auto_alloc):
        """Leave the addresses to the compiler, or not."""
        self.auto = use_auto_alloc

    def is_default_stack_alloc(self):
        """Whether `alloc` uses the stack."""
        return self.stack_by_default

    def is_default_heap_alloc(self):
        """Whether `alloc` uses the heap."""
        return not self.stack_by_default

    def get_total_space(self):
        """Bytes between the bounds."""
        return self.upper - self.lower

    def get_free_space(self):
        """Bytes between the stack, all sections of its open scopes included, and the heap."""
        return self.heap_addr - self._stack_top()

    def get_used_space(self):
        """Bytes of the stack and the heap."""
        return self.get_total_space() - self.get_free_space()

    def get_stack_curr_addr(self):
        """Where the stack's next allocation starts, before it is aligned."""
        assert not self.auto, "get_stack_curr_addr: there are no addresses in auto allocation mode"
        return self.stack_addr

    def get_heap_curr_addr(self):
        """Where the heap's youngest tensor starts."""
        assert not self.auto, "get_heap_curr_addr: there are no addresses in auto allocation mode"
        return self.heap_addr

    def align_stack_curr_addr(self, align=32):
        """Move the stack's address up to a multiple of `align` bytes."""
        assert not self.auto, "align_stack_curr_addr: there are no addresses in auto allocation mode"
        start = align_to(self.stack_addr, align)
        assert start <= self.heap_addr, (
            f"Stack out of memory: aligned to {align} B it would end at {start}, and the heap starts at {self.heap_addr}"
        )
        self.stack_addr = start
        if len(self.scopes) > 0:
            self._touched(self.scopes[len(self.scopes) - 1])

    def set_name_prefix(self, prefix):
        """Put `prefix` before the names of tensors from now on."""
        self.prefix = prefix

    def get_name_prefix(self):
        """The prefix of names."""
        return self.prefix

    def flush_logs(self):
        """Write out what was allocated and freed since the last time."""
        if len(self.logs) > 0:
            text = "SBUF allocations:"
            for line in self.logs:
                text = text + "\n" + line
            if self.logger == None:  # noqa: E711
                print(text)
            else:
                self.logger.info(text)
        self.logs = []

    # --- inside

    def _size(self, shape, dtype):
        return num_elts(shape[1:]) * sizeinbytes(dtype)

    def _alignment(self, dtype, align):
        if align == None:  # noqa: E711
            align = sizeinbytes(dtype)
        assert align >= 1, f"SbufManager: `align` {align} must be at least 1"
        if align % WORD == 0:
            return align
        # the least common multiple with a word, whose factors are 2 and 2
        return align * 2 if align % 2 == 0 else align * WORD

    def _tensor(self, shape, dtype, name, address):
        # a name that is not given is left out, so that the language makes one up
        if name == None and address == None:  # noqa: E711
            return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        if name == None:  # noqa: E711
            return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, address=address)
        if address == None:  # noqa: E711
            return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name=self.prefix + name)
        return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name=self.prefix + name, address=address)

    def _touched(self, scope):
        """Note how far the current section of a scope, and of the scopes around it, reaches."""
        for outer in self.scopes:
            section = outer.cur_section_id
            outer.section_ends[section] = max(outer.section_ends[section], self.stack_addr)
        scope.min_independent_addr = max(scope.min_independent_addr, self.stack_addr)

    def _scope_end(self, scope):
        end = scope.starting_addr
        for section_end in scope.section_ends:
            end = max(end, section_end)
        return end

    def _stack_top(self):
        """Behind all that open scopes hold, in other sections than the current one, too."""
        top = self.stack_addr
        for scope in self.scopes:
            top = max(top, self._scope_end(scope))
        return top

    def _label(self, name):
        return "(unnamed)" if name == None else self.prefix + name  # noqa: E711

    def _log(self, depth, text):
        indent = "  "
        for _ in range(depth):
            indent = indent + "  "
        self.logs.append(indent + text)


BufferManager = SbufManager


def create_auto_alloc_manager(logger=None):
    """A manager that leaves all addresses to the compiler.

    Example:
        >>> create_auto_alloc_manager().is_auto_alloc()
        True
    """
    return SbufManager(0, nl.tile_size.total_available_sbuf_size, logger, use_auto_alloc=True)
