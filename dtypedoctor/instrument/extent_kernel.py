"""One launch that measures many tensors: largest finite magnitude, number of NaN, number of inf of each.

The bits of a float without its sign, read as an integer, order NaN above inf above everything finite, so the magnitudes of
16-bit and 32-bit floats are found with integer instructions on 4-byte words, two values to a word where they are narrow.
A program reads its share of all tensors, and reads a part of it once more to count only where that is not finite.
The program that ends last copies the rows to the host's memory, so a row arrives there without any call from the host.
"""

import triton
import triton.language as tl

ROWS = 16
"""Tensors in one launch. They are kernel arguments, which costs no copy of a table to the device."""

SLOTS = 1024
"""Launches whose results are kept on the device; half of them may be on their way at a time."""

WORDS = 1024
TILES = 4
CHUNK = WORDS * TILES
"""4-byte words in the smallest part of a tensor that a program reads (16 KiB): eight loads of 16 bytes for each thread."""

WARPS = 4
PROGRAMS = 5
"""Programs on each multiprocessor. All run at a time and share the chunks evenly, so that none is left for a last, thin wave."""

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
def _chunks_of(description, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks of the tensor of a description."""
    return tl.cdiv(_words_of(description), chunk).to(tl.int32)


@triton.jit
def _words_of(description):  # type: ignore[no-untyped-def]
    """4-byte words that hold the tensor of a description."""
    numel = (description >> 4) & 0xFFFFFFFFFF
    return tl.where((description & 15) == 4, numel, (numel + 1) // 2)


@triton.jit
def _find_row(place, addresses, descriptions, rows: tl.constexpr, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row that chunk number ``place`` of the launch belongs to: its number, first chunk, address and description."""
    row = 0
    first = 0
    start = 0
    address = addresses[0]
    description = descriptions[0]
    for i in tl.static_range(rows):
        end = start + _chunks_of(descriptions[i], chunk)
        inside = (place >= start) & (place < end)
        row = tl.where(inside, i, row)
        first = tl.where(inside, start, first)
        address = tl.where(inside, addresses[i], address)
        description = tl.where(inside, descriptions[i], description)
        start = end
    return row, first, address, description


@triton.jit
def _read(source, begin, description, masked: tl.constexpr, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """Magnitude bits of ``words`` words: of the lower halves, and of the upper halves (or whole words)."""
    wide = (description & 15) == 4
    numel = (description >> 4) & 0xFFFFFFFFFF
    place = begin + tl.arange(0, words)
    low_mask = tl.where(wide, 0, 0x7FFF).to(tl.int32)
    high_mask = tl.where(wide, 0x7FFFFFFF, 0x7FFF).to(tl.int32)
    shift = tl.where(wide, 0, 16).to(tl.int32)
    if masked:
        word = tl.load(source + place, mask=place < _words_of(description), other=0)
        others = (wide == 0) & (place * 2 + 1 >= numel)  # the upper half of an odd tensor's last word
        return word & low_mask, tl.where(others, 0, (word >> shift) & high_mask)
    word = tl.load(source + place)
    return word & low_mask, (word >> shift) & high_mask


@triton.jit
def _largest(source, begin, end, description, words: tl.constexpr, tiles: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitude bits among the words from ``begin`` to ``end``, NaN and inf included."""
    largest = tl.zeros([words], tl.int32)
    whole = tl.minimum(end, _words_of(description) - 1) // (words * tiles) * (words * tiles)  # what needs no masks
    place = begin
    while place < whole:
        for t in tl.static_range(tiles):
            lower, upper = _read(source, place + t * words, description, False, words)
            largest = tl.maximum(largest, tl.maximum(lower, upper))
        place += words * tiles
    while place < end:
        lower, upper = _read(source, place, description, True, words)
        largest = tl.maximum(largest, tl.maximum(lower, upper))
        place += words
    return tl.max(largest, 0)


@triton.jit
def _count(source, begin, end, description, own, words: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds largest finite magnitude, NaN and inf of the words from ``begin`` to ``end`` to the row ``own``."""
    kind = description & 15
    infinity = tl.where(kind == 4, 0x7F800000, tl.where(kind == 2, 0x7F80, 0x7C00)).to(tl.int32)
    finite = tl.zeros([words], tl.int32)
    nan = tl.zeros([words], tl.int32)
    inf = tl.zeros([words], tl.int32)
    place = begin
    while place < end:
        lower, upper = _read(source, place, description, True, words)
        place += words
        nan += (lower > infinity).to(tl.int32) + (upper > infinity).to(tl.int32)
        inf += (lower == infinity).to(tl.int32) + (upper == infinity).to(tl.int32)
        kept = tl.maximum(tl.where(lower < infinity, lower, 0), tl.where(upper < infinity, upper, 0))
        finite = tl.maximum(finite, kept)
    tl.atomic_max(own, tl.max(finite, 0), sem="relaxed")
    tl.atomic_add(own + 1, tl.sum(nan, 0), sem="relaxed")
    tl.atomic_add(own + 2, tl.sum(inf, 0), sem="relaxed")


@triton.jit
def _publish(results, host, tag, rows: tl.constexpr, slots: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies the rows of a finished launch to the host, and clears the slot that is used half a ring later."""
    slot = tag % slots
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


@triton.jit(do_not_specialize=["launch", "chunks"])
def measure_rows(  # type: ignore[no-untyped-def]
    addresses, descriptions, results, host, launch, chunks,
    rows: tl.constexpr, slots: tl.constexpr, words: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Measures up to ``rows`` tensors. Each program of the grid takes an equal share of all their chunks.

    Args:
        addresses: tuple of the tensors' addresses, multiples of 16; any such address for an unused row.
        descriptions: tuple of what :func:`describe` gives; of no elements for an unused row.
        results: int32 [slots, rows, 4] on the device: magnitude bits, NaN, inf, and in row 0 the programs that have ended.
        host: address of int32 [slots, rows, 4] in page-locked memory: magnitude bits, NaN, inf, :func:`check_of` them.
        launch: number of the launch (31 bits), its tag; its remainder by ``slots`` is its slot. Plus :data:`FLAG`.
        chunks: number of chunks of all tensors. Plus :data:`FLAG`.
    """
    chunk: tl.constexpr = words * tiles
    tag = (launch & 0x7FFFFFFF).to(tl.int32)
    slot = tag % slots
    total = chunks & 0x7FFFFFFF
    programs = tl.num_programs(0)
    place = (tl.program_id(0) * total // programs).to(tl.int32)
    stop = ((tl.program_id(0) + 1) * total // programs).to(tl.int32)
    while place < stop:
        row, first, address, description = _find_row(place, addresses, descriptions, rows, chunk)
        here = tl.minimum(stop, first + _chunks_of(description, chunk))
        gate = ((description >> 44) & 0xFFFF).to(tl.int32) - 1
        wanted = gate < 0
        if gate >= 0:
            wanted = tl.load(results + gate * 4 + 1) + tl.load(results + gate * 4 + 2) > 0
        if wanted:
            own = results + (slot * rows + row) * 4
            source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            begin = (place - first).to(tl.int64) * chunk
            end = (here - first).to(tl.int64) * chunk
            largest = _largest(source, begin, end, description, words, tiles)
            kind = description & 15
            infinity = tl.where(kind == 4, 0x7F800000, tl.where(kind == 2, 0x7F80, 0x7C00)).to(tl.int32)
            if largest < infinity:
                tl.atomic_max(own, largest, sem="relaxed")
            else:
                _count(source, begin, end, description, own, words)
        place = here
    if tl.atomic_add(results + slot * rows * 4 + 3, 1, sem="acq_rel") == programs - 1:
        _publish(results, host, tag, rows, slots)
