"""What instruments observe reaches a reader as the record that was written, and what no reader knows is kept as it is."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest

from dtypedoctor.trace.events import End, Header, Observation, Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.records import RECORDS
from dtypedoctor.trace.writer import TraceWriter


def example(hint: Any, *, full: bool) -> Any:
    """A value of this type; optional and collected ones are there if ``full``."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: example(hints[f.name], full=full) for f in fields(hint)})  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        return example(inner[0], full=full) if full or type(None) not in inner else None
    if origin is list:
        return [example(inner[0], full=full)] if full else []
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"name": example(inner[1], full=full)} if full else {}
    return {str: "text" if full else "", int: 7 if full else 0, float: 0.25, bool: full, Any: ["anything"]}[hint]


def written_and_read(directory: Path, record: Any) -> Trace:
    writer = TraceWriter(directory)
    writer.write(Header())
    writer.write(record)
    writer.write(End(n=2, outcome="completed", steps_completed=0))
    writer.close()
    return read_trace(directory)


@pytest.mark.parametrize("full", [True, False], ids=["full", "empty"])
@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.KIND)
def test_a_record_is_read_as_it_was_written(record: type[Any], full: bool, tmp_path: Path) -> None:
    """Every field, nested ones too, and the coordinates; an empty name of a module is not None."""
    observed = Observed(n=1, step=2, call=3, phase="forward", fqn="", what=example(record, full=full))
    trace = written_and_read(tmp_path, observed)
    assert trace.observed(record) == (observed,)
    assert not trace.damage


@pytest.mark.parametrize("kind", ["of-a-later-version", "packed-weight"])
def test_what_is_no_known_record_is_kept_raw(kind: str, tmp_path: Path) -> None:
    """A kind that this version does not know, and one that lacks fields: neither is damage."""
    raw = Observation(n=1, step=2, call=3, phase="forward", kind=kind, values={"shape": [1, {"a": None}]})
    trace = written_and_read(tmp_path, raw)
    assert trace.all(Observation) == (raw,)
    assert not trace.all(Observed)
    assert not trace.damage
