"""A call of a kernel as a function of its floating-point tensors, which can be made again with one thing changed."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import version_of
from dtypedoctor.instrument.live_call import LiveCall, tensors_of
from dtypedoctor.instrument.module_tree import mapped
from dtypedoctor.instrument.operators import OperatorMode, is_unfinished

MARGIN = 1 << 14
"""Elements of padding on each side of an input, at most: a block of a Triton kernel reads so far beyond a row."""
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

Values = Mapping[str, Tensor]


class CollectiveError(Exception):
    """The call waits for other ranks, so it cannot be made by one alone."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What a call returned.

    Attributes:
        outputs: its floating-point tensors, detached, by their position; behind those that it returns the arguments that it writes to.
        gradients: by name of the input, those that the upstream gradients make; zeros where the kernel gives none.
        drew: whether random numbers were drawn.
    """

    outputs: dict[int, Tensor]
    gradients: dict[str, Tensor]
    drew: bool

    def named(self) -> dict[str, Tensor]:
        """All tensors, with names for a person."""
        outputs = {f"output {index}": tensor for index, tensor in self.outputs.items()}
        return outputs | {f"gradient of {name}": tensor for name, tensor in self.gradients.items()}


class FilledMemory(OperatorMode):
    """Fills what ``torch.empty`` and its relatives allocate, and stops a collective before other ranks wait for it."""

    def __init__(self, value: float | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_unfinished(func):
            raise CollectiveError(f"it calls the collective {func}")
        result = self.run(func, tuple(args), dict(kwargs or {}))
        is_new = func.namespace == "aten" and func.overloadpacket.__name__ in _EMPTY and isinstance(result, Tensor)
        if self._value is not None and is_new and result.is_floating_point():
            result.fill_(self._value)
        return result


class Subject:
    """A call that was made, with its own copies of all tensors.

    Args:
        call: the call; its arguments' tensors are copied here, its module's parameters are not.
        is_compiled: it is a compiled region, which would be compiled again for other dtypes and allocates where no mode sees it.

    Attributes:
        consumed: positions of the outputs through which the program's backward pass went.
    """

    def __init__(self, call: LiveCall, *, is_compiled: bool = False) -> None:
        memo: dict[int, Any] = {}
        self._call = replace(call, args=mapped(call.args, _copied, memo), kwargs=mapped(call.kwargs, _copied, memo))
        self.is_compiled = is_compiled
        self.consumed: set[int] = set()
        self._upstream: dict[int, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor among its arguments, by name."""
        return dict(self._call.inputs())

    @property
    def moving(self) -> dict[str, Tensor]:
        """The floating-point tensors to which a gradient goes back."""
        several = (*self._call.inputs(), *self._call.parameters())
        return {name: tensor for name, tensor in several if tensor.requires_grad and tensor.is_floating_point()}

    def narrowest(self) -> torch.dtype:
        """The floating-point dtype with the widest spacing among its tensors and autocast's."""
        dtypes = [tensor.dtype for tensor in (*self.tensors.values(), *self.moving.values())]
        dtypes = [dtype for dtype in dtypes if dtype.is_floating_point] + [state.dtype for state in self._call.autocast]
        return max(dtypes or [torch.get_default_dtype()], key=lambda dtype: torch.finfo(dtype).eps)

    def again(
        self,
        *,
        values: Values | None = None,
        dtype: torch.dtype | None = None,
        padding: float | None = None,
        allocated: float | None = None,
        upstream: Mapping[int, Tensor] | None = None,
        backward: bool = True,
    ) -> Result:
        """Makes the call once more, and the backward pass through it.

        Args:
            values: in the place of inputs or parameters, by name.
            dtype: to which floating-point arguments are cast, without autocast then.
            padding: what stands in memory before and behind each input.
            allocated: what stands in memory that is allocated.
            upstream: gradients of the outputs by position; random ones of size 1, always the same, without it.
            backward: whether the gradients are wanted.

        Raises:
            CollectiveError: it waits for other ranks.
            Exception: whatever the kernel raises.
        """
        backward = backward and self._call.grad and not self._call.inference
        call = replace(self._call, autocast=()) if dtype is not None else self._call
        leaves: dict[str, Tensor] = {}
        passed: list[tuple[Tensor, int]] = []
        names = {id(tensor): name for name, tensor in call.inputs()}

        def fresh(tensor: Tensor) -> Tensor:
            name = names.get(id(tensor), "")
            value = (values or {}).get(name, tensor)
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            copy = _copied(value, padding).detach()
            if backward and tensor.requires_grad and tensor.is_floating_point():
                leaf = leaves[name] = copy.clone().requires_grad_()
                # A kernel may write to what it is given, but not to a leaf. An expanded tensor cannot be written to at all
                copy = leaf.clone() if 0 in copy.stride() and copy.numel() > 1 else copy.copy_(leaf)
            passed.append((copy, version_of(copy)))
            return copy

        memo: dict[int, Any] = {}
        with call.modes(), self._state_kept(values or {}):
            args, kwargs = mapped(call.args, fresh, memo), mapped(call.kwargs, fresh, memo)
            before = _generators()
            with self._around(allocated):
                output = call.module(*args, **kwargs)
                written = [copy for copy, version in passed if version_of(copy) != version]
                outputs = {i: t for i, t in enumerate(tensors_of((output, written))) if t.is_floating_point()}
                leaves |= {name: parameter for name, parameter in call.parameters() if parameter.requires_grad}
                gradients = self._pulled(outputs, leaves, upstream) if backward else {}
            drew = any(not torch.equal(a, b) for a, b in zip(before, _generators(), strict=False))
        return Result(outputs={i: t.detach() for i, t in outputs.items()}, gradients=gradients, drew=drew)

    @contextmanager
    def _around(self, allocated: float | None) -> Iterator[None]:
        waits = torch.distributed.is_available() and torch.distributed.is_initialized()
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        with ExitStack() as stack:
            if waits or not self.is_compiled:  # a mode would have a compiled region compiled again
                stack.enter_context(FilledMemory(allocated))
            if allocated is not None and math.isnan(allocated):
                # torch itself fills what operators and C++ allocate where no mode sees it, with NaN only
                stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield

    def weighed(self, outputs: Mapping[int, Tensor]) -> float:
        """The scalar whose gradient the random upstream gradients make: their inner product with the outputs, in float64."""
        pairs = [(outputs[i].double(), weight) for i, weight in self._upstream.items() if i in outputs]
        return sum(float((output * weight.to(output.device)).sum()) for output, weight in pairs)

    def upstream(self, outputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The random upstream gradients, float64, for the outputs that the program uses and that need one."""
        if not self._upstream:
            generator = torch.Generator().manual_seed(0)
            for index, tensor in outputs.items():
                if tensor.requires_grad and (not self.consumed or index in self.consumed):
                    self._upstream[index] = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return self._upstream

    def _pulled(
        self, outputs: Mapping[int, Tensor], leaves: Mapping[str, Tensor], upstream: Mapping[int, Tensor] | None
    ) -> dict[str, Tensor]:
        weights = upstream if upstream is not None else self.upstream(outputs)
        ends = [index for index in weights if index in outputs and outputs[index].requires_grad]
        if not ends or not leaves:
            return {}
        # `to` returns what needs no cast as it is, with the strides that a trial may have changed
        given = [weights[i].to(device=outputs[i].device, dtype=outputs[i].dtype) for i in ends]
        wanted = list(leaves.values())
        made = torch.autograd.grad([outputs[i] for i in ends], wanted, given, materialize_grads=True)
        return dict(zip(leaves, (gradient.detach() for gradient in made), strict=True))

    @contextmanager
    def _state_kept(self, values: Values) -> Iterator[None]:
        """Inside, parameters have other values; afterwards parameters and buffers have those of before."""
        parameters, buffers = dict(self._call.parameters()), dict(self._call.buffers())
        before = [(parameter, parameter.data) for name, parameter in parameters.items() if name in values]
        kept = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
        try:
            for name, parameter in parameters.items():
                if name in values:
                    parameter.data = values[name].to(parameter.dtype)
            yield
        finally:
            for parameter, data in before:
                parameter.data = data
            with torch.no_grad():
                for buffer, data in kept:
                    buffer.copy_(data)


def _generators() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *cuda]


def _copied(tensor: Tensor, padding: float | None = None) -> Tensor:
    """A copy with the same strides and what lies between its elements, in memory of its own, with padding where that is asked for."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided or not (padding is None or tensor.is_floating_point()):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # Whole cache lines, so that the padded copy is as well aligned as the other
    margin = 0 if padding is None else min(MARGIN, -(-2 * span // 64) * 64)
    memory = tensor.new_full((span + 2 * margin,), 0 if padding is None else padding)
    memory[margin : margin + span] = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
    return memory.as_strided(tensor.shape, tensor.stride(), margin).requires_grad_(tensor.requires_grad)


class Called(nn.Module):
    """Makes a module of a function, so that a call of it can be recorded as one of a module's.

    Args:
        function: what is called.
        holder: the module whose parameters and buffers it uses.
    """

    def __init__(self, function: Callable[..., Any], holder: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.holder = holder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)
