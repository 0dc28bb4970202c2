"""Which modules a bisection suspects, and how much, from traces alone."""

import pytest
from traces import TraceBuilder

from dtypedoctor.lab.bisect.probes import Layers
from dtypedoctor.lab.bisect.questions import called_modules, layers_in, plant, suspicion
from dtypedoctor.lab.bisect.results import OWN

CALLED = ("model", "model.layers.0", "model.layers.0.mlp", "model.layers.10", "model.layers.2", "head")


def test_each_module_has_its_own_arithmetic_beside_its_parts() -> None:
    """Layers stand in the order of their numbers, and a module without parts is one leaf."""
    assert plant(CALLED, {}).leaves == (
        "::self", "head", "model::self",
        "model.layers.0::self", "model.layers.0.mlp", "model.layers.2", "model.layers.10",
    )  # fmt: skip


def test_treated_leaves_get_the_fewest_names() -> None:
    """Both leaves of `layers.0` are that module."""
    forest = plant(CALLED, {})
    assert forest.names(frozenset({"model.layers.0::self", "model.layers.0.mlp", "head"})) == ("head", "model.layers.0")


def test_modules_that_a_failing_run_did_not_come_to_are_taken_from_the_reference() -> None:
    """But not those inside of a module like one that returned without calling any: there it runs a fused kernel."""
    failing = TraceBuilder()
    failing.sample("layers.0", 1.0, kind="entered").sample("layers.0.norm", 1.0).sample("layers.0", 1.0)
    reference = TraceBuilder()
    for fqn in ("layers.0", "layers.0.norm", "layers.1", "layers.1.norm", "layers.1.norm.inner", "head"):
        reference.sample(fqn, 1.0)
    assert called_modules([failing.build()], reference.build()) == {
        "layers.0", "layers.0.norm", "layers.1", "layers.1.norm", "head",
    }  # fmt: skip


def test_layers_are_what_only_a_number_tells_apart() -> None:
    """The longest row of them counts; a model may have none."""
    trace = TraceBuilder()
    for fqn in (
        "tower.blocks.0",
        "model.layers.0",
        "model.layers.0.experts.7",
        "model.layers.1",
        "model.layers.10",
        "head",
    ):
        trace.sample(fqn, 1.0)
    assert layers_in(trace.build()) == Layers("model.layers", 3)
    assert layers_in(TraceBuilder().sample("head", 1.0).build()) is None


@pytest.mark.parametrize(
    ("culprits", "inside"),
    [
        (["model.layers.3.mlp::self", "model.norm"], False),
        (["model.layers.3::self", "modelling::self"], False),
        (["lm_head", "model::self"], True),
        (["::self"], True),
    ],
)
def test_layers_lie_in_a_culprit_that_calls_them(culprits: list[str], inside: bool) -> None:
    """Nothing of them would be compiled then."""
    assert Layers("model.layers", 12).lie_in(culprits) is inside


def test_what_comes_near_the_end_of_its_dtype_is_suspicious() -> None:
    """By octaves below the maximum; an input is its caller's doing, and float32 is nobody's."""
    trace = TraceBuilder()
    trace.sample("mlp.act", 65504.0).sample("mlp.down", 65504.0 / 2, kind="input").sample("norm", 0.0)
    trace.sample("mlp.act", 1.0).sample("head", 1e30, dtype="float32")
    found = suspicion(trace.build(), blamed="mlp")
    assert found.pop("mlp") == 32.0
    assert found == {
        "mlp.act": 1.0, f"mlp.act{OWN}": 1.0, f"mlp{OWN}": 0.5,
        "norm": pytest.approx(1 / 41), f"norm{OWN}": pytest.approx(1 / 41),
    }  # fmt: skip
