"""Run directories as `dtypedoctor run` leaves them, written without running anything."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.report.build import write_report
from dtypedoctor.report.to_json import Outcome, Report, RunSummary, Status, Trial
from dtypedoctor.trace.events import (
    End,
    Flow,
    Header,
    Op,
    ParameterNote,
    Raised,
    Replay,
    Root,
    Site,
    TensorNote,
)
from dtypedoctor.trace.writer import TraceWriter

LIMIT = 65504.0
ORIGIN = "model.layers.1.mlp"
HOSTILE = "model.</script><img src=x onerror=alert(1)>\u202e"
STEPS, BROKEN_AT = 20, 14

Growth = Callable[[int, str], float]
"""The magnitude of a module's output in a step."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a trace is."""

    modules: int
    steps: int


def module_names(count: int) -> list[tuple[str, str]]:
    """Names and classes of a decoder with about ``count`` modules, in execution order."""
    names = [("model.embed_tokens", "Embedding")]
    parts = [("input_layernorm", "RMSNorm"), ("self_attn.q_proj", "Linear"), ("self_attn", "Attention"), ("mlp.gate_proj", "Linear"),
             ("mlp.down_proj", "Linear"), ("mlp", "MLP")]  # fmt: skip
    for layer in range(max(1, (count - 4) // 7)):
        names += [(f"model.layers.{layer}.{part}", cls) for part, cls in parts]
        names.append((f"model.layers.{layer}", "DecoderLayer"))
    return [*names, ("model", "Model"), ("lm_head", "Linear"), ("", "CausalLM")]


def write_trace(
    directory: Path, names: list[tuple[str, str]], steps: int, dtype: str, growth: Growth, **more: int
) -> TraceWriter:
    """A trace with one sample per module, direction and step; ``broken_at`` makes the origin infinite in that step."""
    broken_at = more.get("broken_at", 0)
    directory.mkdir(parents=True)
    writer = TraceWriter(directory)
    writer.write(Header(created=1.0, pid=1))
    writer.write(Root(root=0, cls="CausalLM", modules=len(names), dtypes={dtype: 1}))
    sites = {}
    for phase, kind in (("forward", "output"), ("backward", "grad_output")):
        for fqn, cls in names:
            sites[phase, fqn] = len(sites)
            writer.write(
                Site(
                    id=sites[phase, fqn],
                    root=0,
                    fqn=fqn,
                    cls=cls,
                    phase=phase,
                    kind=kind,
                    index="",
                    dtype=dtype,
                    shape=[2, 8],
                )
            )
    for fqn, cls in names:
        entering = "int64" if cls == "Embedding" else "float32" if fqn == ORIGIN else dtype
        writer.write(Flow(n=writer.next_n(), step=1, call=1, phase="forward", root=0, fqn=fqn, cls=cls, inputs=[entering], outputs=[dtype],
                          weights=[dtype]))  # fmt: skip
    for step in range(1, steps + 1):
        for fqn, _ in names:
            inf = 12 if step == broken_at and fqn == ORIGIN else 0
            writer.write_samples(
                writer.next_n(), step, step, [(sites["forward", fqn], min(growth(step, fqn), LIMIT), 0, inf)]
            )
        if step == broken_at:
            break
        for fqn, _ in reversed(names):
            writer.write_samples(writer.next_n(), step, step, [(sites["backward", fqn], 1e-4, 0, 0)])
    return writer


def climbing(step: int, fqn: str) -> float:
    """The origin's output grows from 8 to float16's limit at the step that breaks; everything else stays."""
    return 8.0 * (LIMIT / 8.0) ** ((step - 1) / (BROKEN_AT - 1)) if fqn == ORIGIN else 2.0


def failing_run(directory: Path) -> Path:
    """A run that overflows in :data:`ORIGIN` at :data:`BROKEN_AT`, with the op trace of it and a remedy that cures."""
    names = [*module_names(25), (HOSTILE, "<b>Evil</b>")]
    writer = write_trace(directory / "before", names, STEPS, "float16", climbing, broken_at=BROKEN_AT)
    _write_op(writer)
    writer.write(Raised(n=writer.next_n(), step=BROKEN_AT, call=BROKEN_AT, phase="forward", type="RuntimeError", message="it is inf",
                        frames=[], modules=["", ORIGIN]))  # fmt: skip
    writer.write(End(n=writer.next_n(), outcome="raised", steps_completed=BROKEN_AT - 1))
    writer.close()
    writer = write_trace(
        directory / "remedy-bfloat16", names, STEPS, "bfloat16", lambda step, fqn: min(climbing(step, fqn), 9e4)
    )
    writer.write(End(n=writer.next_n(), outcome="completed", steps_completed=STEPS))
    writer.close()
    write_report(directory, failing_report())
    return directory


def _write_op(writer: TraceWriter) -> None:
    number = writer.next_n()
    operands = [TensorNote(id=i, dtype="float16", shape=[2, 8], absmax=300.0) for i in (1, 2)]
    result = TensorNote(id=3, dtype="float16", shape=[2, 8], absmax=60000.0, num_posinf=12)
    writer.write(Op(n=number, step=BROKEN_AT, call=BROKEN_AT, phase="forward", fqn=ORIGIN, op="aten.mul.Tensor", inputs=operands,
                    outputs=[result], source="modeling.py:42"))  # fmt: skip
    writer.write(Replay(n=writer.next_n(), of=number, how="float32", finite=True, absmax=90000.0))


def failing_report() -> Report:
    """The report of :func:`failing_run`."""
    finding = Finding(id="float16-overflow", severity=Severity.ERROR, confidence=Confidence.PROVEN, fqn=ORIGIN, op="aten.mul.Tensor",
                      phase="forward", step=BROKEN_AT, dtype="float16", source="modeling.py:42", summary="The product overflows.",
                      cause="90,000 is more than float16 holds.", evidence=("12 inf",), remedies=("bfloat16",))  # fmt: skip
    cured = RunSummary(
        label="bfloat16", steps_completed=STEPS, steps_planned=STEPS, loss=tuple(2.0 - i / 20 for i in range(STEPS))
    )
    return Report(
        name="climbing",
        status=Status.FINDINGS,
        headline="float16 overflows in layers.1.mlp at step 14.",
        findings=(finding,),
        trials=(
            Trial(remedy="bfloat16", summary="", outcome=Outcome.FIXED, reason="All steps done.", safe=True, run=cured),
        ),
        before=RunSummary(
            label="before", steps_completed=BROKEN_AT - 1, steps_planned=STEPS, loss=(2.0, 1.9), ended="RuntimeError"
        ),
        command="dtypedoctor run climbing.yaml",
    )


SOURCE = "transformers/models/llama/modeling_llama.py:66"
PROMOTES, REJECTS = "model.norm", "model.q_proj"
_WEIGHTS = {"model.embed_tokens": "bfloat16", PROMOTES: "float32", REJECTS: "bfloat16", "lm_head": "bfloat16"}


def _write_weights(writer: TraceWriter, weights: dict[str, str]) -> None:
    for fqn, dtype in weights.items():
        writer.write(ParameterNote(n=writer.next_n(), root=0, name=f"{fqn}.weight", dtype=dtype, shape=[8, 8]))


def mismatched_run(directory: Path, root: int = 0) -> Path:
    """A norm with float32 weights promotes what a bfloat16 projection then rejects, in the first model or another; one fix works, one does not."""
    names = [("model.embed_tokens", "Embedding"), (PROMOTES, "RMSNorm")]
    writer = write_trace(directory / "before", [names[0]], 1, "bfloat16", climbing)
    _write_weights(writer, _WEIGHTS)
    writer.write(Flow(n=writer.next_n(), step=1, call=1, phase="forward", root=root, fqn=PROMOTES, cls="RMSNorm", inputs=["bfloat16"], outputs=["float32"],
                      weights=["float32"]))  # fmt: skip
    operands = [
        TensorNote(id=1, dtype="float32", shape=[2, 8]),
        TensorNote(id=2, dtype="bfloat16", shape=[8, 8], name=f"{REJECTS}.weight", origin="parameter"),
    ]
    writer.write(Op(n=writer.next_n(), step=1, call=1, phase="forward", fqn=REJECTS, op="aten.mm.default", inputs=operands, outputs=[],
                    error="expected m1 and m2 to have the same dtype", root=root))  # fmt: skip
    writer.write(End(n=writer.next_n(), outcome="raised", steps_completed=0))
    writer.close()
    writer = write_trace(directory / "remedy-norm-output-cast", [*names, (REJECTS, "Linear")], 2, "bfloat16", climbing)
    _write_weights(writer, _WEIGHTS)
    writer.close()
    write_report(directory, _mismatched_report())
    return directory


def _mismatched_report() -> Report:
    finding = Finding(id="norm-promotes-to-float32", severity=Severity.ERROR, confidence=Confidence.PROVEN, fqn=PROMOTES, op="aten.mm.default",
                      phase="forward", step=1, dtype="float32", source=SOURCE, summary="The norm promotes.", cause="Its weight is float32.")  # fmt: skip
    surfaces = replace(finding, id="operand-dtype-mismatch", fqn=REJECTS, consequence_of=finding.id)
    run = RunSummary(label="norm-output-cast", steps_completed=2, steps_planned=2)
    trials = tuple(
        Trial(remedy=remedy, summary="Casts.", outcome=outcome, reason="It ran.", safe=True, run=replace(run, label=remedy))
        for remedy, outcome in (("norm-output-cast", Outcome.FIXED), ("cast-at-lora-input", Outcome.NOT_FIXED))
    )  # fmt: skip
    before = RunSummary(label="before", steps_completed=0, steps_planned=2, ended="RuntimeError")
    return Report(
        name="mismatch",
        status=Status.FINDINGS,
        headline="The norm promotes.",
        findings=(finding, surfaces),
        trials=trials,
        before=before,
    )


def large_run(directory: Path, shape: Shape) -> Path:
    """A healthy run of ``shape.modules`` modules × ``shape.steps`` steps, forward and backward."""
    names = module_names(shape.modules)
    writer = write_trace(
        directory / "before", names, shape.steps, "float16", lambda step, fqn: 2.0 + math.sin(step + len(fqn))
    )
    writer.write(End(n=writer.next_n(), outcome="completed", steps_completed=shape.steps))
    writer.close()
    write_report(directory, Report(name="large", status=Status.HEALTHY, headline="Nothing found."))
    return directory
