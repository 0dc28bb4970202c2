"""What this package needs of the standard library while another program runs, so that it is not that program's replacement.

``json.dumps = orjson.dumps`` and ``builtins.print = log`` are ordinary code. What stands here was bound when this module was
imported, or does not go through the names that programs replace.
"""

import os
from inspect import unwrap
from io import FileIO
from json.decoder import JSONDecoder
from json.encoder import JSONEncoder
from os import PathLike, getpid, listdir
from time import monotonic, perf_counter, process_time, sleep, thread_time, time_ns
from typing import Any

__all__ = [
    "from_json",
    "getpid",
    "listdir",
    "monotonic",
    "perf_counter",
    "process_time",
    "read_text",
    "sleep",
    "thread_time",
    "time_ns",
    "to_json",
    "unseen_by_warnings",
    "unwrap",
]


_INTERNAL = " (importlib._bootstrap)"
"""What the warnings of Python look for in the name of a file: frames of such a one are none that ``stacklevel`` counts."""


def unseen_by_warnings(function: Any) -> Any:
    """Decorates a function that stands between two of the program: its warnings are attributed to the same lines as without it."""
    code = function.__code__
    function.__code__ = code.replace(co_filename=code.co_filename + _INTERNAL)
    return function


class _Encoder(JSONEncoder):
    default = JSONEncoder.default
    encode = JSONEncoder.encode
    iterencode = JSONEncoder.iterencode


class _Decoder(JSONDecoder):
    decode = JSONDecoder.decode
    raw_decode = JSONDecoder.raw_decode


_compact = _Encoder(separators=(",", ":"), allow_nan=False).encode
_indented = _Encoder(indent=2, allow_nan=False).encode


def _refuse(constant: str) -> Any:
    raise ValueError(f"not JSON: {constant}")


_read = _Decoder(parse_constant=_refuse).decode


def to_json(value: Any, *, indented: bool = False) -> str:
    """``value`` as JSON in ASCII, on one line or indented by two.

    Raises:
        ValueError: it holds NaN or inf.
        TypeError: it holds something that JSON has not.
    """
    return _indented(value) if indented else _compact(value)


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text, of bytes in UTF-8.

    Raises:
        ValueError: it is not JSON; NaN and Infinity are not.
    """
    return _read(text if isinstance(text, str) else str(text, "utf-8"))


def read_text(path: str | PathLike[str]) -> str:
    """What stands in a file, in UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    with FileIO(os.fspath(path)) as file:
        return str(file.readall(), "utf-8")
