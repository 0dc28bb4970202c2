"""Reads what a safetensors file says of its tensors: an 8-byte length, then JSON (https://github.com/huggingface/safetensors#format)."""

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import open_file, parse_json, reason

LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""

_MOST_DIMENSIONS = 64
"""Of a tensor; torch has no more."""

LARGEST_SMALL = 1 << 20
"""Bytes of a tensor that is read: a quantization state in JSON, or a table of frequencies."""

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip

_BITS = {name: int((re.search(r"\d+", name) or ["8"])[0]) for name in DTYPES.values()}
"""Of an element; a bool takes 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor in a file; ``begin`` and ``end`` are byte offsets in the file, ``cut`` says that it ends before ``end``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int
    cut: bool

    def read(self) -> bytes:
        """The tensor's bytes, for the small ones that are worth it."""
        if self.end - self.begin > LARGEST_SMALL:
            raise ValueError(f"{self.end - self.begin} bytes, which is too much for what it is named")
        if self.cut:
            raise ValueError(f"the file ends before byte {self.end}")
        with open_file(self.file, follow=True) as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin)

    def outside_float16(self) -> tuple[int, int, int]:
        """How many of its elements, bfloat16 or float32, become inf in float16 (65,520 and more), how many become 0, and how many are inf or NaN already.

        The bytes with sign and exponent are counted by ``bytes.translate``, about a second for each GiB. No more than a chunk is in memory.
        """
        size, beyond, vanishing, nonfinite = {"bfloat16": 2, "float32": 4}[self.dtype], 0, 0, 0
        with open_file(self.file, follow=True) as file:
            file.seek(self.begin)
            for left in range(self.end - self.begin, 0, -_CHUNK):
                data = file.read(min(left, _CHUNK))
                high, low = data[size - 1 :: size], data[size - 2 :: size]
                beyond += _counted(high, _BEYOND)
                vanishing += _counted(high, _VANISHING)
                if _counted(high, _AT_A_BORDER):
                    third = data[1::4] if size == 4 else bytes(len(high))
                    beyond += sum(
                        l << 8 | t >= 0x7FF0 for h, l, t in zip(high, low, third, strict=True) if h & 0x7F == 0x47
                    )
                    nonfinite += sum(l >= 0x80 for h, l in zip(high, low, strict=True) if h & 0x7F == 0x7F)
        return beyond - nonfinite, vanishing, nonfinite

    @property
    def is_whole(self) -> bool:
        """Whether it has as many bytes as its shape and dtype take; also where the dtype is not known here."""
        bits = _BITS.get(self.dtype)
        return bits is None or self.elements * bits == (self.end - self.begin) * 8

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)  # of at most 64 sizes


_CHUNK = 1 << 24
_BEYOND = bytes(byte for byte in range(256) if byte & 0x7F > 0x47)
_AT_A_BORDER = b"\x47\xc7\x7f\xff"
"""Bytes in which sign and exponent of bfloat16 and float32 begin: of 131,072 and more; of 32,768 to 131,072, and of 2^127 and more with inf and NaN, where
the next bytes tell."""
_VANISHING = bytes(byte for byte in range(256) if 0 < byte & 0x7F < 0x33)
"""The same of what is less than half of float16's smallest number, 6e-8; what is below 1e-37 is not told from 0."""


def _counted(data: bytes, values: bytes) -> int:
    return len(data) - len(data.translate(None, values))


def read_entries(path: Path, *, follow: bool = True, largest: int = LARGEST_HEADER) -> list[Entry]:
    """Every tensor of the file, in the order of its header; also those that a download has cut off.

    Args:
        path: the file.
        follow: whether it may be a link, as in the cache of the Hugging Face hub.
        largest: bytes that the header may have.

    Raises:
        UsageError: the file cannot be read, or is no safetensors file.
    """
    try:
        with open_file(path, follow=follow) as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(largest, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = parse_json(file.read(length))
        data = (8 + length, size)
        entries = [_entry(path, data, name, one) for name, one in header.items() if name != "__metadata__"]
        _check_header(header.get("__metadata__", {}), entries, 8 + length)
        return entries
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({reason(error)})", "Download it again.") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: not a safetensors file ({reason(error)})", "Download it again; it may be cut short."
        ) from error


def _check_header(metadata: Any, entries: list[Entry], first: int) -> None:
    """Rejects a header that the safetensors library rejects: nobody can load such a file."""
    if not isinstance(metadata, dict) or not all(isinstance(word, str) for word in metadata.values()):
        raise TypeError("__metadata__ has to map strings to strings")
    end = first
    for entry in sorted(entries, key=lambda one: (one.begin, one.end)):
        if entry.begin != end:
            raise ValueError(f"{entry.name[:100]!r} does not begin where the tensor before it ends")
        end = entry.end


def _entry(path: Path, data: tuple[int, int], name: str, described: Mapping[str, Any]) -> Entry:
    """One entry of the header; ``data`` is where the tensors begin and where the file ends."""
    first, last = data
    begin, end = (first + _whole(offset) for offset in described["data_offsets"])
    if not begin <= end:
        raise ValueError(f"{name[:100]!r} lies at bytes {begin} to {end}")
    shape, dtype = described["shape"], described["dtype"]
    if not isinstance(shape, list) or not isinstance(dtype, str) or len(shape) > _MOST_DIMENSIONS:
        raise TypeError(f"{name[:100]!r} has no shape or no dtype")
    return Entry(
        name=name,
        dtype=DTYPES.get(dtype, dtype.lower()[:40]),
        shape=tuple(_whole(size) for size in shape),
        file=path,
        begin=begin,
        end=end,
        cut=end > last,
    )


def _whole(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{str(number)[:40]} is no size")
    return number
