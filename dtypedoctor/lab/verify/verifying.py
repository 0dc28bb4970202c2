"""Verifies a saved model against the trained one: what was loaded, each tensor, ties, merges, and the function. Runs in a process of its own too."""

import copy
import importlib
import json
import math
import runpy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.foreign_files import write_file
from dtypedoctor.instrument.live_call import tensors_of
from dtypedoctor.instrument.module_tree import mapped
from dtypedoctor.lab.models.loading_errors import CANNOT_LOAD
from dtypedoctor.lab.verify.loading import Loaded, load
from dtypedoctor.lab.verify.verdicts import (
    CAST,
    DECLARED,
    FUNCTION,
    IDENTICAL,
    MERGE,
    MERGED,
    NOT_LOADED,
    NOT_SAVED,
    READ,
    REQUANTIZED,
    ROUNDED,
    SHAPE,
    TIES,
    UNMERGE,
    UNQUANTIZED,
    UPDATE,
    VALUES,
    Difference,
    Verification,
)
from dtypedoctor.lab.verify.weights import (
    NotComparableError,
    Update,
    Weight,
    adapter_layers,
    ties_of,
    unwrapped,
    weights_of,
    widest_spacing,
)

_EXPLAINED = 5
"""How many differing tensors are looked for among the others."""


def verify_saved(saved: Path | str, of: nn.Module | Path | str, inputs: Any = None) -> Verification:
    """Compares a saved model, loaded as its users load it, with the trained one.

    Args:
        saved: a model folder of transformers, an adapter folder of peft, or files of a state dict (safetensors, or pickled tensors).
        of: the live model, which stays as it is, or the folder of another saved one (base and adapter, say).
        inputs: what both models are called with, a tuple of arguments or a dict of keyword arguments; random token ids without it.

    Raises:
        UsageError: there is nothing of that name to load, or no library that loads it.
    """
    result = Verification(saved=str(saved), reference=type(of).__name__ if isinstance(of, nn.Module) else str(of))
    try:
        reference = unwrapped(of) if isinstance(of, nn.Module) else _reference(Path(of), result)
        loaded = load(Path(saved), reference)
    except NotComparableError as error:
        result.unknown.append(str(error))
        return result
    result.unknown += loaded.unknown
    _compare_with_files(loaded, result)
    # An adapter layer is compared as what it computes only where the other model has none
    merged = bool(adapter_layers(reference)) != bool(adapter_layers(loaded.model))
    was, now = weights_of(reference, merged=merged), weights_of(loaded.model, merged=merged)
    if was.keys().isdisjoint(now):  # the model below the head was saved by itself
        now = {f"{getattr(reference, 'base_model_prefix', '')}.{name}": weight for name, weight in now.items()}
    _compare_tensors(was, now, loaded, result)
    for name, layer in adapter_layers(reference if adapter_layers(reference) else loaded.model).items():
        try:
            _try_merge(name, layer, result)
        except (NotComparableError, *CANNOT_LOAD) as error:
            result.notes.append(f"not merged in a copy: {name}: {str(error)[:200]}")
    try:
        _compare_functions(reference, loaded.model, inputs, result)
    except CANNOT_LOAD as error:
        result.notes.append(f"the functions are not compared: {type(error).__name__}: {str(error)[:200]}")
    return result


def _reference(folder: Path, result: Verification) -> nn.Module:
    loaded = load(folder, None)
    if loaded.not_loaded:
        result.unknown.append(f"of {folder}, the reference, this is not loaded: {_several(loaded.not_loaded)}")
    return loaded.model


def _compare_with_files(loaded: Loaded, result: Verification) -> None:
    """Names what the load has left as it was, and compares the rest with what the files hold, cast to its dtype."""
    unused = f"; in the files, and not used: {_several(loaded.unexpected)}" if loaded.unexpected else ""
    for name, shapes in loaded.mismatched.items():
        result.add(Difference(tensor=name, kind=SHAPE, said=f"skipped by the load: {shapes}"))
    for name in loaded.not_loaded:
        if name not in loaded.mismatched:
            result.add(Difference(tensor=name, kind=NOT_LOADED, said=f"no value of the files arrives in it{unused}"))
    if unused and not loaded.not_loaded:
        result.notes.append(unused.removeprefix("; "))
    converted = []
    for name, tensor in loaded.stored.items():
        own = loaded.state.get(name)
        if isinstance(own, Tensor) and own.shape == tensor.shape:
            if not bits_equal(tensor.to(own.dtype), own.detach().cpu()):
                said = "its bits are not those of the file after the cast to its dtype"
                result.add(Difference(tensor=name, kind=READ, said=said))
        elif name not in loaded.unexpected and name not in loaded.mismatched:
            converted.append(name)
    if converted:
        result.notes.append(f"converted by the load, so not compared with the files: {_several(converted)}")


def _compare_tensors(was: dict[str, Weight], now: dict[str, Weight], loaded: Loaded, result: Verification) -> None:
    """Compares what both models compute with, name by name, and which names are one tensor."""
    for name in was.keys() - {*loaded.not_loaded, *loaded.mismatched}:
        if name not in now:
            if was[name].is_saved:
                result.add(Difference(tensor=name, kind=NOT_SAVED, said="the loaded model has no such tensor"))
            continue
        is_plain = name in loaded.stored and not now[name].packing
        try:
            compared = compare(name, was[name], now[name], loaded.stored[name].dtype if is_plain else None)
            if compared.kind == VALUES and len(result.differences) < _EXPLAINED:
                compared.said += _explained(name, was, now[name].dense())
            result.add(compared)
        except NotComparableError as error:
            result.unknown.append(f"{name}: {error}")
    before, after = (
        {frozenset(names & was.keys() & now.keys()) for names in ties_of(weights)} for weights in (was, now)
    )
    for names in before ^ after:
        if len(names) > 1:
            whose = "trained" if names in before else "saved"
            result.add(
                Difference(tensor=", ".join(sorted(names)), kind=TIES, said=f"one tensor in the {whose} model only")
            )


def _explained(name: str, trained: dict[str, Weight], values: Tensor) -> str:
    """Says that a tensor holds the trained values of another one, transposed, or times a factor."""
    was = trained[name].dense()
    if not bool((values != values.flatten()[:1]).any()):
        return "; all of its values are the same"
    for other, weight in trained.items():
        if (
            other != name
            and weight.tensor.shape == values.shape
            and bits_equal(weight.dense().to(values.dtype), values)
        ):
            return f"; it holds the values of {other}"
    if was.dim() == 2 and bits_equal(was.T.to(values.dtype), values):
        return "; it is transposed"
    a, b = was.double().flatten(), values.double().flatten()
    times = float((a * b).sum() / a.square().sum().clamp(min=1e-300))
    is_multiple = abs(times - 1) > 0.01 and float((b - times * a).norm()) < 0.01 * abs(times) * float(a.norm())
    return f"; it is {times:.3g} times the trained one" if is_multiple else ""


def _try_merge(name: str, layer: Any, result: Verification) -> None:
    """Merges a copy of an adapter layer and unmerges it: what the library makes of it, against W + s·BA and W."""
    twin = copy.deepcopy(layer)
    weight = next((weight for weight in weights_of(twin, merged=True).values() if weight.adapter), None)
    update = weight.update() if weight is not None and not weight.packing and hasattr(twin, "merge") else None
    if weight is None or update is None:
        return
    before = Weight(tensor=weight.tensor.detach().clone(), holder=weight.holder, is_saved=True, adapter=layer)
    twin.merge()
    compared = compare(name, before, Weight(tensor=twin.base_layer.weight, holder=twin.base_layer, is_saved=True))
    if compared.kind == MERGE:
        compared.said = f"{type(layer).__name__}.merge() of a copy: {compared.said}"
        result.add(compared)
    twin.unmerge()
    was, back = before.dense().double(), twin.base_layer.weight.detach().cpu().double()
    reach = float((was.abs() + update.delta.abs()).max())
    moved = float((was - back).abs().max())
    # Two sums are rounded, and so is the product in each of them
    if not moved <= 4 * torch.finfo(before.tensor.dtype).eps * reach:
        said = f"after merge() and unmerge() of a copy, W is off by up to {moved:.2g}, of at most {float(was.abs().max()):.2g}"
        result.add(Difference(tensor=name, kind=UNMERGE, said=said, size=moved / reach))


def _compare_functions(was: nn.Module, now: nn.Module, inputs: Any, result: Verification) -> None:
    """Calls both with the same inputs: as they are, and where their weights are the same also in float32 with the same values in both."""
    inputs = inputs if inputs is not None else _token_ids(was)
    if inputs is None:
        result.notes.append("the functions are not compared: no inputs are known; return (model, inputs) to give them")
        return
    first, second = _called(was, inputs), _called(now, inputs)
    said = "outputs for the same inputs are up to {:.3g} apart, of at most {:.3g}"
    apart, largest = _apart(first, second)
    result.notes.append(said.format(apart, largest) if largest else "the outputs have other shapes")
    if result.differences or not apart:
        return
    formats = [{weight.packing for weight in weights_of(model).values()} for model in (was, now)]
    if formats == [{""}, {""}]:
        models = [copy.deepcopy(model).float() for model in (was, now)]
        if len({bool(adapter_layers(model)) for model in models}) > 1:
            models = [_merged(model) if adapter_layers(model) else model for model in models]
        _transplant(weights_of(models[1]), weights_of(models[0]))
        first, second = (_called(model, inputs) for model in models)
        allowed = 1024 * torch.finfo(torch.float32).eps
    elif formats[0] == formats[1] and set(result.counts) == {IDENTICAL}:
        allowed = 16 * max(torch.finfo(tensor.dtype).eps for tensor in first)
    else:
        result.notes.append("one of the models is quantized otherwise, so only its weights are compared")
        return
    apart, largest = _apart(first, second)
    if not apart <= allowed * largest:
        result.add(Difference(tensor="", kind=FUNCTION, said=said.format(apart, largest)))


def _merged(model: Any) -> nn.Module:
    merged: nn.Module = model.merge_and_unload()
    return merged


def _transplant(source: dict[str, Weight], target: dict[str, Weight]) -> None:
    with torch.no_grad():
        for name in source.keys() & target.keys():
            if target[name].tensor.shape == source[name].tensor.shape:
                target[name].tensor.copy_(source[name].tensor)


def _token_ids(model: Any) -> dict[str, Tensor] | None:
    """Random ids for a model of transformers that takes them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "main_input_name", "") != "input_ids":
        return None
    size = base.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, size, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if base.config.is_encoder_decoder else {})


def _called(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The floating-point tensors that the model returns in evaluation mode, on the CPU; modes and generators stay."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    training = {module: module.training for module in model.modules()}
    given = mapped(inputs, lambda tensor: tensor.to(device), {})
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            output = model(**given) if isinstance(given, dict) else model(*given)
    finally:
        for module, was in training.items():
            module.training = was
    return [tensor.cpu() for tensor in tensors_of(getattr(output, "logits", output)) if tensor.is_floating_point()]


def _apart(first: list[Tensor], second: list[Tensor]) -> tuple[float, float]:
    """The largest difference, infinity where one has NaN or another shape, and the largest value."""
    if not first or [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        return math.inf, 0.0
    differences = [
        float((a.double() - b.double()).nan_to_num(math.inf).abs().max()) for a, b in zip(first, second, strict=True)
    ]
    return max(differences), max(float(tensor.double().abs().max()) for tensor in first)


def _several(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first


def live_model(named: str) -> tuple[nn.Module, Any]:
    """The live model that a user names, and its inputs where they come with it.

    Args:
        named: ``file.py``, which is run as a script, ``file.py:name`` or ``package.module:name``: a model, or a function that returns one or ``(model, inputs)``.

    Raises:
        UsageError: there is no such file, or no model under this name.
    """
    path, _, name = named.rpartition(":") if ":" in named else (named, "", "")
    is_file = path.endswith(".py")
    if (is_file or not name) and not Path(path).is_file():
        raise UsageError(f"{path}: no such file", "Give FILE.py:FUNCTION, or the folder of another saved model.")
    sys.path.insert(0, str(Path(path).resolve().parent if is_file else Path.cwd()))
    if name:
        module = importlib.import_module(Path(path).stem if is_file else path)
        if not hasattr(module, name):
            raise UsageError(f"{path}: has no {name!r}", "Name a model, or a function that returns one.")
        made = getattr(module, name)
        made = made() if callable(made) and not isinstance(made, nn.Module) else made
    else:
        models = list(_outermost(runpy.run_path(path, run_name="__main__").values()))
        if len(models) != 1:
            raise UsageError(f"{path}: leaves {len(models)} models in its variables", f"Name one: {path}:NAME.")
        made = models[0]
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{named}: is {type(model).__name__}, and no torch.nn.Module",
            "Name a model, or a function that returns one.",
        )
    return model, inputs


def _outermost(values: Iterable[Any]) -> Iterator[nn.Module]:
    models = {id(value): value for value in values if isinstance(value, nn.Module)}
    inner = {id(module) for model in models.values() for module in model.modules() if module is not model}
    yield from (model for key, model in models.items() if key not in inner)


_HOME = str(Path(__file__).resolve().parents[2])


def _as_program_raises(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints what Python would print of the script alone: the frames begin in it."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(
        (_HOME, "<frozen ", importlib.__file__)
    ):
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def main(request: dict[str, str]) -> None:
    """Verifies what a request names and writes what came of it, as JSON, to the request's ``result``."""
    sys.excepthook, of = _as_program_raises, request["of"]
    try:
        is_live = of.endswith(".py") or (":" in of and not Path(of).exists())
        subject, inputs = live_model(of) if is_live else (of, None)
        result = verify_saved(request["saved"], subject, inputs)
        result.reference = of
        answer: dict[str, Any] = result.data()
    except DoctorError as error:
        answer = {"message": error.message, "hint": error.hint}
    write_file(Path(request["result"]), json.dumps(answer))


_CHUNK = 1 << 22
"""Elements that are compared at a time, in float64."""
_STEP = 1 + 2**-4
"""How many times as far from the reference as the nearest codes quantized weights may be: their scales are rounded too."""


@dataclass(slots=True)
class Distance:
    """How far two tensors of one shape are apart.

    Attributes:
        units: the largest difference, in units of a dtype's rounding at the larger of the two values.
        differing: how many elements differ.
        size: norm of the difference over norm of the first.
        overflowed: elements that are finite in the first only.
        flushed: elements that are 0 in the second only.
    """

    units: float = 0.0
    differing: int = 0
    size: float = 0.0
    overflowed: int = 0
    flushed: int = 0


def distance(reference: Tensor, other: Tensor, dtype: torch.dtype) -> Distance:
    """Measures how far ``other`` is from ``reference``, where a unit is the spacing of ``dtype``."""
    info, apart, squares, norm = torch.finfo(dtype), Distance(), 0.0, 0.0
    first, second = reference.reshape(-1), other.reshape(-1)
    for begin in range(0, first.numel(), _CHUNK):
        a, b = first[begin : begin + _CHUNK].double(), second[begin : begin + _CHUNK].double()
        both, differing = a.isfinite() & b.isfinite(), (a != b) & ~(a.isnan() & b.isnan())
        error = torch.where(both, (a - b).abs(), 0.0)
        units = error / (torch.maximum(a.abs(), b.abs()).clamp(min=info.tiny) * info.eps)
        apart.units = max(
            apart.units, float(torch.where(differing & ~both, float("inf"), units).nan_to_num(0.0, float("inf")).max())
        )
        apart.differing += int(differing.sum())
        apart.overflowed += int((a.isfinite() & ~b.isfinite()).sum())
        apart.flushed += int(((a != 0) & (b == 0)).sum())
        squares += float(error.square().sum())
        norm += float(torch.where(both, a, 0.0).square().sum())
    apart.size = (squares / norm) ** 0.5 if norm else float(squares > 0)
    return apart


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def compare(name: str, reference: Weight, saved: Weight, stored: torch.dtype | None = None) -> Difference:
    """Compares the weight that a model computes with to the one that was trained.

    Args:
        name: of the tensor.
        reference: that was trained, with its adapters where the saved one has none.
        saved: as it is loaded.
        stored: its dtype in the file, through which it has gone.

    Raises:
        NotComparableError: one of the two cannot be read.
    """
    was, now = reference.dense(), saved.dense()
    if was.shape != now.shape:
        return Difference(tensor=name, kind=SHAPE, said=f"{list(was.shape)} was trained, {list(now.shape)} is loaded")
    update, added = reference.update(), saved.update()
    if added is not None:
        return _merged_weight(name, saved, reference, added, stored)
    if update is not None:
        return _merged_weight(name, reference, saved, update, stored)
    if saved.packing and not reference.packing:
        # Compares quantized values with dense ones: they may be as far away as the nearest codes are
        size = distance(was, now, torch.float32).size
        step = distance(was, saved.requantized(was), torch.float32).size
        said = f"off by {_percent(size)}, where the nearest {saved.packing} codes are off by {_percent(step)}"
        return Difference(tensor=name, kind=REQUANTIZED if size <= step * _STEP else VALUES, said=said, size=size)
    if not (was.is_floating_point() and now.is_floating_point()):
        differing = int((was != now).sum())
        kind = VALUES if differing else IDENTICAL
        return Difference(
            tensor=name, kind=kind, said=f"{differing:,} of {was.numel():,} values differ" if differing else ""
        )
    compared = _dense(name, was, now, stored, repacked=reference.packing != saved.packing)
    if compared.kind == VALUES and _is_unquantized(now, reference):
        compared.kind = UNQUANTIZED
    return compared


def _is_unquantized(dense: Tensor, packed: Weight) -> bool:
    """Whether quantizing dense values leads to the packed ones, or nearly: scales may be rounded, too."""
    if not packed.packing:
        return False
    was = packed.dense()
    again = distance(was, packed.requantized(dense), torch.float32)
    return again.size < distance(was, dense, torch.float32).size / 4


def _dense(name: str, was: Tensor, now: Tensor, stored: torch.dtype | None, *, repacked: bool) -> Difference:
    through = stored if stored is not None and stored.is_floating_point else now.dtype
    narrow = widest_spacing(was.dtype, now.dtype, through)
    apart = Distance() if bits_equal(was, now) else distance(was, now, narrow)
    if not apart.differing:
        return Difference(tensor=name, kind=IDENTICAL)
    compared = Difference(tensor=name, kind=VALUES, size=apart.size)
    compared.said = f"{apart.differing:,} of {was.numel():,} values differ"
    if bits_equal(was.to(through).to(now.dtype), now):
        compared.said = f"the cast to {_short(narrow)} changes {apart.differing:,} of {was.numel():,} values"
        # A cast that keeps the digits of each value moves none by more than half a unit
        is_rounded = not apart.overflowed and apart.size <= torch.finfo(narrow).eps / 2
        is_whole_in_file = torch.finfo(through).eps <= torch.finfo(was.dtype).eps and through != now.dtype
        compared.kind = CAST if not is_rounded else DECLARED if is_whole_in_file else ROUNDED
    elif (was.dtype != now.dtype or repacked) and apart.units <= 1:
        compared.kind = ROUNDED  # a cast that truncates, or a dequantization that rounds elsewhere
    if apart.overflowed:
        compared.said += f": {apart.overflowed:,} become inf or NaN"
    elif compared.kind == CAST:
        compared.said += f": {apart.flushed:,} become 0, and the whole is off by {_percent(apart.size)}"
    else:
        compared.said += (
            f", by up to {apart.units:.3g} units of {_short(narrow)}'s rounding ({_percent(apart.size)} of the whole)"
        )
    return compared


def _merged_weight(
    name: str, unmerged: Weight, merged: Weight, update: Update, stored: torch.dtype | None
) -> Difference:
    """Compares with W + s·BA: each element within the rounding of product and sum, and most of the update there."""
    was, values = unmerged.dense(), merged.dense()
    base, delta, now = was.double(), update.delta, values.double()
    wanted = base + delta
    error, length = now - wanted, float(delta.norm())
    if not length:
        return _dense(name, was, values, stored, repacked=True)
    lost, moved = float(error.norm()) / length, now - base
    arrived = float((moved * delta).sum()) / length**2
    compared = Difference(tensor=name, kind=MERGED, size=float(error.norm() / wanted.norm()))
    narrow = widest_spacing(was.dtype, values.dtype, stored or was.dtype)
    if merged.packing:
        step = merged.requantized(wanted.to(was.dtype)).double() - wanted
        is_right = float(error.norm()) <= float(step.norm()) * _STEP
    else:
        eps, of_update = torch.finfo(narrow).eps, torch.finfo(update.dtype).eps
        allowed = eps * (torch.maximum(wanted.abs(), base.abs()) + delta.abs()) + 2 * of_update * delta.abs()
        allowed += 16 * torch.finfo(torch.float32).eps * update.magnitude + torch.finfo(narrow).tiny
        is_right = bool((error.abs() <= allowed).all())
    if not is_right:
        # Where a multiple of the update explains the weight, the number of times says what has happened
        rest = float((moved - arrived * delta).norm()) / length
        is_multiple = rest <= max(0.1, abs(arrived) / 10)
        compared.kind = UNQUANTIZED if _is_unquantized(now - delta, unmerged) else MERGE
        compared.said = (
            f"it holds W + {arrived:.3g} times the update"
            if is_multiple
            else f"it is off by {lost:.3g} times the update's norm"
        )
    elif lost**2 >= 0.5:  # half of the update's squares: it is nearer to no merge than to a whole one
        compared.kind = UPDATE
        to = merged.packing or _short(narrow)
        compared.said = f"rounding to {to} moves it by {lost:.2g} times the update's norm; {_percent(arrived)} of the update arrives"
    else:
        compared.said = f"rounding is {_percent(lost)} of the update"
    return compared


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 10 else f"{share:.3g} times"


if __name__ == "__main__":
    main(json.load(sys.stdin))
