"""Builds or loads what a scenario's ``model:`` asks for, packs it to 4 bits, and changes its weights: outliers, noise, float32 copies.

Libraries are imported where a model needs them: the call of a capsule may need none of them, and they take seconds.
"""

import fnmatch
import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of, is_persistent
from dtypedoctor.corrections.contract import runs_other_forward
from dtypedoctor.errors import UsageError, is_installed, require_installed
from dtypedoctor.interruptions import contained
from dtypedoctor.lab.scenarios.model import Lora, Model, Outlier, Perturbation, Quantization
from dtypedoctor.plugins import BUILTIN, known, registered, resolve
from dtypedoctor.plugins import Model as Registered
from dtypedoctor.replay.capsule import MODEL
from dtypedoctor.worker.call_fixes import load_capsule


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model on its device.

    Attributes:
        model: the model.
        tokenizer: the tokenizer that belongs to it; None for a checkpoint that has none, and without transformers.
        stream_choosers: functions that choose the CUDA streams of its kernels; see :class:`dtypedoctor.plugins.Model`.
    """

    model: nn.Module
    tokenizer: Any
    stream_choosers: tuple[str, ...] = ()


def set_seed(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def builder_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The options as keyword arguments; YAML keys with dashes become Python names."""
    return {key.replace("-", "_"): value for key, value in options.items()}


def _tokenizer_of_bytes() -> Any:
    """None without transformers: what runs without it asks for no tokenizer."""
    if not is_installed("transformers"):
        return None
    from dtypedoctor.lab.models.builtin import byte_tokenizer

    return byte_tokenizer()


def is_from_factory(spec: Model) -> bool:
    """Whether code of others makes the model, named as ``package.module:factory``."""
    is_ours = spec.name.startswith((MODEL, BUILTIN))
    return not is_ours and ":" in spec.name and not Path(spec.name).exists()


def build(spec: Model, device: torch.device, seed: int) -> Built:
    """Builds, scales, casts, packs and adapts a model, in this order, and moves it to ``device``, or with ``device_map`` to all of its kind.

    Weights and adapters are each drawn from ``seed`` anew, as TRL's trainers do when they add the adapters, so that an
    option of one does not change the other.

    Raises:
        UsageError: the model is unknown, cannot be loaded, or an option does not fit it.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    set_seed(seed)
    if spec.name.startswith(MODEL):
        allowed = spec.options.get("allow_code") is True  # which is asked for where the scenario was read
        capsule = load_capsule(Path(spec.name.removeprefix(MODEL)), dtype, device, allow_code=allowed)
        built = Built(model=capsule, tokenizer=None)
    elif spec.name.startswith(BUILTIN):
        built = _builtin(spec, dtype, device, seed)
    elif is_from_factory(spec):
        built = _prepare(_from_factory(spec), _tokenizer_of_bytes(), spec, dtype, device)
    else:
        model, tokenizer = load_pretrained(spec, dtype, device)
        built = Built(model=model, tokenizer=tokenizer)
    model = built.model
    if is_spread_out(spec, device):
        _require_on_gpus(model, spec.name)
    if spec.lora is not None:
        set_seed(seed)
        model = _adapt(model, spec.lora)
    if spec.gradient_checkpointing:
        _require(model, "gradient_checkpointing_enable", "gradient_checkpointing")
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec.float32_twin:
        widen(model)
    if spec.perturbation is not None:
        perturb(model, spec.perturbation, device)
    return replace(built, model=model)


def _builtin(spec: Model, dtype: torch.dtype, device: torch.device, seed: int) -> Built:
    name = spec.name.removeprefix(BUILTIN)
    builtin = registered(Registered).get(name)
    if builtin is None:
        raise UsageError(f"there is no builtin model {name!r}", known(Registered, BUILTIN))
    require_installed(spec.name, builtin.needs)
    arguments = builder_arguments(spec.options)
    if builtin.finished:
        given = {"outliers": spec.outliers, "lora": spec.lora, "quantization": spec.quantization}
        wrong = [key for key, value in given.items() if value]
        if wrong or spec.attention or spec.gradient_checkpointing or spec.device_map:
            raise UsageError(
                f"{spec.name} decides on its weights, packing and adapters itself: remove {', '.join(wrong) or 'the rest'}",
                "Its `options` choose among what it can do; see docs/scenarios.md.",
            )
        arguments |= {"dtype": dtype, "seed": seed}
    try:
        model = _code(builtin)(**arguments)
    except TypeError as error:
        raise UsageError(f"{spec.name} does not take these options: {error}", "See docs/scenarios.md.") from error
    if builtin.finished:
        built = Built(model=model.to(device), tokenizer=_tokenizer_of_bytes())
    else:
        built = _prepare(model, _tokenizer_of_bytes(), spec, dtype, device)
    return replace(built, stream_choosers=builtin.stream_choosers)


def _code(builtin: Registered) -> Callable[..., nn.Module]:
    try:
        return cast(Callable[..., nn.Module], resolve(builtin.build))
    except ImportError as error:
        raise UsageError(f"{BUILTIN}{builtin.name}: cannot import {builtin.build}: {error}") from error


def _from_factory(spec: Model) -> nn.Module:
    module_name, _, function_name = spec.name.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # at the end: a module there must not be taken for one of somebody else
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"cannot find the model factory {spec.name}: {error}",
            "Give package.module:function, importable from the current directory, or builtin:NAME.",
        ) from error
    model = None
    with contained() as refused:
        model = factory(**builder_arguments(spec.options))
    if (failure := refused.error) is not None:
        raise UsageError(f"the model factory {spec.name} raised {type(failure).__name__}: {failure}") from failure
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model factory {spec.name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _prepare(model: nn.Module, tokenizer: Any, spec: Model, dtype: torch.dtype, device: torch.device) -> Built:
    for outlier in spec.outliers:
        _scale(model, outlier)
    _cast(model, dtype)
    model = _placed(model, spec, device)
    if spec.attention is not None:
        _require(model, "set_attn_implementation", "attention")
        choose: Any = model.set_attn_implementation
        choose(spec.attention)
    if spec.quantization is not None:
        quantize_linears(model, spec.quantization, dtype)
    return Built(model=model, tokenizer=tokenizer)


def is_spread_out(spec: Model, device: torch.device) -> bool:
    """Whether the model's modules lie on several devices of the kind of ``device``; a CPU is one."""
    return spec.device_map is not None and device.type != "cpu"


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost ``nn.ModuleList`` objects that hold several modules, most of one class; empty where there are none.

    These are the regions that libraries shard, place and compile one by one: a decoder's layers, a vision tower's blocks.
    """
    layers: dict[nn.Module, None] = {}
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        most = max(Counter(map(type, members)).values(), default=0)
        is_row = len(members) > 1 and 2 * most > len(members)
        layers.update(dict.fromkeys(members if is_row else repeated_layers(child)))
    return list(layers)


def _placed(model: nn.Module, spec: Model, device: torch.device) -> nn.Module:
    """``model`` on ``device``, or spread over all GPUs as transformers spreads one that it loads, no block of it over two."""
    if not is_spread_out(spec, device):
        return model.to(device)
    if spec.quantization is not None:
        raise UsageError(f"{spec.name}: device_map cannot be combined with quantization here", "Load a checkpoint.")
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    blocks = {type(module) for module in repeated_layers(model) or model.children()} - {type(model)}
    whole = sorted(kind.__name__ for kind in blocks)
    room = get_balanced_memory(model, no_split_module_classes=whole)
    places = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    spread: nn.Module = dispatch_model(model, device_map=places)
    return spread


def _require_on_gpus(model: nn.Module, name: str) -> None:
    """Refuses weights that would be fetched for each call, because they have no place at which they could be measured.

    Raises:
        UsageError: a part of the model lies in the host's memory or on a disk.
    """
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    elsewhere = [part for part, place in places.items() if str(place) in ("cpu", "disk")]
    if elsewhere:
        count = torch.cuda.device_count()
        raise UsageError(
            f"{name} does not fit on {count} GPU{'' if count == 1 else 's'}: there is no room for {len(elsewhere)} of {len(places)} parts",
            "Take more GPUs, a dtype of fewer bytes, or run your own script by `dtypedoctor exec`.",
        )


def _require(model: nn.Module, method: str, key: str) -> None:
    """Refuses what would change nothing, so that no run is mistaken for one in another mode.

    Raises:
        UsageError: the model has no such method.
    """
    if not hasattr(model, method):
        raise UsageError(
            f"{type(model).__name__} has no {method}, so `{key}` cannot be chosen", f"Remove `{key}` from the scenario."
        )


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts what a checkpoint would hold, as ``from_pretrained`` does: ``model.to(dtype)`` would round the rotary tables,
    which are buffers that no checkpoint holds. Packed weights and integers are what they are.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
                parameter.data = parameter.data.to(dtype)
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_floating_point() and is_persistent(module, name):
                buffers_of(module)[name] = buffer.to(dtype)


def _scale(model: nn.Module, outlier: Outlier) -> None:
    matching = [p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, outlier.parameters)]
    if not matching:
        raise UsageError(
            f"outliers: no parameter matches {outlier.parameters!r}",
            f"The model has, for example, {next(iter(dict(model.named_parameters())), 'none')}.",
        )
    with torch.no_grad():
        for parameter in matching:
            parameter.mul_(outlier.scale)


def _adapt(model: nn.Module, spec: Lora) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=list(spec.targets),
        modules_to_save=list(spec.modules_to_save) or None,
        use_dora=spec.dora,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config, autocast_adapter_dtype=spec.autocast_adapter_dtype)
    except ValueError as error:
        raise UsageError(f"lora: {str(error).splitlines()[0]}", "Check `targets` and `modules_to_save`.") from error


def perturb(model: nn.Module, spec: Perturbation, device: torch.device) -> None:
    """Moves every unpacked floating parameter of ``model``, up or down at random, by one unit in the last place of ``spec.dtype``,
    and so each gradient that comes back to a parameter or to the output of a module without modules in it.

    The unit of a value x with 2^e <= |x| < 2^(e+1) is 2^e * eps, whatever dtype it is stored in (which should be float32, or
    the move is rounded); zeros stay zeros. A gradient's unit is no smaller than the smallest number of the dtype: a weight below
    that was rounded when the model was cast, a gradient is rounded in each backward pass anew. In float16 that is most of what a
    training step rounds. It is computed on ``device``: on the host it takes minutes for some billion weights.
    """
    generator = torch.Generator(device=device).manual_seed(spec.seed)
    limits = torch.finfo(getattr(torch, spec.dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not hasattr(parameter, "quant_state"):
                exact = parameter if parameter.device.type == device.type else parameter.to(device)
                parameter.copy_(exact + _unit(exact, limits.eps) * _signs(exact, generator))

    def moved(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # of an output that nothing has used
            return None
        unit = _unit(gradient, limits.eps, at_least=limits.smallest_normal * limits.eps)
        return gradient + unit * _signs(gradient, generator)

    def watch_output(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(moved)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(moved)
    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(watch_output)


def _unit(tensor: Tensor, eps: float, at_least: float = 0.0) -> Tensor:
    _, exponent = torch.frexp(tensor.float())  # |x| = m * 2^exponent with 0.5 <= m < 1
    unit = torch.ldexp(torch.full_like(tensor, eps, dtype=torch.float32), exponent - 1).clamp_min(at_least)
    return torch.where(tensor == 0, torch.zeros_like(unit), unit).to(tensor.dtype)


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, tensor.shape, generator=generator, device=generator.device, dtype=torch.int8)
    return (2 * bits - 1).to(device=tensor.device, dtype=tensor.dtype)


def widen(model: nn.Module) -> None:
    """Makes ``model`` its own float32 twin, in place.

    Floating parameters and buffers become float32, packed weights keep their codes but dequantize to float32, and fused
    modules go back to the forward methods of their class, whose kernels are not under suspicion.
    """
    for module in model.modules():
        if runs_other_forward(module):
            del module.__dict__["forward"]
        if hasattr(module, "compute_dtype"):
            vars(module)["compute_dtype"] = torch.float32
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            state: Any = getattr(tensor, "quant_state", None)
            if state is not None:
                state.dtype = torch.float32
            elif tensor.is_floating_point():
                tensor.data = tensor.data.float()


def load_pretrained(spec: Model, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Any]:
    """The model and its tokenizer; None for the tokenizer where the checkpoint has none, which plain passes do not need.

    A causal language model where transformers has one for the configuration, else the class that the checkpoint names.

    Raises:
        UsageError: it cannot be loaded, or an option does not fit it.
    """
    from transformers import AutoConfig

    if spec.outliers:
        raise UsageError(f"{spec.name}: outliers are for builtin models", "Remove `outliers`: real weights need none.")
    places = spec.device_map if is_spread_out(spec, device) else {"": device}
    arguments: dict[str, Any] = {"dtype": dtype, "device_map": places, "trust_remote_code": False}
    if spec.attention is not None:
        arguments["attn_implementation"] = spec.attention
    if spec.quantization is not None:
        arguments["quantization_config"] = _bnb_config(spec.quantization, dtype)
    try:
        model = _class_for(AutoConfig.from_pretrained(spec.name, trust_remote_code=False)).from_pretrained(
            spec.name, **arguments
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        place = "folder" if Path(spec.name).exists() else "model id"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") else ""
        raise UsageError(
            f"cannot load the {place} {spec.name!r}: {reason}",
            f"Give builtin:NAME, a folder with config.json and weights, or a hub id that can be reached.{offline}",
        ) from error
    return model, _tokenizer(spec.name)


def _class_for(config: Any) -> Any:
    import transformers
    from transformers import AutoModelForCausalLM

    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    named = (config.architectures or [""])[0]
    return getattr(transformers, named, AutoModelForCausalLM)


def _tokenizer(name: str) -> Any:
    """Without its files transformers makes up an empty one for some models, which knows no digit."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    if not tokenizer.decode(tokenizer("12")["input_ids"], skip_special_tokens=True):
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _bnb_config(spec: Quantization, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=spec.kind,
        bnb_4bit_use_double_quant=spec.nested,
        bnb_4bit_compute_dtype=getattr(torch, spec.compute_dtype) if spec.compute_dtype else dtype,
        llm_int8_skip_modules=list(spec.skip),
    )


def quantize_linears(model: nn.Module, spec: Quantization, dtype: torch.dtype) -> None:
    """Replaces every ``nn.Linear`` of ``model`` in place, except those that ``spec.skip`` names.

    Args:
        model: a model in ``dtype``.
        spec: what to pack and how.
        dtype: the model's dtype, taken where the specification leaves one open.
    """
    compute = getattr(torch, spec.compute_dtype) if spec.compute_dtype else dtype
    stored = getattr(torch, spec.quant_state_dtype) if spec.quant_state_dtype else dtype
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not any(part in spec.skip for part in name.split(".")):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _packed(module, spec, compute, stored))


def _packed(linear: nn.Linear, spec: Quantization, compute: torch.dtype, stored: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    packed = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute,
        compress_statistics=spec.nested,
        quant_type=spec.kind,
        device="meta",
    )
    weight = bnb.nn.Params4bit(
        linear.weight.data.to(stored), requires_grad=False, compress_statistics=spec.nested, quant_type=spec.kind
    )
    packed.weight = weight.to(linear.weight.device)
    # else one eval-mode forward on such a CPU reorders the bytes for good, and training then loses its gradients silently
    packed.support_avx512bf16_for_cpu = False
    if linear.bias is not None:
        packed.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    return packed
