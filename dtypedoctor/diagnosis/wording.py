"""Words: what torch's messages say of dtypes, and how findings name modules, operators, tensors and numbers."""

import builtins
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.dtypes import DTYPE_WORDS, DTYPES, parts_of
from dtypedoctor.text import clipped
from dtypedoctor.trace.events import Coverage, Op, ParameterNote, Raised, Site, TensorNote
from dtypedoctor.trace.model import Trace

_DTYPE = r"(?:c10::|torch\.)?((?:long |(?:un)?signed )?\w+(?:<\w+>)?)"

PATTERNS: tuple[tuple[str, str], ...] = (
    ("product", rf"expected m(?:at)?1 and m(?:at)?2 to have the same dtype, but got: {_DTYPE} != {_DTYPE}"),
    ("biased-product", rf"mat1 and mat2 must have the same dtype, but got {_DTYPE} and {_DTYPE}"),
    ("accumulation", rf"self and mat2 must have the same dtype, but got {_DTYPE} and {_DTYPE}"),
    ("batched-product", rf"Input dtypes must be the same, got: input {_DTYPE}, batch1:? {_DTYPE}"),
    ("batched-product", rf"expected scalar type {_DTYPE} but found {_DTYPE}"),
    ("vectors", rf"expected both vectors to have same dtype, but found {_DTYPE} and {_DTYPE}"),
    ("vectors", rf"addmv input tensors must have the same dtype, but got {_DTYPE}, {_DTYPE}"),
    ("average", rf"expected dtype {_DTYPE} for `\w+` but got dtype {_DTYPE}"),
    ("loss", rf"Found dtype {_DTYPE} but expected {_DTYPE}"),
    ("gradient", rf"assign a gradient with dtype '{_DTYPE}' to a tensor with grad_dtype '{_DTYPE}'"),
    ("parametrization", rf"unparametrized dtype: (?=\S+\s+parametrized dtype: {_DTYPE}){_DTYPE}"),
    ("out", rf"Expected out tensor to have dtype {_DTYPE}, but got {_DTYPE} instead"),
    ("attention", r"Expected query, key, and value to have the same dtype"),
    ("attention", r"Expected attn_mask dtype to be bool or"),
    ("flash-attention", r"FlashAttention only support"),
    ("index-put", r"Index put requires the source and destination dtypes match"),
    ("index-add", rf"index_add_\(\): self \({_DTYPE}\) and source \({_DTYPE}\) must have the same scalar type"),
    ("index-copy", r"index_copy_\(\): self and source expected to have the same dtype"),
    ("scatter", r"scatter\(\): Expected self\.dtype to be equal to src\.dtype"),
    ("masked-scatter", r"masked_scatter: expected self and source to have same dtypes"),
    ("convolution", rf"Input type \({_DTYPE}\) and (?:bias|weight) type \({_DTYPE}\) should be the same"),
    ("norm", r"mixed dtype \(CPU\): expect parameter to have scalar type of"),
    ("recurrent", rf"RNN input dtype \({_DTYPE}\) does not match weight dtype \({_DTYPE}\)"),
    ("recurrent", rf"input must have the type (?=\S+ got type {_DTYPE}){_DTYPE}"),  # torch 2.9
    ("shards", r"Must flatten tensors with uniform dtype"),
    ("shards", r"FSDP expects uniform original parameter dtype"),
    ("shards", r"FSDP reduce-scatter expects uniform gradient dtype"),
    ("recompute", r"Recomputed values for the following tensors have different metadata"),
)
"""Family of operators and the message by which it rejects. What torch does not say more exactly than ``expected scalar type``
is counted as a batched product, the most frequent of them."""

_SPELLINGS = {
    "half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16", "byte": "uint8", "char": "int8",
    "long": "int64", "int": "int32", "short": "int16", "float16": "float16", "float32": "float32", "float64": "float64",
    "long int": "int64", "unsigned char": "uint8", "signed char": "int8", "complex<float>": "complex64", "complex<double>": "complex128",
    "complexfloat": "complex64", "complexdouble": "complex128",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What a message says.

    Attributes:
        family: the family of operators that raised.
        dtypes: the dtypes that it names, in the order of the message; often empty.
    """

    family: str
    dtypes: tuple[str, ...]


def complaint_of(message: str) -> Complaint | None:
    """What ``message`` complains about; None for one that is not about dtypes, or not known."""
    for family, pattern in PATTERNS:
        found = re.search(pattern, message)
        if found is not None:
            return Complaint(family=family, dtypes=tuple(dtype_named(word) for word in found.groups()))
    return None


def dtype_named(word: str) -> str:
    """torch's name of a dtype that a message spells as in C++ (``Half``, ``c10::BFloat16``, ``float``)."""
    plain = word.removeprefix("c10::").removeprefix("torch.")
    return _SPELLINGS.get(plain.lower(), plain)


COMPILER_ERRORS = frozenset({"Unsupported", "FailOnRecompileLimitHit"})
"""Exceptions of Dynamo, which quote the code that it could not trace; that code may well speak of dtypes."""


OF_NO_TENSOR = (OSError, ImportError, LookupError, NameError, AttributeError, SyntaxError)
"""Types of exceptions that neither a dtype nor a value leads to, whatever they quote."""


def is_dtype_error(raised: Raised) -> bool:
    """Whether an exception may be about dtypes, by its type and its words: a reason to look at operands, and no evidence by itself."""
    if raised.type in COMPILER_ERRORS or issubclass(type_of(raised), OF_NO_TENSOR):
        return False
    return any(word in raised.message for word in DTYPE_WORDS)


def type_of(raised: Raised) -> type:
    """Its class, where Python has it; of others only the name is known."""
    cls = getattr(builtins, raised.type, Exception)
    return cls if isinstance(cls, type) else Exception


def rejection_in(trace: Trace) -> Raised | None:
    """The exception that ended the run, where torch or a library raised it: what the program's own ``raise`` says is its author's opinion."""
    raised = trace.last(Raised)
    return raised if raised is not None and not is_own_statement(raised) else None


def is_own_statement(raised: Raised) -> bool:
    """Whether a ``raise`` or ``assert`` of the program's own raised it."""
    return raised.by_statement and bool(raised.frames) and not _OF_LIBRARIES.search(raised.frames[-1])


OUTSIDE = -1
"""``Op.root`` of an op that ran outside of every module call."""


def short(fqn: str | None) -> str:
    """The tail of a dotted name that a person recognizes."""
    if fqn is None:
        return "the code outside of all modules"
    return module_name(fqn) or "the outermost module"


_USUAL_PARTS = 3
"""Parts of a dotted name that usually say which module it is, where none of them is a number."""


def module_name(fqn: str, others: Collection[str] = ()) -> str:
    """The shortest end of a dotted name by which a person finds the module: ``layers.0.mlp``, ``model[1]``; empty for the outermost one.

    Args:
        fqn: the dotted name.
        others: names of the modules beside it; the end is made longer until none of them has it.
    """
    parts = fqn.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    shortest = min(len(parts) - numbers[-1] + 1 if numbers else _USUAL_PARTS, len(parts))
    for length in range(shortest, len(parts)):
        end = ".".join(parts[-length:])
        ambiguous = any(other == end or other.endswith(f".{end}") for other in others if other != fqn)
        if not end[:1].isdigit() and not ambiguous:
            return end
    return indexed(fqn)


def named_in(trace: Trace, finding: Finding) -> Finding:
    """The finding with its module named so that it can be found in the program: in the summary with class and own line, elsewhere by name.

    Args:
        trace: that the finding comes from; it knows the other modules and the classes.
        finding: whose ``module`` is set, and whose texts name it.
    """
    names = {site.fqn for site in trace.sites.values() if site.fqn}
    names |= {module for note in trace.all(ParameterNote) if (module := module_of(note.name))}
    if finding.fqn is None:
        told = _with_texts(_compiled(finding), lambda text: with_spoken_operators(_shortened(text, names)))
        return replace(told, summary=_at_its_line(told)) if told.source else told
    name = module_name(finding.fqn, names)
    usual = re.compile(rf"(?<![\w.]){re.escape(short(finding.fqn))}(?![\w\[]|\.\w| \()", re.IGNORECASE)

    def renamed(text: str) -> str:
        return usual.sub(lambda found: name or found[0], text)

    cls = _class_at(trace, finding)
    promoting = [
        link.source for link in finding.provenance if link.fqn == finding.fqn and link.dtype_in and link.dtype_out
    ]
    here = any(op.error is not None and (op.source, place(op)) == (finding.source, finding.fqn) for op in trace.all(Op))
    line = (promoting[-1] if promoting and not here else None) or finding.source
    own_line = line if line and "/" not in line else ""
    known = ", ".join(filter(None, (cls, own_line)))
    summary = usual.sub(lambda found: f"{name or found[0]} ({known})", finding.summary, count=1) if known else ""
    shown = name or "the outermost module"
    told = replace(_with_texts(finding, renamed), module=f"{shown} ({cls})" if cls else shown)
    told = replace(told, summary=summary or told.summary)
    return _with_texts(told, lambda text: with_spoken_operators(_shortened(text, names)))


def _at_its_line(finding: Finding) -> str:
    """The summary of a finding outside of all modules, which names the line in the place of saying so."""
    nowhere = re.compile(rf"\bin {re.escape(short(None))}|^{re.escape(short(None))}", re.IGNORECASE)
    return nowhere.sub(lambda found: f"{'at ' * found[0].startswith('in')}{finding.source}", finding.summary, count=1)


_GENERATED = re.compile(r"^<eval_with_key>|:codegen\(|torchinductor_")
"""In the line of an operator that compiled code has called: the files that Dynamo, AOTAutograd and Inductor write."""
COMPILED_CODE = "compiled code"


def _compiled(finding: Finding) -> Finding:
    """The finding, with what it says of code outside of all modules said of compiled code where that ran: modules that are compiled into it are not known."""
    if finding.source is None or not _GENERATED.search(finding.source):
        return finding
    usual = re.compile(re.escape(short(None)), re.IGNORECASE)

    def renamed(text: str) -> str:
        return usual.sub(lambda found: COMPILED_CODE.capitalize() if found[0][0] == "T" else COMPILED_CODE, text)

    return replace(_with_texts(finding, renamed), module=COMPILED_CODE)


def at_line(source: str | None) -> str:
    """Where something happens, to follow it; empty where the line is not known: no code of the program calls the module of a capsule."""
    return f" at {source}" if source else ""


_DOTTED = re.compile(r"(?<![\w./\[\]])[A-Za-z_0-9]+(?:\.[A-Za-z_0-9]+)+(?![\w(\[]|\.\w)")


def _shortened(text: str, names: Collection[str]) -> str:
    """The text with each module, and each parameter of one, by the one name that the whole report has for it."""

    def shown(found: re.Match[str]) -> str:
        module, _, last = found[0].rpartition(".")
        if found[0] in names and not found[0].replace(".", "").isdigit():  # 4.1 may be a number
            return module_name(found[0], names)
        if module in names and last.isidentifier():
            return f"{module_name(module, names)}.{last}"
        return found[0]

    return _DOTTED.sub(shown, text)


_OPERATOR = re.compile(
    r"(?<![\w.`/])`?(?:aten|function|module(?=\.[A-Z]))\.(\w+)(?:\.\w+)?`?(?![\w(]|\.\w)|\b_to_copy\b"
)
_PRIVATE = {"_softmax": "softmax", "_log_softmax": "log_softmax"}


def with_spoken_operators(text: str) -> str:
    """The text with its operators as people call them, in backticks, since some are words: ``mul`` for ``aten.mul.Tensor``.

    torch's own name stands in the field ``op`` of a finding.
    """

    def spoken(found: re.Match[str]) -> str:
        name = found[1] or "_to_copy"
        if name == "_to_copy":
            begins = text[: found.start()].endswith(". ")
            return "The cast" if begins else "the cast"
        return f"`{_PRIVATE.get(name, name)}`"

    return _OPERATOR.sub(spoken, text)


def _with_texts(finding: Finding, changed: Callable[[str], str]) -> Finding:
    return replace(
        finding,
        summary=changed(finding.summary),
        cause=changed(finding.cause),
        evidence=tuple(map(changed, finding.evidence)),
        proven_by=changed(finding.proven_by) if finding.proven_by else finding.proven_by,
    )


def indexed(fqn: str) -> str:
    """A dotted name as it can be typed: ``model[1].up`` for ``1.up``, a part of a model that is a sequence; other names as they are."""
    found = re.match(r"\d+(?:\.\d+)*(?=\.|$)", fqn)
    if found is None:
        return fqn
    return "model" + "".join(f"[{number}]" for number in found[0].split(".")) + fqn[found.end() :]


def named_module(fqn: str | None) -> str:
    """A dotted name in a list of modules, where the outermost one's would be empty."""
    return fqn or "(the outermost module)"


def short_parameter(name: str) -> str:
    """The name of a parameter behind the tail of its module's that a person recognizes."""
    module, _, own = name.rpartition(".")
    return f"{short(module)}.{own}" if module else own


def place(op: Op) -> str | None:
    """Dotted name of the module that ``op`` ran in: empty for the outermost one, None outside of all."""
    return None if op.root == OUTSIDE else op.fqn


def differentiated(op: Op) -> str | None:
    """The operator that a backward op differentiates, as far as its autograd node says it: ``sqrt`` for ``SqrtBackward0``."""
    name, found, _ = (op.node or "").partition("Backward")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition("::")[2]).lower() if found and name else None


def module_of(parameter: str) -> str:
    """Dotted name of the module that holds ``parameter``."""
    return parameter.rpartition(".")[0]


def limit_of(dtype: str) -> float:
    """Largest finite value of ``dtype``, of a complex one's parts; inf where it is not a floating-point format."""
    known = DTYPES.get(parts_of(dtype))
    return known.max if known is not None else float("inf")


def number(value: float) -> str:
    """A magnitude as people read it: ``84,628``, ``318.8``, ``3.4e38``."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.2g}".replace("e+", "e")


def percent(share: float) -> str:
    """A share (1.0 is all) in percent, two significant digits, never with an exponent: ``100%``, ``7.3%``, ``0.031%``, ``less than 0.01%``.

    What is not all is not rounded to all: ``more than 99%``.
    """
    value = 100 * share
    if 0 < value < 0.01:
        return "less than 0.01%"
    if 99.5 <= value < 100:
        return "more than 99%"
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.2g}%"


def max_of(dtype: str) -> str:
    """The largest finite value of ``dtype``, in words: ``float16 max is 65,504``."""
    return f"{dtype} max is {number(limit_of(dtype))}"


def magnitudes(op: Op) -> str:
    """The largest magnitudes of an op's operands, e.g. ``318.8 and 333.2``."""
    return " and ".join(number(t.absmax) for t in op.inputs if t.absmax is not None) or "unknown"


def operands_are_finite(op: Op) -> str:
    """What was measured of operands none of which is known to be inf or NaN, without a full stop; those that were not measured are counted.

    E.g. ``The operands of aten.mul.Tensor are finite: absmax 318.8 and 333.2``.
    """
    missed = unmeasured(op.inputs)
    if not missed:
        return f"The operands of {op.op} are finite: absmax {magnitudes(op)}"
    dtypes = ", ".join(dict.fromkeys(t.dtype for t in missed))
    if all(t.absmax is None for t in op.inputs):
        return f"The operands of {op.op} were not measured ({dtypes})"
    return f"The operands of {op.op} that were measured are finite: absmax {magnitudes(op)}; not measured: {len(missed)} ({dtypes})"


def unmeasured(tensors: Iterable[TensorNote]) -> list[TensorNote]:
    """Those that may hold inf or NaN and were not measured."""
    return [t for t in tensors if t.absmax is None and t.finite and t.dtype.startswith(("float", "bfloat", "complex"))]


def bad_elements(tensor: TensorNote) -> str:
    """How many elements of a tensor are not finite, in words."""
    count = tensor.num_nan + tensor.num_posinf + tensor.num_neginf
    return f"{count:,} of {prod(tensor.shape):,} elements"


def worst_of(tensor: TensorNote) -> str:
    """``NaN`` where a tensor that is not finite holds any, else ``inf``, or ``-inf`` where that is all."""
    if tensor.num_nan:
        return "NaN"
    return "inf" if tensor.num_posinf or not tensor.num_neginf else "-inf"


def listed(names: Sequence[str]) -> str:
    """The first three names in a sentence, the others counted; of four all, since a count is no shorter than a name."""
    more = len(names) - 3
    if more == 1:
        return f"{', '.join(names[:3])} and {names[3]}"
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


THE_RUN_ENDED = "The run ended "


def how_the_run_ended(trace: Trace) -> tuple[str, ...]:
    """The exception that ended the run, as a piece of evidence; empty where there was none."""
    raised = trace.last(Raised)
    if raised is None:
        return ()
    when = trace.when(raised)
    said = f": {clipped(raised.message.splitlines()[0], 200)}" if raised.message.strip() else ""
    if raised.caught:
        return (f"{raised.type} was raised {when} and {what_became_of(raised)}{said}",)
    return (f"{THE_RUN_ENDED}{when} with {raised.type}{said}",)


def what_became_of(raised: Raised) -> str:
    """What an exception led to after which the program went on, as the end of a sentence."""
    return "ended its thread, while the program continued" if raised.thread else "was caught by the program"


def failing_line(raised: Raised) -> str | None:
    """``package/file.py:line`` of the innermost frame that computes: neither torch's nor one that watches or counts its calls."""
    between = ("/torch/", "/dtypedoctor/instrument/", "/dtypedoctor/corrections/")
    computing = [frame for frame in _at_work(raised) if not any(part in frame for part in between)]
    return _line(computing[-1]) if computing else None


def raising_line(raised: Raised) -> str | None:
    """``package/file.py:line`` of the innermost frame outside of torch and of the doctor; None where there is none."""
    outside = [frame for frame in _at_work(raised) if "/torch/" not in frame and "/dtypedoctor/" not in frame]
    return _line(outside[-1]) if outside else None


_OF_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|/dtypedoctor/|^<")


def own_line(raised: Raised) -> str | None:
    """``file.py:line`` of the innermost frame of the program itself; where only libraries are known, that of :func:`raising_line`."""
    own = own_frame(raised)
    return _line(own) if own is not None else raising_line(raised)


def own_frame(raised: Raised) -> str | None:
    """The program's innermost frame; None where only libraries are known."""
    return next((frame for frame in reversed(raised.frames) if not _OF_LIBRARIES.search(frame)), None)


def _line(frame: str) -> str:
    """The place of a frame, its path from the top of an installed package on; of other code the file's name."""
    return shown_line(frame.rpartition(" ")[0])


def shown_line(at: str) -> str:
    """``/path/of/file.py:line`` with its path from the top of an installed package on; of other code the file's name."""
    _, found, rest = at.rpartition("/dtypedoctor/")
    if found:
        return f"dtypedoctor/{rest}"
    _, installed, rest = at.rpartition("/site-packages/")
    return rest if installed else at.rpartition("/")[-1]


def _at_work(raised: Raised) -> list[str]:
    """The frames without those that only hand on a call: of subclasses of tensors, and around functions that are deprecated."""
    return [
        frame
        for frame in raised.frames
        if not frame.endswith((" __torch_function__", " __torch_dispatch__")) and not _AROUND_DEPRECATED.search(frame)
    ]


_AROUND_DEPRECATED = re.compile(r"/(typing_extensions|_?(py_)?warnings)\.py:\d+ wrapper$")


def class_of(trace: Trace, fqn: str, roots: Collection[int] | None = None) -> str:
    """Class name of the module ``fqn``, of certain models only where ``roots`` has their numbers; or an empty string."""
    sites = (site for site in trace.sites.values() if site.fqn == fqn and (roots is None or site.root in roots))
    return next((site.cls for site in sites if site.cls), "")


def _class_at(trace: Trace, finding: Finding) -> str:
    """Class name of the finding's module; of several models with a module of that name, of the one that it was seen in."""
    root = next(_roots_of(trace, finding), None)
    of_root = class_of(trace, finding.fqn or "", [root]) if root is not None else ""
    return of_root or class_of(trace, finding.fqn or "")


def _roots_of(trace: Trace, finding: Finding) -> Iterator[int]:
    """Numbers of the models in which the finding's op, its first bad value or the exception was seen."""
    here = [op for op in trace.all(Op) if (op.source, op.fqn) == (finding.source, finding.fqn)]
    yield from (op.root for op in here if op.op == finding.op)
    yield from (site.root for site in _bad_sites(trace) if site.fqn == finding.fqn)
    yield from (op.root for op in here if op.error is not None)


def _bad_sites(trace: Trace) -> Iterator[Site]:
    bad = {sample.site: None for sample in trace.samples if not sample.finite}
    return map(trace.sites.__getitem__, bad)


def class_of_named(trace: Trace | None, name: str) -> str:
    """Class name of the module of this dotted name, or of the only one whose name ends in it; empty where there is none."""
    sites = trace.sites.values() if trace is not None else ()
    ending = {s.fqn: s.cls for s in sites if s.cls and s.fqn and (s.fqn == name or s.fqn.endswith(f".{name}"))}
    return ending.get(name) or (next(iter(ending.values())) if len(ending) == 1 else "")


OWN_WORKLOADS = "dtypedoctor/lab/workloads/"
"""Where the source lines begin that do what a scenario asks for."""


ENOUGH = 0.9
"""Share of what ran that has to be measured before anything is said of all of it. Operators are sampled, so any number is enough."""


def compiled_outside(trace: Trace) -> bool:
    """Whether compiled functions were called outside of modules: whatever modules they call, none of those is measured."""
    covered = trace.last(Coverage)
    return covered is not None and covered.compiled_outside > 0


def operators_were_seen(trace: Trace) -> bool:
    """Whether a value that no recorded operator has made was made by none."""
    covered = trace.last(Coverage)
    if covered is None:
        return True
    return not covered.compiled_outside and covered.module_calls_measured >= ENOUGH * _calls(covered)


def modules_were_finite(trace: Trace) -> str:
    """What is known of all modules where the first value that is not finite is none of theirs."""
    covered = trace.last(Coverage)
    if covered is None:
        returned = any(site.kind == "output" for site in trace.sites.values())
        return "everything measured of what modules returned was finite" if returned else "no module call was measured"
    calls, measured = _calls(covered), covered.module_calls_measured
    unseen = ", nor was what compiled functions compute" if covered.compiled_outside else ""
    if not measured:
        return f"what modules returned was not measured{unseen}" if calls or unseen else "no module was called"
    partly = f"what was measured of the modules ({measured:,} of {calls:,} calls) was finite"
    if unseen:
        return f"{partly}; what compiled functions compute was not measured"
    return partly if measured < calls else "everything that modules returned was finite"


def _calls(covered: Coverage) -> int:
    """How many module calls ran, also those that were left out by a budget."""
    return covered.module_calls + covered.module_calls_skipped
