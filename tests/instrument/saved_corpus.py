"""Saved models with a seeded fault, and healthy ones: the truth that ``dtypedoctor verify`` is measured against.

Each case writes to a folder and returns what is saved, and the live model or the folder of which it is saved. Weights are tiny, libraries are real.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dtypedoctor.lab.verify.verdicts import (
    CAST,
    DECLARED,
    FUNCTION,
    MERGE,
    NOT_LOADED,
    NOT_SAVED,
    SHAPE,
    TIES,
    UNMERGE,
    UNQUANTIZED,
    UPDATE,
    VALUES,
)

Subject = tuple[Path, "nn.Module | Path"] | tuple[Path, "nn.Module | Path", Any]


@dataclass(frozen=True)
class Case:
    """A saved model; ``kind`` is what is wrong with it, empty for a healthy one."""

    make: Callable[[Path], Subject]
    kind: str

    @property
    def name(self) -> str:
        """For a test's id."""
        return self.make.__name__


CASES: list[Case] = []


def case(kind: str = "") -> Callable[[Callable[[Path], Subject]], Callable[[Path], Subject]]:
    def added(make: Callable[[Path], Subject]) -> Callable[[Path], Subject]:
        CASES.append(Case(make, kind))
        return make

    return added


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=tied, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def trained(model: nn.Module, rate: float = 1e-2, steps: int = 2) -> nn.Module:
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def adapted(model: nn.Module, size: float = 0.02, **changes: Any) -> PeftModel:
    """An adapter as after a training: B is not 0."""
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]} | changes)
    adapter = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(0, size)
    return adapter.eval()


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str = "model.safetensors") -> Path:
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
    return folder


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def reconfigured(folder: Path, file: str = "config.json", **changes: Any) -> Path:
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | changes))
    return folder


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def base_and_adapter(
    tmp: Path, dtype: torch.dtype = torch.float32, size: float = 0.02, **changes: Any
) -> tuple[Path, Path]:
    """A base in a folder, and an adapter that names it."""
    base = saved(llama(dtype), tmp / "base")
    return base, saved(adapted(LlamaForCausalLM.from_pretrained(base), size, **changes), tmp / "adapter")


def loaded(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)


QUERY = "model.layers.0.self_attn.q_proj.weight"


# Loading


@case(NOT_LOADED)
def a_key_is_renamed(tmp: Path) -> Subject:
    model = trained(llama())

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.attn.q_proj.weight"] = tensors.pop(QUERY)

    return rewritten(saved(model, tmp / "s"), change), model


@case(NOT_LOADED)
def a_shard_misses_a_tensor(tmp: Path) -> Subject:
    model = trained(llama())
    folder = saved(model, tmp / "s", max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    rewritten(folder, without(QUERY), index["weight_map"][QUERY])
    return folder, model


@case(NOT_LOADED)
def norms_of_ones_are_not_in_the_file(tmp: Path) -> Subject:
    """What a load leaves as initialized has the trained values here: only NaN tells them apart."""
    model = llama()
    return rewritten(saved(model, tmp / "s"), without("model.norm.weight")), model


@case(NOT_LOADED)
def every_key_has_the_prefix_of_a_wrapper(tmp: Path) -> Subject:
    model = small_net()
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, tmp / "net.pt")
    return tmp / "net.pt", model


@case(SHAPE)
def the_vocabulary_was_resized_after_the_save(tmp: Path) -> Subject:
    model = trained(llama())
    return reconfigured(saved(model, tmp / "s"), vocab_size=136), model


@case(NOT_LOADED)
def running_statistics_are_not_saved(tmp: Path) -> Subject:
    model = small_net()
    torch.save(dict(model.named_parameters()), tmp / "net.pt")
    return tmp / "net.pt", model


@case(NOT_LOADED)
def a_layer_of_the_adapter_is_not_in_its_file(tmp: Path) -> Subject:
    base, adapter = base_and_adapter(tmp)
    live = loaded(base, adapter)
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    return rewritten(adapter, without(key), "adapter_model.safetensors"), live


# Values


@case(VALUES)
def the_adapter_is_saved_before_the_last_step(tmp: Path) -> Subject:
    base = saved(llama(), tmp / "base")
    live = adapted(LlamaForCausalLM.from_pretrained(base))
    saved(live, tmp / "adapter")
    return tmp / "adapter", trained(live, steps=1)


@case(VALUES)
def two_layers_are_swapped(tmp: Path) -> Subject:
    model = trained(llama())
    other = QUERY.replace("layers.0", "layers.1")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUERY], tensors[other] = tensors[other], tensors[QUERY]

    return rewritten(saved(model, tmp / "s"), change), model


@case(VALUES)
def a_square_weight_is_transposed(tmp: Path) -> Subject:
    model = trained(llama())
    return rewritten(saved(model, tmp / "s"), lambda t: t.update({QUERY: t[QUERY].T})), model


@case(VALUES)
def running_statistics_are_those_of_the_start(tmp: Path) -> Subject:
    model = small_net()
    state = model.state_dict()
    torch.save(state | {"1.running_mean": torch.zeros(16), "1.running_var": torch.ones(16)}, tmp / "net.pt")
    return tmp / "net.pt", model


@case(VALUES)
def the_head_that_was_trained_is_not_saved_with_the_adapter(tmp: Path) -> Subject:
    base = saved(llama(), tmp / "base")
    live = adapted(LlamaForCausalLM.from_pretrained(base))
    with torch.no_grad():
        live.get_base_model().lm_head.weight.mul_(1.5)
    live.save_pretrained(tmp / "adapter")
    return tmp / "adapter", live


@case(NOT_SAVED)
def the_model_is_saved_without_its_head(tmp: Path) -> Subject:
    model = llama()
    return saved(model.model, tmp / "s"), model


# Dtypes


@case(CAST)
def float16_overflows(tmp: Path) -> Subject:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    return saved(copy.deepcopy(model).half(), tmp / "s"), model


@case(CAST)
def float16_flushes_a_tensor(tmp: Path) -> Subject:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e-6)
    return saved(copy.deepcopy(model).half(), tmp / "s"), model


@case(DECLARED)
def the_config_declares_bfloat16_for_float32_weights(tmp: Path) -> Subject:
    model = trained(llama())
    return reconfigured(saved(model, tmp / "s"), dtype="bfloat16"), model


@case(VALUES)
def a_buffer_went_through_half_precision(tmp: Path) -> Subject:
    """The rotary table of the live model is rounded, which no file tells: the loaded model has an exact one."""
    model = llama()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()
    return saved(model, tmp / "s"), model


# Ties and functions


@case(TIES)
def the_tied_head_is_untied_by_the_config(tmp: Path) -> Subject:
    model = trained(llama(tied=True))
    folder = saved(model, tmp / "s")
    rewritten(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    return reconfigured(folder, tie_word_embeddings=False), model


@case(FUNCTION)
def the_config_has_another_rotary_base(tmp: Path) -> Subject:
    model = llama()
    folder = saved(model, tmp / "s")
    config = json.loads((folder / "config.json").read_text())
    # A hidden activation leaves no tensor behind, unlike the rotary base
    assert config["hidden_act"] == "silu"
    return reconfigured(folder, hidden_act="gelu"), model


@case(FUNCTION)
def the_norms_epsilon_is_another(tmp: Path) -> Subject:
    model = llama(rms_norm_eps=1e-6)
    return reconfigured(saved(model, tmp / "s"), rms_norm_eps=1e-3), model


@case(FUNCTION)
def the_adapters_alpha_is_another(tmp: Path) -> Subject:
    base, adapter = base_and_adapter(tmp)
    live = loaded(base, adapter)
    return reconfigured(adapter, "adapter_config.json", lora_alpha=16), live


# Merges


def merged_by(
    tmp: Path, dtype: torch.dtype = torch.float32, size: float = 0.02, times: float = 1.0, **changes: Any
) -> Subject:
    base, adapter = base_and_adapter(tmp, dtype, size, **changes)
    live = loaded(base, adapter)
    other = copy.deepcopy(live)
    for module in other.modules():
        if hasattr(module, "lora_A"):
            module.scaling = {name: scale * times for name, scale in module.scaling.items()}
    return saved(other.merge_and_unload(), tmp / "merged"), adapter


@case(MERGE)
def merged_twice(tmp: Path) -> Subject:
    return merged_by(tmp, times=2.0)


@case(MERGE)
def merged_with_another_scale(tmp: Path) -> Subject:
    """lora_alpha / sqrt(r) in the place of lora_alpha / r."""
    return merged_by(tmp, torch.bfloat16, times=2.0**-1)


@case(MERGE)
def one_module_is_not_merged(tmp: Path) -> Subject:
    merged, adapter = merged_by(tmp)
    key = "model.layers.1.mlp.up_proj.weight"
    base = load_file(tmp / "base" / "model.safetensors")
    return rewritten(merged, lambda t: t.update({key: base[key]})), adapter


@case(UPDATE)
def merged_in_bfloat16_where_the_update_rounds_away(tmp: Path) -> Subject:
    return merged_by(tmp, torch.bfloat16, size=2e-5)


@case(UNQUANTIZED)
def merged_into_the_unquantized_base_of_a_quantized_training(tmp: Path) -> Subject:
    base = saved(llama(torch.bfloat16), tmp / "base")
    live = adapted(four_bit(base))
    saved(live, tmp / "adapter")
    return saved(loaded(base, tmp / "adapter").merge_and_unload(), tmp / "merged"), live


@case(UPDATE)
def merged_into_4_bit_weights_where_the_update_rounds_away(tmp: Path) -> Subject:
    base = saved(llama(torch.bfloat16), tmp / "base")
    live = adapted(four_bit(base), size=2e-4)
    return saved(copy.deepcopy(live).merge_and_unload(), tmp / "merged"), live


@case(UNMERGE)
def the_adapter_layer_unmerges_with_another_scale(tmp: Path) -> Subject:
    from peft.tuners.lora import Linear

    class Doubled(Linear):
        def unmerge(self) -> None:
            self.scaling = {name: 2 * scale for name, scale in self.scaling.items()}
            super().unmerge()

    base, adapter = base_and_adapter(tmp)
    live = loaded(base, adapter)
    for module in live.modules():
        if type(module) is Linear:
            module.__class__ = Doubled
    return adapter, live


# Quantized


def four_bit(folder: Path, **options: Any) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config)


@case(VALUES)
def dequantized_with_the_scales_of_another_layer(tmp: Path) -> Subject:
    base = saved(trained(llama()), tmp / "base")
    live = four_bit(base)
    dense = copy.deepcopy(live).dequantize()
    with torch.no_grad():
        dense.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    return saved(dense, tmp / "s"), live


@case(VALUES)
def quantized_weights_have_the_scales_of_another_layer(tmp: Path) -> Subject:
    live = four_bit(saved(trained(llama()), tmp / "base"))
    name = "model.layers.{}.mlp.up_proj.weight.absmax"
    return rewritten(saved(live, tmp / "s"), lambda t: t.update({name.format(0): t[name.format(1)]})), live


@case(VALUES)
def quantized_from_the_weights_before_the_training(tmp: Path) -> Subject:
    before = saved(llama(), tmp / "before")
    return saved(four_bit(before), tmp / "s"), trained(llama(), rate=1.0, steps=8)


@case(VALUES)
def quantized_rows_are_shorter_than_a_block(tmp: Path) -> Subject:
    """Nothing is seeded: bitsandbytes 0.50.2 dequantizes such rows wrongly on a CPU."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = saved(LlamaForCausalLM(config), tmp / "base")
    return saved(four_bit(base), tmp / "s"), base


# Healthy


def small_net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model(torch.randn(32, 8))
    return model


@case()
def a_llama(tmp: Path) -> Subject:
    model = trained(llama())
    return saved(model, tmp / "s"), model


@case()
def a_llama_in_bfloat16(tmp: Path) -> Subject:
    model = trained(llama(torch.bfloat16))
    return saved(model, tmp / "s"), model


@case()
def a_tied_llama_in_shards(tmp: Path) -> Subject:
    model = trained(llama(tied=True))
    return saved(model, tmp / "s", max_shard_size="60KB"), model


@case()
def a_float32_model_saved_in_bfloat16(tmp: Path) -> Subject:
    model = trained(llama())
    return saved(copy.deepcopy(model).bfloat16(), tmp / "s"), model


@case()
def a_float32_model_saved_in_float16(tmp: Path) -> Subject:
    model = trained(llama())
    return saved(copy.deepcopy(model).half(), tmp / "s"), model


@case()
def a_classifier_with_buffers(tmp: Path) -> Subject:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = BertForSequenceClassification(config).eval()
    return saved(model, tmp / "s"), model


@case()
def a_state_dict_with_running_statistics(tmp: Path) -> Subject:
    model = small_net()
    torch.save({"model": model.state_dict(), "step": 3, "optimizer": {"state": {}}}, tmp / "checkpoint.pt")
    return tmp / "checkpoint.pt", model, (torch.randn(4, 8),)


@case()
def a_compiled_model_saved_as_safetensors(tmp: Path) -> Subject:
    model = small_net()
    save_file(model.state_dict(), tmp / "net.safetensors")
    return tmp / "net.safetensors", torch.compile(model, backend="eager")


@case()
def a_diverged_model_whose_weights_are_nan(tmp: Path) -> Subject:
    model = small_net()
    with torch.no_grad():
        model[3].weight.fill_(float("nan"))
    torch.save(model.state_dict(), tmp / "net.pt")
    return tmp / "net.pt", model


@case()
def an_adapter(tmp: Path) -> Subject:
    base, adapter = base_and_adapter(tmp)
    return adapter, loaded(base, adapter)


@case()
def an_adapter_with_a_trained_head(tmp: Path) -> Subject:
    base, adapter = base_and_adapter(tmp, modules_to_save=["lm_head"])
    return adapter, loaded(base, adapter)


@case()
def an_adapter_whose_base_is_not_here(tmp: Path) -> Subject:
    model = adapted(llama())
    return saved(model, tmp / "adapter"), model


@case()
def merged(tmp: Path) -> Subject:
    return merged_by(tmp)


@case()
def merged_in_bfloat16(tmp: Path) -> Subject:
    return merged_by(tmp, torch.bfloat16)


@case()
def merged_in_float16_of_rank_32(tmp: Path) -> Subject:
    return merged_by(tmp, torch.float16, r=32)


@case()
def merged_embeddings_and_all_linear_layers(tmp: Path) -> Subject:
    return merged_by(tmp, target_modules=["embed_tokens", "q_proj", "down_proj", "lm_head"])


@case()
def merged_dora(tmp: Path) -> Subject:
    return merged_by(tmp, use_dora=True)


@case()
def merged_with_rank_stabilized_scale(tmp: Path) -> Subject:
    return merged_by(tmp, use_rslora=True, modules_to_save=["lm_head"])


@case()
def quantized_to_4_bits_and_saved(tmp: Path) -> Subject:
    live = four_bit(saved(trained(llama(torch.bfloat16)), tmp / "base"), bnb_4bit_use_double_quant=True)
    return saved(live, tmp / "s"), live


@case()
def quantized_to_4_bits_of_a_float_model(tmp: Path) -> Subject:
    base = saved(trained(llama()), tmp / "base")
    return saved(four_bit(base), tmp / "s"), base


@case()
def quantized_to_8_bits_of_a_float_model(tmp: Path) -> Subject:
    base = saved(trained(llama()), tmp / "base")
    model = LlamaForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    return saved(model, tmp / "s"), base


@case()
def dequantized_and_saved(tmp: Path) -> Subject:
    live = four_bit(saved(trained(llama()), tmp / "base"))
    return saved(copy.deepcopy(live).dequantize(), tmp / "s"), live


@case()
def an_adapter_of_a_4_bit_model_merged_into_its_dequantized_weights(tmp: Path) -> Subject:
    base = saved(llama(), tmp / "base")
    live = adapted(four_bit(base))
    saved(live, tmp / "adapter")
    dense = copy.deepcopy(four_bit(base)).dequantize()
    return saved(PeftModel.from_pretrained(dense, tmp / "adapter").merge_and_unload(), tmp / "merged"), live


@case()
def an_adapter_of_a_4_bit_model(tmp: Path) -> Subject:
    """Its folder names the base, and not how that was quantized."""
    live = adapted(four_bit(saved(llama(torch.bfloat16), tmp / "base")))
    return saved(live, tmp / "adapter"), live


@case()
def one_of_two_adapters(tmp: Path) -> Subject:
    live = adapted(LlamaForCausalLM.from_pretrained(saved(llama(), tmp / "base")))
    live.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return saved(live, tmp / "adapter"), live


@case()
def an_adapter_of_a_live_model_that_is_merged(tmp: Path) -> Subject:
    base, adapter = base_and_adapter(tmp, torch.bfloat16)
    return adapter, loaded(base, adapter).merge_and_unload()


@case()
def merged_ia3(tmp: Path) -> Subject:
    """No low rank: what the adapter computes is measured."""
    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(saved(llama(), tmp / "base"))
    live = get_peft_model(base, IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]))
    with torch.no_grad():
        for name, parameter in live.named_parameters():
            if "ia3" in name:
                parameter.uniform_(0.5, 1.5)
    saved(live, tmp / "adapter")
    return saved(copy.deepcopy(live).merge_and_unload(), tmp / "merged"), tmp / "adapter"


@case()
def experts_that_the_load_fuses(tmp: Path) -> Subject:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    return saved(model, tmp / "s"), model


@case()
def an_encoder_and_a_decoder_that_share_a_table(tmp: Path) -> Subject:
    torch.manual_seed(0)
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = T5ForConditionalGeneration(config).eval()
    return saved(model, tmp / "s"), model
