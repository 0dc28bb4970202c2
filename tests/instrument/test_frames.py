"""Source places are named from the package on."""

import math
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtypedoctor.instrument.frames import number_given, raising_operator, source_of


def frame_of(path: str, module: str) -> FrameType:
    space = {"__name__": module, "sys": sys}
    exec(compile("frame = sys._getframe()", path, "exec"), space)  # noqa: S102
    found = space["frame"]
    assert isinstance(found, FrameType)
    return found


@pytest.mark.parametrize(
    ("path", "module", "expected"),
    [
        ("/v/site-packages/transformers/models/llama/modeling_llama.py", "transformers.models.llama.modeling_llama",
         "transformers/models/llama/modeling_llama.py:1"),
        ("/v/site-packages/peft/tuners/__init__.py", "peft.tuners", "peft/tuners/__init__.py:1"),
        ("/home/someone/project/train.py", "__main__", "train.py:1"),
        ("train.py", "a.name.that.is.longer.than.its.path", "train.py:1"),
    ],
)  # fmt: skip
def test_a_place_begins_at_the_top_of_its_package(path: str, module: str, expected: str) -> None:
    """Enough to find the line, and nothing of the machine that it is on."""
    assert source_of(frame_of(path, module)) == expected


def test_a_subclass_of_tensors_that_hands_on_is_not_the_place() -> None:
    """The line that asked for the product is."""
    seen: list[str | None] = []

    class HandingOn(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(source_of(sys._getframe()))
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.ones(2, 2) @ torch.ones(2, 2).as_subclass(HandingOn)
    line = sys._getframe().f_lineno - 1
    assert seen[-1] is not None
    assert seen[-1].endswith(f"test_frames.py:{line}")


class Passing(TorchDispatchMode):
    """Calls every operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls it."""
        return func(*args, **(kwargs or {}))


def refused() -> RuntimeError:
    """What a product of two dtypes raises."""
    with pytest.raises(RuntimeError) as caught:
        _ = torch.zeros(2, 2) @ torch.zeros(2, 2, dtype=torch.bfloat16)
    return caught.value


def test_the_operator_that_raised_is_known_where_it_was_called_from_python() -> None:
    """A dispatch mode is Python; without one the kernel is called below it and leaves no frame."""
    with Passing():
        inside = refused()
    assert raising_operator(inside) == "aten.mm.default"
    assert raising_operator(refused()) is None
    assert raising_operator(ValueError("never raised")) is None


def given(count: int, numbers: list[float]) -> list[object]:
    """What the first arguments of some calls are, computed once more: each in a function of its own, whose caller asks."""

    def ask(_: object) -> object:
        return number_given(sys._getframe(1))

    return [
        ask(0.999),
        ask([0.1 * number for number in numbers]),
        ask([math.cos(i / count) for i in range(count)]),
        ask(sum(i * j for i in range(count) for j in range(count))),
        ask(sum(range(count * count))),
        ask(float(math.factorial(count))),
    ]


def test_numbers_are_computed_once_more_where_that_takes_few_turns() -> None:
    """What takes the program seconds is not computed twice."""
    few = given(3, [1.0, 2.0])
    assert few[:5] == [0.999, [0.1, 0.2], [math.cos(i / 3) for i in range(3)], 9, 36]
    assert given(100, [1.0])[3:] == [None, None, None]
