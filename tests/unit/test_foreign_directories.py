"""Run directories and model folders of strangers cost no memory, hang nothing, are not left, and reach no terminal raw."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import packed, write_checkpoint, write_safetensors
from patience import PATIENCE
from report_builders import overflow
from sealed import sealed
from test_saved_runs import left

from dtypedoctor.report.build import write_report
from dtypedoctor.trace.events import Header, NotWatched, Raised, Root, Site

PROBE = Path(__file__).with_name("foreign_probe.py")
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
UNSEEN = ("\x1b", "\x07", "\x9b", "\u202e")
HUGE = 2**31
NESTED = "[" * 100_000

Build = Callable[[Path], object]


def probed(*commands: list[str]) -> list[dict[str, Any]]:
    """The outcomes of commands that were run in a process of their own."""
    done = subprocess.run(
        [sys.executable, str(PROBE)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def harmless(outcome: dict[str, Any], *codes: int) -> None:
    """It ended by itself with one of these codes, without a traceback, and showed nothing that a terminal obeys."""
    said = outcome["out"] + outcome["err"]
    assert outcome["code"] in codes, (outcome["arguments"], outcome["code"], outcome["err"][-1500:])
    assert "Traceback" not in said
    assert [sign for sign in UNSEEN if sign in said] == [], outcome["arguments"]
    if outcome["code"] == 2:
        assert outcome["err"].startswith("error: ")


def end(**more: Any) -> dict[str, Any]:
    """An End record as it is written."""
    return {"e": "end", "n": 1, "outcome": "completed", "steps_completed": 1} | more


def events(*lines: object) -> Build:
    """A trace of these records behind a header."""
    return lambda run: (left(run), (run / "events.jsonl").write_bytes(sealed({"e": "header"}, *lines)))


def put(name: str, content: bytes | str) -> Build:
    """A run that is whole, with one more file."""

    def build(run: Path) -> None:
        left(run)
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return build


def linked(name: str, target: str) -> Build:

    def build(run: Path) -> None:
        left(run)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)

    return build


def piped(name: str) -> Build:
    """A run of which a file is a pipe that nobody writes to."""

    def build(run: Path) -> None:
        left(run)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return build


def sparse(name: str) -> Build:
    """A run with a file of a terabyte that takes no room."""

    def build(run: Path) -> None:
        left(run)
        with (run / name).open("wb") as file:
            file.truncate(1 << 40)

    return build


def matrix(report: str, name: str = "x") -> Build:
    """Several scenarios, of which one names its report so."""
    row = {"scenario": name, "status": "findings", "before": name, "finding": name, "cause": name, "as_expected": False,
           "exit": 10, "report": report}  # fmt: skip

    def build(run: Path) -> None:
        run.mkdir()
        (run / "matrix.json").write_text(json.dumps({"schema": 1, "rows": [row]}))

    return build


def named_by_escapes(run: Path) -> None:
    """Texts of every kind of record, and files, hold what a terminal obeys."""
    site = Site(
        id=1, root=0, fqn=ESCAPES, cls=ESCAPES, phase=ESCAPES, kind="output", index=ESCAPES, dtype=ESCAPES, shape=[1]
    )
    raised = Raised(
        n=3, step=1, call=1, phase="forward", type=ESCAPES, message=ESCAPES, frames=[ESCAPES], modules=[ESCAPES]
    )
    missed = NotWatched(what=ESCAPES, why=ESCAPES)
    left(run, Header(), Root(root=0, cls=ESCAPES, modules=1, dtypes={ESCAPES: 1}), site, raised, missed)
    (run / f"detail-1{ESCAPES}.jsonl").write_text(ESCAPES)
    (run / "request.json").write_text(
        json.dumps({"scenario": {"name": ESCAPES, "steps": [{"workload": {"kind": ESCAPES}}]}})
    )


def reported(run: Path) -> dict[str, Any]:
    """A finished report, and the trace beside it."""
    left(run / "before")
    write_report(run, overflow())
    found: dict[str, Any] = json.loads((run / "report.json").read_text())
    return found


def climbing(run: Path) -> None:
    """A report whose remedy names a trace elsewhere."""
    found = reported(run)
    (run / "remedy-..").mkdir()
    found["trials"][0] |= {"remedy": "../../elsewhere", "outcome": "fixed"}
    (run / "report.json").write_text(json.dumps(found))


def outward(run: Path) -> None:
    """The run that stands for the directory is a link to one elsewhere."""
    run.mkdir()
    (run / "before").symlink_to(left(run.parent / "elsewhere"))


def ranked(run: Path) -> None:
    """Ranks are links, and so is what leads."""
    run.mkdir()
    elsewhere = left(run.parent / "another")
    (run / "rank-0").symlink_to(elsewhere)
    (run / "rank-999999999999999999").mkdir()
    (run / "leading").symlink_to(elsewhere)


def doubled(value: object) -> bytes:
    """A report with one field replaced everywhere."""
    return json.dumps({"schema": value}).encode()


HOSTILE: dict[str, Build] = {
    "details that were never written": events(end(details=HUGE)),
    "details without number": events(end(details=2**62)),
    "steps without number": events(end(steps_completed=2**62), {"e": "metric", "n": 2, "step": 2**62, "values": {"loss": 1.0}}),
    "a world of ranks": events({"e": "header", "world_size": 2**62, "rank": 2**61}),
    "a last file of details": put("detail-999999999.jsonl", ""),
    "a last file with lines": put("detail-999999999.999999999.jsonl", ""),
    "many lines": put("detail-000001.999999999.jsonl", "{}\n"),
    "folded to the end": put("folded.json", sealed({"e": "folded", "segments": [2**62], "spans": [[[0, 0], [2**62, 0]]],
                                                    "sites": {"1": {"count": 2**62}}, "metrics": {}, "skipped": 2**62})),
    "brackets": put("events.jsonl", NESTED + "\n"),
    "brackets in an object": events({"e": "environment", "values": {}}, {"e": "observation"}),
    "nested totals": put("folded.json", NESTED + "\n"),
    "nested report": put("report.json", NESTED),
    "nested matrix": put("matrix.json", NESTED),
    "a matrix that is a list": put("matrix.json", "[]"),
    "a report without end": sparse("report.json"),
    "a trace without end": sparse("events.jsonl"),
    "a cursor without end": sparse("cursor.bin"),
    "a matrix without end": sparse("matrix.json"),
    "a report of digits": put("report.json", b'{"schema": 1' + b"0" * 100_000 + b"}"),
    "a report of another kind": put("report.json", doubled(True)),
    "no text": put("report.json", b"\xff\xfe\x00"),
    **{f"a device as {name}": linked(name, "/dev/zero") for name in
       ("events.jsonl", "report.json", "matrix.json", "cursor.bin", "folded.json", "request.json", "exit.json",
        "detail-000001.jsonl")},
    **{f"a pipe as {name}": piped(name) for name in
       ("events.jsonl", "report.json", "matrix.json", "cursor.bin", "folded.json", "request.json", "exit.json",
        "detail-000001.jsonl")},
    "a report of the matrix elsewhere": matrix("../elsewhere/report.json"),
    "a report of the matrix from the root": matrix("/etc/hostname"),
    "a report of the matrix that is a folder": matrix("."),
    "a matrix in colors": matrix("nothing", ESCAPES),
    "names in colors": named_by_escapes,
    "a remedy that climbs": climbing,
    "a run elsewhere": outward,
    "ranks elsewhere": ranked,
    "nothing but names": lambda run: (run.mkdir(), (run / f"a{ESCAPES}").mkdir(), left(run / f"b{ESCAPES}")),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each verb makes of each directory."""
    place = tmp_path_factory.mktemp("foreign")
    whole = left(place / "whole")
    commands = []
    for number, build in enumerate(HOSTILE.values()):
        run = place / str(number) / "run"
        run.parent.mkdir()
        build(run)
        commands += [["report", str(run)], ["report", str(run), "--format", "html"], ["report", str(run), "-f", "json"],
                     ["compare", str(run), str(whole)], ["job-report", str(run)]]  # fmt: skip
    found = iter(probed(*commands))
    return {name: [next(found) for _ in range(5)] for name in HOSTILE}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strangers_run_directory_does_no_harm(name: str, outcomes: dict[str, list[dict[str, Any]]]) -> None:
    """Each verb answers within seconds and two gigabytes, with one of its own exit codes and nothing that a terminal obeys."""
    for outcome in outcomes[name]:
        harmless(outcome, 0, 2, 3, 10)


JOB = {"argv": ["python", "train.py"], "failed": False}
WRITTEN = ("report.json", "report.json.part", "report.md", "report.md.part", "do-this.patch", "job.json", "before/exit.json", "before/leading",
           "before/request.json", "before/failures.json", "before/rank-0/exit.json", "before/stderr.txt", "before/events.jsonl", "before/cursor.bin",
           "before/capsule-x-y.json", "before/capsule-1-1.json", "before/operator-1.json", "before/operator-1.safetensors")  # fmt: skip
OBSTACLES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "pipe": lambda path, _: os.mkfifo(path),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
    "folder": lambda path, _: path.mkdir(),
    "terabyte": lambda path, _: (path.touch(), os.truncate(path, 1 << 40)),
    "brackets": lambda path, _: path.write_text(NESTED),
    "list": lambda path, _: path.write_text("[1]"),
    "digits": lambda path, _: path.write_text('{"argv": ["x"], "failed": ' + "9" * 5_000_000 + "}"),
    "colors": lambda path, _: path.write_text(json.dumps({"argv": ["python", ESCAPES], "failed": True, "0": {"code": "x", "time": ESCAPES}})),
}  # fmt: skip


def test_the_report_of_a_job_is_written_nowhere_else(tmp_path: Path) -> None:
    """Each file that it reads or writes is a link to somebody's file, a pipe, a device, a folder, a terabyte or damaged: it answers, and the file is as it was."""
    commands, victims = [], []
    for name in WRITTEN:
        for kind, build in OBSTACLES.items():
            place = tmp_path / f"{len(commands)}"
            run, victim = place / "run", place / "victim.txt"
            left(run / "before" / "rank-0" if "rank-0" in name else run / "before")
            (run / "job.json").write_text(json.dumps(JOB))
            victim.write_text(json.dumps(JOB))
            (run / name).unlink(missing_ok=True)
            build(run / name, victim)
            commands.append(["job-report", str(run)])
            victims.append((name, kind, victim))
    elsewhere = tmp_path / "elsewhere"
    left(elsewhere)
    (tmp_path / "outward").mkdir()
    (tmp_path / "outward" / "job.json").write_text(json.dumps(JOB))
    (tmp_path / "outward" / "before").symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    *outcomes, outward = probed(*commands, ["job-report", str(tmp_path / "outward")])
    for outcome, (name, kind, victim) in zip(outcomes, victims, strict=True):
        harmless(outcome, 0, 2, 3, 10)
        assert victim.read_text() == json.dumps(JOB), (name, kind)
    harmless(outward, 2)
    assert sorted(path.name for path in elsewhere.iterdir()) == before


def test_a_record_that_promises_files_which_are_not_there_is_counted(tmp_path: Path) -> None:
    """A record that promises two thousand million files is believed as a number."""
    run = tmp_path / "run"
    events(end(details=HUGE))(run)
    [outcome] = probed(["compare", str(run), str(left(tmp_path / "whole"))])
    assert f"{HUGE:,} file(s) of details are missing" in outcome["out"]


def test_links_out_of_a_run_directory_are_not_followed(tmp_path: Path) -> None:
    """A report, a trace, a rank or a remedy elsewhere is not read; a report that the user names by a link is."""
    real = tmp_path / "real"
    reported(real)
    run = tmp_path / "run"
    run.mkdir()
    (run / "report.json").symlink_to(real / "report.json")
    by_matrix = tmp_path / "matrix"
    matrix("sub/report.json")(by_matrix)
    (by_matrix / "sub").symlink_to(real)
    refused, also, named = probed(
        ["report", str(run)], ["report", str(by_matrix), "-f", "junit"], ["report", str(run / "report.json")]
    )
    assert "links are not followed" in refused["err"]
    assert "links are not followed" in also["err"]
    assert (refused["code"], also["code"], named["code"]) == (2, 2, 0)


def test_a_link_that_leads_back_to_itself_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    (refused,) = probed(["inspect", str(tmp_path)])
    assert "leads back to itself" in refused["err"]
    assert ("--out" in refused["err"], refused["code"]) == (False, 2)


def header(value: object) -> bytes:
    """A safetensors file with this header."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(**changes: object) -> bytes:
    """A safetensors file with one tensor that is described so."""
    return header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}) + bytes(4)


BROKEN: dict[str, dict[str, bytes | None]] = {
    **{f"weights {number}": {"model.safetensors": content} for number, content in enumerate((
        b"", b"1234567", struct.pack("<Q", 2**63), struct.pack("<Q", 100) + b"{", header(NESTED.encode()), header([]), header("x"),
        header({"w": 7}), header({"w": {}}), tensor(data_offsets=[0]), tensor(data_offsets="ab"), tensor(data_offsets=[4, 0]),
        tensor(data_offsets=[0, 2**70]), tensor(data_offsets=[-8, 0]), tensor(data_offsets=[0.5, 4]), tensor(shape=[2**70]),
        header({"__metadata__": ["pt"]}), header({"__metadata__": {"format": 7}}), tensor(data_offsets=[4, 8]),
        header({name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in (("a", [0, 8]), ("b", [4, 12]))}) + bytes(12),
        tensor(shape="12"), tensor(shape=[-1]), tensor(dtype=7), tensor(dtype=["F32"]), header(b"\xff\xfe"), header(b"{\"w\": NaN"),
        header({"inv_freq": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}) + bytes(3),
        header({"w.quant_state.bitsandbytes__nf4": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}) + b"{x}",
        header({"w.quant_state.bitsandbytes__nf4": {"dtype": "U8", "shape": [9], "data_offsets": [0, 2]}}) + b"[]",
        header({"w.quant_state.bitsandbytes__nf4": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}) + b"null"))},
    **{f"config {number}": {"config.json": content} for number, content in enumerate((
        b"", b"{", b"[]", b"7", b"\xff\xfe{}", NESTED.encode(), b"null"))},
    **{f"index {number}": {"model.safetensors.index.json": content} for number, content in enumerate((
        b"", b"{", b"[]", NESTED.encode(), b'{"weight_map": []}', b'{"weight_map": {"a": 7}}', b'{"weight_map": {"a": ["b"]}}',
        b'{"weight_map": {"a": {}}}', b'{"weight_map": "x"}', b'{"weight_map": {"a": "b", "c": 1}}'))},
    "adapter": {"adapter_config.json": b"[1"},
    "a pipe for weights": {"model.safetensors": None},
    "a pipe for config": {"config.json": None},
    "a pipe for index": {"model.safetensors.index.json": None},
}  # fmt: skip
ODD: tuple[dict[str, Any], ...] = (
    {"dtype": {"a": 1}}, {"dtype": [1]}, {"torch_dtype": 7}, {"model_type": ["x"]}, {"model_type": "../../x"}, {"model_type": "x" * 5000},
    {"quantization_config": [1]}, {"quantization_config": {"quant_method": [1], "bnb_4bit_compute_dtype": {}}},
    {"text_config": {"dtype": [1]}}, {"text_config": 5}, {"architectures": 3}, {ESCAPES: {"dtype": "float32"}},
)  # fmt: skip


def test_a_broken_model_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    """Headers, configurations and index files broken in every way: exit 2, the file and what is wrong with it."""
    commands = []
    for number, files in enumerate(BROKEN.values()):
        folder = write_checkpoint(tmp_path / str(number))
        for name, content in files.items():
            (folder / name).unlink(missing_ok=True)
            if content is None:
                os.mkfifo(folder / name)
            else:
                (folder / name).write_bytes(content)
        commands.append(["inspect", str(folder)])
    for name, outcome in zip(BROKEN, probed(*commands), strict=True):
        if name.startswith("a pipe"):  # it is no checkpoint without the file, or one that lacks it
            harmless(outcome, 0, 2, 10)
            continue
        harmless(outcome, 2)
        [file] = BROKEN[name]
        assert f"/{file}: " in outcome["err"].splitlines()[0], (name, outcome["err"])


def test_odd_settings_and_names_of_a_model_do_no_harm(tmp_path: Path) -> None:
    """Values of other kinds than transformers writes, and names in colors."""
    commands = []
    for number, config in enumerate(ODD):
        folder = write_checkpoint(tmp_path / str(number), config=config)
        commands += [["inspect", str(folder), "--scaler", "--fsdp"], ["inspect", str(folder), "--json"]]
    folder = write_checkpoint(tmp_path / "colors")
    odd = {f"{ESCAPES}.inv_freq": ("F16", [4], None), f"a{ESCAPES}": ("F32", [4], None)} | packed(
        f"m{ESCAPES}.w", ESCAPES
    )
    write_safetensors(folder / f"model{ESCAPES}.safetensors", odd)
    (folder / f"pytorch_model{ESCAPES}.bin").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": ESCAPES}}))
    commands += [["inspect", str(folder), "--fsdp"], ["inspect", str(folder), "--json"], ["inspect", str(tmp_path / ("x" * 5000))],
                 ["inspect", str(tmp_path / "no\0thing")], ["inspect", "no/such\x1b[2Jmodel"]]  # fmt: skip
    for outcome in probed(*commands):
        harmless(outcome, 0, 2, 10)


def mutations(data: bytes, count: int) -> Iterator[bytes]:
    """The same bytes with something changed, cut, doubled or grown; seeded."""
    chance = random.Random(3407)
    grown = (b"9" * 400, b"-1", b"[" * 2000, b"null", b'"\\u001b[2J"', b"1e999", b"{}", b"true", b"\xff")
    for _ in range(count):
        at = chance.randrange(len(data))
        width = chance.choice((1, 1, 4, 40))
        yield chance.choice((
            data[:at], data[:at] + chance.choice(grown) + data[at + width :], data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
            data[:at] + data[at : at + width] * 3 + data[at + width :],
        ))  # fmt: skip


def test_mutated_files_do_no_harm(tmp_path: Path) -> None:
    """Reports, traces, totals, headers and settings with random damage, without their checksums."""
    run, folder = tmp_path / "run", write_checkpoint(tmp_path / "model")
    reported(run)
    bodies = [
        line[: line.rfind(b',"~"')] + b"}" for line in (run / "before" / "events.jsonl").read_bytes().splitlines()
    ]
    (run / "before" / "events.jsonl").write_bytes(b"\n".join(bodies) + b"\n")
    commands = []
    for source, file, verb in ((run, "report.json", "report"), (run / "before", "events.jsonl", "report"),
                               (folder, "model.safetensors", "inspect"), (folder, "config.json", "inspect")):  # fmt: skip
        for number, data in enumerate(mutations((source / file).read_bytes(), 25)):
            copy = tmp_path / f"{file}-{number}"
            shutil.copytree(source, copy)
            (copy / file).write_bytes(data)
            commands.append([verb, str(copy)])
    for outcome in probed(*commands):
        harmless(outcome, 0, 2, 3, 10)
