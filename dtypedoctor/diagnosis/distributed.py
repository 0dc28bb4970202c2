"""What the traces of several ranks say together: where a failure began, and what carried it to the others."""

import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from dtypedoctor.diagnosis import rules
from dtypedoctor.diagnosis.incidents import Incident, incidents
from dtypedoctor.diagnosis.rule import Confidence, Finding, most_severe_first
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.trace.events import Observed, Raised, Sample, Site
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.ranks import Succession
from dtypedoctor.trace.records.execution import CollectiveCall, ProcessGroup

SENT, RECEIVED = "sent", "received"
ONE_SIDED = frozenset({"broadcast", "scatter"})
"""Collectives to which one rank alone sends something."""

SEND, RECV = "send", "recv"
"""A message from one rank to another: as it is called where it leaves and where it arrives."""

OF_ANOTHER_RANK = re.compile(
    r"closed by peer|reset by peer|remote process exited|broken pipe|NCCL (watchdog|operation|communicator)|heartbeat",
    re.IGNORECASE,
)
"""What collectives say on the ranks that are left when another one has died."""

Key = tuple[str, int, str, int]
"""Process group and tensor (or ends of a message), step, collective, number among those of the step.

Equal for what ranks do together; both ends of a message are called :data:`SEND`.
"""


@dataclass(frozen=True)
class Rank:
    """One process of several.

    Attributes:
        number: its rank.
        trace: what it left.
        code: its exit status, or minus the signal that ended it.
        ended: how it ended, in words.
        stopped: whether the doctor stopped it, with all others, at the time limit.
        lost: whether nobody knows how it ended: its trace has no end, and it had no exit status when this was asked.
    """

    number: int
    trace: Trace
    code: int
    ended: str
    stopped: bool = False
    lost: bool = False

    @cached_property
    def first(self) -> Incident | None:
        """The first value on it that is not finite and matters."""
        return next(iter(incidents(self.trace)), None)

    @cached_property
    def began(self) -> float:
        """When it had something of its own that is not finite: that value, or what it put into a collective of that step.

        A gradient that no module returns is seen first when it is reduced.
        """
        first = self.first
        if first is None:
            return inf
        sent = (s.n for s in self.collectives[SENT].values() if s.step == first.step and not s.finite)
        return min(first.n, min(sent, default=inf))

    @cached_property
    def collectives(self) -> dict[str, dict[Key, Sample]]:
        """What it sent and received, by collective, in order."""
        return {kind: dict(_numbered(self.trace, kind)) for kind in (SENT, RECEIVED)}

    def entered(self, before: float = inf) -> int:
        """How many collectives to which every rank sends something it had entered before an event: a clock that all share.

        At the end of the trace it is the count that was kept beside it: of a rank that waits for ever in a collective, what
        it has sent may still be on the device.
        """
        if before == inf and self.trace.collectives is not None:
            return self.trace.collectives
        not_shared = {*ONE_SIDED, SEND}
        return sum(sample.n < before and key[2] not in not_shared for key, sample in self.collectives[SENT].items())

    def messages(self, kind: str) -> int:
        """How many messages it has sent, or received."""
        return sum(key[2] == SEND for key in self.collectives[kind])

    @property
    def completed(self) -> bool:
        """Whether it came to the end of its program by itself."""
        return self.trace.end is not None and self.code == 0 and not self.stopped

    @property
    def last_module(self) -> str:
        """The module that it entered last, in words."""
        cursor = self.trace.cursor
        if cursor is None or cursor.site is None:
            return "before any module was entered"
        return f"last in {cursor.site.fqn or cursor.site.cls} (step {cursor.step}, {cursor.site.phase})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A collective or a message that brought something not finite from one rank to others.

    Attributes:
        sent: what the source put in, and ``site`` where and as what.
        victims: ranks whose own part was finite (or who had none) and whose result is not.
        group: the ranks that took part.
    """

    sent: Sample
    site: Site
    victims: tuple[int, ...]
    group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Called:
    """A collective or message as one rank called it.

    Attributes:
        seen: the record that describes it.
        exact: whether that was written at this call; else at an earlier one that was the same but for its shape.
    """

    seen: Observed[CollectiveCall]
    exact: bool


def calls_of(trace: Trace) -> dict[str, Sequence[Called]]:
    """Every collective and message that the rank is known to have called, by channel, in order."""
    records: dict[str, dict[int, Observed[CollectiveCall]]] = {}
    for seen in trace.observed(CollectiveCall):
        records.setdefault(seen.what.channel, {})[seen.what.number] = seen
    counts = [*trace.called, *[0] * len(records)]
    return {
        channel: tuple(_unrolled(known, max(count, max(known) + 1)))
        for (channel, known), count in zip(records.items(), counts, strict=False)
    }


def _unrolled(known: dict[int, Observed[CollectiveCall]], count: int) -> Iterator[Called]:
    """The calls of a channel; where there is no record, those that who wrote them expected."""
    latest: dict[_Call, Observed[CollectiveCall]] = {}
    calls: Succession[_Call] = Succession()
    for number in range(count):
        expected = calls.expected()
        seen = known.get(number) or (latest[expected] if expected is not None else None)
        if seen is None:  # its record is lost
            return
        call = (seen.what.name, seen.what.dtype, seen.what.source, seen.fqn)
        latest[call] = seen
        calls.came(call)
        yield Called(seen, number in known)


_Call = tuple[str, str, str | None, str | None]


def leading_rank(ranks: Sequence[Rank]) -> int:
    """The rank that the report is about: where something was not finite first, else the one that died first.

    The number of collectives entered is the clock; of ranks that were equally far the one that died or raised comes first.
    """
    bad = [rank for rank in ranks if rank.first is not None]
    if bad:
        return min(bad, key=lambda r: (r.entered(r.began), _was_carried(r), r.number)).number
    stopped = [rank for rank in ranks if rank.stopped]
    if stopped:
        return min(stopped, key=lambda r: (r.entered(), r.number)).number
    return min(ranks, key=lambda r: (_blame(r), r.number)).number


def carrier(ranks: Sequence[Rank], source: int) -> Carried | None:
    """The first collective or message after the failure began that brought it from rank ``source`` to others."""
    origin = _rank(ranks, source)
    groups = {seen.what.name: tuple(seen.what.ranks) for seen in origin.trace.observed(ProcessGroup)}
    spread = {key: s for key, s in origin.collectives[SENT].items() if not s.finite and s.n >= origin.began}
    for key, sample in spread.items():
        victims = tuple(rank.number for rank in ranks if rank is not origin and _is_victim(rank, key))
        if victims:
            site = origin.trace.sites[sample.site]
            group = groups.get(site.index.partition(":")[0], ())
            return Carried(sent=sample, site=site, victims=victims, group=group)
    return None


def _rank(ranks: Sequence[Rank], number: int) -> Rank:
    return next(rank for rank in ranks if rank.number == number)


def across_ranks(findings: Sequence[Finding], ranks: Sequence[Rank], source: int) -> tuple[Finding, ...]:
    """The findings of rank ``source``, the first of them with what the other ranks add, and what only several ranks show together."""
    if size_of(ranks) < 2:
        return tuple(findings)
    own = [replace(finding, rank=source) for finding in findings]
    if own:
        own[0] = replace(own[0], evidence=(*_told(ranks, source), *own[0].evidence))
    return with_compared([_begun_elsewhere(finding, ranks, source) for finding in own], ranks)


def _begun_elsewhere(finding: Finding, ranks: Sequence[Rank], source: int) -> Finding:
    """The finding; where it only shows what came in through a collective from a rank that nobody has recorded, it says so and is no more than possible."""
    origin, others = _rank(ranks, source), not_recorded(ranks)
    if not others or origin.first is None or not _was_carried(origin):
        return finding
    by = next(key[2] for key, sample in origin.collectives[RECEIVED].items() if not sample.finite)
    said = f"Rank {source} received it through {by}: it began on another rank; not recorded here: {others}."
    return replace(finding, summary=f"{finding.summary} {said}", confidence=Confidence.POSSIBLE, proven_by=None)


def size_of(ranks: Sequence[Rank]) -> int:
    """How many processes the job had, by what those say that left a trace; ranks of other machines count."""
    told = (rank.trace.header.world_size for rank in ranks if rank.trace.header is not None)
    return max([*told, *(rank.number + 1 for rank in ranks)], default=0)


def not_recorded(ranks: Sequence[Rank]) -> str:
    """The ranks of the job of which nothing was recorded here, e.g. ``ranks 1, 4-7``; empty where there are none."""
    parts, first = [], 0
    for number in [*sorted(rank.number for rank in ranks), size_of(ranks)]:
        if number > first:
            parts.append(str(first) if number == first + 1 else f"{first}-{number - 1}")
        first = number + 1
    several = len(parts) > 1 or "-" in "".join(parts)
    return f"rank{'s' if several else ''} {', '.join(parts)}" if parts else ""


def with_compared(own: Sequence[Finding], ranks: Sequence[Rank]) -> tuple[Finding, ...]:
    """The findings with what only several ranks show together. That comes first, unless something was found in an earlier step."""
    shared = [finding for rule in rules() if rule.compare for finding in rule.compare(ranks)]
    if shared and own and (own[0].step or 0) < (shared[0].step or 0):
        return most_severe_first((*own, *shared))
    return most_severe_first((*shared, *own))


def coverage_of(ranks: Sequence[Rank]) -> Iterator[str]:
    """A line for each rank, how it ended and how far it came, unless all of several completed; and one for those that were not recorded."""
    if others := not_recorded(ranks):
        yield f"{others}: not recorded here, so nothing is known of it; {_JOIN}"
    if size_of(ranks) > 1 and not all(rank.completed for rank in ranks):
        furthest = max(rank.entered() for rank in ranks)
        yield from (_progress(rank, furthest) for rank in ranks)


def _progress(rank: Rank, furthest: int) -> str:
    count, sent, received = rank.entered(), rank.messages(SENT), rank.messages(RECEIVED)
    behind = " and never entered the next one, in which others wait" if rank.stopped and count < furthest else ""
    where = "" if rank.completed else f", {rank.last_module}"
    messages = f"; it sent {sent} message(s) and received {received}" if sent or received else ""
    return f"rank {rank.number}: {rank.ended}{where}; it entered {count} collective(s){behind}{messages}"


_JOIN = "`dtypedoctor report DIR DIR` joins what several machines have recorded"


def _told(ranks: Sequence[Rank], source: int) -> Iterator[str]:
    origin = _rank(ranks, source)
    first = origin.first
    if first is None:
        yield f"Seen on rank {source} of {size_of(ranks)}."
        return
    of_these = " recorded here" if not_recorded(ranks) else ""
    place = "the loss" if first.kind == "loss" else short(first.site.fqn if first.site is not None else None)
    if origin.began < first.n:
        place = "in what it put into a collective"
    yield (
        f"Rank {source} of {len(ranks)}{of_these} was the first with something that is not finite: {origin.trace.moment(first.step)}, "
        f"{first.phase}, {place}."
    )
    carried = carrier(ranks, source)
    if carried is not None:
        yield _in_words(carried, source)
    elif len(ranks) > 1:
        yield "No recorded collective or message propagated it to another rank."


def _in_words(carried: Carried, source: int) -> str:
    site, sent = carried.site, carried.sent
    victims, bad = ", ".join(map(str, carried.victims)), f"{sent.num_nan} NaN and {sent.num_inf} inf"
    when = f"in the {site.phase} pass of step {sent.step} ({site.dtype}, {site.shape}"
    if site.cls == SEND:
        inside = f" inside of {short(site.fqn)}" if site.fqn else ""
        return (
            f"The send from rank {source} to rank {victims}{inside} {when}) carried it: rank {source} sent {bad}, and what rank {victims} received "
            "is not finite."
        )
    unit = f" of {short(site.fqn)}" if site.fqn else ""
    return (
        f"The {site.cls}{unit} {when}, among ranks {', '.join(map(str, carried.group)) or 'unknown'}) carried it to rank {victims}: "
        f"rank {source} put in {bad}; what rank {victims} put in was finite, and what came back is not."
    )


def _numbered(trace: Trace, kind: str) -> Iterator[tuple[Key, Sample]]:
    passed: Counter[tuple[str, int, str]] = Counter()
    for sample, site in trace.measured():
        if site.kind == kind:
            place = (site.index, sample.step, SEND if site.cls == RECV else site.cls)
            yield (*place, passed[place]), sample
            passed[place] += 1


def _is_victim(rank: Rank, key: Key) -> bool:
    sent = rank.collectives[SENT].get(key)
    together = _together(key)
    received = [sample for other, sample in rank.collectives[RECEIVED].items() if _together(other) == together]
    return (sent is None or sent.finite) and any(not sample.finite for sample in received)


def _together(key: Key) -> tuple[object, ...]:
    """The same for everything that one collective or message holds, whichever of its tensors a key is of."""
    return key if key[2] == SEND else (key[0].partition(":")[0], *key[1:])


def _was_carried(rank: Rank) -> bool:
    """Whether the rank got something that is not finite before it had anything of its own."""
    return any(not sample.finite and sample.n < rank.began for sample in rank.collectives[RECEIVED].values())


def _blame(rank: Rank) -> int:
    """How likely the rank has brought the others down: killed, raised, lost, raised because of another, failed, ended by torchrun, or well."""
    raised = rank.trace.last(Raised)
    if rank.code < 0 and rank.code != -signal.SIGTERM:
        return 0
    if raised is not None:
        return 3 if OF_ANOTHER_RANK.search(raised.message) else 1
    if rank.lost:
        return 2
    return 6 if not rank.code else 5 if rank.code == -signal.SIGTERM else 4
