"""Calls that are made once more: without the copies that autocast keeps, and of compiled functions in eager mode."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer

from dtypedoctor._torch_private import EntersCompiled, as_the_program, register_own
from dtypedoctor.instrument.live_call import inputs_in
from dtypedoctor.instrument.module_tree import ByModule, is_of_several, named_modules
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import tensors_of
from dtypedoctor.instrument.silent.logprobs import LogprobCheck
from dtypedoctor.instrument.silent.look import may_look
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.shadows import Shadows
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.instrument.untouched import KeptMemory, undone
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.records.silent import StaleCopy

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that do nothing but one product which autocast casts for."""
COMPARED = 8
"""Layers of a model whose weights are compared."""
ELEMENTS = 16
"""Elements of a weight that are compared."""

MAX_SECONDS = 10.0
"""Time in which the operators of a compiled call may begin that is made in eager mode."""

Layer = tuple[Any, str]
"""A weak reference to a layer, and its dotted name."""


@dataclass(slots=True)
class _Root:
    """What is known of an outermost module within one region."""

    calls: int = 1
    before: dict[str, Tensor] = field(default_factory=dict)


class CacheCheck(Observer):
    """Writes a :class:`StaleCopy` for a layer that computes with an old copy of its weight.

    Autocast keeps the copy of a float32 weight until the outermost region ends, and does not look whether the weight has changed.
    So where one region sees a second call of the same outermost module, a few elements of some weights are compared with what
    they were at the first. Where they differ, the layer is run once more on the same input without the cache.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._region: int | None = None
        "Number of the region in which the calls are that are compared."
        self._roots: dict[int, _Root] = {}
        self._layers: ByModule[list[Layer]] = ByModule()
        self._stepped = False
        self._changed: dict[int, str] = {}
        self._hook: Any = None

    def after_step(self, optimizer: Optimizer) -> None:
        """Weights have changed."""
        self._stepped = True

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins."""
        self.after_call(module)
        autocast = self.session.autocast
        outermost = autocast.outermost if autocast.open_regions else None
        if outermost != self._region:
            self._region = outermost
            self._roots.clear()
            self._stepped = False
        if outermost is None or not torch.is_autocast_cache_enabled() or self.position.backward_depth:
            return
        known = self._roots.get(id(module))
        if known is None:
            self._roots[id(module)] = _Root(before=self._fingerprints(module))
        else:
            known.calls += 1
            power_of_two = known.calls & (known.calls - 1) == 0
            if not known.before or not (self._stepped or power_of_two):
                return
            self._stepped = False
            changed = self._changed_since(known.before, self._fingerprints(module))
            self._changed = {id(layer): name for layer, name in self._alive(module) if name in changed}
            if self._changed:
                returned = self.session.guard.shield(self._layer_returned, "layers under autocast")
                self._hook = register_own(hooks.register_module_forward_hook, returned, with_kwargs=False)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned; where it is a layer itself, its hook would come after :meth:`after_call`."""
        if id(module) in self._changed and not kwargs:
            self._layer_returned(module, args, output)

    def after_call(self, module: nn.Module) -> None:
        """The outermost call has ended, in whatever way."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._changed.clear()

    def stop(self) -> None:
        """The program has ended, a call of it perhaps not."""
        if self._hook is not None:
            self._hook.remove()

    def _changed_since(self, before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> set[str]:
        """Names of the layers whose fingerprints are not the same any more; waits for the device once."""
        same = [name for name in now if name in before and now[name].shape == before[name].shape]
        if not same:
            return set()
        with self.position.aside():
            differ = torch.stack([now[name].ne(before[name]).any() for name in same]).tolist()
        return {name for name, differs in zip(same, differ, strict=True) if differs}

    def _layer_returned(self, layer: nn.Module, args: Any, output: Any) -> None:
        name = self._changed.pop(id(layer), None)
        if name is None or len(args) != 1 or not measurable(output) or not torch.is_autocast_cache_enabled():
            return
        with self.position.mute(), torch.no_grad(), as_the_program():
            torch.set_autocast_cache_enabled(False)
            try:
                fresh = type(layer).forward(layer, *args)
            finally:
                torch.set_autocast_cache_enabled(True)
            largest = float(fresh.float().abs().max()) if fresh.numel() else 0.0
            error = float((fresh.float() - output.float()).abs().max()) / largest if largest else 0.0
        if 0.0 < error < math.inf:  # a result that is inf or NaN is not what the copy does
            place, regions = self.session.names.find(layer), self.session.autocast.open_regions
            fqn = place[1] if place is not None else name
            copy = StaleCopy(
                weight=f"{fqn}.weight" if fqn else "weight",
                dtype=dtype_name(output),
                relative_error=error,
                region=regions[0].source if regions else None,
            )
            self.session.once(copy, name, fqn=fqn)

    def _fingerprints(self, module: nn.Module) -> dict[str, Tensor]:
        """A few elements of the weights that autocast would keep a copy of."""
        found = {}
        with self.position.aside():
            for layer, name in self._alive(module):
                weight = layer.weight
                # Autocast keeps a copy of float32 leaves that are trained (`cached_cast` in torch's autocast_mode.cpp).
                if (
                    isinstance(weight, Tensor)
                    and weight.dtype is torch.float32
                    and weight.requires_grad
                    and weight.is_leaf
                    and weight.is_contiguous()
                    and measurable(weight)
                ):
                    flat = weight.detach().reshape(-1)
                    found[name] = flat[:: max(1, flat.numel() // ELEMENTS)].clone()
        return found

    def _alive(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        layers = self._layers.get(module)
        if layers is None:
            all_layers = [(ref(child), name) for name, child in named_modules(module) if type(child) in LAYERS]
            every = max(1, len(all_layers) // COMPARED)
            layers = self._layers[module] = all_layers[::every][: COMPARED + 1]
        return [(layer, name) for held, name in layers if (layer := held()) is not None]


class CompiledCalls(Observer):
    """Makes calls of compiled functions in eager mode first, so that the look sees their operators, and puts back whatever that changes.

    What the program computes with are the bits of the compiled code: those of eager mode differ by roundings, which a look is about.
    """

    def before_compiled(self, entered: EntersCompiled) -> None:
        """A compiled function is about to be entered: an outermost one, since all that is called in the other is left in eager mode."""
        position, look = self.position, self.checks.look
        call = entered.call()
        if call is None or position.muted or position.backward_depth or is_of_several() or not may_look():
            return  # what DDP's forward begins in C++ cannot be undone
        function, args, kwargs = call
        if not (look.looks if position.stack else look.is_turn(function)):
            return
        memory = KeptMemory.within_free(inputs_in(args, kwargs), MAX_SECONDS)
        roots = (function, getattr(function, "__self__", None), args, kwargs)
        # what it raises here, it raises again
        with contained(), undone(self.session, roots, position.mute(), memory, lambda: True):
            with memory, look.at_call_made_again():
                result = function(*args, **kwargs)
            losses = list(filter(_may_be_loss, tensors_of(result)))
            self.checks[Shadows].before_backward(losses)
            self.checks[LogprobCheck].before_backward(losses)


def _may_be_loss(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.dim() == 0
