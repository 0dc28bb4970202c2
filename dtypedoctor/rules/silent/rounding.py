"""``float-to-int-cast``, ``router-flip``, ``rounded-rotary-buffer`` and ``rounded-result``: rounding that changes what a program computes."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.checkpoint import Subject
from dtypedoctor.diagnosis.incidents import incidents
from dtypedoctor.diagnosis.rule import SILENT, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import at_line, listed, module_of, named_module, percent, short
from dtypedoctor.dtypes import DTYPES, HALF
from dtypedoctor.rules import Statement, make_finding, make_finding_of
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import MomentsStoredInHalf, PackedWeight, StateLoaded
from dtypedoctor.trace.records.silent import (
    Absorbed,
    FloatToInt,
    LostWrites,
    RotaryTable,
    RoundedAngles,
    RoundedIndices,
    RoundedSum,
    RoundedUse,
    RouterChoice,
)

FLOAT_TO_INT_CAST = FindingSpec(
    id="float-to-int-cast",
    title="Activations were cast to an integer dtype",
    family=SILENT,
    references=("https://github.com/unslothai/unsloth-zoo/pull/482",),
    do_this="Cast activations to the dtype that is computed in, never to that of an index or of a packed weight ({dtype}).",
    edits=("in-wider-dtype",),
)


WHOLE = {"bfloat16": 256, "float16": 2048, "float32": 1 << 24}
"""The whole number up to which a dtype has all of them."""


def detect_integer_casts(trace: Trace) -> Iterator[Finding]:
    """Activations that went through an integer dtype and came back as numbers; a line of code tells once of all its modules."""
    by_line: dict[tuple[str | None, ...], list[Observed[FloatToInt]]] = {}
    for one in trace.observed(FloatToInt):
        by_line.setdefault((one.what.op, one.what.source, one.what.to), []).append(one)
    for seen, *others in by_line.values():
        what = seen.what
        statement = Statement(
            id="float-to-int-cast",
            proven_by=f"the activation before the cast differs from what is used by {what.relative_error:.3g} times its norm",
            summary=f"{short(seen.fqn)} casts an activation from {what.from_} to {what.to} in step {seen.step}.",
            cause=(
                f"A cast to {what.to} cuts fractions off, and what lies outside of its range has no defined result. The "
                f"integers are used as numbers again by {what.used_by}{at_line(what.used_at)}, so every dtype after that "
                "looks right. A common reason is `x.to(layer.weight.dtype)` with a packed weight."
            ),
            evidence=(
                (
                    f"The {what.elements} integers differ from the activation by {what.relative_error:.3g} times its "
                    "Euclidean norm."
                ),
                "They are never used to look something up.",
                *((f"The same line does so in {listed([named_module(o.fqn) for o in others])}.",) if others else ()),
            ),
        )
        yield make_finding_of(seen, statement, dtype=what.to, op=what.op, source=what.source)


ROUNDED_INDICES = FindingSpec(
    id="rounded-indices",
    title="Labels, token ids or other indices went through half precision",
    family=SILENT,
    references=(
        "https://github.com/Nerogar/OneTrainer/issues/1177",
        "https://github.com/deepspeedai/DeepSpeed/issues/5701",
    ),
    do_this="Leave whole numbers in integers, or in float32, from where they are made or counted to where they look something up: cast no ids with a batch to "
    "{dtype}.",
    edits=("in-wider-dtype",),
)


def detect_rounded_indices(trace: Trace) -> Iterator[Finding]:
    """Whole numbers that are cast to half precision and back, and are others then."""
    for seen in trace.observed(RoundedIndices):
        what = seen.what
        if what.arrived:
            yield _arrived_rounded(seen)
            continue
        statement = Statement(
            id="rounded-indices",
            proven_by=(
                "the same count in float64 gives other whole numbers"
                if what.counted
                else "the whole numbers before the cast and after it were compared"
            ),
            summary=(
                f"{what.source or 'A line outside of modules'} {'counts in' if what.counted else 'casts whole numbers to'} {what.dtype}, and {what.used_at or 'another line'} uses them as whole "
                f"numbers again: {what.changed:,} of {what.elements:,} have changed ({what.before:,} is {what.after:,})."
            ),
            cause=f"{_whole_numbers_of(what.dtype)} Labels, token ids, positions and timesteps become their neighbors, and what is looked up by them is another row.",
            evidence=(f"Compared where they are cast back: {what.changed:,} of {what.elements:,} differ.",),
        )
        yield make_finding_of(seen, statement, dtype=what.dtype, source=what.source or None)


def _arrived_rounded(seen: Observed[RoundedIndices]) -> Finding:
    """Whole numbers in half precision that no operator of this process has made."""
    what = seen.what
    statement = Statement(
        id="rounded-indices",
        severity=Severity.WARNING,
        summary=(
            f"{what.used_at or 'A line'} reads whole numbers from {what.dtype} and looks something up by them: {what.changed:,} of {what.elements:,} are beyond "
            f"{WHOLE[what.dtype]:,}, where it lacks some ({what.before:,} would be {what.after:,})."
        ),
        cause=(
            f"{_whole_numbers_of(what.dtype)} No operator that was measured has made them: they come from a worker of a DataLoader, a file or another library, so "
            "whether they were other numbers there is not known. Keep them in integers from where they are read on."
        ),
        evidence=(f"Read where they are cast to whole numbers: {what.changed:,} of {what.elements:,} are beyond.",),
    )
    return make_finding_of(seen, statement, dtype=what.dtype, source=what.used_at or None)


def _whole_numbers_of(dtype: str) -> str:
    return f"{dtype} has all whole numbers up to {WHOLE[dtype]:,} and beyond that only every second, fourth, and so on."


ROUTER_FLIP = FindingSpec(
    id="router-flip",
    title="Half-precision router scores choose other experts than float32 would",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/vllm-project/vllm/pull/14027", "https://github.com/sgl-project/sglang/pull/33764"),
    do_this="Compute the router in float32.",
    edits=("set-float32", "bfloat16-to-float32"),
)

FLIPPED = 0.005
"""Share of tokens from which on a router's choice is called unstable."""
FLIPPED_TOKENS = 2


def detect_router_flips(trace: Trace) -> Iterator[Finding]:
    """Routers that choose other experts than they would with scores in float32; the worst one speaks for all."""
    flipping = [
        o
        for o in trace.observed(RouterChoice)
        if o.what.flipped >= FLIPPED_TOKENS and o.what.flipped > FLIPPED * o.what.tokens
    ]
    if not flipping:
        return
    seen = max(flipping, key=lambda o: o.what.flipped / o.what.tokens)
    what = seen.what
    statement = Statement(
        id="router-flip",
        proven_by=f"with {what.scores_op} in float32 on the same operands {what.flipped} tokens choose other experts",
        severity=Severity.WARNING,
        summary=(
            f"{short(seen.fqn)} routes {percent(what.flipped / what.tokens)} of the tokens to other experts than "
            f"in float32: its scores are {what.dtype}."
        ),
        cause=(
            f"The selection of {what.chosen} of {what.experts} experts is discontinuous: scores that differ by less than "
            f"the rounding of {what.dtype} swap, and the token goes through another network."
        ),
        evidence=(
            (
                f"{what.flipped} of {what.tokens} tokens have another set of experts when {what.scores_op} runs in "
                "float32 on the same operands; everything up to the selection was run again."
            ),
            f"For {what.tied} tokens the scores on both sides of the border are equal.",
            f"Routers seen so: {listed([named_module(o.fqn) for o in flipping])}.",
        ),
    )
    yield make_finding_of(seen, statement, dtype=what.dtype, op=what.scores_op, source=what.scores_source)


def _harmless_table(finding: Finding) -> str:
    """What to do about a table whose rounding is small; empty for any other finding."""
    if finding.severity is not Severity.INFO:
        return ""
    return (
        "It may stay as it is. To keep only the table in float32, hold it while the model is cast: `table = rotary.inv_freq` before the cast, "
        "`rotary.inv_freq = table` after it."
    )


ROUNDED_ROTARY_BUFFER = FindingSpec(
    id="rounded-rotary-buffer",
    title="Rotary frequencies, positions or angles were rounded to half precision",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/issues/25681",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2549",
    ),
    do_this="Compute the rotary table in float32, its positions and angles included, and leave it there.",
    edits=("in-wider-dtype", "bfloat16-to-float32", "set-float32"),
    instead=_harmless_table,
)


NOTICEABLE = {"bfloat16": 0.03, "float16": 0.004}
"""Errors of an angle (rad) that change attention scores about as much as rounding the finished queries and keys to the dtype does (measured: the finding's page)."""


def detect_rotary_tables(trace: Trace) -> Iterator[Finding]:
    """Rotary frequencies that equal their own rounding; one table stands for all of the same numbers."""
    alike: dict[tuple[object, ...], list[Observed[RotaryTable]]] = {}
    last = {one.what.name: one for one in trace.observed(RotaryTable)}
    for one in last.values():
        numbers = (one.what.dtype, one.what.rounded_to, one.what.length, one.what.first, one.what.last)
        alike.setdefault((*numbers, one.what.position), []).append(one)
    for seen, *others in alike.values():
        what = seen.what
        at, error = what.here
        small = error < NOTICEABLE[what.rounded_to]
        restored = what.dtype != what.rounded_to
        was = f"has the dtype {what.dtype} again and still" if restored else f"is {what.dtype}, so it"
        cast = f", here{at_line(what.source)}" if what.source is not None else ""
        statement = Statement(
            id="rounded-rotary-buffer",
            severity=Severity.INFO if small else Severity.WARNING,
            proven_by=(
                f"a table computed in float32 differs from the one that is read by up to {percent(what.deviation)}"
                if what.read
                else None
            ),
            summary=(
                f"The frequencies {short(what.name)} are rounded to {what.rounded_to}: at position "
                f"{at:,.0f}{', the last of this run,' if what.used is not None else ''} an angle is off by about {error:.2g} rad."
            ),
            cause=(
                f"{what.name} {was} holds {what.rounded_to} values. Casting a whole model casts its buffers too{cast}. The error "
                "of a frequency is multiplied by the position; casting back does not bring the bits back."
            ),
            evidence=(
                (
                    f"{what.length} values from {what.first:.6g} to {what.last:.6g}, all equal to their own "
                    f"rounding to {what.rounded_to}."
                ),
                (
                    f"They are up to {percent(what.deviation)} off the geometric progression that is nearest to "
                    "them, which a table in float32 follows."
                ),
                *((_little(what.rounded_to),) if small else ()),
                *(
                    (f"At position {what.position:,} it would be {what.angle_error:.2g} rad.",)
                    if at < what.position
                    else ()
                ),
                *((f"The same numbers are in {listed([short(o.what.name) for o in others])}.",) if others else ()),
            ),
        )
        found = make_finding_of(seen, statement, dtype=what.dtype, source=what.source)
        yield replace(found, phase="static", step=None)


def _little(dtype: str) -> str:
    return (
        f"Rounding queries and keys to {dtype} changes attention scores about as much as {NOTICEABLE[dtype]:g} rad do."
    )


def detect_rounded_angles(trace: Trace) -> Iterator[Finding]:
    """Sines of rounded angles."""
    for seen in trace.observed(RoundedAngles):
        what = seen.what
        yield make_finding_of(seen, _angles(what, seen.fqn), dtype=what.dtype, op=what.op, source=what.source)


def _angles(what: RoundedAngles, fqn: str | None) -> Statement:
    """What is said of whole numbers, or of an angle, that are rounded."""
    if what.apart is not None:
        summary = (
            f"{short(fqn)} takes the sine of whole numbers up to {what.largest:,.0f} that {what.dtype} has rounded: they change "
            f"by up to {what.apart:g}."
        )
        evidence = f"{what.op}{at_line(what.source)} rounds them; that amounts to {what.error:.2g} rad of the angle."
        proven = f"the same numbers in float64 are up to {what.apart:g} apart from those that are used"
    else:
        summary = f"{short(fqn)} takes the sine of angles up to {what.largest:,.0f} rad, rounded to {what.dtype}."
        evidence = f"In this call the same operators in float64 give angles that are up to {what.error:.2g} rad apart from these."
        proven = f"the same operators in float64 give angles that are up to {what.error:.2g} rad apart"
    return Statement(
        id="rounded-rotary-buffer",
        severity=Severity.WARNING,
        proven_by=proven,
        summary=summary,
        cause=(
            f"{what.dtype} does not have every whole number above {_exact(what.dtype)}, so angles of neighbouring positions or "
            "timesteps become one. Compute positions, frequencies and angles in float32, and cast the finished sines."
        ),
        evidence=(evidence,),
    )


def _exact(dtype: str) -> int:
    """The largest whole number up to which a format has all of them."""
    return 256 if dtype == "bfloat16" else 2048


TABLES = ("inv_freq", "freqs_cis", "cos_cached", "sin_cached")
"""How models name their tables of frequencies."""


def check_rotary(subject: Subject) -> Iterator[Finding]:
    """Tables in half precision, and float32 tables all of whose values are those of a half-precision one."""
    for tensor in subject.tensors:
        if not tensor.name.endswith(TABLES):
            continue
        lost = tensor.dtype if tensor.dtype in HALF else rounded_to(tensor.values)
        if lost is not None:
            now = f"is {lost}" if tensor.dtype == lost else f"is float32 and holds only values that {lost} has too"
            statement = Statement(
                id="rounded-rotary-buffer",
                severity=Severity.WARNING,
                confidence=Confidence.LIKELY,
                summary=f"The rotary frequencies were rounded to {lost}.",
                cause="An angle is a frequency times a position, so the rounding of the frequency grows with the position. "
                "A later cast to float32 does not bring the bits back.",
                evidence=(f"{tensor.name} {now}.",),
            )
            yield make_finding(statement, phase="static", fqn=module_of(tensor.name), dtype=tensor.dtype)
            return  # one table stands for all layers


def rounded_to(values: tuple[float, ...]) -> str | None:
    """The half-precision dtype that every value survives, where there are enough values to say so; else None."""
    telling = [value for value in values if value not in (0.0, 1.0)]
    if len(telling) < 2:
        return None
    if all(_bits(value) & 0xFFFF == 0 for value in telling):
        return "bfloat16"
    return "float16" if all(_survives_float16(value) for value in telling) else None


def _bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _survives_float16(value: float) -> bool:
    try:
        return bool(struct.unpack("<e", struct.pack("<e", value))[0] == value)
    except OverflowError:
        return False


def _of_float32(finding: Finding) -> str:
    """What to do where float32 is not enough; empty for half precision."""
    if finding.dtype != "float32":
        return ""
    return (
        "Take away what all values have in common (an origin, a mean) before, or compute what is decided by in float64."
    )


PARTS_READ = "the parts of the numbers that are cast were read"


def _of_imaginary_part(finding: Finding) -> str:
    """What to do where it is no rounding that is lost; empty for all else."""
    if finding.proven_by != PARTS_READ:
        return ""
    return "Keep the complex dtype, or say which part is meant: `.real`, `.abs()`. No wider real dtype holds the imaginary part."


ROUNDED_RESULT = FindingSpec(
    id="rounded-result",
    title="Rounding changes what the program decides, indexes or keeps",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/Comfy-Org/ComfyUI/pull/16001",
        "https://github.com/huggingface/trl/issues/6688",
    ),
    do_this="Compute what is decided by (positions, schedules, distances, counts) in {wider}, from the line that first rounds it on.",
    instead=_of_imaginary_part,
    without_edit=_of_float32,
    edits=("in-wider-dtype", "half-to-float32", "bfloat16-to-float32"),
)

FEWEST = 0.05
"""Share of the results of a line that have to differ. Below it they may be scores that are nearly equal, or fractions close to a whole number."""
SETTLING = 7
"""Uses, the first of those below, of which each line is told."""
ROOTS = 1 / 4
"""Share of roots of which more than half is rounding; a few numbers may be near each other by chance."""
MANY = 1 / 3
"""Share of choices from which on they do not only differ where values are nearly equal."""
CONDITIONS = 3
"""Conditions at a line that have to differ: one comparison of two near numbers may be a coincidence."""
HIDDEN = 0.5
"""Of a difference, what is left of it where rounding hides it."""
TIED, TIES = 0.01, 8
"""The same where the order of equal values decides, and how many at least: one row of a hundred may be a coincidence."""

_CHANGES = {
    "whole": "gives other whole numbers than float64, in which the numbers are whole before",
    "integer": "gives other whole numbers than the same operators do in float64",
    "imaginary": "cuts the imaginary part off",
    "restored": "takes away what was added before and does not get back what was there",
    "decision": "takes another decision than the same operators do in float64",
    "factor": "multiplies by 0, which it would not be in float64",
    "step": "makes a step of 0 between two numbers that are apart in float64",
    "fraction": "takes the fraction of numbers that are off by a quarter of what it is a fraction of",
    "root": "takes the root of a difference of near numbers, which is off by half of itself or more",
    "compared": "compares whole numbers that are others in float64",
    "state": "leaves inf in memory that outlives the call, where the same operators in float64 leave finite values",
    "mask": "makes another mask than the same operators do in float64",
    "condition": "decides a condition otherwise than the same operators do in float64",
    "choice": "chooses others than the same operators do in float64, as often as not",
    "tie": "chooses by their order between values that are equal only after rounding",
    "schedule": "uses a schedule of which neighboring entries are equal, and differ in float64",
    "series": "reads one number after another that rises or falls in float64, and is the same as the one before here",
    "distinct": "leaves fewer different whole numbers than the same operators do in float64",
    "draw": "draws what has the probability 0, or never what has one in float64",
    "vanished": "casts values to 0 which a scale would keep",
    "drift": "computes a value from itself over and over, and it drifts away from that in float64",
}
"""What an operator does, by the use of its result; of one cause the first of these is told."""
_LOST = {
    "loss": "it is the loss that is differentiated",
    "gradient": "it goes on as a gradient",
    "input": "a layer takes it",
    "number": "Python reads it",
}
"""How a value is used of which half of the digits are lost; told where nothing above is."""
_ORDER = (*_CHANGES, *_LOST)
_DIFFERENCES = frozenset({"add", "sub", "rsub"})
_WEAK = frozenset({"schedule", "series", "drift", *_LOST})
"""Uses that say no more than what rounded sums, counts and angles are told of by."""


def detect_rounded_results(trace: Trace) -> Iterator[Finding]:
    """Lines that do something else with rounded values than with exact ones; what is written last of a line holds. Of one rounding the clearest use is told."""
    for uses in _by_cause(trace).values():
        uses.sort(key=lambda seen: _ORDER.index(seen.what.use))
        first = uses[0].what
        settled = [seen for seen in uses if seen.what.use == first.use and _ORDER.index(first.use) < SETTLING]
        for seen in settled or uses[:1]:
            what = seen.what
            # the line that rounds is the one to change
            yield make_finding_of(
                seen, _statement(what), dtype=what.dtype, op=what.op, source=what.made_at or what.source or None
            )


def _by_cause(trace: Trace) -> dict[str, list[Observed[RoundedUse]]]:
    """The uses that matter, by the line that is to blame."""
    last = {(s.what.use, s.what.op, s.what.source, s.what.used_at): s for s in trace.observed(RoundedUse)}
    of_cause: dict[str, list[Observed[RoundedUse]]] = {}
    explained, elsewhere = _explained(trace), _told_elsewhere(trace)
    for seen in last.values():
        what = seen.what
        if elsewhere(what):
            continue
        if what.changed and _matters(what) and not (what.use in _WEAK and {what.source, what.made_at} & explained):
            of_cause.setdefault(what.made_at, []).append(seen)
    return of_cause


def _told_elsewhere(trace: Trace) -> Callable[[RoundedUse], bool]:
    """Whether a use is a consequence of what is told of as inf or NaN, as an overflow that is hidden, or where a checkpoint is loaded."""
    overflows = {seen.what.born.source for seen in trace.observed(Absorbed)}
    is_loaded, is_nonfinite = _is_told_where_it_comes_from(trace), bool(incidents(trace))
    return lambda what: (
        (what.use == "vanished" and is_loaded) or (what.nonfinite and (is_nonfinite or what.made_at in overflows))
    )


def _is_told_where_it_comes_from(trace: Trace) -> bool:
    """Whether values that a cast makes 0 are told of where a checkpoint is loaded, or as garbage where it is unpacked."""
    is_garbage = any(seen.what.is_wrong for seen in trace.observed(PackedWeight))
    return bool(is_garbage or trace.observed(StateLoaded) or trace.observed(MomentsStoredInHalf))


def _explained(trace: Trace) -> set[str | None]:
    """Lines of which other findings say that they round sums, whole numbers, or angles."""
    lines: set[str | None] = {seen.what.source for seen in trace.observed(LostWrites) if seen.what.tensors}
    lines |= {seen.what.source for seen in trace.observed(RoundedSum)}
    lines |= {seen.what.source for seen in trace.observed(RoundedIndices)}
    lines |= {seen.what.source for seen in trace.observed(RoundedAngles)}
    return lines - {"", None}


def _matters(what: RoundedUse) -> bool:
    if what.use in _LOST:
        return what.use != "number" or not _is_meant(what)
    fewest, share = _ENOUGH.get(what.use, (0, FEWEST))
    return what.changed >= max(fewest, share * what.of)


_ENOUGH = {
    "root": (0, ROOTS),
    "choice": (TIES, MANY),
    "tie": (TIES, TIED),
    "distinct": (TIES, FEWEST),
    "mask": (TIES, FEWEST),
    "condition": (CONDITIONS, FEWEST),
    "whole": (0, 0.0),
    "draw": (0, 0.0),
    "factor": (0, 0.0),
    "compared": (0, 0.0),
}
"""How many changed results of a use count, and which share of all; of other uses :data:`FEWEST`."""


def _is_meant(what: RoundedUse) -> bool:
    """Whether a program may read such a number as it is: who reads a difference of near numbers compares them, tests do, and reports of errors."""
    value, exact = float(what.value), float(what.exact)
    is_hidden = 0 < abs(value) < HIDDEN * abs(exact)  # rounding hides most of the difference, and does not make it
    return (what.difference or value == 0) and not is_hidden and not what.is_off()


def _cut_off(what: RoundedUse) -> Statement:
    """What is said of a cast of complex numbers to real ones."""
    elements = what.elements or what.of
    at = at_line(what.source) if what.source else ""
    return Statement(
        id="rounded-result",
        severity=Severity.WARNING,
        proven_by=PARTS_READ,
        summary=f"{short_op(what.op)}{at} {_CHANGES[what.use]}, for {what.changed:,} of {elements:,} numbers: {what.value} of {what.exact}.",
        cause=(
            f"A cast of complex numbers to {what.dtype} keeps their real parts alone. torch warns of it once in a process."
        ),
        evidence=(
            f"{what.changed:,} of {elements:,} numbers lose more than a rounding ({percent(what.changed / elements)}).",
        ),
    )


def _statement(what: RoundedUse) -> Statement:
    if what.use == "imaginary":
        return _cut_off(what)
    maker = f"{short_op(what.made_by)} at {what.made_at or what.source or 'a line outside of modules'}"
    cancels = what.dtype == "float32" and what.difference and short_op(what.made_by).rstrip("_") in _DIFFERENCES
    maker += f" takes a difference of near {what.dtype} numbers" if cancels else f" rounds to {what.dtype}"
    elements = what.elements or what.of
    if what.use in _LOST:
        used_at = at_line(what.used_at) if what.used_at != what.made_at else ""
        summary = f"{maker}, and what comes of it loses most of its digits ({what.value} instead of {what.exact}): {_LOST[what.use]}{used_at}."
    else:
        at = at_line(what.source) if what.made_at and what.made_at != what.source else ""
        summary = (
            f"{maker}: {short_op(what.op)}{at} {_CHANGES[what.use]}, for {what.changed:,} of {elements:,} results: "
            f"{what.value} instead of {what.exact}."
        )
    return Statement(
        id="rounded-result",
        severity=Severity.WARNING,
        proven_by="the same operators in float64 give another result where it is used",
        summary=summary,
        cause=(
            f"The spacing of {what.dtype} numbers is {DTYPES[what.dtype].epsilon:.3g} of their magnitude. Values that lie closer become one, differences between near values lose "
            f"their digits, and what is beyond {DTYPES[what.dtype].max:,.6g} is inf. Each operator from the first rounding to the line that uses the values was run in float64 beside the real one."
        ),
        evidence=(
            f"{what.changed:,} of {elements:,} results differ ({percent(what.changed / elements)}).",
            f"What {what.made_by} is given was rounded before, which is much beside the difference."
            if cancels
            else f"Of the operators before, the rounding of {what.made_by} moves them most.",
        ),
    )


def short_op(op: str) -> str:
    """``argmin`` of ``aten.argmin.default``."""
    name = op.split(".")[1] if op.startswith("aten.") else op
    return "item" if name == "_local_scalar_dense" else name


RULES = (
    Rule(name="rounded-results", specs=(ROUNDED_RESULT,), detect=detect_rounded_results),
    Rule(name="rounded-indices", specs=(ROUNDED_INDICES,), detect=detect_rounded_indices),
    Rule(name="integer-casts", priority=110, specs=(FLOAT_TO_INT_CAST,), detect=detect_integer_casts),
    Rule(name="router-flips", priority=170, specs=(ROUTER_FLIP,), detect=detect_router_flips),
    Rule(name="rounded-angles", priority=190, specs=(ROUNDED_ROTARY_BUFFER,), detect=detect_rounded_angles),
    Rule(name="rotary-tables", priority=210, specs=(ROUNDED_ROTARY_BUFFER,), detect=detect_rotary_tables),
    Rule(name="rotary-weights", priority=270, specs=(ROUNDED_ROTARY_BUFFER,), inspect=check_rotary),
)
