"""One launch that measures many tensors: largest finite magnitude, number of NaN, number of inf of each.

The bits of a float without its sign, read as an integer, order NaN above inf above everything finite, so the magnitudes of
16-bit and 32-bit floats are found with integer instructions on 4-byte words, two values to a word where they are narrow.
A program reads one chunk of one tensor, and reads it once more to count only where something in it is not finite.
The program that ends last copies the rows to the host's memory, so a row arrives there without any call from the host.
"""

import triton
import triton.language as tl

ROWS = 16
"""Tensors in one launch. They are kernel arguments, which costs no copy of a table to the device."""

SLOTS = 1024
"""Launches whose results are kept on the device; half of them may be on their way at a time."""

WORDS = 4096
TILES = 4
CHUNK = WORDS * TILES
"""4-byte words that one program reads (64 KiB), in tiles of 16 KiB: four 16-byte loads in flight for each thread."""

WARPS = 8

KIND_BITS, NUMEL_BITS = 4, 40
FLAG = 1 << 61
"""Set in every description, so that it is always a 64-bit argument and the kernel is compiled once."""


def describe(kind: int, numel: int, gate: int) -> int:
    """Packs what the kernel has to know of a tensor into one integer.

    Args:
        kind: 2 for bfloat16, 3 for float16, 4 for float32 (never a multiple of 16, which Triton would specialise on).
        numel: number of elements, less than 2**40.
        gate: index of the row (slot × ROWS + place) that must not be finite for this tensor to be read, -1 for none.
    """
    return FLAG | kind | numel << KIND_BITS | (gate + 1) << (KIND_BITS + NUMEL_BITS)


def check_of(bits: int, nan: int, inf: int, tag: int) -> int:
    """What the fourth word of a row is once the row has arrived whole, as an unsigned integer."""
    return ((bits ^ (nan << 8) ^ (inf << 16) ^ tag) * 0x5BD1E995) & 0xFFFFFFFF


@triton.jit
def _words_of(description):  # type: ignore[no-untyped-def]
    """4-byte words that hold the tensor of a description."""
    numel = (description >> 4) & 0xFFFFFFFFFF
    return tl.where((description & 15) == 4, numel, (numel + 1) // 2)


@triton.jit
def _find_row(program, descriptions, rows: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row that a program works on, and the first program of that row."""
    row = 0
    first = 0
    start = 0
    for i in tl.static_range(rows):
        end = start + tl.cdiv(_words_of(descriptions[i]), chunk).to(tl.int32)
        inside = (program >= start) & (program < end)
        row = tl.where(inside, i, row)
        first = tl.where(inside, start, first)
        start = end
    return row, first


@triton.jit
def _pick(values, row, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """``values[row]`` of a tuple of integers."""
    value = values[0]
    for i in tl.static_range(1, rows):
        value = tl.where(row == i, values[i], value)
    return value


@triton.jit
def _read(source, begin, description, tile, masked: tl.constexpr, words_in_tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Magnitude bits in one tile of words: of the lower halves, and of the upper halves (or whole words) in place."""
    wide = (description & 15) == 4
    numel = (description >> 4) & 0xFFFFFFFFFF
    offsets = tile * words_in_tile + tl.arange(0, words_in_tile)
    low_mask = tl.where(wide, 0, 0x7FFF).to(tl.int32)
    high_mask = tl.where(wide, 0x7FFFFFFF, 0x7FFF0000).to(tl.int32)
    if masked:
        place = begin + offsets
        word = tl.load(source + offsets, mask=place < _words_of(description), other=0)
        others = (wide == 0) & (place * 2 + 1 >= numel)  # the upper half of an odd tensor's last word
        return word & low_mask, tl.where(others, 0, word & high_mask)
    word = tl.load(source + offsets)
    return word & low_mask, word & high_mask


@triton.jit
def _measure(source, begin, description, own, words_in_tile: tl.constexpr, tiles: tl.constexpr):  # type: ignore[no-untyped-def]
    """Measures one chunk and adds it to the row ``own``."""
    wide = (description & 15) == 4
    shift = tl.where(wide, 0, 16).to(tl.int32)
    infinity = tl.where(wide, 0x7F800000, tl.where((description & 15) == 2, 0x7F80, 0x7C00)).to(tl.int32)
    low = tl.zeros([words_in_tile], tl.int32)
    high = tl.zeros([words_in_tile], tl.int32)
    if begin + words_in_tile * tiles < _words_of(description):
        for t in tl.static_range(tiles):
            lower, upper = _read(source, begin, description, t, False, words_in_tile)
            low = tl.maximum(low, lower)
            high = tl.maximum(high, upper)
    else:
        for t in range(tiles):
            lower, upper = _read(source, begin, description, t, True, words_in_tile)
            low = tl.maximum(low, lower)
            high = tl.maximum(high, upper)
    largest = tl.maximum(tl.max(low, 0), tl.max(high, 0) >> shift)
    if largest < infinity:
        tl.atomic_max(own, largest, sem="relaxed")
    else:
        finite = tl.zeros([words_in_tile], tl.int32)
        nan = tl.zeros([words_in_tile], tl.int32)
        inf = tl.zeros([words_in_tile], tl.int32)
        for t in range(tiles):
            lower, upper = _read(source, begin, description, t, True, words_in_tile)
            upper = upper >> shift
            nan += (lower > infinity).to(tl.int32) + (upper > infinity).to(tl.int32)
            inf += (lower == infinity).to(tl.int32) + (upper == infinity).to(tl.int32)
            kept = tl.maximum(tl.where(lower < infinity, lower, 0), tl.where(upper < infinity, upper, 0))
            finite = tl.maximum(finite, kept)
        tl.atomic_max(own, tl.max(finite, 0), sem="relaxed")
        tl.atomic_add(own + 1, tl.sum(nan, 0), sem="relaxed")
        tl.atomic_add(own + 2, tl.sum(inf, 0), sem="relaxed")


@triton.jit
def measure_rows(  # type: ignore[no-untyped-def]
    addresses, descriptions, results, host, launch, rows: tl.constexpr, slots: tl.constexpr,
    words_in_tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Measures up to ``rows`` tensors. The grid has one program for each chunk of each tensor.

    Args:
        addresses: tuple of the tensors' addresses, multiples of 16; any such address for an unused row.
        descriptions: tuple of what :func:`describe` gives; of no elements for an unused row.
        results: int32 [slots, rows, 4] on the device: magnitude bits, NaN, inf, and in row 0 the programs that have ended.
            The slot half a ring ahead is cleared for later.
        host: address of int32 [slots, rows, 4] in page-locked memory: magnitude bits, NaN, inf, :func:`check_of` them.
        launch: number of the launch (31 bits), its tag; its remainder by ``slots`` is its slot. Plus :data:`FLAG`.
    """
    chunk: tl.constexpr = words_in_tile * tiles
    program = tl.program_id(0)
    tag = (launch & 0x7FFFFFFF).to(tl.int32)
    slot = tag % slots
    row, first = _find_row(program, descriptions, rows, chunk)
    description = _pick(descriptions, row, rows)
    address = _pick(addresses, row, rows)
    gate = ((description >> 44) & 0xFFFF).to(tl.int32) - 1
    wanted = gate < 0
    if gate >= 0:
        wanted = tl.load(results + gate * 4 + 1) + tl.load(results + gate * 4 + 2) > 0
    if wanted:
        begin = (program - first).to(tl.int64) * chunk
        source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + begin
        _measure(source, begin, description, results + (slot * rows + row) * 4, words_in_tile, tiles)

    ended = tl.atomic_add(results + slot * rows * 4 + 3, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        every = (slot * rows + tl.arange(0, rows)) * 4
        bits = tl.load(results + every, cache_modifier=".cg")
        nan = tl.load(results + every + 1, cache_modifier=".cg")
        inf = tl.load(results + every + 2, cache_modifier=".cg")
        there = host.to(tl.pointer_type(tl.int32)) + every
        tl.store(there, bits)
        tl.store(there + 1, nan)
        tl.store(there + 2, inf)
        tl.store(there + 3, (bits ^ (nan << 8) ^ (inf << 16) ^ tag) * 0x5BD1E995)
        ahead = (slot + slots // 2) % slots
        tl.store(results + ahead * rows * 4 + tl.arange(0, rows * 4), tl.zeros([rows * 4], tl.int32))
