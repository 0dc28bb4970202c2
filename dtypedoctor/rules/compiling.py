"""``compile-graph-break``, ``recompile-limit`` and ``stale-cuda-stream``: code that the compiler or another stream cannot take.

A stale stream is seen only where a model names the functions that choose its streams (:class:`dtypedoctor.plugins.Model`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtypedoctor.diagnosis import corrections_of_library, spec_of
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import rejection_in
from dtypedoctor.plugins import Correction, registered
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.trace.events import Observed, ParameterNote, Raised
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import CompileCounts, GraphBreak, Recompiled, RecompileLimit, StreamLaunches

COMPILE_GRAPH_BREAK = FindingSpec(
    id="compile-graph-break",
    title="torch.compile gives up at an operation it cannot trace",
    family=COMPILE_AND_LOAD,
    severity=Severity.WARNING,
    references=(
        "https://github.com/thad0ctor/axolotl/pull/25",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3677",
    ),
    ablations=("eager-attention",),
    do_this="Move what the compiler cannot trace out of the compiled module, or leave the module out of `torch.compile`.",
    edits=("without-compiler",),
)
RECOMPILE_LIMIT = FindingSpec(
    id="recompile-limit",
    title="A compiled function was recompiled until Dynamo gave up",
    family=COMPILE_AND_LOAD,
    severity=Severity.WARNING,
    references=(
        "https://github.com/thad0ctor/axolotl/pull/25",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3677",
    ),
    ablations=("eager-attention",),
    do_this="Compile once for all sizes with `dynamic=True`, and keep counters out of the module's attributes.",
    edits=("counter-in-tensor", "compiled-for-any-size"),
)

REFUSED = "Unsupported"
"""Type of the exception that a graph break is under ``fullgraph=True``."""
REFUSED_LIMIT = "FailOnRecompileLimitHit"
"""Type of the exception that the recompile limit is under ``fullgraph=True``."""

SHOWN = 4
"""Places and functions that are named one by one."""

MAX_GUARD = 160
"""Characters of a guard; one that compares objects can fill a page."""

_REST = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)")
"""Dynamo's name for what follows a graph break."""
_FOREIGN = re.compile(r"_ctypes|FuncPtr|PyC(Simple|Pointer)Type|_SimpleCData|get_ptr")
"""What a C function that is called through ctypes looks like to Dynamo: torch 2.9 names the class, later releases its metaclass."""
_OF_PRECISION = re.compile(r"dtype|autocast|quant|bitsandbytes", re.IGNORECASE)
"""What a break that has to do with number formats speaks of."""
_EXPLANATION = re.compile(r"^ +Explanation: (?P<text>.+)$", re.MULTILINE)
_USER_LINE = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/|.*/(?=dtypedoctor/)")
"""What stands before the package that a file belongs to."""
_TORCH = re.compile(r"/torch/(nn|_dynamo|_compile|utils)/")


def detect_compilation(trace: Trace) -> Iterator[Finding]:
    """Graph breaks first, because the functions behind them are those that are compiled again."""
    raised = rejection_in(trace)
    breaks = trace.observed(GraphBreak)
    if raised is not None and raised.type == REFUSED:
        yield _refused(trace, raised)
    elif breaks:
        yield _broken(trace, breaks)
    hits = trace.observed(RecompileLimit)
    if hits or (raised is not None and raised.type == REFUSED_LIMIT):
        fatal = raised is not None and raised.type == REFUSED_LIMIT
        name, versions, guard, place = "a function", "too many", "", ""
        if hits:
            first = hits[0].what
            name, versions, guard, place = _function(first.function), str(first.value), _guard(first.guard), first.place
        statement = Statement(
            id="recompile-limit",
            severity=Severity.ERROR if fatal else Severity.WARNING,
            summary=(
                f"Dynamo gives up compiling {name} after {versions} versions of it"
                f"{f'; the guard that failed last: {guard}' if guard else ''}."
            ),
            cause=(
                "A compiled graph holds for what it was traced with: dtypes, sizes, Python values. Each guard failure "
                "triggers a recompile, up to a limit; beyond it the function runs in plain Python for the rest of the process."
            ),
            evidence=tuple(_evidence_of_recompiles(trace.observed(Recompiled), hits)),
        )
        fqn = hits[0].fqn if hits else None
        finding = make_finding(statement, phase="compile", fqn=fqn, source=_file_and_line(place) or None)
        yield _with_custom_op(finding, trace, [str(one.what) for one in (*hits, *trace.observed(GraphBreak))])


def _broken(trace: Trace, breaks: Sequence[Observed[GraphBreak]]) -> Finding:
    counts = next((seen.what for seen in trace.observed(CompileCounts)), None)
    first = breaks[0].what
    origin = _origin(breaks)
    via = f", called by {_short(origin)}" if _function_of(origin) != _function_of(first.frames[-1]) else ""
    places = f"{len(breaks)} places" if len(breaks) > 1 else "one place"
    reasons = [f"{one.what.kind} {one.what.explanation} {one.what.context}" for one in breaks]
    ours = any(_FOREIGN.search(text) or _OF_PRECISION.search(text) for text in reasons)
    statement = Statement(
        id="compile-graph-break",
        severity=Severity.WARNING if ours else Severity.INFO,  # a print in a forward is the user's business
        summary=(
            f"torch.compile breaks the graph {_times(sum(one.what.count for one in breaks))} at {places}, "
            f"first of all at {_short(first.frames[-1])}{via}."
        ),
        cause=(
            f"Dynamo stops at what it cannot trace ({first.explanation or first.kind}), compiles the pieces by themselves "
            "and runs what lies between them in plain Python: the speed-up of compiling is lost."
        ),
        evidence=(
            *(
                f"{_times(one.what.count)} at {_short(one.what.frames[-1])}: {one.what.explanation or one.what.kind}"
                for one in breaks[:SHOWN]
            ),
            *_more(len(breaks) - SHOWN, "place", "places"),
            f"{counts.unique_graphs if counts is not None else 0} graphs were compiled in place of one.",
        ),
    )
    finding = make_finding(statement, phase="compile", fqn=breaks[0].fqn, source=_file_and_line(origin))
    return _with_custom_op(finding, trace, [str(one.what) for one in breaks])


def _refused(trace: Trace, raised: Raised) -> Finding:
    """A graph break under ``fullgraph=True``, told from the exception alone."""
    explanation = _EXPLANATION.search(raised.message)
    kind = raised.message.split("\n", 1)[0]
    lines = [found for found in _USER_LINE.finditer(raised.message) if not _TORCH.search(found["file"])]
    place = f"{lines[-1]['file']}:{lines[-1]['line']}" if lines else ""
    statement = Statement(
        id="compile-graph-break",
        summary=f"torch.compile with fullgraph=True cannot compile the model{f' at {_short(place)}' if place else ''}: {kind}.",
        cause=(
            f"Dynamo cannot trace what is there ({explanation['text'] if explanation else kind}). Without fullgraph=True it would "
            "break the graph there and go on; with it a graph break is an exception."
        ),
        evidence=(f"The run ended in step {raised.step} with {raised.type}: {kind}",),
    )
    finding = make_finding(statement, phase="compile", step=raised.step, source=_file_and_line(place) or None)
    return _with_custom_op(finding, trace, [raised.message])


def _origin(breaks: Sequence[Observed[GraphBreak]]) -> str:
    """The frame to change: where the first break stands, or its caller, if all breaks go through that and it breaks alike.

    What breaks most often may be a helper of another package; who calls it, and breaks for the same reason itself, is the cause.
    """
    first = breaks[0].what
    shared = set.intersection(*({_function_of(frame) for frame in seen.what.frames} for seen in breaks))
    alike = {_function_of(one.what.frames[-1]) for one in breaks if one.what.explanation == first.explanation}
    return next((frame for frame in reversed(first.frames) if _function_of(frame) in shared & alike), first.frames[-1])


def _function_of(frame: str) -> tuple[str, str]:
    """File and name of the function of ``/path/file.py:line function``; the rest of a function behind a break is that function."""
    place, _, name = frame.partition(" ")
    rest = _REST.fullmatch(name)
    return place.rpartition(":")[0], rest["function"] if rest else name


def _evidence_of_recompiles(
    recompiles: Sequence[Observed[Recompiled]], hits: Sequence[Observed[RecompileLimit]]
) -> Iterator[str]:
    for hit in (seen.what for seen in hits[:SHOWN]):
        yield f"{hit.limit} ({hit.value}) was hit by {_function(hit.function)}, {_short(hit.place)}."
    yield from _more(len(hits) - SHOWN, "limit hit", "limit hits")
    for one in (seen.what for seen in recompiles[:SHOWN]):
        guards = "; ".join(map(_guard, one.guards[:2]))
        yield f"{_function(one.function)}, {_short(one.place)}, was compiled again {_times(one.count)}: {guards}"
    yield from _more(len(recompiles) - SHOWN, "function", "functions")


def _with_custom_op(finding: Finding, trace: Trace, texts: Sequence[str]) -> Finding:
    """The finding; for C functions between packed weights with what hides them from Dynamo. What is mere information needs no fix."""
    if finding.severity is Severity.INFO or finding.remedies:
        return finding
    packed = any(note.quant for note in trace.all(ParameterNote))
    foreign = any(_FOREIGN.search(text) for text in texts)
    return replace(finding, remedies=_hiding(finding.id, trace)) if packed and foreign else finding


def _hiding(finding: str, trace: Trace) -> tuple[str, ...]:
    """What hides C functions from Dynamo: the corrections of the library that calls them, or, where it has none, an operator."""
    breaks = trace.observed(GraphBreak)
    of_library = corrections_of_library(finding, _file_and_line(_origin(breaks))) if breaks else ()
    corrections = registered(Correction)
    return of_library or tuple(one for one in spec_of(finding).settled_by if not corrections[one].library)


def _function(name: str) -> str:
    """A function's name; Dynamo's own names for the rest of a function behind a break are put in words."""
    rest = _REST.fullmatch(name)
    return f"the rest of {rest['function']} after line {rest['line']}" if rest else name


def _guard(text: str) -> str:
    """A guard without the advice and the source line that Dynamo adds to it."""
    return re.split(r"\. Guard failed|\s{2,}#", text)[0][:MAX_GUARD].rstrip()


def _more(count: int, one: str, several: str) -> tuple[str, ...]:
    return (f"And {count} more {one if count == 1 else several}.",) if count > 0 else ()


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _file_and_line(frame: str) -> str:
    """``package/file.py:line`` of a frame, whose path may already begin at its package; of a script, its name."""
    place = frame.partition(" ")[0]
    if not place.startswith("/"):
        return place
    packaged = _PACKAGES.match(place)
    return place[packaged.end() :] if packaged else place.rsplit("/", 1)[-1]


def _short(frame: str) -> str:
    """``file.py:line`` with the function where the frame has one."""
    function = frame.partition(" ")[2]
    return f"{_file_and_line(frame)}{f' ({function})' if function else ''}"


STALE_CUDA_STREAM = FindingSpec(
    id="stale-cuda-stream",
    title="A kernel is launched on a CUDA stream that was remembered from an earlier call",
    family=COMPILE_AND_LOAD,
    references=("https://github.com/thad0ctor/axolotl/pull/25",),
    in_any_program=False,
)


def detect_stale_streams(trace: Trace) -> Iterator[Finding]:
    """One finding for all launches whose stream was not the current one of the memory's device."""
    uses = trace.observed(StreamLaunches)
    stale = [seen for seen in uses if seen.what.stale]
    if not stale:
        return
    launched, wrong = (sum(seen.what.count for seen in some) for some in (uses, stale))
    statement = Statement(
        id="stale-cuda-stream",
        summary=f"{wrong} of {launched} kernel launches went to another CUDA stream than the current one of {stale[0].what.device}.",
        cause=(
            "The stream's handle was asked for once and kept. Work on another stream is not ordered with what the current "
            "stream does before and after it, so a weight may be used before it is dequantized, or read while it changes."
        ),
        evidence=tuple(
            f"{o.what.count} launches on {o.what.device}: stream {o.what.used:#x}, current {o.what.current:#x}."
            for o in stale
        ),
    )
    yield make_finding(statement, phase=stale[0].phase, step=stale[0].step)


RULES = (
    Rule(name="compilation", priority=80, specs=(COMPILE_GRAPH_BREAK, RECOMPILE_LIMIT), detect=detect_compilation),
    Rule(name="streams", priority=40, specs=(STALE_CUDA_STREAM,), detect=detect_stale_streams),
)
