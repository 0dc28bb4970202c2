"""Source places are named from the package on."""

import sys
from types import FrameType

import pytest

from dtypedoctor.instrument.frames import source_of


def frame_of(path: str, module: str) -> FrameType:
    """A frame of code that stands in ``path`` and belongs to ``module``."""
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
