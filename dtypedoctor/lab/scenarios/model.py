"""The Scenario: what to build, what to do with it, what is expected to go wrong and what fixes it; and the Request to run one.

Scenarios are immutable. A remedy, a reference run, a bisection probe are all scenarios derived from another one with
:meth:`Scenario.with_changes`, which validates again.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from dtypedoctor.replay.capsule import MODEL as CAPSULE
from dtypedoctor.text import SHARE

DTypeName = Literal["float16", "bfloat16", "float32", "float64"]
Device = Literal["auto", "cpu", "cuda"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
FixName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*(:[\w.,:\[\] -]+)?$", max_length=1000)]
"""A name; of ``keep-float32`` with its modules behind a colon, which ``exec --try`` takes."""
ConditionName = Literal["autocast-off", "eager-attention", "compile-off", "loss-scale-one"]


class Strict(BaseModel):
    """Base of all parts: immutable, unknown keys refused, no silent conversion (``yes`` is not 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Outlier(Strict):
    """Scales parameters of a builtin model, so that a tiny random model reaches the magnitudes of a trained one."""

    parameters: str = Field(description="Glob over dotted parameter names, e.g. `model.layers.0.mlp.gate_proj.weight`.")
    scale: float = Field(description="Factor by which the matching parameters are multiplied.")


class Lora(Strict):
    """LoRA adapters through peft."""

    r: int = Field(default=8, ge=1, description="Rank of the update matrices.")
    alpha: float = Field(default=16.0, gt=0, description="LoRA alpha; the update is scaled by alpha / r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability on the adapter's input.")
    targets: list[str] = Field(min_length=1, description="Names of the modules to adapt, as peft's `target_modules`.")
    modules_to_save: list[str] = Field(default_factory=list, description="Modules trained in full beside the adapters.")
    dora: bool = Field(default=False, description="Use DoRA (weight-decomposed LoRA).")
    autocast_adapter_dtype: bool = Field(
        default=True, description="peft's own flag: keep float16/bfloat16 adapters in float32."
    )


class Quantization(Strict):
    """4-bit weights through bitsandbytes."""

    kind: Literal["nf4", "fp4"] = Field(default="nf4", description="4-bit data type.")
    compute_dtype: DTypeName | None = Field(
        default=None, description="`bnb_4bit_compute_dtype`; the model's dtype if left out."
    )
    quant_state_dtype: DTypeName | None = Field(
        default=None, description="dtype stored in each `quant_state`; the model's dtype if left out."
    )
    nested: bool = Field(default=True, description="Quantize the statistics too (double quantization).")
    skip: list[str] = Field(
        default_factory=lambda: ["lm_head"], description="Modules that stay unquantised (matched by name part)."
    )


class Perturbation(Strict):
    """A random move of every unpacked weight by one unit in the last place of a dtype, up or down."""

    dtype: DTypeName = Field(description="Whose unit in the last place.")
    seed: int = Field(default=0, ge=0, description="Seed of the signs.")


class Model(Strict):
    """What to build or load."""

    name: str = Field(description="`builtin:NAME`, a local folder, a hub id, or `package.module:factory`.")
    dtype: DTypeName = Field(default="float32", description="dtype of the weights.")
    outliers: list[Outlier] = Field(default_factory=list, description="Scaled parameters (builtin models only).")
    lora: Lora | None = Field(default=None, description="LoRA adapters.")
    quantization: Quantization | None = Field(default=None, description="4-bit quantization.")
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = Field(
        default=None, description="Attention implementation; transformers' choice if left out."
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    device_map: Literal["auto"] | None = Field(
        default=None, description="`auto` spreads the modules over all GPUs, in one process; one device if left out."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Extra keyword arguments of a builtin model's builder."
    )
    float32_twin: bool = Field(
        default=False,
        description="Compute in float32 with the weights as `dtype` rounds them; output errors are against it.",
    )
    perturbation: Perturbation | None = Field(
        default=None, description="Move the weights a little, to see how much the outputs depend on rounding."
    )


def is_limited(model: Model | None) -> bool:
    """Whether a model is the module of a capsule that nobody trusts, whose call is made within limits of memory and time."""
    return model is not None and model.name.startswith(CAPSULE) and model.options.get("allow_code") is not True


class TrainSettings(Strict):
    """Settings that the training workloads share."""

    steps: int = Field(default=8, ge=1, description="Optimizer steps.")
    learning_rate: float = Field(default=1e-3, gt=0, description="Learning rate.")
    batch_size: int = Field(default=2, ge=1, description="Sequences per device and micro-step.")
    gradient_accumulation: int = Field(default=1, ge=1, description="Micro-steps per optimizer step.")
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="Optimizer.")


class Grpo(TrainSettings):
    """TRL's GRPOTrainer on a small arithmetic prompt set with a reward that needs no model."""

    kind: Literal["grpo"] = Field(description="Chooses this workload.")
    generations: int = Field(default=2, ge=2, description="Completions per prompt (`num_generations`).")
    new_tokens: int = Field(default=8, ge=1, description="Largest completion length.")
    prompts: int = Field(default=64, ge=1, description="Number of prompts in the generated data set.")
    beta: float = Field(default=0.0, ge=0, description="Weight of the KL term.")
    mixed_precision: Literal["no", "fp16", "bf16"] = Field(
        default="no", description="TRL's own amp flag (`fp16=`/`bf16=`); does nothing for float16 on a CPU."
    )


class Sft(TrainSettings):
    """TRL's SFTTrainer on a small arithmetic data set."""

    kind: Literal["sft"] = Field(description="Chooses this workload.")
    examples: int = Field(default=64, ge=1, description="Number of examples in the generated data set.")
    max_length: int = Field(default=64, ge=8, description="Longest example in tokens.")
    mixed_precision: Literal["no", "fp16", "bf16"] = Field(default="no", description="TRL's own amp flag.")


class Train(TrainSettings):
    """A plain PyTorch training loop on random token ids, without any trainer."""

    kind: Literal["train"] = Field(description="Chooses this workload.")
    sequence_length: int = Field(default=32, ge=1, description="Tokens per sequence.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Largest gradient norm; no clipping if null.")
    autocast_scope: Literal["forward", "loop"] = Field(
        default="forward", description="Whether autocast wraps each forward or the whole loop."
    )


class Forward(Strict):
    """Forward passes on random token ids; with `backward` also the gradients of the summed loss."""

    kind: Literal["forward"] = Field(description="Chooses this workload.")
    steps: int = Field(default=1, ge=1, description="Number of forward passes.")
    batch_size: int = Field(default=2, ge=1, description="Sequences per pass.")
    sequence_length: int = Field(default=32, ge=1, description="Tokens per sequence.")
    backward: bool = Field(default=False, description="Also run the backward pass.")


class Generate(Strict):
    """Text generation from short prompts."""

    kind: Literal["generate"] = Field(description="Chooses this workload.")
    steps: int = Field(default=1, ge=1, description="Number of `generate` calls.")
    batch_size: int = Field(default=2, ge=1, description="Prompts per call.")
    new_tokens: int = Field(default=8, ge=1, description="New tokens per prompt.")
    sample: bool = Field(default=True, description="Sample instead of greedy decoding.")


class Unload(Strict):
    """Deletes the model of the steps before and frees its memory, as a notebook user would."""

    kind: Literal["unload"] = Field(description="Chooses this workload.")


class Plugin(Strict):
    """A workload that another package has registered."""

    kind: Literal["plugin"] = Field(description="Chooses this workload.")
    name: str = Field(description="Name under which the package registers it.")
    steps: int = Field(default=1, ge=1, description="Steps that it is to do.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its own options.")


class Script(Strict):
    """Runs a user's script, unchanged, in a process of its own: the only step of its scenario."""

    kind: Literal["script"] = Field(description="Chooses this workload.")
    path: str | None = Field(default=None, description="Path of the script.")
    module: str | None = Field(default=None, description="Dotted module name, as `python -m`.")
    code: str | None = Field(default=None, description="Source text, as `python -c`.")
    args: list[str] = Field(default_factory=list, description="Arguments of the script.")
    command: list[str] = Field(
        default_factory=list,
        description="Another program that starts it, with all arguments: a launcher, say. `path` or `module` only names the script then.",
    )

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        given = [self.path is not None, self.module is not None, self.code is not None]
        if not self.command and sum(given) != 1:
            raise ValueError("give either path, module, code or command")
        return self


Workload = Annotated[Grpo | Sft | Train | Forward | Generate | Unload | Plugin | Script, Field(discriminator="kind")]


class Autocast(Strict):
    """An autocast region around the workload (for trainers: around `train()`)."""

    dtype: DTypeName = Field(description="Autocast dtype.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device type of the region.")


class Compile(Strict):
    """`torch.compile` of the model."""

    backend: Literal["inductor", "eager", "aot_eager"] = Field(default="inductor", description="Compiler backend.")
    fullgraph: bool = Field(default=False, description="Raise on graph breaks.")
    dynamic: bool | None = Field(default=None, description="torch.compile's `dynamic`.")
    regions: Literal["model", "layers"] = Field(
        default="model",
        description="The whole model, or each of its repeated layers by itself, compiled once for all that are alike.",
    )


class CorrectionSpec(Strict):
    """A correction to switch on inside the worker, with the modules it is meant for where it takes any."""

    id: Name = Field(description="Correction id.")
    modules: list[str] = Field(default_factory=list, description="Dotted module names, for corrections that take them.")


class ScenarioStep(Strict):
    """One thing done in the process; steps run in order and share it."""

    name: Name | None = Field(default=None, description="Name of the step in reports.")
    model: Model | None = Field(default=None, description="Model to build; the previous step's model if left out.")
    workload: Workload = Field(description="What to do with it.")
    autocast: Autocast | None = Field(default=None, description="Autocast region around the workload.")
    grad_scaler: bool = Field(default=False, description="Use a gradient scaler (plain training loop only).")
    compile: Compile | None = Field(default=None, description="Compile the model.")
    side_stream: bool = Field(
        default=False, description="Run the workload on a separate CUDA stream; no effect on a CPU."
    )


class Distributed(Strict):
    """Several processes of a script on this machine, which torchrun starts."""

    processes: int = Field(default=2, ge=1, le=64, description="Number of processes.")


class Reference(Strict):
    """The healthy run to compare with: the same scenario with these changes."""

    dtype: DTypeName = Field(default="bfloat16", description="dtype of every model.")
    autocast: bool = Field(default=False, description="Keep the autocast regions of the scenario.")
    compile: bool = Field(default=True, description="Compile the models that the scenario compiles.")


ReleaseBound = Annotated[str, Field(pattern=r"^[a-z0-9_]+(<|>=)[0-9]+(\.[0-9]+)*$", max_length=100)]


class Expectation(Strict):
    """What the scenario is there to show; `run` exits 0 only if it comes true."""

    findings: list[Name] = Field(default_factory=list, description="Finding ids, the root cause first.")
    cured_by: list[Name] = Field(default_factory=list, description="Fixes that work.")
    not_cured_by: list[Name] = Field(default_factory=list, description="Fixes that are tried and do not work.")
    only_on: Literal["cpu", "cuda"] | None = Field(
        default=None, description="The device on which this holds; elsewhere nothing is expected to go wrong."
    )
    seen_with: list[ReleaseBound] = Field(
        default_factory=list,
        description="Releases of libraries with which this was seen, as `transformers<5.24`; with others the run is reported and not judged.",
    )


OVERHEAD_BUDGET = Annotated[str, Field(pattern=SHARE)]
"""How much may be left unmeasured: see :attr:`Scenario.overhead_budget`."""


class Scenario(Strict):
    """A complete, reproducible run. See ``docs/scenario-keys.md`` for every key."""

    name: Name = Field(description="Name, equal to the file name without `.yaml`.")
    summary: str = Field(description="One sentence: what is shown.")
    references: list[str] = Field(default_factory=list, description="Public tickets of the failure.")
    requires: list[str] = Field(
        default_factory=list,
        description="Releases that it needs, each as `NAME==VERSION`: installed, or in `--wheels`.",
    )
    steps: list[ScenarioStep] = Field(min_length=1, description="What is done, in order, in one process.")
    device: Device = Field(default="auto", description="`auto` takes CUDA where there is one.")
    seed: int = Field(default=3407, ge=0, lt=2**32, description="Seed of weights, data and sampling.")
    time_limit: int = Field(
        default=600, ge=1, le=604_800, description="Seconds after which the worker is stopped; at most a week."
    )
    deterministic: bool = Field(default=True, description="Ask torch for deterministic algorithms.")
    overhead_budget: OVERHEAD_BUDGET = Field(
        default="off",
        description="`5%`: after the first steps as many are looked at as take no more of the time; `auto`: `1%` on a GPU, `5%` on a CPU; "
        "`1/16`: one of 16 steps; `off`: all. In the others the loss and the gradients of each optimizer step are measured.",
    )  # fmt: skip
    distributed: Distributed | None = Field(
        default=None, description="Run a script in several processes; a model that a scenario builds has one."
    )
    corrections: list[CorrectionSpec] = Field(default_factory=list, description="Corrections switched on in this run.")
    conditions: list[ConditionName] = Field(
        default_factory=list, description="Conditions of the whole process that are switched from outside in this run."
    )
    remedies: list[FixName] = Field(
        default_factory=list, description="Remedies to try beside those that the findings propose."
    )
    reference: Reference | None = Field(default=None, description="The run to compare with; none if left out.")
    expect: Expectation = Field(default_factory=Expectation, description="What this scenario shows.")

    @field_validator("steps")
    @classmethod
    def _first_step_has_a_model(cls, steps: list[ScenarioStep]) -> list[ScenarioStep]:
        if steps[0].model is None and not isinstance(steps[0].workload, Script):
            raise ValueError("the first step needs a model")
        return steps

    @field_validator("steps")
    @classmethod
    def _a_script_runs_alone(cls, steps: list[ScenarioStep]) -> list[ScenarioStep]:
        """A script has its process to itself and makes its own model, so nothing else of a step would have any effect."""
        for step in steps:
            if not isinstance(step.workload, Script):
                continue
            if len(steps) > 1:
                raise ValueError("a script is the only step of its scenario: it runs in a process of its own")
            given = [
                key for key in ("model", "autocast", "grad_scaler", "compile", "side_stream") if getattr(step, key)
            ]
            if given:
                raise ValueError(f"a script makes its model and its regions itself: leave out {', '.join(given)}")
        return steps

    @model_validator(mode="after")
    def _a_script_has_no_reference(self) -> Self:
        if self.reference is not None and isinstance(self.steps[0].workload, Script):
            raise ValueError(
                "a script has no `reference`: it makes its models itself, so it would only be run again as it is"
            )
        return self

    @model_validator(mode="after")
    def _a_script_may_have_processes(self) -> Self:
        if self.distributed is not None and not isinstance(self.steps[0].workload, Script):
            raise ValueError(
                "several processes run a script: leave out `distributed`, or run the script by `dtypedoctor exec`"
            )
        return self

    def with_changes(self, **changes: Any) -> "Scenario":
        """A copy with the given fields replaced, validated again (``model_copy`` alone would not validate)."""
        return Scenario.model_validate(self.model_dump() | changes)

    def with_each_step(self, edit: Callable[[dict[str, Any]], None]) -> "Scenario":
        """A copy in which ``edit`` has changed each step, as a scenario file has it; validated again."""
        steps = self.model_dump()["steps"]
        for step in steps:
            edit(step)
        return self.with_changes(steps=steps)


class Capture(Strict):
    """A module that is kept with its arguments in one call, the number of the outermost module call, so that the call can be repeated alone."""

    module: str
    call: int = Field(ge=1)


class Request(Strict):
    """One run of a worker. The trace goes to the directory that holds the request file.

    ``replay`` has failing calls made again in the process itself; ``capsule_limit`` is how many bytes a capsule of one may take, and without it none is kept.
    ``repeats`` and ``witness`` are for scripts, which seed their random numbers themselves or not at all: the label of the run whose
    random state this one begins with, and whether a digest of the parameters is taken after each optimizer step.
    ``repeatable`` has the random states kept for a later run. ``member`` is what launchers call the process that makes the request.
    ``look_steps`` is the last training step in which operators are looked at for failures that leave finite values; None for all. With 0 the
    weights get no checksum at the end either: a probe of a bisection asks where values stop being finite.
    """

    scenario: Scenario
    watch: bool = True
    replay: bool = Field(default=False, validation_alias=AliasChoices("replay", "standby"))
    capsule_limit: int | None = None
    repeats: str | None = None
    witness: bool = False
    repeatable: bool = False
    member: str = ""
    capture: Capture | None = None
    look_steps: int | None = None

    def to_text(self) -> str:
        """Write this as ASCII JSON. pydantic's own writer rejects arguments and file names with bytes that are no text."""
        return json.dumps(self.model_dump(mode="json"))

    @classmethod
    def from_text(cls, text: str | bytes) -> Self:
        """Read what :meth:`to_text` has written.

        Raises:
            ValueError: it is no request.
        """
        return cls.model_validate(json.loads(text))
