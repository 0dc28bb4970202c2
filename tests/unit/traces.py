"""Builds traces by hand."""

from typing import Any

from dtypedoctor.trace.events import End, Header, Observation, Op, Sample, Site, TensorNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records import RECORDS, from_disk


class TraceBuilder:
    """Collects records in execution order."""

    def __init__(self) -> None:
        self._records: list[Any] = [Header()]
        self._samples: list[Sample] = []
        self._sites: dict[int, Site] = {}
        self._numbers: dict[str, int] = {}
        self._n = 0

    def n(self) -> int:
        self._n += 1
        return self._n

    def sample(self, fqn: str, absmax: float, *, dtype: str = "float16", nan: int = 0, inf: int = 0, cls: str = "Linear",
               kind: str = "output", phase: str = "forward", step: int = 1, call: int = 1,
               **site: Any) -> "TraceBuilder":  # fmt: skip
        known = {"root": 0, "index": "", "shape": [2, 8]} | site
        number = self._site(fqn=fqn, cls=cls, phase=phase, kind=kind, dtype=dtype, **known)
        self._samples.append(
            Sample(n=self.n(), step=step, call=call, site=number, absmax=absmax, num_nan=nan, num_inf=inf)
        )
        return self

    def _site(self, **described: Any) -> int:
        """The number of the site of this description, which is written once."""
        key = repr(described)
        if key not in self._numbers:
            number = self._numbers[key] = len(self._sites) + 1
            self._sites[number] = Site(id=number, **described)
        return self._numbers[key]

    def op(self, op: str, fqn: str, inputs: list[TensorNote], outputs: list[TensorNote], **more: Any) -> Op:
        record = Op(
            n=self.n(),
            step=more.pop("step", 1),
            call=more.pop("call", 1),
            phase=more.pop("phase", "forward"),
            fqn=fqn,
            op=op,
            inputs=inputs,
            outputs=outputs,
            source=more.pop("source", "model.py:7"),
            **more,
        )
        self._records.append(record)
        return record

    def add(self, *records: Any) -> "TraceBuilder":
        """Raw observations become typed ones, as they do when a trace is read; one of a known kind that lacks a field is a mistake."""
        typed = [from_disk(record) if isinstance(record, Observation) else record for record in records]
        assert not [r for r in typed if isinstance(r, Observation) and r.kind in RECORDS]
        self._records += typed
        return self

    def build(self, *, outcome: str = "completed") -> Trace:
        records = (*self._records, *self._sites.values(), End(n=self.n(), outcome=outcome, steps_completed=1))
        return Trace(records=records, samples=tuple(self._samples), sites=dict(self._sites))


def tensor(
    number: int, absmax: float | None = 1.0, *, dtype: str = "float16", nan: int = 0, inf: int = 0, **more: Any
) -> TensorNote:
    return TensorNote(id=number, dtype=dtype, shape=[2, 4], absmax=absmax, num_nan=nan, num_posinf=inf, **more)
