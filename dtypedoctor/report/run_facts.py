"""Parts of a report in words: what ran, what was found, where, how sure; and its fixes, what each changes and what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from dtypedoctor.diagnosis.rule import Confidence, Finding, Link
from dtypedoctor.diagnosis.wording import OWN_WORKLOADS, indexed, module_name, short
from dtypedoctor.plugins import KEEP_FLOAT32, Correction, registered
from dtypedoctor.report.document import (
    Block,
    Check,
    Heading,
    Items,
    Line,
    Look,
    Paragraph,
    Section,
    Table,
    Words,
    anchored,
    named,
)
from dtypedoctor.report.document import Outcome as Gate
from dtypedoctor.report.model import Observer, Outcome, Report, RunSummary, Status, Trial
from dtypedoctor.report.to_json import plain
from dtypedoctor.scenario.model import Scenario, ScenarioStep
from dtypedoctor.text import ABSENT, counted, one_line
from dtypedoctor.trials.remedies import remedies, remedy_named
from dtypedoctor.trials.results import Bearing

_WORDS = {Outcome.FIXED: "fixed", Outcome.NOT_FIXED: "not fixed", Outcome.NOT_TRIED: "not tried"}
_WORDS_HERE = {
    Outcome.FIXED.value: "fixed on this call",
    Outcome.NOT_FIXED.value: "not fixed",
    Outcome.NOT_TRIED.value: "not tried",
}
_BEARINGS = {
    None: "passes, as does the baseline",
    Bearing.NEEDED: "passes",
    Bearing.NOT_NEEDED: "fails the same way",
    Bearing.MOVED: "fails elsewhere",
}
"""The outcomes of an ablation, which is not a fix."""
_MARK = " Unsafe."
_DIAGNOSTIC = " Diagnostic only, not a fix."
_UNSAFE = "Unsafe: it may hide the failure instead of fixing it."
_FIXED_HERE = "Fixed on this call: it alone was made again. Whether it fixes the whole script: `dtypedoctor exec --try FIX SCRIPT`, or the edit in the script."
_PASSES = "the failing call passes with it"
_MOST_NAMED = 2
"""Fixes that a headline names."""
_LOOKS = {
    "fixed": Look.GOOD,
    "fixed on this call": Look.GOOD,
    "raises, as intended": Look.GOOD,
    "passes": Look.GOOD,
    "not fixed": Look.BAD,
    "not tried": Look.WARN,
    "never reached": Look.WARN,
    "passes, as does the baseline": Look.WARN,
    "fails the same way": Look.WARN,
    "fails elsewhere": Look.WARN,
}
_ORDER = (Outcome.FIXED, Outcome.NOT_FIXED, Outcome.NOT_TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyLine:
    """One fix in words.

    Attributes:
        id: its id.
        change: what it changes, beginning with a capital letter; empty where that is not known.
        outcome: ``fixed``, ``fixed on this call`` (of a capsule), ``not fixed``, ``not tried``, ``raises, as intended``, ``never reached``; of an ablation
            ``passes``, ``fails the same way``, ``fails elsewhere``.
        reason: what decided.
        result: how far its run came, beside the baseline (``3/3 steps; 0/3 without it``); empty without a run.
        cures: whether it fixes.
        safe: whether it keeps the meaning of the run.
    """

    id: str
    change: str
    outcome: str
    reason: str
    result: str = ""
    cures: bool = False
    safe: bool = False


def fixes_part(report: Report) -> Section:
    """All fixes, each with what came of it and what it changes, and which to prefer."""
    on_the_call = _on_the_call(report)
    passing = {str(fix["fix"]) for fix in _call_fixes(report) if fix["outcome"] != Outcome.NOT_TRIED.value}
    lines = [line for line in remedy_lines(report) if line.outcome != "not tried" or line.id not in passing]
    tried = any(trial.outcome is not Outcome.NOT_TRIED for trial in report.trials)
    blocks = list(_table(lines, "fix"))
    if any(line.change.endswith(_MARK) for line in lines):
        blocks.append(Paragraph(_UNSAFE, Look.DIM))
    if inside := _inside(report):
        blocks.append(Paragraph(inside))
    if report.replay is not None and cures(report):
        blocks.append(Paragraph(_FIXED_HERE, Look.DIM))
    if on_the_call:
        blocks += [Heading("on the failing call alone"), *_table(on_the_call, "fix-on-the-call")]
        blocks += [Paragraph(_FIXED_HERE, Look.DIM)] if any(line.cures for line in on_the_call) else []
    elif blocks and not tried and report.capsule and "directory" in report.capsule:
        blocks.append(Paragraph(f"Try them on the failing call, without running the script: {replay_command(report)}"))
    if choice := which_one(report):
        blocks += [Heading("which to prefer"), Items(tuple((named(fix), f" if {when}") for fix, when in choice))]
    return Section("Fixes tried" if tried or on_the_call else "Suggested fixes", tuple(blocks), "remedies", "Fixes")


def _table(lines: Sequence[RemedyLine], anchor: str) -> Iterator[Block]:
    """Lay out fixes, each under an anchor of its own."""
    rows: list[tuple[Line, ...]] = []
    for line in lines:
        outcome = Words(line.outcome, outcome_look(line.outcome))
        name = (named(line.id), anchored(f"{anchor}-{line.id}"))
        rows.append((name, line.change, (outcome, f": {line.reason}") if line.reason else outcome))
    if rows:
        yield Table(("fix", "what it changes", "outcome"), tuple(rows))


def _inside(report: Report) -> str:
    """What a bisection inside the module of a capsule has found, as a sentence; empty where there was none."""
    found = (report.replay or {}).get("inside")
    if not found:
        return ""
    cost = f"{counted(found['runs'], 'run')}, {counted(found['candidates'], 'part')}"
    if not found["parts"]:
        return f"Float32 inside the module does not fix it: {found['why']} ({cost})."
    words = " and ".join(map(_part, found["parts"]))
    minimal = "no smaller set passes" if found["one_minimal"] else found["why"] or "a smaller set may pass"
    return f"Smallest set of parts that must run in float32: {words} ({minimal}; {cost})."


def _part(name: str) -> str:
    """A part as ``keep-float32`` names it: a module whole, or ``::self`` for its own operators."""
    module = short(name.removesuffix("::self"))
    return f"{module}'s own operators" if name.endswith("::self") else module


def _on_the_call(report: Report) -> list[RemedyLine]:
    """Say what became of the fixes that were tried on the failing call when it was kept."""
    lines = []
    for fix in _call_fixes(report):
        tried, outcome = _as_tried(str(fix["fix"]), report), str(fix["outcome"])
        lines.append(
            RemedyLine(
                id=tried,
                change=_summary_of(tried, report.capsule or {}),
                outcome=_WORDS_HERE.get(outcome, outcome),
                reason=str(fix["reason"]),
                cures=outcome == Outcome.FIXED.value,
            )
        )
    return lines


def _call_fixes(report: Report) -> Sequence[Mapping[str, Any]]:
    """The fixes that were tried on the failing call when it was kept."""
    return (report.capsule or {}).get("fixes") or ()


def _as_tried(fix: str, report: Report) -> str:
    """A fix of the failing call as `exec --try` takes it for the whole script: with the module of the call where it needs one."""
    module = str((report.capsule or {}).get("module") or "")
    return f"{fix}:{module}" if fix == KEEP_FLOAT32 and module else fix


def _summary_of(fix: str, capsule: Mapping[str, Any]) -> str:
    """What a fix of the module of a capsule changes; empty for one that is not known here."""
    known = registered(Correction).get(fix) or remedy_named(fix, lambda _: str(capsule.get("class") or ""))
    return known.summary[:1].upper() + known.summary[1:] if known is not None else ""


def replay_command(report: Report, directory: str = "RUN") -> str:
    """What makes the failing call again that was kept in the run's ``directory``."""
    kept = report.capsule or {}
    option = " --allow-code" if kept.get("allow_code") else ""
    return f"dtypedoctor replay {directory}/{kept['directory']}{option}"


def replay_title(report: Report) -> str:
    """What a replay of a capsule has made again, and whether it fails as the run did."""
    it = report.replay or {}
    name = f"{indexed(it['module'])} ({it['class']})" if it["module"] else f"the whole model ({it['class']})"
    failed = f"; in the run {it['op']} failed" if it["op"] and not it["verdict"] else ""
    device = str(report.environment.get("device", ""))
    where = f" on {device}" if device else ""
    told = f"replay of the call of {name} from capsule {it['capsule']}, {it['dtype']}{where}{failed}."
    return one_line(f"{told} {it['verdict']}".rstrip(), 400)


def fix_checks(report: Report) -> Iterator[Check]:
    """A check for each fix that was tried: skipped unless it fixes the failure."""
    for trial in report.trials:
        words = f"{outcome_words(trial, here=report.replay is not None)}: {trial.reason}"
        fixed = trial.outcome is Outcome.FIXED
        run = trial.run
        yield Check(
            name=f"remedy {trial.remedy}",
            outcome=Gate.PASSED if fixed else Gate.SKIPPED,
            message=words,
            text=words if fixed else "",
            seconds=seconds_of(run),
        )


def seconds_of(run: RunSummary | None) -> float:
    """How long a run took, for a test report: an older report says only how long its steps did, and none may have been completed."""
    if run is None:
        return 0.0
    return run.seconds if run.seconds is not None else (run.step_time or 0.0) * run.steps_completed


def outcome_look(words: str) -> Look:
    """How an outcome is told apart."""
    return _LOOKS.get(words, Look.PLAIN)


def outcome_words(trial: Trial, *, here: bool = False) -> str:
    """The outcome of a trial as it is written in running text.

    Args:
        trial: of a fix or an ablation.
        here: it was tried on the call of a capsule: what works is *fixed on this call*.
    """
    if here and _is_fix(trial):
        return "fixed on this call"
    if trial.diagnostic is not None and trial.outcome is not Outcome.NOT_TRIED:
        return _BEARINGS[trial.diagnostic.bearing]
    if trial.outcome is Outcome.FIXED and trial.remains:
        return "does not recur, others do"
    if trial.as_intended:
        return "raises, as intended"
    return "never reached" if trial.never_reached else _WORDS[trial.outcome]


def cures(report: Report) -> list[RemedyLine]:
    """The fixes that were tried and fix it, in the order in which they were tried."""
    return [line for trial in report.trials if (line := _of_trial(trial, report)).cures]


def which_one(report: Report) -> list[tuple[str, str]]:
    """Where several fixes work and keep the meaning of the run: the id of each, and when to prefer it."""
    known = [remedies()[line.id] for line in cures(report) if line.id in remedies()]
    told = [(remedy.id, remedy.prefer) for remedy in known if remedy.prefer]
    return told if len(told) > 1 else []


def cured_sentence(trials: Sequence[Trial], *, here: bool = False) -> str:
    """What fixes it, to follow a headline; fixes that may only hide the failure count where nothing else helps.

    Args:
        trials: what was tried.
        here: on the call of a capsule.
    """
    fixed = [trial for trial in trials if _is_fix(trial)]
    safe = [trial.remedy for trial in fixed if trial.safe]
    if safe:
        more = f" (and {len(safe) - _MOST_NAMED} more)" if len(safe) > _MOST_NAMED else ""
        return f"{' On this call, fixed' if here else ' Fixed'} by {' or '.join(safe[:_MOST_NAMED])}{more}."
    if fixed:
        return f" It disappears with {fixed[0].remedy}, which may only hide it."
    partly = [trial for trial in trials if trial.outcome is Outcome.FIXED and trial.remains][:1]
    return "".join(f" It does not recur with {one.remedy}, but {', '.join(one.remains)} is found." for one in partly)


def remedy_lines(report: Report) -> list[RemedyLine]:
    """All fixes: those that work, those that do not, those that were not tried, those that are only proposed."""
    ordered = sorted(report.trials, key=lambda trial: _ORDER.index(trial.outcome))
    return [*(_of_trial(trial, report) for trial in ordered), *_only_proposed(report)]


def _of_trial(trial: Trial, report: Report) -> RemedyLine:
    return RemedyLine(
        id=trial.remedy,
        change=_sentence(trial.summary) + _mark(trial),
        outcome=outcome_words(trial, here=report.replay is not None),
        reason=trial.reason,
        result=_result(trial, report),
        cures=_is_fix(trial),
        safe=trial.safe,
    )


def _is_fix(trial: Trial) -> bool:
    return trial.outcome is Outcome.FIXED and trial.diagnostic is None and not trial.remains


def _mark(trial: Trial) -> str:
    if trial.diagnostic is not None:
        return _DIAGNOSTIC
    return "" if trial.safe else _MARK


def _result(trial: Trial, report: Report) -> str:
    if trial.run is None or not trial.run.steps_planned:
        return ""
    planned, before = trial.run.steps_planned, report.before
    done = f"{trial.run.steps_completed}/{planned} steps"
    if before is None or before.steps_planned != planned:
        return done
    return f"{done}; {before.steps_completed}/{planned} without it"


def _only_proposed(report: Report) -> Iterator[RemedyLine]:
    tried = {trial.remedy for trial in report.trials}
    for name in dict.fromkeys(name for finding in report.findings for name in finding.remedies):
        if name not in tried:
            known = remedies().get(name)
            change = _sentence(known.summary) if known is not None else ""
            yield RemedyLine(id=name, change=change, outcome="not tried", reason="no fix was tried in this run")


def _sentence(text: str) -> str:
    """``text`` with a full stop behind, and a capital letter in front unless it begins with the id of a fix."""
    text = text.strip().rstrip(".")
    first = text.partition(" ")[0]
    return f"{text if '-' in first else text[:1].upper() + text[1:]}." if text else ""


STATUS = {
    Status.HEALTHY: "HEALTHY",
    Status.FINDINGS: "FOUND",
    Status.WORKER_DIED: "WORKER DIED",
    Status.ERROR: "ERROR",
    Status.UNKNOWN: "UNKNOWN",
}
CONFIDENCE = {
    Confidence.PROVEN: "proven",
    Confidence.LIKELY: "likely, not proven",
    Confidence.POSSIBLE: "possible, not proven",
}
_SETTLED = "the operator, or the whole run, was repeated with one change, and the failure disappeared"
_AS_LOADED = "load-dtype"
"""A link of a chain that ends at a parameter: the name is a contract, and says little."""
_OF_A_REGION = "autocast-contradicts-model"

_BUILTIN = "builtin:"
_MOST_STEPS = 3
"""Steps of a scenario that are told."""


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
    number = f"step {finding.step}" if finding.call is None else f"call {finding.call}"
    when = [finding.phase or "", number if finding.step is not None else ""]
    rows = [
        ("module", finding.module or (indexed(finding.fqn) if finding.fqn else None)),
        ("op", finding.op),
        ("when", ", ".join(part for part in when if part)),
        (_dtype_of_what(finding), finding.dtype),
        ("source", _source(finding)),
    ]
    return [(label, one_line(value)) for label, value in rows if value]


def _dtype_of_what(finding: Finding) -> str:
    if finding.id == _OF_A_REGION:
        return "region dtype"
    failing = finding.provenance[0] if finding.provenance else None  # its dtype_in is that of the odd operand
    return "operand dtype" if failing is not None and failing.dtype_in == finding.dtype else "dtype"


def _source(finding: Finding) -> str | None:
    own = finding.source is not None and finding.source.startswith(OWN_WORKLOADS)
    return f"{finding.source} (the scenario's workload)" if own else finding.source


def origins(finding: Finding) -> list[str]:
    """Where a finding originates: of a mismatch where each of the two dtypes was set, of anything else operator, module and line."""
    ends = [chain[-1] for _, chain in chains(finding) if chain[-1].source]
    if ends:
        return [_set_by(link) for link in dict.fromkeys(ends)]
    told = dict(place(finding))
    where = " in ".join(told[label] for label in ("op", "module") if label in told)
    at = f" at {told['source']}" if "source" in told else ""
    return [f"{where}{at} ({told['when']})".strip() if "when" in told else f"{where}{at}"]


def _set_by(link: Link) -> str:
    """``float32: parameter bias (nn.Linear()) in head at train.py:22``."""
    where = f" in {module_name(link.fqn)}" if link.fqn else ""
    return f"{link.dtype_out or link.dtype_in}: {link.op}{where} at {link.source}"


def finding_anchor(finding: Finding) -> Words:
    """What a page can be opened at to show this finding."""
    return anchored(f"finding-{finding.id}")


def title(finding: Finding) -> str:
    """The sentence at the head of a finding; of one that another finding leads to, that it is where that one surfaces."""
    return f"Where it surfaces: {finding.summary}" if finding.consequence_of else finding.summary


def chains(finding: Finding) -> Iterator[tuple[str, tuple[Link, ...]]]:
    """The provenance chains of a finding that has any: what each is about, and its links in a reader's words."""
    if finding.provenance:
        yield (
            "dtype provenance, from the failing operator back to the origin",
            tuple(map(_worded, _joined(finding.provenance))),
        )
    if finding.met:
        yield "dtype provenance of the other operand", tuple(map(_worded, finding.met))


def _joined(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """A last link that goes back to the failing op itself is told with that op."""
    if len(links) < 2 or (links[0].fqn, links[0].source) != (links[-1].fqn, links[-1].source):
        return links
    return (replace(links[0], op=f"{links[0].op} ({links[-1].op.replace(f'{links[0].op} is ', '')})"), *links[1:-1])


def _worded(link: Link) -> Link:
    """Names of parameters without that of the module, which the link has already."""
    op = link.op.replace(f": {link.fqn}.", ": ") if link.fqn else link.op
    return replace(link, op=op.replace(f"{_AS_LOADED}: ", "parameter "))


def watched_and_not(observer: Observer) -> str:
    """Whether the run was the same without instrumentation, in few words; empty where that is not known."""
    if observer.bitwise_equal is None:
        return "raises the same error" if observer.same_error else ""
    return "same failure, bitwise identical" if observer.bitwise_equal else "NOT the same, see below"


def ended_with(report: Report) -> str:
    """What the baseline raised, when and where; empty where it did not raise, or the headline says it already."""
    ended = report.before.ended if report.before is not None else "completed"
    return one_line(ended, 400) if report.status is Status.FINDINGS and ended != "completed" else ""


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
    try:
        scenario = Scenario.model_validate(plain(report.scenario))
    except ValidationError:
        return ""
    told = [_step(step) for step in scenario.steps[:_MOST_STEPS]]
    more = len(scenario.steps) - len(told)
    told += [f"{more} more"] if more else []
    jobs = scenario.distributed
    ranks = f", in {counted(jobs.processes, 'process', 'processes')}" if jobs is not None else ""
    device = str(report.environment.get("device", ""))
    return one_line("; then ".join(told) + (f"; on {device}" if device else "") + ranks, 400)


def _step(step: ScenarioStep) -> str:
    return ", ".join(_parts(step))


def _parts(step: ScenarioStep) -> Iterator[str]:
    model: Any = step.model
    on = ""
    if model is not None:
        own = model.name.startswith(_BUILTIN)
        name = f"builtin model {model.name.removeprefix(_BUILTIN)}" if own else f"model {model.name}"
        on = f" on {name}"
    yield f"{step.workload.kind}{on}"
    if model is not None:
        yield f"{model.dtype}" + (f" with {model.quantization.kind} weights" if model.quantization is not None else "")
    if model is not None and model.lora is not None:
        yield "LoRA"
    if step.autocast is not None:
        yield f"{step.autocast.dtype} autocast"
    if step.compile is not None:
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
        name, _, cls = value.partition(" (")
        module = (Words(name, Look.MODULE, finding.fqn or ""), f" ({cls}" if cls else "")
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
    """Name a finding, with how severe and how sure it is, under an anchor."""
    return (named(finding.id), f": {finding.severity}, {CONFIDENCE[finding.confidence]}", finding_anchor(finding))


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
    else:
        yield Fact("fixed by", "no automatic fix", on_screen=not edit)


def _suggested(report: Report) -> Iterator[RemedyLine]:
    """List fixes that no run was made with, except those that do not fix the failing call alone."""
    on_the_call = {str(fix["fix"]): fix["outcome"] for fix in _call_fixes(report)}
    for line in (line for line in remedy_lines(report) if line.outcome == "not tried"):
        outcome = on_the_call.get(line.id, Outcome.NOT_TRIED.value)
        if outcome != Outcome.NOT_FIXED.value:
            yield replace(line, result=_PASSES) if outcome == Outcome.FIXED.value else line


def _labelled(first: str, others: str, lines: Sequence[RemedyLine], *, on_screen: bool) -> Iterator[Fact]:
    """Give a fact for each fix, the first with a label of its own."""
    for position, line in enumerate(lines):
        told = " ".join(filter(None, (line.change.rstrip("."), f"({line.result})" if line.result else "")))
        yield Fact(others if position else first, (named(line.id), f": {told}") if told else named(line.id), on_screen)
