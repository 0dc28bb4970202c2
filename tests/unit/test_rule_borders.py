"""Small judgements of rules and trials on both sides of their borders."""

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_safetensors
from report_builders import overflow
from traces import TraceBuilder

from dtypedoctor.diagnosis import cap_confidence
from dtypedoctor.diagnosis.checkpoint import Subject, read_checkpoint
from dtypedoctor.diagnosis.incidents import cannot_settle
from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.diagnosis.wording import named_in
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.examine import rerun_advice
from dtypedoctor.examination.results import NOT_REQUESTED, Outcome, Trial
from dtypedoctor.rules.mismatch.dtype_origin import _adapts
from dtypedoctor.rules.nonfinite.undefined import _what_rounds
from dtypedoctor.trace.events import ParameterNote, ScalerState
from dtypedoctor.trace.records.execution import RoundedBefore


def test_a_damaged_trace_proves_no_finding() -> None:
    """A proven finding becomes likely and says why; one that is not proven stays as it is."""
    proven = overflow().findings[0]
    capped = cap_confidence(proven)
    assert (capped.confidence, capped.proven_by) == (Confidence.LIKELY, None)
    assert capped.evidence == (
        *proven.evidence,
        "A part of the trace is lost, so what was found in the rest is not called proven.",
    )
    assert cap_confidence(capped) is capped


@pytest.mark.parametrize(
    ("scales", "exhausted"),
    [
        ((), False),
        ((2.0,), False),
        ((1.0,) * 4, False),  # the data of these steps may hold an inf
        ((16.0, 8.0, 4.0, 2.0, 1.0), True),  # it cannot be halved to any use
        ((65536.0, 32768.0, 16384.0, 8192.0, 4096.0), False),  # it looks for its place
        ((65536.0,) * 4, False),
        ((65536.0,) * 5, True),  # it is stuck
        (tuple(2.0**n for n in range(40, 21, -1)), False),
        (tuple(2.0**n for n in range(40, 20, -1)), True),  # 20 in a row
    ],
)
def test_a_scaler_is_exhausted_where_it_skips_without_getting_anywhere(
    scales: tuple[float, ...], exhausted: bool
) -> None:
    """Five times at nearly one scale or down to 1, or twenty times."""
    skipped = tuple(
        ScalerState(n=n, step=n, scale=scale, found_inf=True, skipped=True) for n, scale in enumerate(scales)
    )
    assert cannot_settle(skipped) is exhausted


@pytest.mark.parametrize(
    ("shape", "adapts"), [([8, 64], True), ([32, 8], True), ([32, 64], False), ([8, 8], False), ([64, 64], False)]
)
def test_an_adapter_is_narrower_than_the_frozen_matrix_and_as_long_on_one_side(shape: list[int], adapts: bool) -> None:
    """A matrix of the full rank is a weight like any other."""
    base = ParameterNote(n=1, root=0, name="q.weight", dtype="bfloat16", shape=[32, 64])
    adapter = replace(base, name="q.lora", shape=shape, requires_grad=True)
    assert _adapts(adapter, base) is adapts
    assert not _adapts(adapter, replace(base, requires_grad=True))
    assert not _adapts(adapter, replace(base, shape=[64]))


def test_what_rounds_is_named_as_closely_as_it_is_known() -> None:
    """The number in the code, the parameter, the operator, or only that something does."""
    rounded = RoundedBefore(of=2, n=1, op="aten.sub.Tensor", source="train.py:7", module="norm", parameter="", dtype="float16", scalars=[],
                            elements=8, zeros=3, ones=0, overflows=0)  # fmt: skip
    bound = replace(rounded, zeros=0, ones=8, scalars=["0.9999999"], dtype="bfloat16")
    assert _what_rounds(replace(rounded, scalars=["2", "1e-8"])) == "The number 1e-8 rounds to 0 in float16"
    assert _what_rounds(bound) == "The number 0.9999999 rounds to 1 in bfloat16"
    assert _what_rounds(replace(bound, scalars=["0.5"])) == "The result of aten.sub.Tensor rounds to 1 in bfloat16"
    assert _what_rounds(replace(rounded, parameter="buffer eps")) == "The buffer eps rounds to 0 in float16"
    assert _what_rounds(rounded) == "The result of aten.sub.Tensor rounds to 0 in float16"
    assert _what_rounds(replace(rounded, zeros=0)) == "The result of aten.sub.Tensor rounds in float16"
    assert _what_rounds(None).startswith("Rounding moves an operand")


def test_a_finding_names_its_module_with_class_and_line_once() -> None:
    """In the summary; of the outermost module, which has no name, the class says which."""
    trace = TraceBuilder().sample("model.layers.3.mlp", 1.0, cls="Gated").sample("", 1.0, cls="Net").build()
    found = replace(overflow().findings[0], fqn="model.layers.3.mlp", source="train.py:8", provenance=())
    told = named_in(trace, replace(found, summary="layers.3.mlp overflows.", cause="It is layers.3.mlp."))
    assert told.summary == "layers.3.mlp (Gated, train.py:8) overflows."
    assert (told.cause, told.module) == ("It is layers.3.mlp.", "layers.3.mlp (Gated)")
    library = named_in(trace, replace(found, summary="layers.3.mlp overflows.", source="lib/nn.py:8"))
    assert library.summary == "layers.3.mlp (Gated) overflows."
    unknown = named_in(TraceBuilder().sample("a.mlp", 1.0, cls="").build(), replace(found, fqn="a.mlp", source=None))
    assert unknown.module == "a.mlp"


def test_an_adapters_config_says_what_its_files_should_hold(tmp_path: Path) -> None:
    """Of many shards that are missing three are named."""
    write_safetensors(tmp_path / "adapter_model.safetensors", {"a": ("F16", [1], None)})
    (tmp_path / "adapter_config.json").write_text("{}")
    assert not any("config" in gap for gap in read_checkpoint(tmp_path).gaps)
    named = {f"w{n}": f"model-0000{n}.safetensors" for n in range(1, 6)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {str(named).replace(chr(39), chr(34))}}}')
    (gap,) = (gap for gap in read_checkpoint(tmp_path).gaps if "named in the index" in gap)
    assert gap.startswith("model-00001.safetensors, model-00002.safetensors, model-00003.safetensors: ")
    for wrong in ('{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'):
        index.write_text(wrong)
        with pytest.raises(UsageError, match="weight_map is no mapping"):
            _ = read_checkpoint(tmp_path).gaps


@pytest.mark.parametrize(("target", "kept"), [("float16", {"a", "b"}), ("bfloat16", {"b"}), ("float32", set())])
def test_one_list_of_modules_stays_float32_for_float16_only(target: str, kept: set[str], tmp_path: Path) -> None:
    """The strict one for bfloat16 as well; loading in float32 keeps nothing apart."""
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": ("F32", [1], None), "b.weight": ("F32", [1], None)})
    subject: Subject = read_checkpoint(tmp_path)
    lists = {"_keep_in_fp32_modules": ("a",), "_keep_in_fp32_modules_strict": ("b",)}
    subject = replace(subject, keep_in_fp32=lists)
    assert {one.name[0] for one in subject.tensors if subject.keeps(one, target)} == kept


def trial(remedy: str, option: str) -> Trial:
    """One that nobody has asked for."""
    reason = f"{NOT_REQUESTED}: {option} {remedy} runs the script again with it"
    return replace(overflow().trials[0], remedy=remedy, outcome=Outcome.NOT_TRIED, reason=reason)


def test_another_run_is_advised_with_the_option_that_would_tell_most() -> None:
    """A fix, then ablations of what is not proven; nothing where a fix was found or they were asked for."""
    proven = overflow().findings
    likely = (replace(proven[0], confidence=Confidence.LIKELY),)
    fix, ablation = trial("bfloat16", "--try"), trial("autocast-off", "--ablate")
    fixed = replace(fix, outcome=Outcome.FIXED)
    assert rerun_advice(likely, (ablation, fix), "--rerun").startswith("--rerun --try bfloat16: ")
    assert rerun_advice(likely, (ablation,), "--rerun").startswith("--rerun: runs without autocast show")
    assert rerun_advice(proven, (ablation,), "--rerun") == ""
    assert rerun_advice(likely, (fixed, ablation), "--rerun") == ""
