"""Statistics and findings in real experiment trackers, through the Trainer, accelerate and by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess_parts import overflowing, tiny_llama, trace_in
from small_trainers import plain
from torch import nn

import dtypedoctor
from dtypedoctor.errors import UsageError
from dtypedoctor.inprocess import MOST_NAMED, Statistics
from dtypedoctor.trace.events import Observed, Site
from dtypedoctor.trace.records.silent import GradientZeros, StalledParameter, Updates, Zeros

PERCENT = "dtypedoctor/activations/percent_of_max"
BAD = "dtypedoctor/activations/nonfinite"


def train(folder: Path, tracker: str, **settings: Any) -> None:
    """Two steps of a Trainer that reports to a tracker, and in which something overflows."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(2e4)
        model.model.layers[0].mlp.up_proj.weight.mul_(2e4)
    trainer = plain(folder, model=model.half(), report_to=[tracker], max_steps=2, **settings)
    trainer.add_callback(dtypedoctor.DtypeDoctorCallback(folder / "run", log_to=trainer))
    trainer.train()
    assert not any("dtypedoctor" in name for entry in trainer.state.log_history for name in entry)


def expect(
    found: dict[str, list[tuple[int, float]]], prefix: str = "train/", module: str = "model.layers.0.mlp"
) -> None:
    """Series by name, as (step, value): statistics in both steps, findings at the end."""
    overall = found[f"{prefix}{PERCENT}/largest"]
    assert [step for step, _ in overall] == [1, 2]
    assert all(0 < value <= 100 for _, value in overall)
    assert [step for step, value in found[f"{prefix}{BAD}/total"] if value > 0] == [1, 2]
    assert any(name.startswith(f"{prefix}{BAD}/{module}") for name in found)
    assert found[f"{prefix}dtypedoctor/findings/float16-overflow"] == [(2, 1.0)]


def events_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return found


@pytest.mark.slow
def test_the_trainers_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file with the trainer's own scalars."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    train(tmp_path, "tensorboard")
    assert len(list((tmp_path / "logs").rglob("events.out.tfevents.*"))) == 1
    found = events_of(tmp_path / "logs")
    assert "train/loss" in found
    expect(found)


@pytest.mark.slow
def test_a_loop_of_ones_own_with_accelerate(tmp_path: Path) -> None:
    """Whatever trackers an Accelerator was given take the numbers of `scalars()`."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "logs")
    accelerator.init_trackers("own")
    net = overflowing()
    with dtypedoctor.watch(net, out=tmp_path / "run", statistics=True) as watched:
        for step in (1, 2):
            net(torch.ones(2, 4).half())
            accelerator.log(watched.scalars(), step=step)
    accelerator.log(watched.scalars(), step=2)
    accelerator.end_training()
    expect(events_of(tmp_path / "logs"), prefix="", module="1")


def test_statistics_for_trackers_measure_nothing_more(tmp_path: Path) -> None:
    """The trace has the same records as without them."""

    def recorded(statistics: bool) -> list[tuple[float, int]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        out = tmp_path / str(statistics)
        with dtypedoctor.watch(net, out=out, statistics=statistics):
            net(torch.ones(2, 4)).sum().backward()
        return [(sample.absmax, sample.site) for sample in trace_in(out).samples]

    assert recorded(statistics=True) == recorded(statistics=False)


def test_without_statistics_there_are_none(tmp_path: Path) -> None:
    """It says what to write instead."""
    with (
        dtypedoctor.watch(out=tmp_path / "run") as watched,
        pytest.raises(UsageError, match="no statistics are kept") as refused,
    ):
        watched.scalars()
    assert "statistics=True" in refused.value.hint


def site(number: int, fqn: str, kind: str = "output", dtype: str = "float16") -> Site:
    """A place."""
    return Site(id=number, root=0, fqn=fqn, cls="", phase="forward", kind=kind, index="", dtype=dtype, shape=[1])


@pytest.fixture
def statistics() -> Iterator[Statistics]:
    """With two places."""
    kept = Statistics()
    kept.record(site(1, "a"))
    kept.record(site(2, "b"))
    return kept


def test_percent_of_max_and_what_is_not_finite(statistics: Statistics) -> None:
    """Each once: what was taken is gone."""
    statistics.rows([(1, 32752.0, 0, 0), (2, 1.0, 1, 3), (1, 2.0, 0, 0)])
    found = statistics.take()
    assert found[f"{PERCENT}/largest"] == found[f"{PERCENT}/a"] == pytest.approx(50.0, rel=1e-3)
    assert found[f"{BAD}/total"] == found[f"{BAD}/b"] == 4
    assert statistics.take() == {}


def test_series_are_bounded_and_stay() -> None:
    """A module that was among the worst is named from then on, however many come after it."""
    kept = Statistics()
    for number in range(100):
        kept.record(site(number, f"layers.{number}"))
    kept.rows([(number, float(number + 1), 0, 0) for number in range(100)])
    first = kept.take()
    assert len(first) == MOST_NAMED + 2
    assert f"{PERCENT}/layers.99" in first
    kept.rows([(number, 1000.0 - number, 0, 0) for number in range(100)])
    assert kept.take().keys() == first.keys()


def test_trackers_get_the_shares_of_underflow_and_of_lost_updates(statistics: Statistics) -> None:
    """Shares of what the checks around optimizer steps have counted."""

    def seen(what: Any) -> Observed[Any]:
        return Observed(n=1, step=1, call=1, phase="optimizer", what=what)

    statistics.record(
        seen(GradientZeros(parameters={"w": Zeros(zeros=3, elements=4), "v": Zeros(zeros=0, elements=4)}))
    )
    stalled = StalledParameter(wanted=10, lost=9, dtype="bfloat16", absmax=2.0, update=0.001)
    statistics.record(
        seen(Updates(optimizer="SGD", lr=0.1, checks=1, first_step=1, wanted=20, lost=9, parameters={"w": stalled}))
    )
    assert statistics.take() == {
        "dtypedoctor/gradients/underflow/total": 0.375,
        "dtypedoctor/gradients/underflow/w": 0.75,
        "dtypedoctor/updates/lost/total": 0.45,
        "dtypedoctor/updates/lost/w": 0.9,
        "dtypedoctor/updates/update_to_weight/w": 0.0005,
    }
