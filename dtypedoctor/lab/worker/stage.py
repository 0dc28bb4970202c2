"""What may be around the workload of a stage: a call that is captured, a CUDA stream of its own, the compiler, a group of processes."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dtypedoctor._torch_private import recompiling, stays_uncompiled
from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.capture import Capture
from dtypedoctor.instrument.compile_events import CompileWatch, observations
from dtypedoctor.instrument.places import residual_blocks
from dtypedoctor.lab.scenarios.model import Capture as Wanted
from dtypedoctor.lab.scenarios.model import Compile, Distributed, Generate, Grpo, Scenario, ScenarioStep, Sft, Workload
from dtypedoctor.plugins import KEEP_FLOAT32
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.ranks import Member, member_of_torchrun
from dtypedoctor.trace.records.execution import StreamLaunches

if TYPE_CHECKING:
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
        capture = Capture(context.built.model, wanted.module, own=wanted.own, call=wanted.call, position=position)
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
            for what, fqn in observations(watch.report(), context.instruments.code_places.module_at):
                context.instruments.session.emit(what, fqn=fqn, phase="compile")


@contextmanager
def _regions_compiled(context: "Context", spec: Compile) -> Iterator[None]:
    model = context.built.model
    if spec.regions == "model":
        context.compiled = _compiled(spec, model)
        context.instruments.name_as(context.compiled, model)
        yield
        return
    with _layers_compiled(spec, repeated_layers(model)), _without_cache(model, context.stage.workload):
        yield


def _compiled(spec: Compile, what: Any) -> Any:
    return torch.compile(what, backend=spec.backend, fullgraph=spec.fullgraph, dynamic=spec.dynamic)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The members of each ``nn.ModuleList`` of at least two modules of one class; of nested lists those of the outer ones.

    These are the regions that libraries compile one by one: a decoder's layers, a vision tower's blocks.

    Raises:
        UsageError: there are none.
    """
    found = list(_repeated(model))
    if not found:
        raise UsageError("compile.regions: the model has no repeated layers", "Use `regions: model`.")
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if len(members) > 1 and len({type(member) for member in members}) == 1:
            yield from members
        else:
            yield from _repeated(child)


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


BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def take_device(device: torch.device) -> None:
    """Gives this process, if it is one of several, a GPU of its own.

    Raises:
        UsageError: there are not enough of them.
    """
    here = member_of_torchrun()
    if here is None or device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if here.local_rank >= count:
        raise UsageError(
            f"{here.world_size} processes need a CUDA device each, and there are {count}", "Add `--device cpu`."
        )
    torch.cuda.set_device(here.local_rank)


def will_be_sharded(scenario: Scenario, stage: ScenarioStep) -> bool:
    """Whether no device needs room for the whole model: each unit of FSDP2 is moved to one when it is sharded.

    What bitsandbytes packs on a device is not what it packs on the host.
    """
    spec = scenario.distributed
    is_packed = stage.model is not None and stage.model.quantization is not None
    return spec is not None and spec.strategy == "fsdp" and member_of_torchrun() is not None and not is_packed


class Meeting:
    """What the ranks tell each other without a collective, in which one that fails would leave the others waiting.

    Args:
        store: theirs.
        here: which of them this is.
    """

    def __init__(self, store: Store, here: Member) -> None:
        self._store = store
        self._here = here

    def go_on_together(self, error: BaseException | None, seconds: float) -> None:
        """Each rank calls this after the same forward pass, with what it has raised there.

        Where a rank raises that others do not, these wait for it in a collective, and its next one would meet theirs: it cannot go on.

        Args:
            error: what this rank has raised; None if nothing.
            seconds: how long the others may take to come here as well.

        Raises:
            BaseException: ``error``, if another rank does not come.
        """
        self._store.set(f"passed {self._here.rank}", "")
        if error is None:
            return
        try:
            self._store.wait([f"passed {rank}" for rank in range(self._here.world_size)], timedelta(seconds=seconds))
        except RuntimeError:  # torch raises DistStoreError, which is one
            raise error from None


_GROUPS = count(1)
"""Numbers of the process groups of this process, one for each stage; all ranks count alike."""


@contextmanager
def parallel(context: "Context") -> Iterator[Meeting | None]:
    """Inside, ``context.model`` is wrapped as the scenario asks, and this process belongs to the group of all ranks, who can meet."""
    spec = context.scenario.distributed
    here = member_of_torchrun()
    if spec is None or here is None:
        yield None
        return
    context.rank = here.rank
    store = PrefixStore(
        f"group {next(_GROUPS)}", next(iter(rendezvous("env://", here.rank, here.world_size)))[0]
    )  # what an earlier stage has written means nothing to this one
    dist.init_process_group(
        BACKENDS[context.device.type],
        store=store,
        rank=here.rank,
        world_size=here.world_size,
    )
    try:
        model = context.built.model
        if spec.strategy == "fsdp":
            if any(one.id == KEEP_FLOAT32 for one in context.scenario.corrections):
                raise UsageError(
                    f"{KEEP_FLOAT32} keeps nothing in a model that FSDP2 shards", "Leave one of the two out."
                )
            shard(model, spec)
        elif isinstance(context.stage.workload, (Sft, Grpo)):
            pass  # the trainer finds the group, and wraps the model itself
        elif any(parameter.requires_grad for parameter in model.parameters()):
            context.wrapped = nn.parallel.DistributedDataParallel(model)
            context.instruments.name_as(context.wrapped, model)
        yield Meeting(store, here)
    finally:
        context.wrapped = None
        dist.destroy_process_group()


def shard(model: nn.Module, spec: Distributed) -> None:
    """Makes a unit of FSDP2 for each layer of ``model``, and one for the rest."""
    from torch.distributed import fsdp

    names = (spec.param_dtype, spec.reduce_dtype, spec.output_dtype)
    param, reduce, output = (getattr(torch, name) if name is not None else None for name in names)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
    layers = residual_blocks(model) - {id(model)}
    for module in reversed(list(model.modules())):  # what lies inside a unit comes before it
        if id(module) in layers:
            fsdp.fully_shard(module, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
