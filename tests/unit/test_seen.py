"""What is said of all modules, and of all operators, is tied to how much of them was measured."""

from typing import Any

import pytest
from nonfinite_examples import given
from traces import TraceBuilder, tensor

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.wording import named_in, with_spoken_operators
from dtypedoctor.trace.events import Coverage, Raised


def found_in(trace: TraceBuilder, **covered: Any) -> Finding:
    if covered:
        trace.add(Coverage(**covered))
    return analysis_of(trace.build()).findings[0]


def bad_loss() -> TraceBuilder:
    """A loss that is NaN, and nothing that says where it comes from."""
    return TraceBuilder().sample("", 0.0, nan=1, kind="loss", dtype="float32")


@pytest.mark.parametrize(
    ("covered", "said"),
    [
        ({"module_calls": 3, "module_calls_measured": 3}, "everything that modules returned was finite"),
        ({"module_calls": 4, "module_calls_measured": 3}, "what was measured of the modules (3 of 4 calls) was finite"),
        ({"module_calls": 1, "module_calls_measured": 1, "module_calls_skipped": 1}, "(1 of 2 calls) was finite"),
        ({"module_calls": 4}, "what modules returned was not measured"),
        ({"operators": 2, "operators_measured": 2}, "no module was called"),
        ({"compiled_outside": 2}, "was not measured, nor was what compiled functions compute"),
        (
            {"module_calls": 1, "module_calls_measured": 1, "compiled_outside": 1},
            "(1 of 1 calls) was finite; what compiled functions compute was not measured",
        ),
    ],
)
def test_modules_are_all_finite_only_where_all_were_measured(covered: dict[str, int], said: str) -> None:
    """A bad loss alone says nothing of modules that were not measured."""
    finding = found_in(bad_loss(), **covered)
    assert said in finding.cause
    assert ("everything that modules returned" in finding.cause) == (
        said == "everything that modules returned was finite"
    )


def test_a_bad_loss_is_not_outside_of_all_modules_where_compiled_functions_have_run() -> None:
    """They may call modules, which nothing saw; what to do is to have them seen."""
    finding = found_in(bad_loss(), compiled_outside=1)
    assert finding.summary.startswith("The loss is where float32 first stops being finite")
    assert found_in(bad_loss()).summary.startswith("The code outside of all modules")


def test_a_refused_value_says_no_more_of_the_modules() -> None:
    """The same where code has raised because of the value."""

    def refused(**covered: int) -> Finding:
        trace = TraceBuilder()
        message = "probability tensor contains either `inf`, `nan` or element < 0"
        trace.add(
            Raised(
                n=trace.n(),
                step=1,
                call=1,
                phase="forward",
                type="RuntimeError",
                message=message,
                frames=[],
                modules=[],
            )
        )
        return found_in(trace, **covered)

    assert refused(module_calls=1, module_calls_measured=1).cause.startswith(
        "Everything that modules returned was finite"
    )
    assert refused(compiled_outside=1).cause.startswith("What modules returned was not measured")


@pytest.mark.parametrize(
    ("covered", "where"),
    [
        ({"compiled_outside": 1}, "in a compiled function"),
        ({"module_calls": 3}, "in a module call that was not measured"),
    ],
)
@pytest.mark.parametrize(("origin", "name"), [("input", "input.0"), ("", None)])
def test_a_value_is_data_only_where_operators_were_seen(
    covered: dict[str, int], where: str, origin: str, name: Any
) -> None:
    """Else it may have been computed, and the finding is only possible."""
    sure, unsure = found_in(given(origin, name)), found_in(given(origin, name), **covered)
    assert sure.id == unsure.id == "nonfinite-input"
    assert "no dtype of the model can help" in sure.cause
    assert "no dtype of the model can help" not in unsure.cause
    assert f"was computed where nothing was measured: {where}" in unsure.cause
    assert (sure.confidence, unsure.confidence) == (Confidence.LIKELY, Confidence.POSSIBLE)


@pytest.mark.parametrize("source", ["<eval_with_key>.1:13", "subclass_codegen.py:codegen(forward):3"])
def test_generated_code_is_compiled_code_and_not_outside_of_all_modules(source: str) -> None:
    """An operator that it calls may be a module's; code outside of all modules is the program's own, and its line is named."""

    def overflow(source: str) -> Finding:
        trace = TraceBuilder()
        trace.op(
            "aten.mul.Tensor", "", [tensor(1, 300.0), tensor(2, 300.0)], [tensor(3, inf=1)], root=-1, source=source
        )
        built = trace.sample("", 0.0, nan=1, kind="loss").build()
        return named_in(built, analysis_of(built).findings[0])

    assert "in compiled code" in overflow(source).summary
    assert overflow(source).module == "compiled code"
    assert "`mul` at train.py:3 is where" in overflow("train.py:3").summary


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aten.mul.Tensor overflows", "`mul` overflows"),
        ("First rounded by aten.expm1.default.", "First rounded by `expm1`."),
        ("First rounded by aten._to_copy.default.", "First rounded by the cast."),
        ("function.layer_norm and module.Linear are given float32", "`layer_norm` and `Linear` are given float32"),
        ("in `module.down` (float16), of module.layers.0.mlp", "in `module.down` (float16), of module.layers.0.mlp"),
    ],
)
def test_operators_are_named_shortly_and_modules_of_a_wrapped_model_in_full(text: str, said: str) -> None:
    """DDP calls the model that it wraps `module`, which is how the names of failing calls of modules begin, too."""
    assert with_spoken_operators(text) == said
