"""Loads a saved model as its users do, and measures what the load has filled: NaN that stays NaN, or that does not arrive, was not loaded."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dtypedoctor.errors import UsageError, require_installed
from dtypedoctor.foreign_files import parse_json, read_file
from dtypedoctor.lab.models.loading_errors import CANNOT_LOAD
from dtypedoctor.lab.verify.weights import NotComparableError, Weight, weights_of

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_OPTIMIZER = ("optimizer", "scheduler", "rng_state", "training_args", "scaler")
"""How files of a checkpoint begin that hold no model."""

Stored = Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A saved model after a load.

    Attributes:
        model: the model.
        stored: the tensors of its files by their names there; they are read when they are used.
        state: the tensors of the model, by the names that files have.
        not_loaded: parameters and buffers that no tensor of the files has filled.
        unexpected: names in the files that the model has no use for.
        mismatched: those skipped because of their shape, with both.
        unknown: what was not measured, each with the reason.
    """

    model: nn.Module
    stored: Stored
    state: Mapping[str, Any]
    not_loaded: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def load(saved: Path, live: nn.Module | None) -> Loaded:
    """Loads a folder or a file.

    Args:
        saved: a model folder of transformers, an adapter folder of peft, or files of a state dict.
        live: the trained model; it has the architecture that a state dict needs, and the base of an adapter that is not here. Not changed.

    Raises:
        UsageError: there is nothing to load, or a library is missing that loads it.
        NotComparableError: it cannot be loaded; in the words of the library.
    """
    if not saved.exists():
        raise UsageError(
            f"{saved}: no such file or folder", "Give the folder that `save_pretrained` or `torch.save` wrote."
        )
    try:
        if (saved / "adapter_config.json").is_file():
            return _load_adapter(saved, live)
        if (saved / "config.json").is_file():
            return _load_pretrained(saved, live)
        if live is None:
            raise UsageError(
                f"{saved}: has no config.json, so the model's class is not known", "Compare it with a live model."
            )
        return _load_state(saved, live)
    except CANNOT_LOAD as error:
        lines = str(error).strip().splitlines() or [""]
        raise NotComparableError(f"{saved.name} cannot be loaded: {type(error).__name__}: {lines[0][:300]}") from error


class _Files(Mapping[str, Tensor]):
    """The tensors of safetensors files, each read when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        opened: list[Any] = [safe_open(file, "pt") for file in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118  (no mapping)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def stored_in(saved: Path, expected: Collection[str] = ()) -> Stored:
    """The tensors of a folder's files or of one file; pickled ones are read with ``weights_only``.

    Args:
        saved: the folder or file.
        expected: names that the model has; of several state dicts in one file that with the most of them is meant.

    Raises:
        UsageError: there are none.
    """
    files = [saved]
    if saved.is_dir():
        files = sorted(path for path in saved.iterdir() if not path.name.startswith(_OPTIMIZER))
        for index in saved.glob("*.index.json"):  # shards of an earlier save may lie beside those that it names
            shards = parse_json(read_file(index, follow=True))["weight_map"].values()
            files = [path for path in files if path.name in shards]
    if tensors := [path for path in files if path.suffix == ".safetensors"]:
        return _Files(tensors)
    stored: dict[str, Tensor] = {}
    for path in files:
        if path.suffix in _PICKLED:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            states = [{k: v for k, v in state.items() if isinstance(v, Tensor)} for state in _mappings(content)]
            most = max(states, key=lambda state: (len(state.keys() & set(expected)), len(state)), default={})
            stored |= most
    if not stored:
        raise UsageError(
            f"{saved}: has no tensors", f"Give a folder or file of {', '.join(('.safetensors', *_PICKLED))}."
        )
    return stored


def _mappings(content: Any) -> Iterator[Mapping[str, Any]]:
    """The mapping and those in it: trainers put the model beside the optimizer."""
    if isinstance(content, Mapping) and all(isinstance(key, str) for key in content):
        yield content
        for value in content.values():
            yield from _mappings(value)


def _load_pretrained(folder: Path, live: nn.Module | None, **options: Any) -> Loaded:
    """Loads a model folder, and once more with NaN for all of its values: what is not NaN then no value of the files has filled."""
    require_installed(str(folder), ["transformers"])
    import transformers

    described = parse_json(read_file(folder / "config.json", follow=True))
    names = described.get("architectures") or [type(live).__name__]
    # A class of the user's own is only known from the live model; code that lies in the folder is not run
    kinds = {type(live).__name__: type(live)} if hasattr(live, "from_pretrained") else {}
    kind: Any = kinds.get(names[0]) or getattr(transformers, names[0], None) or next(iter(kinds.values()), None)
    if kind is None:
        raise UsageError(
            f"{folder}: transformers has no class {names[0]}", "Compare it with a live model of its class."
        )
    family, own = described.get("model_type"), kind.config_class.model_type
    # Sizes that the config does not name would be the usual ones of the class, and may fill the memory.
    if family is not None and own and family != own:
        raise NotComparableError(
            f"{folder.name} cannot be loaded: its config.json is of a model {family!r}, and {kind.__name__} is of {own!r}"
        )
    here = {"local_files_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = kind.from_pretrained(folder, **here, **options)
    stored = stored_in(folder)
    # Kernels that dequantize read memory as it lies, so only dense values may share the memory of one
    is_dense = not options and "quantization_config" not in described
    hollow = {name: _hollow(tensor, is_dense) for name, tensor in stored.items()}
    loaded = Loaded(model=model, stored=stored, state=model.state_dict(), unexpected=sorted(info["unexpected_keys"]))
    loaded.mismatched = {name: _shapes(of_file, own) for name, of_file, own in info["mismatched_keys"]}
    loaded.not_loaded = sorted(info["missing_keys"])
    try:
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        filled, _ = kind.from_pretrained(None, config=config, state_dict=hollow, **here, **options)
    except CANNOT_LOAD as error:
        loaded.unknown.append(f"what the load fills: {type(error).__name__}: {str(error)[:200]}")
        return loaded
    weights = weights_of(filled)
    not_nan = {name for name, weight in weights.items() if weight.is_saved and not _is_nan(weight)}
    loaded.not_loaded = sorted(not_nan | (weights.keys() & loaded.not_loaded))
    return loaded


def _hollow(tensor: Tensor, is_dense: bool) -> Tensor:
    """NaN in the tensor's dtype and shape; whole numbers stay."""
    if not tensor.is_floating_point():
        return tensor
    nan = torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape)
    return nan if is_dense else nan.contiguous()


def _shapes(of_file: Iterable[int], own: Iterable[int]) -> str:
    return f"{list(of_file)} in the file, {list(own)} in the model"


def _is_nan(weight: Weight) -> bool:
    """Whether all of it is NaN; whole numbers, which cannot be, count as if."""
    if not weight.packing and not weight.tensor.is_floating_point():
        return True
    try:
        values = weight.dense()
        one_for_all = not any(values.stride())  # as it was handed to the load, which reads no more of it either
        return bool((values.as_strided((1,), (1,)) if one_for_all else values).isnan().all())
    except NotComparableError:
        return True


def _load_adapter(folder: Path, live: nn.Module | None) -> Loaded:
    require_installed(str(folder), ["peft"])
    import peft

    wanted = peft.PeftConfig.from_pretrained(str(folder)).base_model_name_or_path or ""
    of_base = _base_folder(folder, wanted)
    trained: Any = live.get_base_model() if isinstance(live, peft.PeftModel) else None
    if of_base is not None:
        # An adapter's config does not say how its base was quantized in the training
        quantized = getattr(getattr(trained, "config", None), "quantization_config", None)
        loaded = _load_pretrained(of_base, None, **({"quantization_config": quantized} if quantized else {}))
    elif trained is not None:
        twin: Any = copy.deepcopy(live)
        loaded = Loaded(model=twin.base_model.unload(), stored={}, state={})
    else:
        raise UsageError(
            f"{folder}: its base model {wanted} is not here", "Write the base's folder to adapter_config.json."
        )
    name = live.active_adapter if isinstance(live, peft.PeftModel) else "default"
    model = peft.PeftModel.from_pretrained(loaded.model, str(folder), adapter_name=name)
    results: list[Any] = []
    own = {key: tensor for key, tensor in model.named_parameters() if name in key.split(".")}
    not_loaded = _untouched(own, lambda: results.append(model.load_adapter(str(folder), name)))
    state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    loaded.not_loaded += not_loaded
    loaded.unexpected = sorted(set(results[-1].unexpected_keys) - state.keys())
    loaded.model, loaded.stored, loaded.state = model.eval(), stored_in(folder), state
    return loaded


def _base_folder(folder: Path, wanted: str) -> Path | None:
    """Where the base of an adapter lies: a folder, or the cache of the hub; nothing is downloaded."""
    for path in (Path(wanted), folder / wanted):
        if wanted and (path / "config.json").is_file():
            return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(wanted, local_files_only=True))
    except (OSError, ValueError):
        return None


def _load_state(saved: Path, live: nn.Module) -> Loaded:
    """Loads a state dict into a copy of the live model that is filled with NaN before."""
    model = copy.deepcopy(live)
    weights = {name: weight for name, weight in weights_of(model).items() if weight.is_saved}
    stored = stored_in(saved, weights)
    before = model.state_dict()
    mismatched = {
        name: _shapes(tensor.shape, before[name].shape)
        for name, tensor in stored.items()
        if isinstance(before.get(name), Tensor) and before[name].shape != tensor.shape
    }
    fitting = {name: tensor for name, tensor in stored.items() if name not in mismatched}
    results: list[Any] = []
    dense = {name: weight.tensor for name, weight in weights.items() if not weight.packing}
    not_loaded = _untouched(dense, lambda: results.append(model.load_state_dict(fitting, strict=False)))
    return Loaded(
        model=model,
        stored=stored,
        state=model.state_dict(),
        not_loaded=not_loaded,
        unexpected=sorted(results[-1].unexpected_keys),
        mismatched=mismatched,
    )


def _untouched(tensors: Mapping[str, Tensor], load: Callable[[], None]) -> list[str]:
    """Names of the tensors that a load does not fill: those that stay NaN, and with a second load infinite, as a file may hold NaN itself."""
    names = list(tensors)
    for filling in (float("nan"), float("inf")):
        with torch.no_grad():
            for name in names:
                tensors[name].fill_(_as_value(filling, tensors[name].dtype))
        if names:
            load()
        names = [name for name in names if _has(tensors[name], _as_value(filling, tensors[name].dtype))]
    return names


def _as_value(filling: float, dtype: torch.dtype) -> float:
    """The filling, or in its place the ends of a dtype of whole numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return filling
    if dtype is torch.bool:
        return math.isnan(filling)
    return torch.iinfo(dtype).max if math.isnan(filling) else torch.iinfo(dtype).min


def _has(tensor: Tensor, value: float) -> bool:
    equal = tensor.isnan() if math.isnan(value) else tensor == value
    return tensor.numel() > 0 and bool(equal.any() if tensor.is_floating_point() else equal.all())
