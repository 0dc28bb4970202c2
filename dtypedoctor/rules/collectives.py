"""``collective-dtype-mismatch``: ranks that call one collective with several dtypes, or one rank that sends and receives in two."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dtypedoctor.diagnosis.distributed import RECV, SEND, Called, Rank, calls_of
from dtypedoctor.diagnosis.rule import DTYPE_MISMATCH, Finding, FindingSpec, Rule
from dtypedoctor.diagnosis.wording import at_line, dtype_named, how_the_run_ended, raising_line, rejection_in
from dtypedoctor.rules import Statement, make_finding, make_finding_of
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import CollectiveCall

SPEC = FindingSpec(
    id="collective-dtype-mismatch",
    title="Ranks call the same collective with tensors of different dtypes",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/pytorch/pytorch/issues/150248",
        "https://github.com/pytorch/pytorch/issues/150433",
        "https://github.com/modelscope/ms-swift/issues/9550",
    ),
    do_this="Give `{op}` a tensor of one dtype on every rank, e.g. cast it with `tensor.float()` before the call.",
)

_SAME_BYTES = frozenset({"bool", "uint8"})
"""Dtypes of one byte that programs send for each other, and that mean the same as bytes."""


def compare_ranks(ranks: Sequence[Rank]) -> Iterator[Finding]:
    """The first collective of each process group that ranks call with several dtypes."""
    channels: dict[str, dict[int, Sequence[Called]]] = {}
    for rank in ranks:  # of a rank whose records are not all there nothing is known
        for channel, calls in calls_of(rank.trace).items() if not rank.trace.damage else ():
            channels.setdefault(channel, {})[rank.number] = calls
    for channel, called in channels.items():
        for number, here in enumerate(_together(called)):
            dtypes = {call.seen.what.dtype for call in here.values()}
            if len(dtypes) > 1 and dtypes != _SAME_BYTES:
                yield _of_ranks(channel, number, here)
                break


def _together(called: Mapping[int, Sequence[Called]]) -> Iterator[dict[int, Called]]:
    """One collective after the other by rank, until the ranks do different things: from there on their numbers say nothing of each other."""
    for number in range(max(map(len, called.values()))):
        here = {rank: calls[number] for rank, calls in called.items() if number < len(calls)}
        if len(here) < 2 or not _is_one_call([call.seen.what for call in here.values()]):
            return
        yield here


def _is_one_call(whats: Sequence[CollectiveCall]) -> bool:
    """Whether these are the parts of one collective: called by one name, at one line or with as many elements."""
    if all(what.name in (SEND, RECV) for what in whats):
        return True
    alike = len({what.source for what in whats}) == 1 or len({what.numel for what in whats}) == 1
    return alike and len({what.name for what in whats}) == 1


def _of_ranks(channel: str, number: int, here: Mapping[int, Called]) -> Finding:
    """The finding, at the line of the rank whose dtype is the rarest; of two equally rare ones, of the rank that comes later."""
    times = Counter(call.seen.what.dtype for call in here.values())
    odd = min(sorted(here, reverse=True), key=lambda rank: times[here[rank].seen.what.dtype])
    seen = here[odd].seen
    name = seen.what.name if seen.what.name != RECV else SEND
    parts = [_part(dtype, [rank for rank in here if here[rank].seen.what.dtype == dtype], here) for dtype in times]
    statement = Statement(
        id=SPEC.id,
        summary=f"{name} gets {', '.join(parts)}.",
        cause=(
            "A collective transfers bytes, and each rank reads them in the dtype of its own tensor: torch does not compare the dtypes of "
            "ranks. Where elements have the same size (float16 and bfloat16) the result is wrong and nothing is raised; else the "
            "process is aborted, or waits for bytes that never come."
        ),
        evidence=tuple(_told(channel, number, name, here)),
    )
    finding = make_finding_of(seen, statement, dtype=seen.what.dtype, op=name, source=seen.what.source)
    return replace(finding, rank=odd, fqn=seen.fqn or None)


def _part(dtype: str, ranks: Sequence[int], here: Mapping[int, Called]) -> str:
    at = here[ranks[0]].seen.what.source
    which = (
        f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}{' …' if ranks[8:] else ''}"
    )
    return f"{dtype} on {which}" + (f" ({at})" if at else "")


def _told(channel: str, number: int, name: str, here: Mapping[int, Called]) -> Iterator[str]:
    group, _, ends = channel.partition(":")
    what = f"message {number + 1} from rank {ends.replace('>', ' to rank ')}" if ends else f"collective {number + 1}"
    for rank, call in here.items():
        one = call.seen.what
        shape = f", {one.shape}" if call.exact else ""
        line = at_line(one.source)
        yield f"Rank {rank}, {what} of process group {group}: {one.name} of {one.dtype}{shape}{line}."
    if len({call.seen.what.source for call in here.values()}) > 1:
        yield f"If these lines are not meant to meet, one rank has called a {name} more or less than the others."


_REJECTED = tuple(
    re.compile(pattern)
    for pattern in (
        r"tensors with different dtypes\s*Found (?P<one>torch\.\w+) and\s+(?P<other>torch\.\w+)",
        r"invalid tensor type at index \d+ \(expected TensorOptions\(dtype=(?P<one>[\w:]+),.* got TensorOptions\(dtype=(?P<other>[\w:]+),",
        r"Tensors\[i\]\.dtype\(\) == \w+Tensors\[i\]\.dtype\(\) \((?P<one>[\w:]+) vs\. (?P<other>[\w:]+)\)",
        r"output tensor must have the same type as input tensor|input tensor must be the same type as the output tensor",
    )
)
"""What torch and its backends say where what one rank sends and what it is to receive differ in dtype."""
_IN_DISTRIBUTED = re.compile(r"/torch/distributed/distributed_c10d\.py:\d+ (?P<name>[a-z]\w+)$")


def detect_rejected(trace: Trace) -> Iterator[Finding]:
    """A collective that torch refused, because of the dtypes of this rank alone."""
    raised = rejection_in(trace)
    if raised is None:
        return
    called = next((one for frame in raised.frames if (one := _IN_DISTRIBUTED.search(frame))), None)
    found = next((match for pattern in _REJECTED if (match := pattern.search(raised.message))), None)
    if called is None or found is None:
        return

    name, line = called["name"], raising_line(raised)
    dtypes = [dtype_named(word) for word in found.groupdict().values() if word]

    statement = Statement(
        id=SPEC.id,
        summary=f"{name if line is None else f'{name} at {line}'} gets input and output tensors of {' and '.join(dtypes) or 'two dtypes'}.",
        cause="A collective casts nothing: what it receives has the dtype of what the ranks send.",
        evidence=how_the_run_ended(trace),
    )
    dtype = dtypes[-1] if dtypes else None
    yield make_finding(statement, phase=raised.phase, step=raised.step, op=name, dtype=dtype, source=line)


RULES = (Rule(name="collectives", priority=10, specs=(SPEC,), detect=detect_rejected, compare=compare_ranks),)
