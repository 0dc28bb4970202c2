"""Parts of a report in words: what ran, what was found, where, how sure; and the ranked list of facts that each length of a report takes from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtypedoctor.diagnosis.rule import Advice, Confidence, Edit, Excerpt, Finding, Link
from dtypedoctor.diagnosis.wording import OWN_WORKLOADS, indexed, module_name, with_spoken_operators
from dtypedoctor.report.document import Block, Code, Heading, Line, Paragraph, named
from dtypedoctor.report.fixes import DIAGNOSTIC, RemedyLine, call_fixes, cures, ended_with, outcome_words, remedy_lines
from dtypedoctor.report.to_json import Observer, Outcome, Report, Status, plain
from dtypedoctor.text import ABSENT, counted, one_line

_PASSES = "the failing call passes with it"
STATUS = {
    Status.HEALTHY: "HEALTHY",
    Status.FINDINGS: "FOUND",
    Status.WORKER_DIED: "WORKER DIED",
    Status.ERROR: "ERROR",
    Status.UNKNOWN: "UNKNOWN",
}
CONFIDENCE = {
    Confidence.PROVEN: "proven",
    Confidence.LIKELY: "cause likely, not proven",
    Confidence.POSSIBLE: "cause possible, not proven",
}
_SETTLED = "the operator, or the whole run, was repeated with one change, and the failure disappeared"
_AS_LOADED, _AN_INPUT = "load-dtype", "model-input"
"""Links of chains that end at a parameter (the name is a contract, and says little) and at what a model is called with."""
_REASONS = {
    "elsewhere": "a tensor from outside of the call, used", "autocast-list": "cast by autocast", "factory": "a tensor made",
    _AN_INPUT: "input", "compute-dtype": "compute dtype of the 4-bit layer", "fsdp-output": "output_dtype of the shard unit",
    "embedding": "embedding", "norm": "norm weight", "adapter": "adapter", "buffer": "buffer", "quant-state": "quantized",
    "keep-in-fp32": "kept in float32:", "modules-to-save": "saved copy", "reinterpreted": "read as another dtype:", "cast": "cast",
    _AS_LOADED: "parameter", "attribute": "attribute", "cache": "cache",
}  # fmt: skip
"""How a chain ends, in words; the names are a contract of report.json."""
_OF_A_REGION = "autocast-contradicts-model"

_BUILTIN = "builtin:"
_MOST_STEPS = 3
"""Steps of a scenario that are told."""


def replay_title(report: Report) -> str:
    """What a replay of a capsule has made again, whether it fails as the run did, and what it adds to that."""
    it = report.replay or {}
    name = f"{indexed(it['module'])} ({it['class']})" if it["module"] else f"the whole model ({it['class']})"
    failed = f"; in the run {it['op']} failed" if it["op"] and not it["verdict"] else ""
    device = str(report.environment.get("device", ""))
    where = f" on {device}" if device else ""
    line = f", {it['source']} in the run" if it.get("source") else ""
    told = f"replay of the call of {name}{line}, from capsule {it['capsule']}, {it['dtype']}{where}{failed}."
    adds = "Added to the run: fixes tried on this call alone, and the parts of it that must stay in float32."
    return one_line(f"{told} {it['verdict']} {adds}", 600)


def status_word(report: Report) -> str:
    """The status in capitals, as it stands before the headline."""
    nothing = bool(report.measured) and not any(measured for measured, _ in report.measured.values())
    ran = any(total for _, total in report.measured.values())
    return "NOTHING MEASURED" if report.status is Status.UNKNOWN and nothing and not ran else STATUS[report.status]


def measured_sentence(report: Report) -> str:
    """How much of what ran was measured; empty where that is not known."""
    if any(gap.startswith(NO_END) for gap in report.coverage):  # the end tells how many ran
        known = [_counted_as(name, total) for name, (_, total) in report.measured.items() if total]
        return f"Measured: {', '.join(known)}; how many ran is not known." if known else ""
    shares = [measured_share(name, *counts) for name, counts in report.measured.items() if counts[1]]
    return f"Measured: {', '.join(shares)}." if shares else ""


MEASURED = {
    "module_calls": "module call",
    "operators": "operator outside of modules",
    "gradients": "parameter gradient",
    "losses": "loss",
}
"""What is measured of a run, by its key in report.json."""
_PLURALS = {"operators": "operators outside of modules", "losses": "losses"}
NO_END = "the end of the run: "
"""How the sentence begins, among what was not covered, that a trace has no end."""


def measured_share(name: str, measured: int, total: int) -> str:
    """How much of one kind was measured, e.g. ``0 of 214 module calls``."""
    return f"{measured:,} of {_counted_as(name, total)}"


def _counted_as(name: str, number: int) -> str:
    return counted(number, MEASURED[name], _PLURALS.get(name, ""))


def proven_means(report: Report) -> str:
    """What *proven* means, and of which finding it is said where that is not the first one; empty where nothing is proven."""
    proven = next((finding for finding in report.findings if finding.confidence is Confidence.PROVEN), None)
    if proven is None:
        return ""
    how = one_line(proven.proven_by or _SETTLED)
    return f"Proven: {how}." if proven is report.findings[0] else f"{one_line(proven.id)}, below, is proven: {how}."


def place(finding: Finding) -> list[tuple[str, str]]:
    """Where and when a finding is, as labelled values; what is not known is left out."""
    module = finding.module or indexed(finding.fqn or "")

    when = finding.phase or ""
    if finding.step is not None:
        number = f"step {finding.step}" if finding.call is None else f"call {finding.call}"
        when = f"{when}, {number}" if when else number

    dtype_of = "dtype"
    if finding.id == _OF_A_REGION:
        dtype_of = "region dtype"
    elif finding.provenance and finding.provenance[0].dtype_in == finding.dtype:  # that of the odd operand
        dtype_of = "operand dtype"

    source = finding.source
    if source is not None and source.startswith(OWN_WORKLOADS):
        source = f"{source} (the scenario's workload)"

    rows = [("module", module), ("op", finding.op), ("when", when), (dtype_of, finding.dtype), ("source", source)]
    return [(label, one_line(value)) for label, value in rows if value]


def origins(finding: Finding) -> list[str]:
    """Where a finding originates: of a mismatch where each of the two dtypes was set, of anything else operator, module and line."""
    ends = [links[-1] for links in filter(None, (finding.provenance, finding.met)) if links[-1].source]
    if ends:
        return [_set_by(link) for link in dict.fromkeys(ends)]
    told = dict(place(finding))
    if not told.keys() & {"op", "module", "source"}:
        return []
    where = " in ".join(told[label] for label in ("op", "module") if label in told)
    where += f"{' at ' * bool(where)}{told['source']}" if "source" in told else ""
    return [_plainly(f"{where} ({told['when']})" if "when" in told else where)]


def _plainly(text: str) -> str:
    """A name with its operators in the short form; it is shown letter by letter, so without backticks."""
    return with_spoken_operators(text).replace("`", "")


def _set_by(link: Link) -> str:
    """``float32: parameter head.bias (nn.Linear()) at train.py:22``."""
    reason, _, name = link.op.partition(": ")
    where = f" in {module_name(link.fqn)}" if link.fqn else ""
    if name and reason != _AN_INPUT:  # what a module holds is named with it
        held, opening, setter = name.partition(" (")
        module, dot, tensor = held.rpartition(".")
        name, where = f"{module_name(module)}{dot}{tensor}{opening}{setter}", ""
    what = _plainly(f"{_REASONS[reason]} {name}".rstrip() if reason in _REASONS else link.op)
    dtype = link.dtype_out or link.dtype_in
    return f"{f'{dtype}: ' if dtype else ''}{what}{where} at {link.source}"


def title(finding: Finding) -> str:
    """The sentence at the head of a finding; of one that another finding leads to, that it is where that one surfaces."""
    return f"Where it surfaces: {finding.summary}" if finding.consequence_of else finding.summary


def chains(finding: Finding) -> Iterator[tuple[str, tuple[Link, ...]]]:
    """The provenance chains of a finding that has any: what each is about, and its links in a reader's words."""
    if finding.provenance:
        links = finding.provenance
        first, last = links[0], links[-1]
        if len(links) > 1 and (first.fqn, first.source) == (last.fqn, last.source):
            # A last link that goes back to the failing op itself is told with that op
            op = f"{first.op} ({last.op.replace(f'{first.op} is ', '')})"
            links = (replace(first, op=op), *links[1:-1])
        yield "dtype provenance, from the failing operator back to the origin", tuple(map(_worded, links))
    if finding.met:
        yield "dtype provenance of the other operand", tuple(map(_worded, finding.met))


def _worded(link: Link) -> Link:
    """Names of parameters without that of the module, which the link has already."""
    op = link.op.replace(f": {link.fqn}.", ": ") if link.fqn else link.op
    return replace(link, op=op.replace(f"{_AS_LOADED}: ", "parameter "))


def watched_and_not(observer: Observer) -> str:
    """Whether the run was the same without instrumentation, in few words; empty where that is not known."""
    if observer.bitwise_equal is None:
        return "raises the same error" if observer.same_error else ""
    return "same failure, bitwise identical" if observer.bitwise_equal else "NOT the same, see below"


def link_dtypes(link: Link) -> str:
    """What a link of a provenance chain does to the dtype, e.g. ``bfloat16 → float32``."""
    return " → ".join(one_line(dtype, 40) for dtype in (link.dtype_in, link.dtype_out) if dtype) or ABSENT


def observer_sentence(observer: Observer) -> str:
    """The observer certificate: whether watching changed the run."""
    if observer.bitwise_equal is None and observer.same_error:
        return f"Instrumentation does not cause the failure: {observer.reason.rstrip('.')}."
    verdict = {
        True: "Instrumentation changed nothing (bitwise identical):",
        False: "Instrumentation CHANGED the run:",
        None: "Not verified that instrumentation is inert:",
    }[observer.bitwise_equal]
    return f"{verdict} {observer.reason.rstrip('.')}."


def raw_sentence(report: Report) -> str:
    """Where the program's own output lies, which is not redacted; empty where it was not kept."""
    places = [report.files[key] for key in ("raw_stdout", "raw_stderr") if key in report.files]
    place = " and ".join(places) or report.files.get("raw_output")
    return (
        f"The program's output is in {place}, not redacted: it may contain secrets and data, and only you can read it."
        if place
        else ""
    )


def run_title(report: Report) -> str:
    """What the baseline does, e.g. ``grpo on builtin model llama, bfloat16, LoRA; on cpu``.

    Empty where the report does not carry a whole scenario (it was redacted, or is older than the present keys).
    """
    ran = plain(report.scenario)
    try:
        steps = ran["steps"]
        told = [", ".join(_parts(step)) for step in steps[:_MOST_STEPS]]
        jobs = ran.get("distributed")
        ranks = f", in {counted(jobs.get('processes', 2), 'process', 'processes')}" if jobs is not None else ""
    except (AttributeError, KeyError, TypeError):
        return ""
    more = len(steps) - len(told)
    told += [f"{more} more"] if more else []
    device = str(report.environment.get("device", ""))
    return one_line("; then ".join(told) + (f"; on {device}" if device else "") + ranks, 400)


def _parts(step: Mapping[str, Any]) -> Iterator[str]:
    """A step of a scenario in words; report.json leaves out what is as usual."""
    model, on = step.get("model"), ""
    if model is not None:
        own = model["name"].startswith(_BUILTIN)
        on = f" on builtin model {model['name'].removeprefix(_BUILTIN)}" if own else f" on model {model['name']}"
    yield f"{step['workload']['kind']}{on}"
    if model is not None:
        packed = model.get("quantization")
        yield model.get("dtype", "float32") + (
            f" with {packed.get('kind', 'nf4')} weights" if packed is not None else ""
        )
    if model is not None and model.get("lora") is not None:
        yield "LoRA"
    if step.get("autocast") is not None:
        yield f"{step['autocast']['dtype']} autocast"
    if step.get("compile") is not None:
        yield "compiled"


_MOST = 6
"""Fixes that are listed among the facts."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A labelled value about the most important finding.

    Attributes:
        on_screen: whether it is among those that the first screen has room for; a whole report has all.
    """

    label: str
    line: Line
    on_screen: bool = True


def ranked_facts(report: Report) -> Iterator[Fact]:
    """Give the facts about the most important finding, in the order of a reader's questions: where, what, what helps."""
    finding = report.findings[0]
    for position, words in enumerate(origins(finding)):
        yield Fact("and" if position else "origin", named(one_line(words)))
    if noticed := report.noticed or ended_with(report):
        yield Fact("noticed", named(one_line(noticed, 400)))
    if report.status is Status.WORKER_DIED and report.before is not None:  # the headline is about the finding
        yield Fact("ended", named(one_line(report.before.ended.removeprefix("was "), 400)))
    yield Fact("what", what(finding))
    for label, value in place(finding):
        name, opening, cls = value.partition(" (")
        module = (named(name), f"{opening}{cls}")
        yield Fact(label, module if label == "module" else named(value), on_screen=False)
    for other in report.findings[1:]:
        if other.consequence_of == finding.id:  # a root cause that is no operation shows first there
            told = dict(place(other))
            where = [told[label] for label in ("op", "module", "source") if label in told]
            yield Fact("surfaces at", named(", ".join(where)), on_screen=False)
    yield from _what_fixes(report)
    for trial in report.trials:
        if trial.diagnostic is not None and trial.diagnostic.bearing is not None:
            ablated = f": the run {outcome_words(trial)} (diagnostic only, not a fix)"
            yield Fact("ablation", (named(trial.remedy), ablated))
    if same := watched_and_not(report.observer):
        yield Fact("uninstrumented", same)


def what(finding: Finding) -> Line:
    """Name a finding, with how severe and how sure it is."""
    return (named(finding.id), f": {finding.severity}, {CONFIDENCE[finding.confidence]}")


def _what_fixes(report: Report) -> Iterator[Fact]:
    """Name the fixes that work, or that could be tried. Where the first screen shows an edit, that is what to do: it proposes nothing else."""
    edit = report.asks_for_edit
    if fixes := cures(report):
        first = "fixed by" if report.replay is None else "on this call, fixed by"
        yield from _labelled(first, "or by", fixes[:_MOST], on_screen=True)
    elif any(trial.outcome is not Outcome.NOT_TRIED and trial.diagnostic is None for trial in report.trials):
        yield Fact("fixed by", f"none of the fixes tried; `dtypedoctor explain {report.findings[0].id}` lists others")
    elif untried := list(_suggested(report)):
        yield from _labelled("suggested fix", "or", untried[:_MOST], on_screen=not edit)
    elif report.do_this and report.do_this[0].text and report.do_this[0].edits:
        yield Fact("suggested fix", "the edit above, in your own source", on_screen=False)


def _suggested(report: Report) -> Iterator[RemedyLine]:
    """List fixes that no run was made with, except those that do not fix the failing call alone, and experiments."""
    on_the_call = {str(fix["fix"]): fix["outcome"] for fix in call_fixes(report)}
    for line in (line for line in remedy_lines(report) if line.outcome == "not tried"):
        outcome = on_the_call.get(line.id, Outcome.NOT_TRIED.value)
        if outcome != Outcome.NOT_FIXED.value and not line.change.endswith(DIAGNOSTIC):
            yield replace(line, result=_PASSES) if outcome == Outcome.FIXED.value else line


def _labelled(first: str, others: str, lines: Sequence[RemedyLine], *, on_screen: bool) -> Iterator[Fact]:
    """Give a fact for each fix, the first with a label of its own."""
    for position, line in enumerate(lines):
        told = " ".join(filter(None, (line.change.rstrip("."), f"({line.result})" if line.result else "")))
        yield Fact(others if position else first, (named(line.id), f": {told}") if told else named(line.id), on_screen)


MOST_CHANGED = 12
"""Changed lines that the first screen always shows; where there are more it names the patch that has all."""
PATCH = "do-this.patch"
"""The edits for the first finding, in the run directory."""


def where_it_shows(excerpts: tuple[Excerpt, ...]) -> tuple[Block, ...]:
    """The excerpts with a caret under what failed, as compilers show it."""
    return (
        (Heading("where"), Code("\n".join(line for one in excerpts for line in _excerpt_lines(one)), "text"))
        if excerpts
        else ()
    )


def _excerpt_lines(one: Excerpt) -> Iterator[str]:
    margin = " " * len(str(one.line))
    if one.skipped:
        yield f"{margin} … {counted(one.skipped, 'frame')}"
    yield f"{margin}--> {one.file}:{one.line}" + (f" in {one.function}" if one.function else "")
    yield f"{margin} |"
    yield f"{one.line} | {one.text}"
    if one.end > one.begin:
        yield f"{margin} | {' ' * one.begin}{'^' * (one.end - one.begin)}"


def do_this(advice: Advice, most: int | None = None, patch: str = "") -> tuple[Block, ...]:
    """The advice: the sentence, then the change as a unified diff.

    Args:
        advice: what to do.
        most: changed lines that are shown where there are more than :data:`MOST_CHANGED`; None for all.
        patch: the file that holds all of them, as it is typed.
    """
    if not advice.text:
        return ()
    cut = most is not None and len(advice.edits) > MOST_CHANGED
    diff = [Code(diff_of(advice.edits[:most] if cut else advice.edits), "diff")] if advice.edits else []
    rest = counted(len(advice.edits) - (most or 0), "more changed line")
    left = [Paragraph(f"… and {rest}. Apply all: patch -p0 < {patch}")] if cut else []
    code = [Code(advice.code, "python")] if advice.code else []
    return (Heading("do this"), Paragraph(advice.text), *diff, *left, *code)


def diff_of(edits: tuple[Edit, ...]) -> str:
    """The edits as a unified diff, which `patch -p0` takes."""
    lines, moved, file = [], 0, ""
    for edit in edits:
        if edit.file != file:
            end = "\t" if " " in edit.file else ""  # a name with spaces ends where a tab stands, for patch as for git
            lines += [f"--- {edit.file}{end}", f"+++ {edit.file}{end}"]
            moved, file = 0, edit.file
        new = edit.new.split("\n") if edit.new else []
        begin = edit.line + moved if new else edit.line + moved - 1
        count = "" if len(new) == 1 else f",{len(new)}"
        lines += [f"@@ -{edit.line} +{begin}{count} @@", f"-{edit.old}", *(f"+{line}" for line in new)]
        moved += len(new) - 1
    return "\n".join(lines)
