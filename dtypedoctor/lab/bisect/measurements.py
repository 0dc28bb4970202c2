"""Makes runs, never one that is done already, and logs what came of each; and what is measured of culprits: what they cost, which other modes fail, a script that reproduces the failure."""

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from dtypedoctor.analysis import ending_of
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import append_file, parse_json, read_file, read_head, write_file
from dtypedoctor.lab.bisect.probes import Mode, describe, perturbed, probe_of, reference, samples_tokens, with_kept
from dtypedoctor.lab.bisect.results import OWN, Cost, Kind, Reproduction, Symptom, Verdict
from dtypedoctor.lab.bisect.symptoms import Tolerance, derive, refused, symptom_of
from dtypedoctor.lab.scenarios.model import Capture, Forward, Grpo, Request, Scenario, Sft, Train
from dtypedoctor.redaction.redact import REQUEST, public_text
from dtypedoctor.replay.script import TENSORS, CannotBeWrittenError, Claim, script_text
from dtypedoctor.runner.directories import clear
from dtypedoctor.runner.run import EXIT, Run, WorkerExit, collect
from dtypedoctor.trace.events import Metric, ParameterNote, Resources
from dtypedoctor.trace.model import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSetup:
    """A workload that runs can be judged on.

    Attributes:
        workload: what is run.
        reference: trace of the float32 reference.
        healthy: what the reference itself came to; nothing can be judged where it is not healthy.
        tolerance: how far runs may be from it.
    """

    workload: Scenario
    reference: Trace
    healthy: Symptom
    tolerance: Tolerance

    def judge(self, run: Run | UsageError) -> Symptom:
        """What ``run`` came to."""
        return refused(run.message) if isinstance(run, UsageError) else symptom_of(run, self.tolerance)


def set_up(runner: "ProbeRunner", workload: Scenario, given: float | None) -> ReferenceSetup:
    """Runs the reference of ``workload``, and the moved references where no tolerance is given.

    Raises:
        UsageError: the reference cannot be run at all.
    """
    exact = runner.run(probe_of(reference(workload)))
    others = [runner.run(probe_of(one)) for one in (() if given is not None else perturbed(workload))]
    moved = [run for run in others if symptom_of(run).healthy]
    return ReferenceSetup(
        workload=workload,
        reference=exact.trace,
        healthy=symptom_of(exact),
        tolerance=derive(exact, moved, sampled=samples_tokens(workload), given=given),
    )


def measure(
    runner: "ProbeRunner", setup: ReferenceSetup, wanted: Sequence[Mode], failure: Symptom
) -> tuple[Verdict, ...]:
    """Runs every mode.

    Finiteness and exceptions decide. How exact a mode is, is asked only where that is what failed.
    """
    verdicts: dict[str, Verdict] = {}
    for mode in sorted(wanted, key=_needs_own_process):  # so that the model is loaded once for the others
        run = runner.ask(probe_of(mode.scenario)).run
        if isinstance(run, UsageError):
            continue  # what the model cannot do is no verdict about it
        # Of another workload only the outputs before any training can be compared.
        tolerance = None
        if failure.kind is Kind.INACCURATE:
            same = _work(mode.scenario) == _work(setup.workload)
            tolerance = setup.tolerance if same else setup.tolerance.of_first_outputs()
        symptom = _as_far_as_seen(symptom_of(run, tolerance), mode)
        verdicts[mode.name] = Verdict(
            mode=mode.name, workload=describe(mode.scenario), outcome=symptom.outcome(failure), symptom=symptom
        )
    return tuple(verdicts[mode.name] for mode in wanted if mode.name in verdicts)


def _needs_own_process(mode: Mode) -> bool:
    """Whether a mode changes more of its process than the model: trainers and the compiler do."""
    return any(step.compile is not None or isinstance(step.workload, (Grpo, Sft)) for step in mode.scenario.steps)


def _work(scenario: Scenario) -> list[dict[str, Any]]:
    """What is done with the models, however many steps of it."""
    return [step.workload.model_dump(exclude={"steps"}) for step in scenario.steps]


def _as_far_as_seen(symptom: Symptom, mode: Mode) -> Symptom:
    """Inside compiled code nothing is watched: what it returns stands for all of it, under the name of the model or layer that was compiled.

    Modules that stay out of it, as those that are kept in float32 do, are watched, and may be what comes nearest to the end of
    its dtype's range; but where it fails they may only have been given what was inf or NaN.
    """
    if all(step.compile is None for step in mode.scenario.steps):
        return symptom
    seen = replace(symptom, absmax=symptom.absmax or None)  # of nothing but NaN it is 0
    if symptom.kind is not Kind.NOT_FINITE:
        return seen
    where = f", step {symptom.step} ({symptom.phase})" if symptom.phase else ""
    reason = f"inf or NaN in what the compiled code returns{where}"
    by_layer = any(step.compile is not None and step.compile.regions == "layers" for step in mode.scenario.steps)
    return replace(seen, fqn=_layer_of(seen.fqn) if by_layer else "", reason=reason)


def _layer_of(fqn: str | None) -> str:
    """The outermost numbered module that ``fqn`` is or lies in; else ``fqn`` itself."""
    parts = (fqn or "").removesuffix("::self").split(".")
    numbered = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: numbered + 1])


STEPS = 6
"""Of a workload whose steps are cheap; the first one, which warms up, does not count."""


def measure_cost(runner: "ProbeRunner", workload: Scenario, modules: Sequence[str]) -> Cost | None:
    """Runs ``workload`` untreated and with ``modules`` in float32, one after the other; None where that is not possible."""
    steps = workload.model_dump()["steps"]
    if len(steps) == 1 and isinstance(workload.steps[0].workload, (Forward, Train)):
        steps[0]["workload"]["steps"] = STEPS
    scenario = workload.with_changes(steps=steps)
    try:
        plain = runner.run(probe_of(scenario), "cost-untreated").trace
        kept = runner.run(probe_of(with_kept(scenario, modules)), "cost-kept").trace
    except UsageError:
        return None
    times = _step_time(plain), _step_time(kept)
    peaks = plain.last(Resources), kept.last(Resources)
    return Cost(
        parameter_bytes=_parameter_bytes(kept) - _parameter_bytes(plain),
        memory_bytes=peaks[1].peak_memory - peaks[0].peak_memory if peaks[0] and peaks[1] else None,
        step_time=times[1],
        step_time_ratio=times[1] / times[0] if times[0] and times[1] else None,
    )


def _step_time(trace: Trace) -> float | None:
    times = [m.values["step_time"] for m in trace.all(Metric) if "step_time" in m.values]
    return median(times[1:]) if len(times) > 1 else None


def _parameter_bytes(trace: Trace) -> int:
    """Bytes of all parameters and buffers as they were first noted."""
    notes: dict[tuple[int, str], ParameterNote] = {}
    for note in trace.all(ParameterNote):
        notes.setdefault((note.root, note.name), note)
    return sum(prod(note.shape) * DTYPES[note.dtype].bits // 8 for note in notes.values() if note.dtype in DTYPES)


SCRIPT = "repro.py"
_CAPTURED = ("capture.json", "capture.safetensors")
"""What the worker calls them."""

_LARGEST = 256 << 20
"""Bytes of a description; that of a whole model takes some megabytes."""

TIME_LIMIT = 300.0
"""Seconds for the script: it imports the module's library."""

MOST_TRIED = 3
"""Culprits for which a script is tried; after them what holds them all."""

WRONG = 1e-2
"""Relative error from which on a module by itself is called inaccurate; float16 and bfloat16 round to less."""

_FAILS = "FAILS"
_IN_ANY_DTYPE = re.compile(r"FAILS: (.+) \(\1 in float32\)")
"""What a script prints if it raises the same error in float32, so that the dtype is not the cause."""
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


def reproduce(runner: "ProbeRunner", setup: ReferenceSetup, culprits: Sequence[str]) -> Reproduction:
    """Writes ``repro.py`` and ``repro.safetensors`` into the run directory for the first culprit that fails by itself.

    The script is run once in a fresh interpreter and kept only if it fails as expected.
    """
    untreated = runner.run(probe_of(setup.workload))
    failure = setup.judge(untreated)
    if failure.phase == "optimizer" or failure.call is None:
        return Reproduction(module=culprits[0], reason="it fails outside of the modules' own calls")
    order = [*sorted(culprits, key=lambda culprit: culprit != failure.fqn)[:MOST_TRIED], *_around(culprits)]
    versions = untreated.trace.environment.get("versions", {})
    tried: list[Reproduction] = []
    for culprit in order:
        made_with = ", ".join(f"{name} {versions[name]}" for name in _LIBRARIES if name in versions)
        tried.append(_attempt(runner, setup, culprit, failure, made_with or "unknown versions"))
        if tried[-1].script:  # another attempt would write over its files
            return tried[-1]
    return tried[0]


def _around(culprits: Sequence[str]) -> tuple[str, ...]:
    """The smallest module that holds several culprits, which may fail only together; none where that is the whole model."""
    if len(culprits) < 2:
        return ()
    paths = [culprit.removesuffix(OWN).split(".") for culprit in culprits]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return (".".join(common),) if common and common != [""] else ()


def _attempt(
    runner: "ProbeRunner", setup: ReferenceSetup, culprit: str, failure: Symptom, made_with: str
) -> Reproduction:
    assert failure.call is not None  # the caller has looked
    wanted = Capture(module=culprit.removesuffix(OWN), call=failure.call)
    try:
        captured = runner.run(Request(scenario=setup.workload, capture=wanted)).directory
        description = parse_json(read_file(captured / _CAPTURED[0], _LARGEST))
    except UsageError as error:
        return Reproduction(module=culprit, reason=error.message)
    except (OSError, ValueError):
        return Reproduction(
            module=culprit, reason=f"the module cannot be carried into a script: {captured / 'stderr.txt'}"
        )
    claim = _claim(culprit, failure, setup, description, made_with)
    reason = "no script could be written"
    for configs in (False, True):
        try:
            text = script_text(description, claim, configs=configs)
        except CannotBeWrittenError as error:
            return Reproduction(module=culprit, reason=str(error))
        write_file(runner.directory / SCRIPT, text)
        (runner.directory / TENSORS).unlink(missing_ok=True)
        shutil.copyfile(captured / _CAPTURED[1], runner.directory / TENSORS)
        status, said, errors = run_clean(runner.directory / SCRIPT, TIME_LIMIT)
        line = next((line for line in said.splitlines() if line.startswith(_FAILS)), "")
        same = _IN_ANY_DTYPE.fullmatch(line)
        if status == 1 and line and not same:
            size = (runner.directory / TENSORS).stat().st_size
            return Reproduction(module=culprit, script=SCRIPT, bytes=size, said=line)
        ended = status in (0, 2)  # in its own words
        reason = f"by itself the module does not fail: {_last_line(said if ended else errors)}"
        if same:
            reason = f"by itself the module raises in float32, too: {same[1]}"
    for name in (SCRIPT, TENSORS):
        (runner.directory / name).unlink(missing_ok=True)
    return Reproduction(module=culprit, reason=reason)


def _claim(culprit: str, failure: Symptom, setup: ReferenceSetup, description: dict[str, Any], made_with: str) -> Claim:
    cls = description["recipe"]["class"].rpartition(":")[2]
    return Claim(
        title=f"{cls} ({culprit.removesuffix(OWN) or 'the whole model'}): {failure.kind}",
        about=(
            f"Found by bisection of {setup.workload.name!r} with {describe(setup.workload)}: {failure.reason}.",
            "With this part alone in float32 the run is healthy; without that it fails.",
        ),
        check=_check(failure),
        limit=WRONG,
        made_with=made_with,
    )


def _check(failure: Symptom) -> str:
    if failure.kind is Kind.DTYPE_ERROR:
        return "dtype"
    if failure.kind is Kind.INACCURATE:
        return "accuracy"
    return "backward" if failure.phase in ("backward", "recompute") else "forward"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


_RUN = """
import runpy, sys
sys.path.append(sys.argv.pop())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_clean(script: Path, time_limit: float) -> tuple[int, str, str]:
    """Runs ``script`` in its own directory; modules of the present directory can be imported where no other has their name.

    Args:
        script: it and its data lie in one directory.
        time_limit: seconds.

    Returns:
        The exit status (minus the signal that ended it, -1 at the time limit), its output, and what it wrote of errors.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RUN, script.name, str(Path.cwd())],
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"it was stopped after {time_limit:.0f} s"
    return done.returncode, done.stdout, done.stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run.

    Attributes:
        run: what it left, or the reason why it could not be done.
        repeated: it had been done before, and was read from disk.
    """

    run: Run | UsageError
    repeated: bool


class ProbeRunner:
    """Makes runs in directories below one; what lies there finished is not run again.

    Args:
        directory: the run directory.
        run: makes a run in a directory that does not exist yet.
        journal: is told each run that was really made.
    """

    def __init__(self, directory: Path, run: Callable[[Request, Path], Run], journal: "Journal") -> None:
        self.directory = directory
        self._run = run
        self._journal = journal
        self.runs = 0
        """How many requests were answered, from disk or by a run."""

    def run(self, request: Request, label: str = "") -> Run:
        """Makes one run; see :meth:`ask`.

        Raises:
            UsageError: the scenario cannot be run at all.
        """
        done = self.ask(request, label=label)
        if isinstance(done.run, UsageError):
            raise done.run
        return done.run

    def ask(self, request: Request, *, label: str = "", attempt: int = 0) -> Done:
        """The run of ``request``, from disk or made now.

        Args:
            request: what to run.
            label: name of the directory; probes, which have none, are named after what is asked of them.
            attempt: another number runs the same request anew.
        """
        digest = hashlib.sha256(request.to_text().encode()).hexdigest()[:16]
        name = label or f"probes/{digest}" + (f"-{attempt}" if attempt else "")
        place = self.directory / name
        self.runs += 1
        known = _reopened(place, request)
        if known is not None:
            return Done(run=known, repeated=True)
        clear(place)  # what an interruption has left there
        run: Run | UsageError
        try:
            run = self._run(request, place)
            ended = ending_of(run).words
        except UsageError as error:
            run, ended = error, error.message
        self._journal.note("run", place=name, ended=ended)
        return Done(run=run, repeated=False)


def _reopened(place: Path, request: Request) -> Run | UsageError | None:
    """What a finished run of ``request`` has left; None where there is none, or a full disk ended its recording, so that it has to be made again."""
    try:
        ended = WorkerExit(**parse_json(read_file(place / EXIT)))
        if read_file(place / REQUEST).decode("utf-8") != public_text(request.to_text()):
            return None
    except (OSError, ValueError, TypeError):
        return None
    try:
        run = collect(place, ended)
    except UsageError as error:
        return error
    return run if all(process.trace.stopped is None for process in run.processes) else None


JOURNAL = "bisection.jsonl"
SCHEMA = 1

_LONGEST = 1 << 20
"""Bytes of the first line, which holds a scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a bisection was asked to do.

    Attributes:
        scenario: the scenario under bisection.
        tolerance: the accepted difference, where it was given.
    """

    scenario: Scenario
    tolerance: float | None


class Journal:
    """Appends to the log; each line reaches the kernel as a whole, so that nothing but a power cut loses it.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL

    def begin(self, asked: Asked) -> None:
        """The first line.

        Raises:
            FileExistsError: there is a log already.
        """
        with self._path.open("xb", buffering=0) as file:
            file.write(_line({
                "schema": SCHEMA,
                "scenario": asked.scenario.model_dump(mode="json", exclude_defaults=True),
                "tolerance": asked.tolerance,
            }))  # fmt: skip

    def note(self, event: str, **values: Any) -> None:
        """Appends one event; without room for it the log lacks it, and nothing else is lost."""
        with contextlib.suppress(OSError), append_file(self._path) as file:
            file.write(_line({"event": event, **values}))

    def asked(self) -> Asked:
        """What the log's first line says.

        Raises:
            UsageError: there is no log, or it cannot be read.
        """
        try:
            first = parse_json(read_head(self._path, _LONGEST).partition(b"\n")[0])
            if first["schema"] > SCHEMA:
                raise UsageError(f"{self._path}: written by a newer version", "Update dtypedoctor to resume it.")
            return Asked(scenario=Scenario.model_validate(first["scenario"]), tolerance=first["tolerance"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise UsageError(
                f"{self._path.parent}: no bisection to resume here",
                "Pass --resume the run directory of an interrupted bisection.",
            ) from error


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
