"""What may be around the workload of a stage: a call that is captured, a CUDA stream of its own, the compiler."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import recompiling, stays_uncompiled
from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.capture import Tensors, describe, recipe
from dtypedoctor.instrument.compile_events import CompileWatch
from dtypedoctor.instrument.live_call import tensors_of
from dtypedoctor.instrument.module_tree import named_modules
from dtypedoctor.lab.models.build import repeated_layers
from dtypedoctor.lab.scenarios.model import Capture as Wanted
from dtypedoctor.lab.scenarios.model import Compile, Generate, Grpo, Workload
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.records.execution import StreamLaunches
from dtypedoctor.unpatched import to_json
from dtypedoctor.worker.call_fixes import call_of

if TYPE_CHECKING:
    from dtypedoctor.instrument.session import Position
    from dtypedoctor.lab.workloads.context import Context

Chooser = Callable[[torch.device], ctypes.c_void_p]


@contextmanager
def watching_streams(owner: Any, name: str) -> Iterator[Counter[tuple[str, int, int]]]:
    """Counts launches while a function ``(device) -> stream handle`` of a module chooses their streams; callers must look it up at each call.

    Work launched on another stream than the one that is current is not ordered with what the current stream does before and after it, and a stream
    of another device belongs to memory that the kernel does not write to (public description: https://github.com/thad0ctor/axolotl/pull/25).
    Neither raises where it happens.

    Yields:
        Launches by device, the handle that was chosen and that of the current stream; 0 is the default stream.
    """
    original: Chooser = getattr(owner, name)
    launches: Counter[tuple[str, int, int]] = Counter()

    def watched(device: torch.device) -> ctypes.c_void_p:
        chosen = original(device)
        launches[str(device), chosen.value or 0, torch.cuda.current_stream(device).cuda_stream] += 1
        return chosen

    setattr(owner, name, watched)
    try:
        yield launches
    finally:
        setattr(owner, name, original)


@contextmanager
def capturing(context: "Context", wanted: Wanted | None, directory: Path) -> Iterator[None]:
    """Inside, the wanted call is watched for; it is written to ``directory`` at the end, also when the workload raises.

    Raises:
        UsageError: the model has no such module.
    """
    if wanted is None or context.holder.built is None:
        yield
        return
    position = context.instruments.position
    try:
        capture = Capture(context.built.model, wanted.module, call=wanted.call, position=position)
    except KeyError:
        raise UsageError(f"the model has no module {wanted.module!r} to capture") from None
    try:
        yield
    finally:
        capture.write(directory)


@contextmanager
def streaming(context: "Context") -> Iterator[None]:
    """Around a workload; streams exist on CUDA only. Where they are not looked at, that is recorded.

    Which stream a kernel is launched on can be seen where the model says which functions choose it
    (:class:`dtypedoctor.plugins.Model`). For each kind of launch a :class:`StreamLaunches` is written.
    """
    choosers = context.holder.built.stream_choosers if context.holder.built is not None else ()
    # why launches are not listened to; empty if they are
    if context.device.type != "cuda":
        why_not = "there is no CUDA device here"
    elif context.stage.compile is not None:
        why_not = "the model is compiled, and a listener would be compiled with it"
    else:
        why_not = ""
    if why_not and (choosers or context.stage.side_stream):
        context.instruments.writer.write(NotWatched(what="CUDA streams", why=why_not))
    if context.device.type != "cuda":
        yield
        return
    listened_to = choosers if not why_not and context.instruments.watching else ()
    watches = []
    with ExitStack() as listening:
        for module, _, function in (chooser.partition(":") for chooser in listened_to):
            watches.append(listening.enter_context(watching_streams(import_module(module), function)))
        if context.stage.side_stream:
            torch.cuda.synchronize(context.device)  # what the default stream has prepared must be there
            with torch.cuda.stream(torch.cuda.Stream(context.device)):
                yield
            torch.cuda.synchronize(context.device)
        else:
            yield
    for (device, used, current), number in (kind for launches in watches for kind in launches.most_common()):
        launch = StreamLaunches(device=device, used=used, current=current, count=number, stale=used != current)
        context.instruments.session.emit(launch)


@contextmanager
def compiling(context: "Context") -> Iterator[None]:
    """Inside, ``context.model`` is compiled if the stage asks for it; what Dynamo reports is recorded at the end.

    The records are written also when the workload raises: with ``fullgraph`` a graph break is an exception.
    """
    spec = context.stage.compile
    if spec is None:
        yield
        return
    with _regions_compiled(context, spec):
        if not context.instruments.watching:
            yield
            return
        watch = CompileWatch()
        try:
            with watch:
                yield
        finally:
            for what, fqn in watch.observations(context.instruments.code_places.module_at):
                context.instruments.session.emit(what, fqn=fqn, phase="compile")


@contextmanager
def _regions_compiled(context: "Context", spec: Compile) -> Iterator[None]:
    model = context.built.model
    if spec.regions == "model":
        context.compiled = _compiled(spec, model)
        context.instruments.name_as(context.compiled, model)
        yield
        return
    layers = repeated_layers(model)
    if not layers:
        raise UsageError("compile.regions: the model has no repeated layers", "Use `regions: model`.")
    with _layers_compiled(spec, layers), _without_cache(model, context.stage.workload):
        yield


def _compiled(spec: Compile, what: Any) -> Any:
    return torch.compile(what, backend=spec.backend, fullgraph=spec.fullgraph, dynamic=spec.dynamic)


@contextmanager
def _layers_compiled(spec: Compile, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the code of each layer's ``forward`` is compiled; hooks on the layers run outside of it, so what they return is measured.

    One that is to stay out of compiled code, as what is kept in float32 and what that calls, is left as it is.
    """
    layers = [layer for layer in layers if not stays_uncompiled(layer.forward)]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _compiled(spec, layer.forward)
    try:
        # layers that differ in kind are versions of the same function
        with recompiling(len(layers)):
            yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


@contextmanager
def _without_cache(model: nn.Module, workload: Workload) -> Iterator[None]:
    """Inside, a transformers model keeps no cache of keys and values, unless it is to generate: each layer has an index of its own there,
    for which it would be compiled anew."""
    config: Any = getattr(model, "config", None)
    if isinstance(workload, Generate | Grpo) or not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True


DESCRIPTION, TENSORS = "capture.json", "capture.safetensors"


class Capture:
    """Watches one module of a model until its call comes, and keeps what it was given there, its parameters and buffers, and the gradients that come back.

    Args:
        model: the model, corrections installed.
        fqn: dotted name of the module.
        call: number of the outermost module call.
        position: tells which call is going on.

    Raises:
        KeyError: the model has no such module.
    """

    def __init__(self, model: nn.Module, fqn: str, *, call: int, position: "Position") -> None:
        self._module = dict(named_modules(model))[fqn]
        self._call = call
        self._position = position
        self._tensors = Tensors()
        self._found: dict[str, Any] | None = None
        self._present = self._module.__dict__.get("forward")
        self._module.forward = self._around(self._module.forward)

    def write(self, directory: Path) -> None:
        """Takes the hook out again and writes ``capture.json`` and ``capture.safetensors``; nothing where the call did not come."""
        self._put_back()
        if self._found is None:
            return
        from safetensors.torch import save_file

        save_file(self._tensors.named(), directory / TENSORS)
        (directory / DESCRIPTION).write_text(to_json(self._found), encoding="utf-8")

    def _put_back(self) -> None:
        if self._present is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.forward = self._present

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            position = self._position
            if self._found is not None or position.call != self._call or position.muted:
                return original(*args, **kwargs)
            with position.mute():
                found = self._found = self._described(args, kwargs)
            result = original(*args, **kwargs)
            with position.mute():
                gradients: dict[str, str] = {}
                found["leaving"].append({"what": "the output", "gradients": gradients})
                for index, tensor in enumerate(tensors_of(result)):
                    if tensor.requires_grad:
                        tensor.register_hook(self._keep_gradient(gradients, str(index)))
            return result

        return forward

    def _described(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        module = self._module
        watched = module.__dict__.pop("forward")
        self._put_back()  # the recipe must not hold this watch's own forward
        try:
            described = recipe(module, self._tensors)
        finally:
            module.__dict__["forward"] = watched
        return {
            "recipe": described,
            "args": [describe(value, self._tensors, f"input.{i}") for i, value in enumerate(args)],
            "kwargs": {name: describe(value, self._tensors, f"input.{name}") for name, value in kwargs.items()},
            "training": module.training,
            "grad": torch.is_grad_enabled(),
            "autocast": list(_autocast_regions()),
            "leaving": [],
        }

    def _keep_gradient(self, gradients: dict[str, str], index: str) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None and index not in gradients:
                gradients[index] = self._tensors.keep(f"gradient.0.{index}", gradient)

        return hook


def run_capsule_call(context: "Context") -> None:
    """Makes the one call of a capsule, and the backward pass through it where the capsule holds the gradients that come back.

    It stands here and not among the workloads, whose lines count as the program's: in a replay no line of ours is the user's.

    Raises:
        UsageError: the model is not the module of a capsule.
    """
    call = call_of(context.built.model)
    context.begin_step()
    if call.random is not None:
        torch.set_rng_state(call.random)
    with call.settings.in_force(), torch.set_grad_enabled(call.grad), context.region():
        output = context.model(*call.args, **call.kwargs)
    found = list(tensors_of(output))
    ends = [index for index in call.gradients if index < len(found) and found[index].requires_grad]
    if ends:
        torch.autograd.backward(
            [found[index] for index in ends], [call.gradients[index].to(found[index].dtype) for index in ends]
        )
    context.steps_completed = 1


def _autocast_regions() -> Iterator[tuple[str, str]]:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            yield device, str(torch.get_autocast_dtype(device)).removeprefix("torch.")
