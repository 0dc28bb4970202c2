"""Every workload in a real worker: what it does, counts and records."""

from pathlib import Path
from typing import Any

import pytest
from launched import launched, llama

from dtypedoctor._torch_private import MODES_CAN_IGNORE_COMPILED
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.workloads import WORKLOADS
from dtypedoctor.trace.events import (
    End,
    Metric,
    NotWatched,
    Observed,
    ProbeLogProbs,
    Raised,
    ScalerState,
    Stage,
)
from dtypedoctor.trace.model import Trace

pytestmark = pytest.mark.slow

TRAINING = [
    {"kind": "train", "steps": 2, "sequence_length": 8},
    {"kind": "sft", "steps": 2, "max_length": 16, "examples": 8},
    {"kind": "grpo", "steps": 2, "new_tokens": 3, "prompts": 4},
    {"kind": "forward", "steps": 2, "sequence_length": 8, "backward": True},
]


def metrics(trace: Trace) -> list[tuple[int, set[str]]]:
    """Step and names of the numbers of every finished step."""
    return [(m.step, set(m.values)) for m in trace.all(Metric)]


def probed(trace: Trace) -> list[tuple[int, bool]]:
    """Step of every probe, and whether it was before training."""
    return [(probe.step, probe.untrained) for probe in trace.all(ProbeLogProbs)]


def test_every_workload_that_a_scenario_can_name_is_there() -> None:
    """A script is run by the worker itself, with the session around it; the call of a capsule is named as a plug-in's workload is."""
    workload = Scenario.model_json_schema()["$defs"]["ScenarioStep"]["properties"]["workload"]
    named = {one.name for one in WORKLOADS} - {"capsule-call"}
    assert {*named, "plugin", "script"} == set(workload["discriminator"]["mapping"])


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("workload", TRAINING, ids=lambda workload: str(workload["kind"]))
def test_training_reports_loss_gradient_norm_and_time_of_each_step(workload: dict[str, Any], tmp_path: Path) -> None:
    """And the policy is probed before the first step and after each."""
    run = launched(tmp_path, {"model": llama(), "workload": workload})
    assert run.trace.end == End(n=run.trace.end.n, outcome="completed", steps_completed=2)  # type: ignore[union-attr]
    assert [step for step, _ in metrics(run.trace)] == [1, 2]
    assert all({"loss", "grad_norm", "step_time"} <= names for _, names in metrics(run.trace))
    if workload["kind"] != "grpo":  # rewards that are all the same leave no gradient
        assert [m.values["grad_norm"] > 0 for m in run.trace.all(Metric)] == [True, True]
    assert probed(run.trace) == [(0, True), (1, False), (2, False)]


def test_steps_are_numbered_through_all_stages(tmp_path: Path) -> None:
    """So that a step number means one thing in the whole trace, and the sum of the stages' steps is what was done."""
    run = launched(
        tmp_path,
        {"name": "first", "model": llama(), "workload": {"kind": "train", "steps": 2}},
        {"workload": {"kind": "generate", "new_tokens": 2}},
        {"workload": {"kind": "unload"}},
        {"name": "second", "model": llama("bfloat16"), "workload": {"kind": "forward", "steps": 2, "backward": True}},
        {"workload": {"kind": "train", "steps": 1}},
    )
    assert [(s.name, s.workload) for s in run.trace.all(Stage)] == [
        ("first", "train"),
        ("step-2", "generate"),
        ("step-3", "unload"),
        ("second", "forward"),
        ("step-5", "train"),
    ]
    assert [step for step, _ in metrics(run.trace)] == [1, 2, 3, 4, 5, 6]
    assert probed(run.trace) == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (4, False),
        (5, False),
        (6, False),
    ]
    assert run.trace.end is not None
    assert run.trace.end.steps_completed == 6
    assert {s.step for s in run.trace.samples if run.trace.sites[s.site].kind == "param"} == {1, 2, 6}


def test_an_exception_in_a_later_stage_is_placed_in_its_step(tmp_path: Path) -> None:
    """The steps of the stages before count as done."""
    run = launched(
        tmp_path,
        {"model": llama(), "workload": {"kind": "train", "steps": 2}},
        {
            "model": {"name": "builtin:custom-moe", "dtype": "bfloat16"},
            "workload": {"kind": "forward"},
        },
    )
    raised = run.trace.last(Raised)
    assert raised is not None
    assert (raised.step, raised.phase, raised.modules[-1]) == (3, "forward", "model.layers.0.self_attn.q_proj.base")
    assert run.trace.end is not None
    assert (run.trace.end.outcome, run.trace.end.steps_completed) == ("raised", 2)


def test_the_unloaded_model_is_forgotten(tmp_path: Path) -> None:
    """What comes after needs a model of its own, and the second one is another root of the trace."""
    unload = {"workload": {"kind": "unload"}}
    with pytest.raises(UsageError, match="the forward step has no model: it was unloaded before"):
        launched(
            tmp_path, {"model": llama(), "workload": {"kind": "forward"}}, unload, {"workload": {"kind": "forward"}}
        )
    (tmp_path / "again").mkdir()
    two = {"model": llama(), "workload": {"kind": "forward"}}
    run = launched(tmp_path / "again", two, unload, two)
    assert {site.root for site in run.trace.sites.values()} == {0, 1}


def test_a_gradient_scaler_scales_and_is_recorded(tmp_path: Path) -> None:
    """One state per step; the scale is among the numbers."""
    run = launched(
        tmp_path,
        {
            "model": llama(),
            "workload": {"kind": "train", "steps": 2},
            "autocast": {"dtype": "float16"},
            "grad_scaler": True,
        },
    )
    assert [state.scale for state in run.trace.all(ScalerState)] == [65536.0, 65536.0]
    assert all(m.values["scale"] == 65536.0 for m in run.trace.all(Metric))


def test_autocast_is_around_each_forward_or_around_the_whole_loop(tmp_path: Path) -> None:
    """A region keeps the weights that it has cast, so inside one that never ends their updates are not seen."""
    moved = {}
    for scope in ("forward", "loop"):
        (tmp_path / scope).mkdir()
        run = launched(
            tmp_path / scope,
            {
                "model": {"name": "builtin:llama-tiny"},
                "workload": {"kind": "train", "steps": 2, "learning_rate": 1e-2, "autocast_scope": scope},
                "autocast": {"dtype": "bfloat16"},
            },
        )
        assert {site.autocast for site in run.trace.sites.values() if site.kind == "output"} == {"bfloat16"}
        first, second = (probe.values for probe in run.trace.all(ProbeLogProbs) if not probe.untrained)
        moved[scope] = max(abs(a - b) for a, b in zip(first, second, strict=True) if a is not None and b is not None)
    assert 0 < moved["loop"] < moved["forward"] / 2


@pytest.mark.parametrize(
    ("model", "workload", "message"),
    [
        ("builtin:nf4-compiled", "generate", "has no generate"),
        ("torch.nn:Identity", "forward", "Identity has no config.vocab_size"),
    ],
)
def test_a_model_that_cannot_do_the_workload_is_refused(
    model: str, workload: str, message: str, tmp_path: Path
) -> None:
    """One message, no traceback."""
    with pytest.raises(UsageError, match=message):
        launched(tmp_path, {"model": {"name": model}, "workload": {"kind": workload}})


def test_a_model_that_fails_in_the_first_probe_fails_in_its_workload(tmp_path: Path) -> None:
    """The probe says that it could not, and the exception that counts is the watched one."""
    run = launched(
        tmp_path, {"model": {"name": "builtin:custom-moe", "dtype": "bfloat16"}, "workload": {"kind": "train"}}
    )
    assert [note.why for note in run.trace.all(NotWatched)] == ["the forward pass raises RuntimeError"]
    assert run.trace.last(Raised) is not None
    assert probed(run.trace) == []


def compiled(directory: Path, *, watch: bool = True, **spec: Any) -> Trace:
    """The NF4 model, compiled, trained for two steps."""
    step = {
        "model": {
            "name": "builtin:nf4-compiled",
            "dtype": "bfloat16",
            "options": {"kv_sizes": [32], "intermediate_sizes": [96]},
        },
        "workload": {"kind": "train", "steps": 2},
        "compile": {"backend": "eager", **spec},
    }
    return launched(directory, step, watch=watch).trace


def of_the_compiler(trace: Trace) -> list[Any]:
    """What was seen of the compiler, not of the model."""
    return [found.what for found in trace.all(Observed) if found.phase == "compile"]


@pytest.mark.release
def test_a_graph_break_that_is_refused_is_an_exception_and_recorded_all_the_same(tmp_path: Path) -> None:
    """With `fullgraph` the run ends there; an unwatched run leaves the compiler alone."""
    trace = compiled(tmp_path, fullgraph=True)
    raised = trace.last(Raised)
    assert raised is not None
    assert raised.type == "Unsupported"
    assert [what.KIND for what in of_the_compiler(trace)] == ["compile"]
    (tmp_path / "unwatched").mkdir()
    assert of_the_compiler(compiled(tmp_path / "unwatched", watch=False)) == []


def by_layers(directory: Path, **more: Any) -> Trace:
    """A Llama of two layers, trained for two steps."""
    model = {"name": "builtin:llama-tiny", "dtype": "float32"}
    work = {"kind": "train", "steps": 2, "sequence_length": 8}
    directory.mkdir()
    return launched(directory, {"model": model, "workload": work, **more}).trace


def test_layers_that_are_alike_are_compiled_once_and_measured_as_any_module_is(tmp_path: Path) -> None:
    """What is between them runs as it is; nothing breaks a graph, the look at the policy before and after a step neither."""
    trace = by_layers(tmp_path / "compiled", compile={"backend": "eager", "regions": "layers"})
    seen = of_the_compiler(trace)
    # Without that a function is compiled anew while a dispatch mode is on, as it is in the first steps.
    if MODES_CAN_IGNORE_COMPILED:
        assert [what.KIND for what in seen] == ["compile"]
        assert seen[0].unique_graphs == 1
    plain = by_layers(tmp_path / "plain")
    assert [m.values["loss"] for m in trace.all(Metric)] == [m.values["loss"] for m in plain.all(Metric)]
    returned = {site.fqn for site in trace.sites.values() if site.kind == "output"}
    assert {"model.layers.0", "model.layers.1", "model.norm"} <= returned
    assert not any(name.startswith("model.layers.0.") for name in returned)


def test_a_model_without_repeated_layers_is_not_compiled_by_layers(tmp_path: Path) -> None:
    """That is said before anything runs."""
    step = {
        "model": {"name": "torch.nn:Flatten"},
        "workload": {"kind": "forward"},
        "compile": {"regions": "layers"},
    }
    with pytest.raises(UsageError, match="the model has no repeated layers"):
        launched(tmp_path, step)
