"""`replay --script` of a stranger's capsule answers within seconds and two gigabytes, whatever the two files are."""

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_foreign_directories import ESCAPES, NESTED, harmless, probed

from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import _description
from dtypedoctor.replay.capsule import read_capsule

RECIPE = {"class": "torch.nn.modules.linear:Linear", "attributes": {"in_features": {"value": 1}}, "parameters": {"weight": "weight.weight", "bias": None},
          "buffers": {}, "children": {}}  # fmt: skip
DESCRIPTION: dict[str, Any] = {
    "capsule": 1, "fqn": "head", "class": "Linear", "kind": "nonfinite", "error": "", "relative_error": None,
    "finding": {"id": "float16-overflow", "summary": "It overflows."}, "requires_grad": [], "random": False, "drawn": {}, "cut": [],
    "data": {"synthetic": True}, "classes": [], "source": "",
    "call": {"recipe": RECIPE, "args": [{"tensor": "input.0"}], "kwargs": {}, "state": {}, "training": True, "grad": True, "autocast": [],
             "leaving": []},
}  # fmt: skip
HEADER: dict[str, Any] = {
    "weight.weight": {"dtype": "F16", "shape": [1, 1], "data_offsets": [0, 2]}, "input.0": {"dtype": "F16", "shape": [1, 1], "data_offsets": [2, 4]},
}  # fmt: skip
DIGITS = "9" * 5_000_000
Build = Callable[[Path], object]


def written(folder: Path, description: object = DESCRIPTION, header: object = HEADER, data: bytes = bytes(4)) -> None:
    folder.mkdir()
    (folder / "capsule.json").write_text(description if isinstance(description, str) else json.dumps(description))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "capsule.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def described(change: Callable[[dict[str, Any]], object]) -> Build:
    """A capsule with another description."""

    def build(folder: Path) -> None:
        description = copy.deepcopy(DESCRIPTION)
        change(description)
        written(folder, description)

    return build


def replaced(old: str, new: str) -> Build:
    """A capsule whose description has another text in one place."""
    return lambda folder: written(folder, json.dumps(DESCRIPTION).replace(old, new, 1))


def headed(**changes: object) -> Build:
    """A capsule whose file says something else of its input."""
    return lambda folder: written(folder, header=HEADER | {"input.0": HEADER["input.0"] | changes})


def instead(name: str, build: Build) -> Build:
    """A capsule of which a file is something else."""

    def built(folder: Path) -> None:
        written(folder)
        (folder / name).unlink()
        build(folder / name)

    return built


def nested(depth: int) -> Any:
    """A list in a list, and so on."""
    value: Any = {"value": 1}
    for _ in range(depth):
        value = {"list": [value]}
    return value


def terabyte(path: Path) -> None:
    """A file that takes no room."""
    path.touch()
    os.truncate(path, 1 << 40)


def long(folder: Path) -> None:
    """A whole capsule, whose file of tensors goes on for a terabyte."""
    written(folder)
    os.truncate(folder / "capsule.safetensors", 1 << 40)


KINDS: dict[str, Build] = {
    "pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir, "link": lambda path: path.symlink_to("/etc/hostname"),
    "terabyte": terabyte, "empty": Path.touch, "short": lambda path: path.write_bytes(b"1234567"), "brackets": lambda path: path.write_text(NESTED),
    "long header": lambda path: path.write_bytes(struct.pack("<Q", 2**63)),
}  # fmt: skip
DRAWN = {"shape": [2], "dtype": "float16", "scale": 1.0, "seed": 0}
HOSTILE: dict[str, Build] = {
    "a file that goes on for a terabyte": long,
    **{f"{kind} as {name}": instead(name, build) for kind, build in KINDS.items() for name in ("capsule.json", "capsule.safetensors")},
    **{f"header {number}": headed(**changes) for number, changes in enumerate((
        {"data_offsets": [2, 1 << 40]}, {"data_offsets": [1 << 40, (1 << 40) + 2]}, {"data_offsets": [-4, -2]}, {"data_offsets": [2]}, {"data_offsets": [4, 2]},
        {"data_offsets": [0.5, 4]}, {"data_offsets": "ab"}, {"data_offsets": [2, 2**70]}, {"shape": [2**70]}, {"shape": [2**62] * 60}, {"shape": [-1]},
        {"shape": [0, 2**62]}, {"shape": [2**62] * 100_000}, {"shape": [1] * 65}, {"shape": "12"}, {"shape": [2]}, {"shape": [1.0]}, {"shape": None},
        {"dtype": "F4"}, {"dtype": 7}, {"dtype": "X" * 1_000_000}, {"dtype": ["F16"]}))},
    "header of brackets": lambda folder: written(folder, header=NESTED.encode()),
    "header of digits": lambda folder: written(folder, header=f'{{"a": {DIGITS}}}'.encode()),
    "header that is a list": lambda folder: written(folder, header=[]),
    "header in colors": lambda folder: written(folder, header={ESCAPES: {"dtype": "F16", "shape": [1], "data_offsets": [0, 9]}}),
    "many tensors": lambda folder: written(folder, header={str(n): {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)}),
    "digits as a value": replaced('"value": 1', f'"value": {DIGITS}'),
    "digits behind a point": replaced('"value": 1', f'"value": 0.{DIGITS}'),
    "an exponent of digits": replaced('"value": 1', '"value": 1e5000000'),
    "digits as a text": replaced('"value": 1', f'"float": "{DIGITS}"'),
    "digits as an error": replaced('"relative_error": null', f'"relative_error": {DIGITS[:4000]}'),
    "brackets as a value": replaced('"value": 1', f'"value": {NESTED}'),
    **{f"drawn {number}": described(lambda d, how=how: d.update(drawn={"weight.weight": DRAWN | how})) for number, how in enumerate((
        {"shape": [2**70]}, {"shape": [2**61] * 60}, {"shape": [-1]}, {"shape": [10**4000]}, {"shape": "99"}, {"shape": [1] * 200_000}, {"shape": None},
        {"scale": 10**4000}, {"scale": DIGITS}, {"scale": "nan"}, {"seed": 10**4000}, {"seed": DIGITS}, {"dtype": "x" * 100_000}))},
    "deep": described(lambda d: d["call"]["args"].append(nested(400))),
    "very deep": described(lambda d: d["call"].update(args=[nested(300)] * 200)),
    "many arguments": described(lambda d: d["call"].update(args=[{"value": 1}] * 20_000)),
    "many lists": described(lambda d: d["call"].update(args=[{"list": []}] * 20_000)),
    "many names": described(lambda d: d["call"].update(kwargs={f"a{n}": {"value": n} for n in range(10_000)})),
    "many children": described(lambda d: d["call"]["recipe"].update(children={str(n): RECIPE for n in range(4_000)})),
    "many texts": described(lambda d: d["call"].update(args=[{"value": f"text {n} at /home/me"} for n in range(4_000)])),
    "a long text": described(lambda d: d["call"]["args"].append({"value": "x /" * 200_000})),
    "a long name": described(lambda d: d.update(fqn="a." * 200_000)),
    "a long summary": described(lambda d: d["finding"].update(summary="Bearer abc " * 40_000)),
    "a text in colors": described(lambda d: d.update({"class": ESCAPES, "fqn": ESCAPES, "finding": {"id": ESCAPES, "summary": ESCAPES}})),
    "code in colors": described(lambda d: d["call"]["recipe"].update({"class": ESCAPES})),
    "another format": lambda folder: written(folder, {"capsule": "x" * 1_000_000}),
    "a list": lambda folder: written(folder, []),
    "in a link": lambda folder: (folder.mkdir(), written(folder.with_name(f"{folder.name}-else")), (folder / "capsule").symlink_to(f"../{folder.name}-else")),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{"fqn": 1}, {"call": []}, {"fixes": [1]}, {"fixes": 1}, {"source": None}, {"drawn": []}], ids=str
)
def test_a_call_that_was_kept_and_damaged_is_no_capsule(changes: dict[str, Any], tmp_path: Path) -> None:
    """Neither beside a trace nor in a directory of its own."""
    path = tmp_path / "capsule-1-1.json"
    path.write_text(json.dumps(DESCRIPTION))
    assert _description(path) == DESCRIPTION | {"operator": None}
    path.write_text(json.dumps(DESCRIPTION | changes))
    with pytest.raises(ValueError, match="damaged"):
        _description(path)
    written(tmp_path / "capsule", DESCRIPTION | changes)
    with pytest.raises(UsageError, match="damaged"):
        read_capsule(tmp_path)


def test_a_script_of_a_strangers_capsule_costs_seconds_and_little_memory(tmp_path: Path) -> None:
    """Exit 0 with a script, or 2 with what is wrong in one line; a whole capsule gives the script."""
    written(tmp_path / "whole")
    commands = [["replay", str(tmp_path / "whole"), "--script"]]
    for number, build in enumerate(HOSTILE.values()):
        build(tmp_path / str(number))
        commands.append(["replay", str(tmp_path / str(number)), "--script"])
    whole, *outcomes = probed(*commands)
    assert (whole["code"], "FAILS" in whole["out"]) == (0, True)
    for name, outcome in zip(HOSTILE, outcomes, strict=True):
        assert outcome["code"] in (0, 2), (name, outcome["code"], outcome["err"][-800:])
        assert (outcome["out"] == "") == (outcome["code"] == 2), name
        compile(outcome["out"], name, "exec")
        assert "Replay it" not in outcome["err"], name  # a replay is made of the same script
        harmless(outcome, 0, 2)
        assert len(outcome["err"]) < 3_000, name


CODE: dict[str, dict[str, Any]] = {
    "the operator aten.from_file.default": RECIPE | {"operator": "aten.from_file.default"},
    "the operator aten._print.default": RECIPE | {"operator": "aten._print.default"},
    **{f"the attribute {name} of torch.nn.modules.linear:Linear": RECIPE | {"attributes": {name: {"dict": {}}}}
       for name in ("_modules", "_forward_pre_hooks", "_call_impl", "forward", "__class__")},
    "the attribute to_dict of transformers.models.llama.configuration_llama:LlamaConfig": RECIPE | {"attributes": {"config": {
        "config": "transformers.models.llama.configuration_llama:LlamaConfig", "values": {"dict": {}}, "chosen": {"to_dict": {"value": 1}}}}},
}  # fmt: skip


def test_a_script_names_all_that_a_replay_rejects_as_code(tmp_path: Path) -> None:
    """On stderr, each by itself and in a capsule of many; an ordinary capsule has no such warning."""
    builds = [described(lambda d, recipe=recipe: d["call"].update(recipe=recipe)) for recipe in CODE.values()]
    children = {str(number): recipe for number, recipe in enumerate(CODE.values())}
    builds += [described(lambda d: d["call"]["recipe"].update(children=children)), written]
    for number, build in enumerate(builds):
        build(tmp_path / str(number))
    *single, many, plain = probed(
        *(["replay", str(tmp_path / str(number)), "--script"] for number in range(len(builds)))
    )
    for name, outcome in zip(CODE, single, strict=True):
        assert f"Read it before you run it: it runs code of its own: {name}"[:130] in outcome["err"]
        assert name[:90] in many["err"]
    assert "Read it before" not in plain["err"]
