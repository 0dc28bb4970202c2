"""What to do about each finding, in words and as a change of the program's source, and the lines at which the first one shows."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from dtypedoctor.diagnosis.edits import INSTEAD, REMARKS, edits_for
from dtypedoctor.diagnosis.registry import page, spec_of
from dtypedoctor.diagnosis.rule import Advice, Excerpt, Finding, FindingSpec, Severity
from dtypedoctor.diagnosis.scene import Scene, Source, masked_line
from dtypedoctor.diagnosis.value_edits import fitting
from dtypedoctor.diagnosis.wording import class_of, short, shown_line
from dtypedoctor.errors import DoctorError
from dtypedoctor.foreign_files import working_directory
from dtypedoctor.text import counted, memory
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import Updates


def advise(
    findings: Sequence[Finding], trace: Trace, script: str | None, *, began: float, own_files: bool
) -> tuple[tuple[Advice, ...], tuple[Excerpt, ...]]:
    """Say what to do about each finding, in their order, and show the lines of the first.

    Args:
        findings: what was found.
        trace: where.
        script: path of the program; None where there is none.
        began: when it ran: a file that was changed since is not the one that ran.
        own_files: whether the program's files may be read: without them there are neither edits nor lines.
    """

    here = working_directory()
    # The program may have deleted its working directory
    path = Path(script).resolve() if script and (here is not None or Path(script).is_absolute()) else None
    folders = [folder for folder in (here and here.resolve(), path and path.parent) if folder is not None]

    scenes = [Scene(finding, trace, tuple(folders), path, began=began) for finding in findings]
    advice = tuple(_advice(scene, own_files=own_files) for scene in scenes)
    return advice, _excerpts(scenes[0]) if scenes and own_files else ()


def _advice(scene: Scene, *, own_files: bool) -> Advice:
    """What may mend it, each way with its edits; one without any where none is seen."""
    finding, spec = scene.finding, spec_of(scene.finding.id)
    if spec.partly_frozen is not None and _is_partly_frozen(scene):
        text, code = (_filled(part, scene) for part in spec.partly_frozen)
        return Advice(finding=finding.id, text=text, code=code)
    if spec.instead is not None and (text := spec.instead(finding)):
        return Advice(finding=finding.id, text=text)
    ways = []
    for edits, maker in edits_for(scene, spec.edits) if own_files else [((), "")]:
        text = f"{_text(spec, scene, INSTEAD.get(maker, ''))} {REMARKS.get(maker, '')}".rstrip()
        ways.append(Advice(finding=finding.id, text=text, edits=edits, maker=maker if edits else ""))
    return replace(ways[0], others=tuple(ways[1:]))


def _excerpts(scene: Scene) -> tuple[Excerpt, ...]:
    """Show the lines at which a finding shows."""
    raised, line = scene.raised, scene.failing_line()
    is_late = line is not None and spec_of(scene.finding.id).nonfinite  # what raises then only noticed it
    if raised is not None and not raised.caught and len(raised.spans) == len(raised.frames) and not is_late:
        return tuple(_along(scene, list(zip(raised.frames, raised.spans, strict=True))))
    return (_excerpt(line[0], line[1], "", [], scene.shown(line[0].path)),) if line is not None else ()


Frame = tuple[str, list[int]]
"""``/path/of/file.py:line function`` and the span of what it was doing."""


def _along(scene: Scene, frames: list[Frame]) -> Iterator[Excerpt]:
    """The program's innermost line, and the line of the library inside of it where the exception was raised."""
    own = [at for at, (frame, _) in enumerate(frames) if _opened(frame, scene.source) is not None]
    if not own:
        return
    last = own[-1]
    yield _excerpt_of(scene, frames[last], skipped=0)
    inside = range(len(frames) - 1, last, -1)  # files of libraries are long: no more are read than needed
    raised_in = next((at for at in inside if _opened(frames[at][0], scene.installed) is not None), last)
    if raised_in > last:
        yield _excerpt_of(scene, frames[raised_in], skipped=raised_in - last - 1)


def _opened(frame: str, read: Callable[[str], Source | None]) -> Source | None:
    """The file of a frame; None for one that cannot be read, or has no such line."""
    path, _, line = frame.rpartition(" ")[0].rpartition(":")
    source = read(path)
    return source if source is not None and source.has(int(line)) else None


def _excerpt_of(scene: Scene, frame: Frame, *, skipped: int) -> Excerpt:
    at, _, function = frame[0].rpartition(" ")
    line = int(at.rpartition(":")[2])
    own = _opened(frame[0], scene.source)
    source = own or _opened(frame[0], scene.installed)
    assert source is not None
    file = scene.shown(source.path) if own is not None else shown_line(at).rpartition(":")[0]
    return _excerpt(source, line, function, frame[1], file, skipped)


def _excerpt(source: Source, line: int, function: str, span: list[int], file: str, skipped: int = 0) -> Excerpt:
    text = masked_line(source, line)
    begin, end = len(text) - len(text.lstrip()), len(text)
    if len(span) == 4 and span[0] == line:
        raw = source.data.splitlines()[line - 1]
        begin = len(raw[: span[2]].decode("utf-8", "replace"))
        end = len(raw[: span[3]].decode("utf-8", "replace")) if span[1] == line else len(text)
    return Excerpt(
        file=file, line=line, function=function, text=text, begin=begin, end=min(end, len(text)), skipped=skipped
    )


def _text(spec: FindingSpec, scene: Scene, of_edit: str) -> str:
    """The sentence of the edit that is shown, where it has one of its own; else that of the finding."""
    do_this = of_edit or (spec.of_line if scene.finding.source else "") or spec.do_this
    text = _filled(do_this, scene) if do_this else _first_way(scene.finding)
    milder = scene.finding.severity is Severity.INFO and spec.severity is not Severity.INFO
    return f"It may stay as it is. To change it: {text[:1].lower()}{text[1:]}" if milder else text


def _filled(text: str, scene: Scene) -> str:
    """``text`` with the names and dtypes of the finding."""
    finding = scene.finding
    module = _module_in_words(finding)
    values = {
        "module": module,
        "alike": _all_alike(scene) or module,
        "op": finding.op or "the operator",
        "dtype": finding.dtype or "odd",
        "other": scene.other or "that of the others",
        "device": scene.device,
    }
    if "{cost}" in text:
        values["cost"] = _cost_of_float32(scene)
    if "{model}" in text or "{before_optimizer}" in text:
        values["model"], values["before_optimizer"] = _optimizer_of(scene)
    filled = text.format(**values)
    return filled.replace("`the operator`", "the operator")


def _module_in_words(finding: Finding) -> str:
    if finding.fqn is None and finding.phase == "backward":
        return "the backward pass"
    return finding.module.partition(" (")[0] or short(finding.fqn)


def _parameters_of(scene: Scene) -> list[ParameterNote]:
    """The parameters of the run, each as it was noted last."""
    notes = {(note.root, note.name): note for note in scene.trace.all(ParameterNote) if not note.buffer}
    return list(notes.values())


def _is_partly_frozen(scene: Scene) -> bool:
    """Whether a line that casts the whole model would widen weights that nobody trains; not of a finding about tensors that are no weights."""
    return bool(fitting(scene, ("set-float32",))) and any(
        not note.requires_grad and note.dtype == scene.finding.dtype for note in _parameters_of(scene)
    )


_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Lion": 1, "Adagrad": 1}
"""Tensors that an optimizer keeps of each parameter, in its dtype; not of SGD and RMSprop, which keep more with momentum."""


def _cost_of_float32(scene: Scene) -> str:
    """What it costs to train in float32 what is trained in half precision, to follow a clause; empty where that is not known."""
    half = [note for note in _parameters_of(scene) if note.requires_grad and note.dtype == scene.finding.dtype]
    elements = sum(prod(note.shape) for note in half)
    optimizer = next((seen.what.optimizer for seen in scene.trace.observed(Updates)), "")
    if not elements or optimizer not in _MOMENTS:
        return ""
    tensors = 2 + _MOMENTS[optimizer]  # weight and gradient
    kept = f" and {counted(_MOMENTS[optimizer], 'moment')} of {optimizer}"
    return f" (costs {memory(2 * tensors * elements)} more for {counted(elements, 'trained weight')}: weight, gradient{kept} take 4 bytes each, not 2)"


def _optimizer_of(scene: Scene) -> tuple[str, str]:
    """What the program calls the model in ``AdamW(model.parameters())``, and where; a general name where that cannot be seen."""
    optimizer = next((seen.what.optimizer for seen in scene.trace.observed(Updates)), "")
    source = scene.failing_file()
    for made in source.every(ast.Call) if source is not None and optimizer else ():
        if source is None or ast.unparse(made.func).rpartition(".")[2] != optimizer:
            continue
        for node in ast.walk(made):
            if isinstance(node, ast.Attribute) and node.attr in ("parameters", "named_parameters"):
                where = f"{scene.shown(source.path)}:{made.lineno}"
                return ast.unparse(node.value), f"Before {optimizer} is made ({where}),"
    return "model", "Before the optimizer is made,"


def _all_alike(scene: Scene) -> str:
    """The modules whose parameters are like that of the finding, ``all 7 modules of class Norm``; empty where there is one only."""
    cls = class_of(scene.trace, scene.finding.fqn) if scene.finding.fqn else ""
    notes = [note for note in scene.trace.all(ParameterNote) if note.owner == cls and not note.buffer]
    modules = {(note.root, note.name.rpartition(".")[0]) for note in notes if note.dtype == scene.finding.dtype}
    return f"all {len(modules)} modules of class {cls}" if len(modules) > 1 else ""


_HOW_TO_FIX = re.compile(
    r"^## How to fix it\n+(?:\d+\.|-)\s+(.+?)(?=\n(?:\d+\.|-)\s|\n\n|\Z)", re.MULTILINE | re.DOTALL
)


def _first_way(finding: Finding) -> str:
    """The first way of fixing that the finding's page names; what shows the page where it names none."""
    try:
        found = _HOW_TO_FIX.search(page(finding.id))
    except DoctorError:
        found = None
    if found is None:
        return f"`dtypedoctor explain {finding.id}` lists what to change."
    without_links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", found[1])
    plain = re.sub(r"(?<![\w*])\*{1,2}(\S[^*]*)\*{1,2}(?![\w*])", r"\1", without_links)  # emphasis, and no product
    return " ".join(plain.replace("`", "").split())
