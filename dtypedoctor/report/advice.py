"""What to do about each finding, in words and as a change of the program's source, and how that is laid out."""

import re
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis.edits import Scene, edits_for
from dtypedoctor.diagnosis.registry import page, spec_of
from dtypedoctor.diagnosis.rule import Advice, Edit, Finding, FindingSpec
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.errors import DoctorError
from dtypedoctor.report.document import Block, Code, Heading, Paragraph
from dtypedoctor.scenario.model import Script
from dtypedoctor.trials.results import Treatment

MOST_LINES = 12
"""Changed lines that the first screen shows."""


def advice_on(treatment: Treatment, *, own_files: bool) -> Iterator[Advice]:
    """What to do about each finding, in their order; without edits where the program's files may not be read."""
    workload = treatment.scenario.steps[0].workload
    script = Path(workload.path).resolve() if isinstance(workload, Script) and workload.path else None
    here = Path.cwd().resolve()
    folders = (here, *([script.parent] if script is not None else []))
    for finding in treatment.findings:
        spec = spec_of(finding.id)
        scene = Scene(finding, treatment.diagnosed, folders, script)
        edits, remark = edits_for(scene, spec.edits) if own_files else ((), "")
        text = f"{_text(spec, finding, scene.other)} {remark}".rstrip()
        yield Advice(finding=finding.id, text=text, edits=edits)


def _text(spec: FindingSpec, finding: Finding, other: str | None) -> str:
    if not spec.do_this:
        return _first_way(finding)
    return spec.do_this.format(
        module=short(finding.fqn),
        op=finding.op or "the operator",
        dtype=finding.dtype or "odd",
        other=other or "that of the others",
    )


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


def do_this(advice: Advice) -> tuple[Block, ...]:
    """The advice as it stands on the first screen: the sentence, then the change as a unified diff."""
    if not advice.text:
        return ()
    diff = (Code(diff_of(advice.edits), "diff"),) if advice.edits else ()
    return (Heading("do this"), Paragraph(advice.text), *diff)


def diff_of(edits: tuple[Edit, ...]) -> str:
    """The edits as a unified diff, which `patch -p0` takes where all are shown."""
    shown, rest = edits[:MOST_LINES], len(edits) - MOST_LINES
    lines = [f"--- {edits[0].file}", f"+++ {edits[0].file}"]
    for edit in shown:
        lines += [f"@@ -{edit.line} +{edit.line} @@", f"-{edit.old}", f"+{edit.new}"]
    return "\n".join(lines) + (f"\n… and {rest} more lines (report.json, do_this)" if rest > 0 else "")
