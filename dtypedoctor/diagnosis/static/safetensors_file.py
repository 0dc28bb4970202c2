"""Reads what a safetensors file says of its tensors: an 8-byte length, then JSON. No tensor is loaded.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError

LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor in a file; ``begin`` and ``end`` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    def read(self) -> bytes:
        """The tensor's bytes, for the small ones that are worth it."""
        with self.file.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.end - self.begin)


def read_entries(path: Path) -> list[Entry]:
    """Every tensor of the file, in the order of its header.

    Raises:
        UsageError: the file cannot be read, or is no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(LARGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        return [_entry(path, 8 + length, name, one) for name, one in header.items() if name != "__metadata__"]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: not a safetensors file ({error})", "Download it again; it may be cut short."
        ) from error


def _entry(path: Path, data: int, name: str, described: Mapping[str, Any]) -> Entry:
    begin, end = described["data_offsets"]
    return Entry(
        name=name,
        dtype=DTYPES.get(described["dtype"], str(described["dtype"]).lower()),
        shape=tuple(int(size) for size in described["shape"]),
        file=path,
        begin=data + int(begin),
        end=data + int(end),
    )
