"""Healthy and failing runs on disk, and everything that may happen to their files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from sealed import sealed_bodies

from dtypedoctor.trace.events import (
    End,
    Environment,
    Flow,
    Header,
    Metric,
    NotWatched,
    Observed,
    Op,
    ParameterNote,
    Raised,
    Replay,
    Resources,
    Root,
    ScalerState,
    Site,
    Stage,
    TensorNote,
)
from dtypedoctor.trace.lines import CURSOR, EVENTS, open_lines
from dtypedoctor.trace.records.execution import CustomFunction, ModelConfig
from dtypedoctor.trace.records.silent import RouterChoice
from dtypedoctor.trace.writer import TraceWriter

MODULES = ("", "model", "model.embed", "model.layers.0.mlp", "model.layers.0.attn", "model.norm", "head")
OBSERVED: tuple[Any, ...] = (
    ModelConfig(root=0, dtype="float16", keep_in_fp32=[]),
    RouterChoice(
        op="aten.topk.default",
        source=None,
        scores_op="aten.mm.default",
        scores_source=None,
        dtype="float16",
        experts=8,
        chosen=2,
        tokens=16,
        flipped=0,
        tied=0,
    ),
    CustomFunction(
        function="Scale",
        decorated=False,
        fwd_used_autocast=None,
        forward_autocast=None,
        forward_source=None,
    ),
)
JUNK: tuple[Any, ...] = (
    None, True, "", "x", "float16", "bfloat16", -1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, [], [[]], {}, {"a": []},
    [1, "a"], [None], {"values": 1},
)  # fmt: skip
RAW = (b"NaN", b"Infinity", b"1e999", b"\x00", b"\xff", b"[" * 2000, b"{}", b'"', b"\n", b",", b"-", b"null")


def healthy(directory: Path) -> None:
    """Three steps with a gradient scaler that skips one, as it may; nothing else is wrong."""
    _run(directory, broken=False)


def overflowing(directory: Path) -> None:
    """The same with an overflow in float16 that the op trace shows and a replay explains."""
    _run(directory, broken=True)


def _run(directory: Path, *, broken: bool) -> None:
    writer = TraceWriter(directory)
    for record in _facts():
        writer.write(record)
    for number, (fqn, phase, kind) in enumerate(_places()):
        writer.write(
            Site(
                id=number,
                root=0,
                fqn=fqn,
                cls="Linear",
                phase=phase,
                kind=kind,
                index="",
                dtype="float16",
                shape=[2, 8],
            )
        )
    for step in (1, 2, 3):
        _step(writer, step, broken=broken and step == 3)
    writer.write(Resources(seconds=1.5, peak_memory=1 << 20, device="cpu", checksum="ab" * 32))
    writer.mark(3, 3, 6)
    writer.write(End(n=writer.next_n(), outcome="completed", steps_completed=3))
    writer.close()


def _facts() -> Iterator[Any]:
    yield Header(created=1.5, pid=7)
    yield Environment(values={"device": "cpu", "versions": {"torch": "2.13.0"}})
    yield Stage(n=0, index=0, name="script", workload="script")
    yield Root(root=0, cls="CausalLM", modules=7, dtypes={"float16": 640})
    for fqn in MODULES[2:]:
        yield ParameterNote(
            n=0, root=0, name=f"{fqn}.weight", dtype="float16", shape=[8, 8], requires_grad=True, owner="Linear"
        )
        yield Flow(n=0, step=1, call=1, phase="forward", root=0, fqn=fqn, cls="Linear", inputs=["float16"], outputs=["float16"],
                   weights=["float16"])  # fmt: skip
    yield NotWatched(what="the inside of 1 compiled graph(s)", why="compiled code runs no module hooks")
    for what in OBSERVED:
        yield Observed(n=1, step=1, call=1, phase="forward", fqn="head", what=what)


def _places() -> Iterator[tuple[str, str, str]]:
    yield from ((fqn, "forward", "output") for fqn in reversed(MODULES))
    yield "", "forward", "loss"
    yield from ((fqn, "backward", "grad_output") for fqn in MODULES)
    yield from ((f"{fqn}.weight", "backward", "grad") for fqn in MODULES[2:])
    yield from ((f"{fqn}.weight", "optimizer", "param") for fqn in MODULES[2:])


def _step(writer: TraceWriter, step: int, *, broken: bool) -> None:
    skipped = step == 2
    for site, (fqn, phase, kind) in enumerate(_places()):
        bad = (broken and fqn != "model.embed" and (phase, kind) != ("forward", "input")) or (
            skipped and kind == "grad"
        )
        if not (skipped and kind == "param"):
            writer.write_samples(writer.next_n(), step, step, [(site, 1.5 + site, 0, int(bad))])
    writer.write(ScalerState(n=writer.next_n(), step=step, scale=1024.0, found_inf=skipped, skipped=skipped))
    writer.write(Metric(n=writer.next_n(), step=step, values={"loss": 2.5, "step_time": 0.25}))
    if broken:
        n = writer.next_n()
        note = TensorNote(id=1, dtype="float16", shape=[2, 8], absmax=318.75)
        born = TensorNote(id=2, dtype="float16", shape=[2, 8], absmax=1.0, num_posinf=3)
        writer.write(Op(n=n, step=step, call=step, phase="forward", fqn="head", op="aten.mul.Tensor", inputs=[note, note],
                        outputs=[born], source="m.py:3"))  # fmt: skip
        writer.write(Replay(n=writer.next_n(), of=n, how="float32", finite=True, absmax=101601.0))
        writer.write(Raised(n=writer.next_n(), step=step, call=step, phase="forward", type="RuntimeError", message="found nan",
                            frames=["m.py:3 f"], modules=["", "head"]))  # fmt: skip


def flip(data: bytes, dice: Random) -> bytes:
    """One bit, or a few."""
    content = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 3, 20))):
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    return bytes(content)


def cut(data: bytes, dice: Random) -> bytes:
    """The end, or a piece of the middle."""
    start = dice.randrange(len(data))
    return data[:start] if dice.random() < 0.5 else data[:start] + data[start + dice.randrange(1, 200) :]


def lines_moved(data: bytes, dice: Random) -> bytes:
    """Lines lost, doubled, or in another place."""
    lines = data.splitlines(keepends=True)
    for _ in range(dice.choice((1, 1, 2, 5))):
        place = dice.randrange(len(lines)) if lines else 0
        match dice.randrange(3):
            case 0:
                del lines[place : place + 1]
            case 1:
                lines[place:place] = lines[place : place + 1]
            case _:
                lines.insert(dice.randrange(len(lines) + 1), lines.pop(place) if lines else b"{}\n")
    return b"".join(lines)


def bytes_put_in(data: bytes, dice: Random) -> bytes:
    """Something that JSON does not have, or has too much of."""
    place = dice.randrange(len(data))
    return data[:place] + dice.choice(RAW) + data[place + dice.choice((0, 1, 4)) :]


def values_changed(data: bytes, dice: Random, *, reseal: bool = False) -> bytes:
    """Values replaced, lost or renamed inside of records; the seals no longer fit, or there are none."""
    bodies = [json.loads(body) for _, body in open_lines(data).lines]
    for _ in range(dice.choice((1, 1, 2, 6))):
        _change(dice.choice([part for body in bodies for part in _parts(body) if part]), dice)
    encoded = [json.dumps(body).encode() for body in bodies]
    return sealed_bodies(encoded) if reseal else b"".join(body + b"\n" for body in encoded)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _parts(inner)


def _change(part: Any, dice: Random) -> None:
    place = dice.choice(list(part) if isinstance(part, dict) else range(len(part)))
    match dice.randrange(3):
        case 0:
            del part[place]
        case 1 if isinstance(part, dict):
            part[f"{place}x"] = part.pop(place)
        case _:
            part[place] = dice.choice(JUNK)


def newer(data: bytes, dice: Random) -> bytes:
    """Another number of the schema, or records and fields of a later version."""
    lines = data.splitlines(keepends=True)
    first = {"e": "header", "schema": dice.choice((2, 10**30, 1, "1", -1, None)), "later": 1}
    lines[0] = sealed_bodies([json.dumps(first).encode()])
    return b"".join(lines)


MUTATIONS: tuple[Callable[[bytes, Random], bytes], ...] = (flip, cut, lines_moved, bytes_put_in, values_changed, newer)


def mutated(directory: Path, seed: int) -> str:
    """Changes the files of a run; returns the names of the mutations."""
    dice = Random(seed)
    names = []
    for _ in range(dice.choice((1, 1, 1, 2))):
        path = directory / dice.choice((EVENTS, EVENTS, EVENTS, EVENTS, CURSOR))
        mutation = dice.choice(MUTATIONS if path.name == EVENTS else MUTATIONS[:2])
        if data := path.read_bytes():
            names.append(mutation.__name__)
            try:
                path.write_bytes(mutation(data, dice))
            except (ValueError, IndexError):  # the mutation before has left nothing that this one could change
                names.pop()
    return "+".join(names)
