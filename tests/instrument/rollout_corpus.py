"""Rollouts of real generation with a seeded difference to the trainer, and healthy ones: the truth that ``dtypedoctor parity`` is measured against.

Models are tiny and random, with weights that are large enough for a distribution that is not flat; what samples them is ``generate`` of transformers.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dtypedoctor.lab.parity.rollouts import PADDING, SAMPLING, SHIFT, WEIGHTS

SIZE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
OWN = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPTS = 16


@dataclass(frozen=True)
class Case:
    """A policy and what a generator drew, the verdict, and the kinds of changes that explain a gap together."""

    make: Callable[[Path], tuple[list[dict[str, Any]], list[Path]]]
    verdict: str
    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        """For a test's id."""
        return self.make.__name__


CASES: list[Case] = []


def case(verdict: str, *kinds: str) -> Callable[..., Any]:
    def added(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CASES.append(Case(make, verdict, kinds))
        return make

    return added


def llama(scale: float = 4, **changes: Any) -> Any:
    return _spread(LlamaForCausalLM(LlamaConfig(**SIZE, **OWN, **changes)), scale)


def _spread(model: Any, scale: float) -> Any:
    """Widens a random model's weights, so that some tokens are much likelier than others."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


def rows(model: Any, *, raw: bool = False, batch: int = 1, left: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """What ``generate`` draws for prompts of 3 to 9 tokens, and its log-probabilities: after what it does to scores, or before if ``raw``."""
    drawn = []
    for begin in range(0, PROMPTS, batch):
        prompts = [torch.randint(3, 128, (3 + number % 7,)) for number in range(begin, begin + batch)]
        longest = max(map(len, prompts))
        ids = torch.stack([nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        mask = torch.stack(
            [nn.functional.pad(torch.ones_like(prompt), (longest - len(prompt), 0)) for prompt in prompts]
        )
        output = model.generate(
            ids, attention_mask=mask, do_sample=True, max_new_tokens=16, output_scores=True, output_logits=True,
            return_dict_in_generate=True, **{"top_k": 0, **settings},
        )  # fmt: skip
        scores = torch.stack(output.logits if raw else output.scores, 1).float().log_softmax(-1)
        for prompt, completion, each in zip(prompts, output.sequences[:, longest:], scores, strict=True):
            ends = (completion == OWN["eos_token_id"]).nonzero()
            completion = completion[: int(ends[0]) + 1 if len(ends) else len(completion)]
            logprobs = each[torch.arange(len(completion)), completion]
            drawn.append(
                {
                    "prompt_ids": prompt.tolist(),
                    "completion_ids": completion.tolist(),
                    "logprobs": logprobs.tolist(),
                    **settings,
                }
            )
    return drawn


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def simple(make: Callable[[], Any], **settings: Any) -> Callable[[Path], Any]:
    def made(path: Path) -> tuple[list[dict[str, Any]], list[Path]]:
        torch.manual_seed(0)
        model = make()
        return rows(model, **settings), [saved(model, path / "policy")]

    return made


def healthy(name: str, verdict: str, make: Callable[[], Any], **settings: Any) -> None:
    made = simple(make, **settings)
    made.__name__ = name
    case(verdict)(made)


for dtype, verdict in ((torch.float32, "same"), (torch.bfloat16, "rounding"), (torch.float16, "rounding")):
    short = str(dtype).removeprefix("torch.")
    healthy(f"llama_{short}", verdict, lambda dtype=dtype: llama().to(dtype))
    healthy(f"llama_peaked_{short}", verdict, lambda dtype=dtype: llama(8).to(dtype), temperature=0.7)
    healthy(f"llama_in_batches_{short}", verdict, lambda dtype=dtype: llama().to(dtype), batch=8)
    healthy(
        f"qwen2_{short}",
        verdict,
        lambda dtype=dtype: _spread(Qwen2ForCausalLM(Qwen2Config(**SIZE, **OWN)), 4).to(dtype),
    )
    healthy(
        f"gemma2_{short}",
        verdict,
        lambda dtype=dtype: _spread(Gemma2ForCausalLM(Gemma2Config(**SIZE, **OWN, head_dim=16)), 4).to(dtype),
    )
    healthy(
        f"mixtral_{short}",
        verdict,
        lambda dtype=dtype: _spread(MixtralForCausalLM(MixtralConfig(**SIZE, **OWN, num_local_experts=4)), 4).to(dtype),
    )


def seeded(name: str, kinds: tuple[str, ...], make: Callable[[], Any], **settings: Any) -> None:
    made = simple(make, **settings)
    made.__name__ = name
    case("gap", *kinds)(made)


for dtype in (torch.float32, torch.bfloat16):
    short = str(dtype).removeprefix("torch.")
    seeded(f"top_p_{short}", (SAMPLING,), lambda dtype=dtype: llama().to(dtype), top_p=0.8)
    seeded(f"top_k_{short}", (SAMPLING,), lambda dtype=dtype: llama().to(dtype), top_k=20)
    seeded(f"min_p_{short}", (SAMPLING,), lambda dtype=dtype: llama().to(dtype), min_p=0.2)
    seeded(
        f"temperature_and_top_p_{short}", (SAMPLING,), lambda dtype=dtype: llama().to(dtype), temperature=0.6, top_p=0.9
    )
    seeded(f"raw_logprobs_{short}", (SAMPLING,), lambda dtype=dtype: llama().to(dtype), temperature=0.6, raw=True)
seeded(
    "gpt2_padded_on_the_left",
    (PADDING,),
    lambda: _spread(GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, **OWN)), 4),
)


def _with_another(path: Path, change: Callable[[Any], Any], dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The generator has other weights than the policy; both are saved."""
    torch.manual_seed(0)
    policy = llama()
    generator = change(copy.deepcopy(policy)).eval()
    return rows(generator.to(dtype), **settings), [
        saved(policy.to(dtype), path / "policy"),
        saved(generator, path / "generator"),
    ]


def _trained(model: Any) -> Any:
    """A few optimizer steps on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        ids = torch.randint(3, 128, (4, 16))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@case("gap", WEIGHTS)
def stale_weights(path: Path) -> Any:
    return _with_another(path, _trained)


@case("gap", WEIGHTS)
def stale_weights_in_bfloat16(path: Path) -> Any:
    return _with_another(path, _trained, torch.bfloat16)


@case("gap", SAMPLING, WEIGHTS)
def stale_weights_and_top_p(path: Path) -> Any:
    return _with_another(path, _trained, top_p=0.8)


@case("gap", WEIGHTS)
def one_layer_is_not_sent(path: Path) -> Any:
    def change(model: Any) -> Any:
        fresh = _trained(copy.deepcopy(model))
        model.model.layers[1].load_state_dict(fresh.model.layers[1].state_dict())
        return model

    return _with_another(path, change)


@case("gap", WEIGHTS)
def adapter_merged_twice(path: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    def change(model: Any) -> Any:
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        return adapted.merge_and_unload()

    return _with_another(path, change)


def _quantized(largest: float, dtype: torch.dtype) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                scale = module.weight.data.abs().amax(1, keepdim=True) / largest
                codes = module.weight.data / scale
                codes = codes if dtype.is_floating_point else codes.round()
                module.weight.data = codes.to(dtype).float() * scale
        return model

    return change


@case("gap", WEIGHTS)
def generated_in_float8(path: Path) -> Any:
    drawn, folders = _with_another(path, _quantized(448, torch.float8_e4m3fn))
    return drawn, folders[:1]


@case("gap", WEIGHTS)
def generated_in_int8(path: Path) -> Any:
    drawn, folders = _with_another(path, _quantized(127, torch.int8))
    return drawn, folders[:1]


@case("gap", SHIFT)
def logprobs_of_the_token_before(path: Path) -> Any:
    torch.manual_seed(0)
    model = llama()
    drawn = rows(model)
    for row in drawn:
        row["logprobs"] = [*row["logprobs"][1:], row["logprobs"][-1]]
    return drawn, [saved(model, path / "policy")]


@case("gap")
def generated_in_bfloat16_and_trained_in_float32(path: Path) -> Any:
    """The generator's own rounding is not the trainer's in bfloat16, so no change removes half of it."""
    torch.manual_seed(0)
    model = llama(8)
    folder = saved(model, path / "policy")
    return rows(model.to(torch.bfloat16)), [folder]


@case("gap")
def of_another_prompt(path: Path) -> Any:
    """A chat template has added a token that the file does not have."""
    torch.manual_seed(0)
    model = llama()
    drawn = rows(model)
    for row in drawn:
        row["prompt_ids"] = row["prompt_ids"][:-1]
    return drawn, [saved(model, path / "policy")]
