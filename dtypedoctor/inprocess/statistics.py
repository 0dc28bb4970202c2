"""Numbers of a recording for experiment trackers: how close modules come to the max of their dtype, what is not finite, what underflows,
which updates are lost.

They are made of the records that the instruments write anyway, as these are written: nothing more is measured, and on a GPU nothing waits for the device,
so what is on its way there is a part of the next numbers. The number of series is bounded. No name is the folder of another one: MLflow makes files of them.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Observed, Site
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward, Updates
from dtypedoctor.trace.writer import SampleRow

PREFIX = "dtypedoctor"
MOST_NAMED = 8
"""Modules, or parameters, that each statistic names; the first that are the worst at some time stay."""

_LANES = {"output": "activations", "grad_output": "gradients", "grad": "gradients"}


class Statistics:
    """Hears the records of a :class:`~dtypedoctor.trace.writer.TraceWriter`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, Site] = {}
        self._largest: dict[int, float] = {}
        self._bad: dict[int, int] = {}
        self._shares: dict[str, dict[str, float]] = {}
        self._totals: dict[str, float] = {}
        self._named: dict[str, set[str]] = {}

    def record(self, record: Any) -> None:
        """One record that is no sample."""
        if isinstance(record, Site):
            if record.kind in _LANES:
                self._sites[record.id] = record
        elif isinstance(record, Observed):
            with self._lock:
                self._observed(record.what)

    def rows(self, rows: Sequence[SampleRow]) -> None:
        """Some samples."""
        with self._lock:
            for site, absmax, num_nan, num_inf in rows:
                if absmax > self._largest.get(site, -1.0):
                    self._largest[site] = absmax
                if num_nan or num_inf:
                    self._bad[site] = self._bad.get(site, 0) + num_nan + num_inf

    def take(self) -> dict[str, float]:
        """The scalars since this was asked last, by name: a total of each statistic, and the worst modules or parameters."""
        with self._lock:
            largest, self._largest = self._largest, {}
            bad, self._bad = self._bad, {}
            shares, self._shares = self._shares, {}
            totals, self._totals = self._totals, {}
        found: dict[str, float] = {}
        for lane in ("activations", "gradients"):
            percents = _by_module(self._percents(largest, lane), max)
            if percents:
                found[f"{PREFIX}/{lane}/percent_of_max/largest"] = max(percents.values())
                found |= self._worst(f"{lane}/percent_of_max", percents)
            counts = _by_module(((self._sites[s].fqn, float(n)) for s, n in bad.items() if self._is(s, lane)), sum)
            if percents or counts:
                found[f"{PREFIX}/{lane}/nonfinite/total"] = float(sum(counts.values()))
                found |= self._worst(f"{lane}/nonfinite", counts)
        found |= {f"{PREFIX}/{name}/total": value for name, value in totals.items()}
        for name, values in shares.items():
            found |= self._worst(name, values)
        return found

    def _is(self, site: int, lane: str) -> bool:
        return site in self._sites and _LANES[self._sites[site].kind] == lane

    def _percents(self, largest: Mapping[int, float], lane: str) -> Iterator[tuple[str, float]]:
        for number, absmax in largest.items():
            if self._is(number, lane) and (known := DTYPES.get(self._sites[number].dtype)) is not None:
                yield self._sites[number].fqn, 100.0 * absmax / known.max

    def _observed(self, what: Any) -> None:
        if isinstance(what, GradientZeros):
            self._underflow({name: (seen.zeros, seen.elements) for name, seen in what.parameters.items()})
        elif isinstance(what, ScaledBackward):
            self._underflow(
                {name: (seen.zeros - seen.zeros_scaled, seen.elements) for name, seen in what.parameters.items()}
            )
        elif isinstance(what, Updates) and what.wanted:
            self._lost(what)

    def _lost(self, what: Updates) -> None:
        seen = what.parameters.items()
        self._totals["updates/lost"] = what.lost / what.wanted
        self._shares["updates/lost"] = {name: one.lost / one.wanted for name, one in seen if one.wanted}
        self._shares["updates/update_to_weight"] = {name: one.update / one.absmax for name, one in seen if one.absmax}

    def _underflow(self, counted: Mapping[str, tuple[int, int]]) -> None:
        elements = sum(total for _, total in counted.values())
        if elements:
            self._totals["gradients/underflow"] = sum(zeros for zeros, _ in counted.values()) / elements
            self._shares["gradients/underflow"] = {
                name: zeros / total for name, (zeros, total) in counted.items() if total
            }

    def _worst(self, statistic: str, values: Mapping[str, float]) -> dict[str, float]:
        """Those that are named already, and as many of the worst others as there is room for."""
        named = self._named.setdefault(statistic, set())
        others = sorted((name for name in values if name not in named and values[name]), key=lambda n: -values[n])
        named.update(others[: MOST_NAMED - len(named)])
        return {f"{PREFIX}/{statistic}/{name or 'root'}": values[name] for name in values if name in named}


def _by_module(values: Iterable[tuple[str, float]], join: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values:
        found[name] = join((found[name], value)) if name in found else value
    return found
