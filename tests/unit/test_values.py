"""Classes made by ``dtypedoctor.values.dataclass`` behave like those of the standard library."""

import copy
import dataclasses
import inspect
import pickle
from typing import ClassVar

import pytest

from dtypedoctor import values


def made_by(dataclass):
    """One class of each kind that dtypedoctor uses, made by ``dataclass``."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Value:
        """A value."""

        KIND: ClassVar[str] = "value"
        name: str
        size: int = 3
        parts: list[int] = dataclasses.field(default_factory=list)
        last: float | None = None

    @dataclass(frozen=True, slots=True)
    class Pair:
        left: object
        right: object = 0

        def __post_init__(self) -> None:
            if self.right is None:
                raise ValueError("right")

    @dataclass(slots=True)
    class Counter:
        count: int = 0
        seen: dict[str, int] = dataclasses.field(default_factory=dict)

        def __repr__(self) -> str:
            return f"{self.count} times"

    @dataclass(frozen=True, slots=True)
    class Empty:
        pass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Larger(Value):
        more: int

    return Value, Pair, Counter, Empty, Larger


OURS, THEIRS = made_by(values.dataclass), made_by(dataclasses.dataclass)
for number, kind in enumerate(OURS):  # where pickle looks for them
    kind.__qualname__ = kind.__name__ = f"Ours{number}"
    globals()[kind.__qualname__] = kind
for number, kind in enumerate(THEIRS):
    kind.__qualname__ = f"Ours{number}"


def outcome(function):
    """What a call returns, or the type of what it raises."""
    try:
        return function()
    except (TypeError, ValueError, AttributeError) as error:
        return type(error)


NAN = float("nan")
CALLS = {
    "defaults": lambda Value, Pair, Counter, Empty, Larger: repr([Value(name="a"), Pair(1), Counter(), Empty()]),
    "arguments": lambda Value, *_: repr(Value(name="a", size=1, parts=[2], last=0.5)),
    "a positional argument": lambda Value, *_: Value("a"),
    "a missing argument": lambda Value, *_: Value(),
    "an unknown argument": lambda Value, *_: Value(name="a", other=1),
    "a factory makes a new value": lambda Value, *_: Value(name="a").parts is Value(name="a").parts,
    "a check after init": lambda _, Pair, *__: Pair(1, None),
    "equal": lambda _, Pair, *__: [Pair(1, 2) == Pair(1, 2), Pair(1, 2) == Pair(1, 3), Pair(1, 2) == (1, 2)],
    "equal to itself with a NaN": lambda _, Pair, *__: Pair(NAN) == Pair(NAN),
    "not equal to a subclass": lambda Value, *rest: Value(name="a") == rest[-1](name="a", more=1),
    "hash": lambda _, Pair, __, Empty, ___: len({Pair(1, 2), Pair(1, 2), Pair(1, 3), Empty(), Empty()}),
    "no hash of what can change": lambda _, __, Counter, *___: hash(Counter()),
    "no hash of a list": lambda Value, *_: hash(Value(name="a")),
    "assignment": lambda Value, *_: setattr(Value(name="a"), "size", 4),
    "deletion": lambda Value, *_: delattr(Value(name="a"), "size"),
    "assignment where it is allowed": lambda _, __, Counter, *___: setattr(Counter(), "count", 4),
    "replace": lambda Value, *_: repr(dataclasses.replace(Value(name="a"), size=5)),
    "asdict": lambda Value, *rest: dataclasses.asdict(rest[-1](name="a", more=2)),
    "order of fields": lambda *kinds: [[f.name for f in dataclasses.fields(kind)] for kind in kinds],
    "match": lambda Value, Pair, *_: (Value.__match_args__, Pair.__match_args__),
    "slots": lambda Value, *_: hasattr(Value(name="a"), "__dict__"),
    "parameters": lambda *kinds: [list(inspect.signature(kind).parameters) for kind in kinds],
    "copy": lambda Value, *_: repr(copy.deepcopy(Value(name="a", parts=[1]))),
    "docstring": lambda Value, *_: Value.__doc__,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_behaves_like_the_standard_library(call):
    """Each call does the same with a class of either kind."""
    assert repr(outcome(lambda: call(*OURS))).replace("Ours", "") == repr(outcome(lambda: call(*THEIRS))).replace(
        "Ours", ""
    )


def test_nothing_is_compiled_before_there_is_an_instance():
    """``__init__`` is made when it is first called: of most classes a process has no instance."""

    @values.dataclass(slots=True)
    class Late:
        size: int

    assert not inspect.isfunction(vars(Late)["__init__"])
    assert Late(3).size == 3
    assert inspect.isfunction(vars(Late)["__init__"])


def test_a_value_that_was_pickled_comes_back_equal():
    """A frozen value comes back equal."""
    value = OURS[0](name="a", parts=[1])
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_field_that_a_method_leaves_out_is_an_error():
    """Such a field would silently be shown or compared."""
    with pytest.raises(TypeError, match="left out of a method"):

        @values.dataclass(slots=True)
        class Hidden:
            secret: str = dataclasses.field(repr=False)
