"""What modules return is measured whatever it is wrapped in, or named as not measured; nothing of the program runs for it."""

import functools
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from transformers.modeling_outputs import BaseModelOutputWithPast
from watched import watched

from dtypedoctor.instrument.contents import MOST_VALUES, contents
from dtypedoctor.trace.events import Coverage, NotWatched
from dtypedoctor.trace.model import Trace

INF = float("inf")


class TouchedError(Exception):
    """Code of the program has run."""


def touched(*_: object, **__: object) -> Never:
    """Raises."""
    raise TouchedError


class Meta(Tensor):
    """As MONAI's MetaTensor, fastai's TensorBase and torchvision's tv_tensors are made."""


class Jealous(Tensor):
    """A subclass that notices every use."""

    __torch_function__ = touched


class Plain:
    """An object with attributes that it computes, compares, counts and iterates by itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    __getattr__ = __len__ = __iter__ = __bool__ = __eq__ = touched
    __hash__ = None
    computed = property(touched)
    __class__ = property(touched)


class Slots:
    """An object without a dictionary; one of its slots is empty."""

    __slots__ = ("empty", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclass(slots=True, frozen=True)
class Record:
    """A dataclass inside of which is another container."""

    x: Any


class Listed(list[Tensor]):
    """A list that does not let itself be read, with an attribute."""

    __iter__ = __len__ = __getitem__ = touched


class Mapped(dict[str, Tensor]):
    """A dict that does not let itself be read."""

    items = keys = values = __iter__ = __len__ = touched


class Endless:
    """An iterator that must not be advanced."""

    __iter__ = __next__ = touched


def nested(x: Tensor, depth: int = 60) -> Any:
    """``x`` in lists of lists."""
    value: Any = x
    for _ in range(depth):
        value = [value]
    return value


def circle(x: Tensor) -> list[Any]:
    """A list that holds itself."""
    value: list[Any] = [x]
    value.append(value)
    return value


MEASURED: dict[str, Callable[[Tensor], Any]] = {
    "subclass": lambda x: x.as_subclass(Meta),
    "jealous subclass": lambda x: x.as_subclass(Jealous),
    "plain object": Plain,
    "slots": Slots,
    "dataclass": lambda x: Record({"a": (x,)}),
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "list": lambda x: Listed([x]),
    "dict": lambda x: Mapped(x=x),
    "deque": lambda x: deque([x]),
    "set": lambda x: {x},
    "dict views": lambda x: [{"x": x}.values()],
    "ordered views": lambda x: OrderedDict(x=x).items(),
    "mapping proxy": lambda x: types.MappingProxyType({"x": x}),
    "user dict": lambda x: UserDict(x=x),
    "partial": lambda x: functools.partial(print, x),
    "deep list": nested,
    "circle": circle,
    "complex": lambda x: torch.complex(x, x),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.reshape(1, -1).to_sparse_csr(),
    "nested tensor": lambda x: torch.nested.as_nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
    "distribution": lambda x: torch.distributions.Categorical(logits=x, validate_args=False),
    "model output": lambda x: BaseModelOutputWithPast(last_hidden_state=x),
    "return type": lambda x: torch.max(x.reshape(1, -1), 1),
}

MISSED: dict[str, Callable[[Tensor], Any]] = {
    "generator": lambda x: (one for one in [x]),
    "iterator": lambda x: Endless(),
    "list iterator": lambda x: (1, iter([x])),
    "map": lambda x: map(touched, [x]),
    "array": lambda x: x.detach().numpy(),
    "masked": lambda x: masked_tensor(x.detach(), x.detach() > 0),
    "mkldnn": lambda x: x.detach().reshape(1, -1).to_mkldnn(),
    "nan beside": lambda x: {"loss": float("nan")},
    "future": lambda x: torch.futures.Future(),
    "many": lambda x: [torch.ones(())] * (MOST_VALUES + 1),
}

NO_FLOATS: dict[str, Any] = {
    "nothing": None,
    "integers": torch.ones(2, dtype=torch.long),
    "text": ["a", {"b": b"c"}],
    "many numbers": list(range(10 * MOST_VALUES)),
    "module": nn.Linear(1, 1),
    "function": print,
    "meta": torch.ones(2, device="meta"),
    "int array": np.ones(2, dtype=np.int64),
    "finite numbers": (1.0, np.float32(2), 3j),
}


class Returns(nn.Module):
    """Returns what is made of its argument."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x)


def run(directory: Path, wrap: Callable[[Tensor], Any], x: Tensor) -> Trace:
    return watched(directory, lambda _: Returns(wrap)(x))


def counts(trace: Trace) -> tuple[int, int]:
    found = trace.last(Coverage)
    assert found is not None
    return found.module_calls, found.module_calls_measured


@pytest.mark.release(all_but=4)
@pytest.mark.parametrize("name", MEASURED)
def test_an_inf_is_found_in_whatever_it_is_returned(name: str, tmp_path: Path) -> None:
    """The call counts as measured, and its sample holds the inf."""
    trace = run(tmp_path, MEASURED[name], torch.tensor([1.0, INF]))
    assert counts(trace) == (1, 1)
    assert any(sample.num_inf for sample in trace.samples if trace.sites[sample.site].kind == "output")
    assert not trace.all(NotWatched)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("name", MISSED)
def test_what_cannot_be_looked_into_is_named_and_not_measured(name: str, tmp_path: Path) -> None:
    """It counts as a call that ran, the report names its type, and it can still be used up by the program."""
    trace = run(tmp_path, MISSED[name], torch.ones(2))
    assert counts(trace) == (1, 0)
    (note,) = trace.all(NotWatched)
    assert note.what.startswith("module outputs of type ")
    assert "1 time" in note.what


@pytest.mark.parametrize("name", NO_FLOATS)
def test_a_result_without_floats_is_no_call_that_was_missed(name: str) -> None:
    """Nothing in it can be inf or NaN."""
    found = contents(NO_FLOATS[name])
    assert (found.tensors, found.missed) == ([], [])


def test_how_often_something_was_missed_is_told_once(tmp_path: Path) -> None:
    """Three calls are one line with their number and the first module."""
    net = nn.Sequential(Returns(MISSED["generator"]))
    trace = watched(tmp_path, lambda _: [net(torch.ones(1)) for _ in range(3)])
    assert counts(trace) == (6, 0)
    assert [note.what for note in trace.all(NotWatched)] == ["module outputs of type generator (6 times, first from 0)"]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("name", ["subclass", "plain object", "slots", "deque", "deep list"])
def test_gradients_of_wrapped_outputs_are_measured(name: str, tmp_path: Path) -> None:
    """The gradient that arrives at a tensor in any wrapping is a sample of its module."""

    def work(_: Any) -> None:
        result = Returns(lambda x: MEASURED[name](x * 2))(torch.ones(2, requires_grad=True))
        found = contents(result).tensors[0].original
        (found.sum() * 3).backward()

    trace = watched(tmp_path, work)
    gradients = [s.absmax for s in trace.samples if trace.sites[s.site].kind == "grad_output"]
    assert gradients == [3.0]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_modules_inside_of_transformations_are_measured(transform: Callable[..., Any], tmp_path: Path) -> None:
    """Under ``vmap`` and ``grad`` the values behind the transformed tensors are read; the result stays the same."""
    net, x = nn.Sequential(nn.Tanh(), Returns(lambda x: x * INF)), torch.ones(3, 2)
    found: list[Tensor] = []
    trace = watched(tmp_path, lambda _: found.append(transform(net)(x)))
    assert torch.equal(found[0], transform(net)(x))
    assert counts(trace) == (3, 3)
    assert any(sample.num_inf == x.numel() for sample in trace.samples)


def test_a_module_that_no_other_holds_is_measured_under_its_caller(tmp_path: Path) -> None:
    """``nn.GELU()(x)`` inside of a forward has a place of its own."""
    inner = Returns(lambda x: nn.GELU()(x))
    trace = watched(tmp_path, lambda _: nn.Sequential(inner)(torch.ones(2)))
    assert counts(trace) == (3, 3)
    assert {trace.sites[sample.site].fqn for sample in trace.samples} == {"0.GELU()", "0", ""}


def test_a_call_whose_measuring_fails_has_run_and_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of ours shows in the counts, and not only among what was not watched."""
    monkeypatch.setattr("dtypedoctor.instrument.returned.contents", touched)
    trace = watched(tmp_path, lambda _: nn.Tanh()(torch.ones(2)))
    assert counts(trace) == (1, 0)
