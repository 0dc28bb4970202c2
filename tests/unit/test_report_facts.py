"""What a report says of a finding and of its run beside the detectors' own sentences."""

from dataclasses import replace

import pytest
from report_builders import facts_of, mismatch, plain_text
from traces import TraceBuilder

from dtypedoctor.diagnosis.rule import Link
from dtypedoctor.diagnosis.wording import named_in
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.run_facts import (
    chains,
    observer_sentence,
    ranked_facts,
    run_title,
    watched_and_not,
)
from dtypedoctor.report.to_json import Observer
from dtypedoctor.report.to_md import render_markdown

BACK = "dtype provenance, from the failing operator back to the origin"
SCENARIO = {
    "name": "case",
    "summary": "It fails.",
    "steps": [
        {
            "model": {"name": "builtin:llama", "dtype": "bfloat16", "lora": {"targets": ["q_proj"]}},
            "workload": {"kind": "grpo", "steps": 2},
            "autocast": {"dtype": "float16"},
        },
        {"workload": {"kind": "unload"}},
    ],
}
TRAINING = [{"model": {"name": "builtin:llama"}, "workload": {"kind": "train", "steps": 2}}]


def test_what_ran_is_told_in_a_line_and_the_summary_with_the_scenario() -> None:
    """The summary says what somebody expects, the headline what was measured; they are not told side by side."""
    report = replace(mismatch(), scenario=SCENARIO, environment={"device": "cpu"})
    assert run_title(report) == "grpo on builtin model llama, bfloat16, LoRA, float16 autocast; then unload; on cpu"
    assert run_title(
        replace(report, scenario={**SCENARIO, "steps": TRAINING, "distributed": {"processes": 2}})
    ).endswith("on cpu, in 2 processes")
    page = render_markdown(run_document(report))
    assert run_title(report) in page.split("###")[0]
    assert "It fails." not in page.split("### Reproduce")[0]


@pytest.mark.parametrize("scenario", [{}, {"name": "case"}, {"name": "case", "steps": [{"model": {"name": 3}}]}])
def test_a_scenario_that_is_not_whole_is_not_told(scenario: dict[str, object]) -> None:
    """A report may be redacted, or older than the present keys."""
    assert run_title(replace(mismatch(), scenario=scenario)) == ""


def test_a_chain_that_ends_at_the_failing_op_tells_it_once() -> None:
    """The reason stands beside the op, without its name; any other chain is told as it is."""
    found = replace(mismatch().findings[0], met=())
    assert dict(chains(found)) == {BACK: found.provenance}
    first = found.provenance[0]
    last = Link(
        fqn=first.fqn, op=f"inplace: {first.op} is not cast", dtype_in=None, dtype_out="float32", source=first.source
    )
    told = dict(chains(replace(found, provenance=(*found.provenance, last))))[BACK]
    assert [link.op for link in told] == ["aten.mm.default (inplace: not cast)", "aten.mul.Tensor"]


def test_a_mismatch_is_told_with_the_origin_of_both_dtypes() -> None:
    """Where the odd dtype came from, and the one that it met; a parameter is named once."""
    (_, odd), (about, met) = chains(mismatch().findings[0])
    assert len(odd) == 2
    assert about == "dtype provenance of the other operand"
    assert [(link.fqn, link.op, link.dtype_out) for link in met] == [
        ("model.layers.3.self_attn.q_proj", "parameter weight", "bfloat16")
    ]


@pytest.mark.parametrize(
    ("observer", "said", "begins"),
    [
        (Observer(bitwise_equal=True, reason="r"), "same failure, bitwise identical", "Instrumentation changed nothing"),
        (Observer(bitwise_equal=False, reason="r"), "NOT the same, see below", "Instrumentation CHANGED"),
        (Observer(bitwise_equal=None, reason="r", same_error=True), "raises the same error", "Instrumentation does not cause the failure"),
        (Observer(bitwise_equal=None, reason="r"), "", "Not verified that instrumentation is inert"),
    ],
)  # fmt: skip
def test_the_same_error_without_the_watch_is_good_news(observer: Observer, said: str, begins: str) -> None:
    """Only where nothing is known does the report say that nothing could be checked."""
    assert watched_and_not(observer) == said
    assert observer_sentence(observer).startswith(begins)


def test_a_root_cause_that_is_no_operation_is_told_with_where_it_surfaces() -> None:
    """The first screen answers *where* with the operation that refused."""
    surface = mismatch().findings[0]
    root = replace(surface, id="autocast-contradicts-model", fqn=None, op=None, source=None)
    report = replace(mismatch(), findings=(root, replace(surface, consequence_of=root.id)))
    told = {label: plain_text(line) for label, line in facts_of(report)}
    assert told["surfaces at"] == "aten.mul.Tensor, model.layers.3.input_layernorm, modeling_llama.py:67"
    assert "surfaces at" not in {fact.label for fact in ranked_facts(mismatch())}


def test_a_module_has_one_name_throughout_a_finding() -> None:
    """Full names, those of parameters too, become the short one, operators what people call them; numbers and files stay what they are."""
    names = ("model.layers.3", "model.layers.3.mlp", "head", "4", "4.1", "encoder.norm", "decoder.norm")
    builder = TraceBuilder()
    for name in names:
        builder.sample(name, 1.0)
    found = replace(
        mismatch().findings[0],
        fqn="model.layers.3.mlp",
        summary="model.layers.3.mlp.up overflows.",
        cause="model.layers.3.weight, head.bias and 4.weight are float16; encoder.norm.weight is not.",
        evidence=("aten.mul.Tensor at head.py:4 reaches 4.1, not 1.01e-05, in model.layers.3.mlp.",),
    )
    told = named_in(builder.build(), found)
    assert told.cause == "layers.3.weight, head.bias and model[4].weight are float16; encoder.norm.weight is not."
    assert told.evidence == ("`mul` at head.py:4 reaches 4.1, not 1.01e-05, in layers.3.mlp.",)
