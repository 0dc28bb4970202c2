"""Hand-built reports that the tests of every format share."""

from dtypedoctor.diagnosis.rule import Advice, Confidence, Edit, Finding, Link, Severity
from dtypedoctor.report.document import Bar, Line, Words, parts_of
from dtypedoctor.report.run_facts import ranked_facts
from dtypedoctor.report.to_json import Observer, Outcome, Parity, Report, RunSummary, Status, StripRow, Trial

ENVIRONMENT = {
    "python": "3.11.7",
    "device": "cpu",
    "versions": {"torch": "2.13.0+cpu", "transformers": "5.23.0", "peft": "0.21.2"},
    "variables": {"OMP_NUM_THREADS": "1"},
}


def healthy() -> Report:
    """A bfloat16 run that ended as planned, with nothing found."""
    return Report(
        name="gemma4_grpo_bf16",
        status=Status.HEALTHY,
        headline="8 of 8 steps done, every tensor finite, no dtype problem.",
        before=RunSummary(
            label="before",
            steps_completed=8,
            steps_planned=8,
            loss=(0.12, 0.11, 0.13, 0.1, 0.09, 0.1, 0.08, 0.07),
            grad_norm=(1.5, 1.4, 1.6, 1.2, 1.1, 1.0, 0.9, 0.95),
            step_time=0.412,
            peak_memory=52_428_800,
        ),
        observer=Observer(bitwise_equal=True, reason="8 losses and 96 parameters compared."),
        environment=ENVIRONMENT,
        scenario={"name": "gemma4_grpo_bf16", "steps": [{"model": {"name": "builtin:gemma4-tiny"}}]},
        command="dtypedoctor run scenarios/gemma4_grpo_bf16.yaml",
        next_command="dtypedoctor report runs/gemma4_grpo_bf16 --format html",
    )


def overflow() -> Report:
    """The float16 overflow in a Gemma-4 MLP, with a correction and a dtype change that cure and one remedy that is not tried."""
    return Report(
        name="gemma4_grpo_fp16",
        status=Status.FINDINGS,
        headline="float16 overflows in model.layers.0.mlp at step 2: act(gate) × up reaches 181,000, float16 ends at 65,504.",
        findings=(_overflow_finding(),),
        do_this=(
            Advice(
                finding="float16-overflow",
                text="Use bfloat16 in the place of float16.",
                edits=(Edit(file="train.py", line=7, old="model = model.half()", new="model = model.bfloat16()"),),
            ),
        ),
        trials=(_correction_trial(), _bfloat16_trial(), _refused_trial()),
        before=RunSummary(
            label="before",
            steps_completed=1,
            steps_planned=8,
            loss=(0.1184,),
            grad_norm=(2.731,),
            reward=(0.25,),
            step_time=0.388,
            peak_memory=41_943_040,
            ended="RuntimeError in step 2",
            finding_ids=("float16-overflow",),
        ),
        reference=_complete("reference (bfloat16)", 0.395, 43_000_000),
        strip=_strip(),
        observer=Observer(bitwise_equal=True, reason="1 loss and 28 gradients compared."),
        coverage=("torch.multinomial: runs outside any module, seen only as an exception.",),
        environment=ENVIRONMENT,
        scenario={
            "name": "gemma4_grpo_fp16",
            "summary": "GRPO on a Gemma-4 whose first MLP leaves float16's range.",
            "steps": [
                {"model": {"name": "builtin:gemma4-tiny", "dtype": "float16"}, "workload": {"kind": "grpo", "steps": 8}}
            ],
        },
        files={"before": "before/trace", "reference": "reference/trace"},
        command="dtypedoctor run scenarios/gemma4_grpo_fp16.yaml",
        expectation="failed with float16-overflow and was cured by gemma4-mlp-float32-product and bfloat16, as the scenario says.",
        expectation_met=True,
        next_command="dtypedoctor report runs/gemma4_grpo_fp16 --format html",
    )


def mismatch() -> Report:
    """A dtype mismatch in LoRA, with the chain of ops back to where the odd dtype was born."""
    finding = Finding(
        id="norm-promotes-to-float32",
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        fqn="model.layers.3.input_layernorm",
        op="aten.mul.Tensor",
        phase="forward",
        step=1,
        dtype="float32",
        source="modeling_llama.py:67",
        summary="A norm with float32 weights hands float32 to a bfloat16 projection.",
        cause="The norm multiplies its bfloat16 input by a float32 weight, so its output is float32; q_proj has bfloat16 weights.",
        evidence=(
            "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
            "model.layers.3.input_layernorm: bfloat16 in, float32 out.",
        ),
        provenance=(
            Link(fqn="model.layers.3.self_attn.q_proj", op="aten.mm.default", dtype_in="float32", dtype_out=None,
                 source="linear.py:134"),
            Link(fqn="model.layers.3.input_layernorm", op="aten.mul.Tensor", dtype_in="bfloat16", dtype_out="float32",
                 source="modeling_llama.py:67"),
        ),
        met=(
            Link(fqn="model.layers.3.self_attn.q_proj", op="load-dtype: model.layers.3.self_attn.q_proj.weight", dtype_in=None,
                 dtype_out="bfloat16", source="linear.py:134"),
        ),
        remedies=("norm-output-to-input-dtype", "norm-weights-to-model-dtype"),
        references=("https://github.com/NVIDIA-NeMo/Automodel/issues/1622",),
    )  # fmt: skip
    return Report(
        name="llama_fp32_norms",
        status=Status.FINDINGS,
        headline="The norm model.layers.3.input_layernorm turns bfloat16 into float32; q_proj after it cannot take that.",
        findings=(finding,),
        before=RunSummary(label="before", steps_completed=0, steps_planned=2, ended="RuntimeError in step 1",
                          finding_ids=("norm-promotes-to-float32",)),
        command="dtypedoctor run scenarios/llama_fp32_norms.yaml --no-remedies",
        next_command="dtypedoctor run scenarios/llama_fp32_norms.yaml",
    )  # fmt: skip


def worker_died() -> Report:
    """A worker that was killed, with the module it had entered last."""
    return Report(
        name="gemma4_cuda",
        status=Status.WORKER_DIED,
        headline="The worker was killed by SIGKILL (out of memory?) in step 3, inside model.layers.7.self_attn.",
        before=RunSummary(label="before", steps_completed=2, steps_planned=8, loss=(0.2, None), grad_norm=(1.0, None),
                          ended="killed by SIGKILL"),
        coverage=("Nothing after sequence number 48,113: the trace ends there.",),
        environment=ENVIRONMENT,
        command="dtypedoctor run scenarios/gemma4_cuda.yaml",
        next_command="dtypedoctor run scenarios/gemma4_cuda.yaml --device cpu",
    )  # fmt: skip


EVIL = "<script>alert(1)</script>|`x`\x1b[31m\u202egnp.\u2028*_]()&amp;\x00$$\"'-->]]>\\|{{7*7}}"
"""Breaks a table, a page, a terminal or a parser that does not escape."""


def hostile() -> Report:
    """Names and texts that try to break out of every format, in every field, and names of 10,000 characters."""
    endless = "a" * 9_000 + "|" * 1_000
    finding = Finding(
        id=EVIL, severity=Severity.ERROR, confidence=Confidence.POSSIBLE, fqn=endless, op=EVIL, phase=EVIL, step=2, dtype=EVIL,
        source=EVIL, summary=EVIL, cause=f"{EVIL}\n\n# {EVIL}\n```\n</details>", evidence=(EVIL, endless, "\n---\n| a | b |\n|---|---|"),
        provenance=(Link(fqn=EVIL, op=EVIL, dtype_in=EVIL, dtype_out=EVIL, source=EVIL),) * 2, remedies=(EVIL,), references=(EVIL, "javascript:alert(1)"),
    )  # fmt: skip
    run = RunSummary(label=EVIL, steps_completed=1, steps_planned=2, loss=(float("nan"), 1.0), grad_norm=(float("inf"), None),
                     ended=EVIL, finding_ids=(EVIL, endless))  # fmt: skip
    trial = Trial(
        remedy=EVIL, summary=EVIL, outcome=Outcome.NOT_FIXED, reason=EVIL, safe=False, run=run, ratio_base=EVIL
    )
    row = StripRow(fqn=EVIL, cls=EVIL, dtype=EVIL, absmax=None, num_nan=1, num_inf=2, headroom=None, is_origin=True)
    return Report(
        name=EVIL, status=Status.FINDINGS, headline=EVIL, findings=(finding,), trials=(trial,), before=run, reference=run,
        strip=(row, row), observer=Observer(bitwise_equal=False, reason=EVIL), coverage=(EVIL, endless),
        bisection={"culprits": [EVIL], "corrections": [EVIL], "probes": 1, "one_minimal": True,
                   "verdicts": [{"mode": EVIL, "outcome": "fail", "phase": EVIL, "fqn": endless, "absmax": float("inf")}]},
        environment={EVIL: EVIL, "lone": "\udcff"}, scenario={EVIL: [EVIL, {EVIL: endless}]}, files={EVIL: EVIL}, command=EVIL,
        expectation=EVIL, expectation_met=False, next_command=EVIL,
    )  # fmt: skip


def everything() -> list[Report]:
    """One report of each kind."""
    return [healthy(), overflow(), mismatch(), worker_died(), hostile()]


def _overflow_finding() -> Finding:
    return Finding(
        id="float16-overflow",
        severity=Severity.ERROR,
        confidence=Confidence.PROVEN,
        proven_by="aten.mul.Tensor run again on the same operands in float32 gives finite values up to 181,000, beyond float16 max (65,504)",
        fqn="model.layers.0.mlp",
        module="layers.0.mlp (Gemma4TextMLP)",
        op="aten.mul.Tensor",
        phase="generate",
        step=2,
        dtype="float16",
        source="modeling_gemma4.py:271",
        summary="The product of activation and up projection is larger than float16 can hold.",
        cause="act(gate) and up are both finite in float16, their product is not: it needs 181,000 where float16 ends at 65,504.",
        evidence=(
            "operands: absmax 412.5 and 438.8, both finite; result: 12 inf of 1,024 elements.",
            "the same operands multiplied in float32 give absmax 181,000, all finite.",
        ),
        remedies=("gemma4-mlp-float32-product", "bfloat16"),
        references=("https://github.com/unslothai/unsloth-zoo/pull/600",),
    )


def _complete(label: str, step_time: float, memory: int) -> RunSummary:
    return RunSummary(
        label=label,
        steps_completed=8,
        steps_planned=8,
        loss=(0.1184, 0.1312, 0.1008, 0.09713, 0.1041, 0.0893, 0.0811, 0.07902),
        grad_norm=(2.731, 2.502, 2.113, 1.984, 1.871, 1.702, 1.655, 1.601),
        reward=(0.25, 0.25, 0.375, 0.5, 0.375, 0.5, 0.625, 0.5),
        step_time=step_time,
        peak_memory=memory,
    )


def _correction_trial() -> Trial:
    return Trial(
        remedy="gemma4-mlp-float32-product",
        summary="Multiplies in float32, clamps to ±65280 and rescues what is still not finite.",
        outcome=Outcome.FIXED,
        reason="8 of 8 steps, the finding is gone, everything finite.",
        safe=True,
        run=_complete("gemma4-mlp-float32-product", 0.401, 44_040_192),
        parity=Parity(
            median_kl=0.00021, p95_kl=0.0019, max_kl=0.0043, total_kl=0.0512, steps_compared=8, reward_equal_steps=7
        ),
        rescued_elements=0,
        clamped_elements=96,
        step_time_ratio=1.034,
        peak_memory_ratio=1.05,
        ratio_base="before",
    )


def _bfloat16_trial() -> Trial:
    return Trial(
        remedy="bfloat16",
        summary="Runs the model in bfloat16.",
        outcome=Outcome.FIXED,
        reason="8 of 8 steps, the finding is gone, everything finite.",
        safe=True,
        run=_complete("bfloat16", 0.395, 43_000_000),
        parity=Parity(median_kl=0.0, p95_kl=0.0, max_kl=0.0, total_kl=0.0, steps_compared=8, reward_equal_steps=8),
        step_time_ratio=1.018,
        peak_memory_ratio=1.025,
        ratio_base="before",
    )


def _refused_trial() -> Trial:
    return Trial(
        remedy="mlp-clamp",
        summary="Clamps the product.",
        outcome=Outcome.NOT_TRIED,
        reason="Gemma4TextMLP.forward takes (self, x, mask), this correction was written for (self, x).",
        safe=False,
    )


def _strip() -> tuple[StripRow, ...]:
    def row(
        fqn: str, cls: str, absmax: float | None, num_inf: int = 0, num_nan: int = 0, origin: bool = False
    ) -> StripRow:
        headroom = 65504.0 / absmax if absmax else None
        return StripRow(fqn=fqn, cls=cls, dtype="float16", absmax=absmax, num_nan=num_nan, num_inf=num_inf, headroom=headroom,
                        is_origin=origin)  # fmt: skip

    return (
        row("model.layers.0.pre_feedforward_layernorm", "Gemma4RMSNorm", 3.21),
        row("model.layers.0.mlp.gate_proj", "Linear", 412.5),
        row("model.layers.0.mlp.act_fn", "GELUTanh", 412.5),
        row("model.layers.0.mlp.up_proj", "Linear", 438.75),
        row("model.layers.0.mlp", "Gemma4TextMLP", 64512.0, num_inf=12, origin=True),
        row("model.layers.0.mlp.down_proj", "Linear", 30112.0, num_inf=40, num_nan=24),
        row("model.layers.0", "Gemma4TextDecoderLayer", None, num_nan=2048),
    )


def plain_text(line: Line) -> str:
    """The texts of a line without their looks."""
    texts = (part.text if isinstance(part, Words) else part for part in parts_of(line) if not isinstance(part, Bar))
    return "".join(texts)


def facts_of(report: Report) -> list[tuple[str, Line]]:
    """The labelled facts about the most important finding."""
    return [(fact.label, fact.line) for fact in ranked_facts(report)]
