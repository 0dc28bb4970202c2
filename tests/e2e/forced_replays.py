"""Forces replays of random calls of healthy programs, while they run and afterwards, and compares the programs with their bare runs.

``python tests/e2e/forced_replays.py [--replays N] [PROGRAM ...]`` prints a line for each program of ``tests/e2e/replay_programs.py``
and exits 1 if one of them differs. With 12 replays for each of the 46 programs it takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from exec_corpus import serve
from forked_script import redirect
from nursery import fork, preload
from replay_programs import BODIES, USE_TRANSFORMERS, source_of
from replayed import files_in, replay, scenario_of

from dtypedoctor.replay.wake import dismiss, go_on, waiting_in
from dtypedoctor.runner.run import STDOUT, Run, WorkerExit, collect
from dtypedoctor.scenario.model import REQUEST, Request, Window

SECONDS = 20.0
"""After which a replay is killed."""


@dataclass(slots=True, kw_only=True)
class Forced:
    """What came of a program.

    Attributes:
        name: of the program.
        changed: how it differs from its bare run.
        replays: that were made.
        killed: of these, those that did not end.
        differed: of these, those whose certificate says that they differ.
        said: what the certificates of those and the reports say.
    """

    name: str
    changed: list[str] = field(default_factory=list)
    replays: int = 0
    killed: int = 0
    differed: int = 0
    said: set[str] = field(default_factory=set)


def force(name: str, folder: Path, replays: int, seed: int = 0) -> Forced:
    """Runs a program bare and with standbys at random calls, and replays it."""
    preload(frozenset({"transformers"}) if name in USE_TRANSFORMERS else frozenset())
    drawn = random.Random(f"{name} {seed}")
    path = folder / "program.py"
    path.write_text(source_of(name), encoding="utf-8")
    bare, before, work = folder / "bare", folder / "before", folder / "work"
    for one in (bare, before, work):
        one.mkdir()
    bare_code = fork(_bare, path, bare, folder / "bare.txt").wait()
    request = Request(scenario=scenario_of(path), standby=True, witness=True)
    (before / REQUEST).write_text(request.model_dump_json(), encoding="utf-8")
    found = Forced(name=name)
    child = fork(_standing_by, before, work, drawn.random())
    while not child.over():
        if found.replays < replays // 2:
            _replay_live(found, before, drawn)
        time.sleep(0.02)
    code = child.wait()
    run = collect(before, WorkerExit(code=code, timed_out=False, seconds=SECONDS / 4), foreign=True)
    try:
        _replay_afterwards(found, run, drawn, replays)
    finally:
        dismiss(before)
    found.changed += _changes(bare_code, code, (folder / "bare.txt", before / STDOUT), (bare, work))
    return found


def _bare(path: Path, work: Path, output: Path) -> int:
    redirect(output)
    os.chdir(work)
    sys.argv = [str(path)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    return _end()


def _standing_by(directory: Path, work: Path, seed: float) -> int:
    from dtypedoctor.worker import standbys

    standbys.FREE_SECONDS = 1e9
    standbys.MOST_READ = -1  # they stay, also where nothing fails
    standbys.MAX_KEPT = 1 << 30
    standbys.IDLE_SECONDS = 1.5  # one that waits for a thread which it has not ends sooner
    drawn, before_call = random.Random(seed), standbys.Standbys._before_call

    def kept(self: standbys.Standbys, module: object) -> None:
        before_call(self, module)  # type: ignore[arg-type]
        if drawn.random() < 0.3:
            self._keep_latest()

    standbys.Standbys._before_call = kept  # type: ignore[method-assign,assignment]
    redirect(directory / STDOUT)
    os.chdir(work)
    return serve(directory) or _end()


def _end() -> int:
    """What the interpreter does at its end; the nursery's child leaves without it."""
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    return 0


def _replay_live(found: Forced, directory: Path, drawn: random.Random) -> None:
    """A replay while the program runs."""
    waiting = waiting_in(directory)
    if not waiting:
        return
    one = drawn.choice(waiting)
    place = directory.parent / f"live-{found.replays}"
    place.mkdir()
    window = Window(call=one.call + drawn.randint(0, 2), until=drawn.choice(["next-call", "backward"]))
    request = {"windows": [window.model_dump()], "seconds": int(SECONDS), "raised": []}
    try:
        ended = go_on(one, place, request, SECONDS)
    except OSError:  # it was dismissed meanwhile
        place.rmdir() if not any(place.iterdir()) else place.rename(place.with_name(f"{place.name}-{time.time_ns()}"))
        return
    found.replays += 1
    found.killed += not ended


def _replay_afterwards(found: Forced, run: Run, drawn: random.Random, replays: int) -> None:
    calls = max((sample.call for sample in run.trace.samples), default=0)
    found.said |= {note.why for note in run.trace.all(_not_watched()) if note.what.startswith("replay")}
    while calls and found.replays < replays and waiting_in(run.directory):
        window = Window(call=drawn.randint(1, calls), until=drawn.choice(["next-call", "backward"]))
        again, made = replay(run, f"again-{found.replays}", [window])
        found.replays += 1
        if again is None:
            found.said.add(made.why_not)
            continue
        found.killed += again.exit.timed_out
        found.said |= {made.why_not} if made.why_not else set()
        certificate = made.certificate(again)
        if certificate.doubt or certificate.differs:
            found.differed += 1
            found.said.add(certificate.words)


def _not_watched() -> type:
    from dtypedoctor.trace.events import NotWatched

    return NotWatched


def _changes(bare: int, code: int, output: tuple[Path, Path], folders: tuple[Path, Path]) -> Iterator[str]:
    if bare != code:
        yield f"exit status {code} instead of {bare}"
    one, other = (_without_warnings(path.read_text(encoding="utf-8", errors="replace")) for path in output)
    if one != other:
        yield f"output {other[-400:]!r} instead of {one[-400:]!r}"
    alone, forced = map(files_in, folders)
    yield from (f"file {name}" for name in alone.keys() | forced.keys() if alone.get(name) != forced.get(name))


_PROFILER = "USDT:"
"""How lines begin in which torch's profiler says when it began."""


def _without_warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if "Warning" not in line and not line.startswith(("  ", _PROFILER))]


def main() -> int:
    """Prints a line for each program; 1 if one was changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("programs", nargs="*", default=list(BODIES))
    options = parser.parse_args()
    total = changed = 0
    for name in options.programs:
        with tempfile.TemporaryDirectory() as folder:
            found = force(name, Path(folder), options.replays, options.seed)
        total += found.replays
        changed += bool(found.changed)
        print(
            name,
            found.replays,
            "replays,",
            found.killed,
            "killed,",
            found.differed,
            "differed",
            *sorted(found.said),
            *found.changed,
            sep=" ",
            flush=True,
        )
    print(total, "replays of", len(options.programs), "programs;", changed, "changed")
    return int(changed > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
