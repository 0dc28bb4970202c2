"""A stand-alone script that shows the failure of one module, made from what the worker kept of it, and run to make sure."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, write_file
from dtypedoctor.replay.script import TENSORS, CannotBeWrittenError, Claim, script_text
from dtypedoctor.scenario.model import Capture, Request
from dtypedoctor.trials.bisection.measurements import ReferenceSetup
from dtypedoctor.trials.bisection.probes import describe, probe_of
from dtypedoctor.trials.bisection.results import OWN, Kind, Reproduction, Symptom

if TYPE_CHECKING:
    from dtypedoctor.trials.bisection.probe_runner import ProbeRunner

__all__ = ["SCRIPT", "reproduce", "run_clean"]


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

    The script is run once in a fresh interpreter and kept only if it fails as it says.
    """
    untreated = runner.run(probe_of(setup.workload))
    failure = setup.judge(untreated)
    if failure.phase == "optimizer" or failure.call is None:
        return Reproduction(module=culprits[0], reason="it fails outside of the modules' own calls")
    order = [*sorted(culprits, key=lambda culprit: culprit != failure.fqn)[:MOST_TRIED], *_around(culprits)]
    versions = untreated.trace.environment.get("versions", {})
    tried: list[Reproduction] = []
    for culprit in order:
        tried.append(_attempt(runner, setup, culprit, failure, _made_with(versions)))
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
    wanted = Capture(module=culprit.removesuffix(OWN), own=culprit.endswith(OWN), call=failure.call)
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
        status, said, errors = _written(runner.directory, text, captured / _CAPTURED[1])
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


def _written(directory: Path, text: str, tensors: Path) -> tuple[int, str, str]:
    write_file(directory / SCRIPT, text)
    (directory / TENSORS).unlink(missing_ok=True)
    shutil.copyfile(tensors, directory / TENSORS)
    return run_clean(directory / SCRIPT, TIME_LIMIT)


def _claim(culprit: str, failure: Symptom, setup: ReferenceSetup, description: dict[str, Any], made_with: str) -> Claim:
    cls = description["recipe"]["class"].rpartition(":")[2]
    part = "own arithmetic of " if culprit.endswith(OWN) else ""
    return Claim(
        title=f"{part}{cls} ({culprit.removesuffix(OWN) or 'the whole model'}): {failure.kind}",
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


def _made_with(versions: dict[str, str]) -> str:
    return ", ".join(_known(versions)) or "unknown versions"


def _known(versions: dict[str, str]) -> Iterator[str]:
    for name in _LIBRARIES:
        if name in versions:
            yield f"{name} {versions[name]}"


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
