"""Edits never make a kept copy share its storage with the weights that it was made from; nor do they change what a stalled average has no part in."""

import ast
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_edits import first_edits
from test_edits_of_classes import edited, lines, parameter, program

from dtypedoctor.diagnosis.value_edits import _masks
from dtypedoctor.report.run_facts import diff_of

HEAD = "model = torch.nn.Linear(2, 2)\n"


def run(text: str) -> dict[str, Any]:
    """What a program of a few lines leaves."""
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102  (the text is that of these tests)
    return names


KEPT = [
    "kept = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}\nkept = list(kept.values())",
    "kept = [p.data.bfloat16() for p in model.parameters()]",
    "kept = []\nfor p in model.parameters():\n    kept.append(p.detach().to(dtype=torch.bfloat16))",
    "kept = list(p.detach().type(torch.bfloat16) for p in model.parameters())",
    "kept = [torch.as_tensor(p.detach(), dtype=torch.bfloat16) for p in model.parameters()]",
    "dtype = torch.bfloat16\nkept = [p.detach().to(dtype).cpu() for p in model.parameters()]",
    "def copies(ps, dtype=torch.bfloat16):\n    return [p.detach().to(dtype) for p in ps]\nkept = copies(model.parameters())",
    "class A:\n    pass\na = A()\na.kept = model.weight.detach().bfloat16()\nkept = [a.kept]",
    "buffers = torch.nn.Module()\nbuffers.register_buffer('kept', model.weight.detach().bfloat16())\nkept = [buffers.kept]",
    "kept = torch.nn.Parameter(model.weight.detach().bfloat16())\nkept.data.mul_(1)\nboth = [kept]\nkept = both",
    "w = model.weight.detach().bfloat16()\nw.mul_(1)\nkept = [w]",
    "state = model.state_dict()\nkept = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in model.state_dict().items()}\nkept = list(kept.values())",
    "model = model.bfloat16()\nkept = [p.detach().float() for p in model.parameters()]",
    "model = model.to(torch.bfloat16)\nkept = {n: p.detach().to(torch.float32) for n, p in model.named_parameters()}\nkept = list(kept.values())",
]  # fmt: skip


@pytest.mark.parametrize("text", KEPT)
def test_a_kept_copy_stays_a_copy(text: str, tmp_path: Path) -> None:
    """However it is cast and kept; the program runs, its copies are float32 and share no storage with the weights."""
    read = program(tmp_path, HEAD + text, id="a")
    changed = edited(read, "bfloat16-to-float32")
    assert changed
    names = run(f"import torch\n{changed}")
    shared = {one.data_ptr() for one in names["model"].parameters()}
    assert all(str(one.dtype) == "torch.float32" and one.data_ptr() not in shared for one in names["kept"]), changed


@pytest.mark.parametrize(
    "line",
    [
        "model = model.bfloat16()",
        "y = model(x.to(torch.bfloat16))",
        "y = x.to(torch.bfloat16)",
        "self.net = Net().to(torch.bfloat16)",
        "self.teacher = copy.deepcopy(student).bfloat16()",
        "p.data = p.data.to(torch.bfloat16)",
        "average.add_(p.detach().to(torch.bfloat16), alpha=0.1)",
        "kept = [p.detach().to(torch.bfloat16).clone() for p in model.parameters()]",
        "kept = [p.detach().to(torch.bfloat16, copy=True) for p in model.parameters()]",
        "keys[:, :n] = k.to(torch.bfloat16)",
        "x, y = torch.randn(2, 2).bfloat16(), data.bfloat16()",
        "def f(x, y):\n    return x, y.to(torch.bfloat16)",
        "self.x = torch.randn(2, 2).bfloat16()",
        "kept = [(a + b).to(torch.bfloat16)]",
    ],
)
def test_no_copy_is_added_where_none_is_kept(line: str, tmp_path: Path) -> None:
    """Modules have no ``clone``, activations need none, and copies that are made already are not made twice."""
    changed = edited(program(tmp_path, line), "bfloat16-to-float32")
    assert changed
    assert changed.count("clone") == line.count("clone")


def test_copies_in_other_files_of_the_program_stay_copies(tmp_path: Path) -> None:
    """The average is made in a module that the script imports, by a cast that copied half-precision weights; the patch changes both files."""
    (tmp_path / "average.py").write_text(
        "def shadow(model):\n    return [p.detach().float() for p in model.parameters()]\n"
    )
    (tmp_path / "other.py").write_text("def loss(x):\n    y = x.float()\n    return [y.detach().half()]\n")
    read = program(tmp_path, "import average, other\nmodel = Net().bfloat16()\nkept = average.shadow(model)")
    edits, _ = first_edits(read, ["bfloat16-to-float32"])
    assert [(edit.file, edit.new.strip()) for edit in edits] == [
        ("train.py", "model = Net().float()"),
        ("average.py", "return [p.detach().float().clone() for p in model.parameters()]"),
    ]
    patch = ["patch", "-p0"]
    subprocess.run(patch, input=f"{diff_of(edits)}\n", text=True, cwd=tmp_path, check=True, capture_output=True)
    assert ".clone()" in (tmp_path / "average.py").read_text()
    assert "Net().float()" in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(("maker", "dtype"), [("bfloat16-to-float32", "bfloat16"), ("half-to-bfloat16", "float16")])
def test_what_is_written_to_a_checkpoint_keeps_its_dtype(maker: str, dtype: str, tmp_path: Path) -> None:
    """It is cast again where it is loaded; what the program computes with changes."""
    save = f"torch.save({{k: v.to(torch.{dtype}) for k, v in model.state_dict().items()}}, path)"
    changed = edited(program(tmp_path, f"model = Net().to(torch.{dtype})\n{save}"), maker).splitlines()
    assert dtype not in changed[0].replace("bfloat16", "" if dtype == "float16" else "bfloat16")
    assert changed[1] == save


AVERAGE = """
    class Average:
        def __init__(self, model):
            self.shadow = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}

        def update(self, model):
            for n, p in model.named_parameters():
                self.shadow[n].mul_(0.99).add_(p.to(torch.bfloat16), alpha=0.01)

    model = Net().to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x.to(torch.bfloat16))
"""
UPDATES = [
    ("self.shadow[n].mul_(0.99).add_(p.to(torch.bfloat16), alpha=0.01)", "self.shadow[n].mul_(0.99).add_(p.to(torch.float32), alpha=0.01)"),
    ("torch._foreach_lerp_([self.shadow[n]], [p], 0.01)", "torch._foreach_lerp_([self.shadow[n]], [t.to(torch.float32) for t in [p]], 0.01)"),
    ("self.shadow[n].lerp_(p, 0.01)", "self.shadow[n].lerp_(p.to(torch.float32), 0.01)"),
]  # fmt: skip


@pytest.mark.parametrize(("update", "after"), UPDATES)
def test_only_what_makes_a_stalled_average_is_changed(update: str, after: str, tmp_path: Path) -> None:
    """The weights are healthy, and so are autocast regions and inputs in half precision."""
    text = AVERAGE.replace(UPDATES[0][0], update)
    changed = edited(_stalled(tmp_path, text), *MAKERS)
    expected = lines(text).replace("p.detach().to(torch.bfloat16)", "p.detach().to(torch.float32).clone()")
    assert changed == expected.replace(update, after)


MAKERS = ("updated-in-float32", "set-float32", "bfloat16-to-float32")


def _stalled(tmp_path: Path, text: str) -> Any:
    at = next(n for n, line in enumerate(lines(text).splitlines(), 2) if "0.01" in line)
    weights = parameter("weight", "bfloat16", set_at=f"{tmp_path}/train.py:1")
    return program(tmp_path, lines(text), None, weights, id="update-stall", source=f"train.py:{at}", dtype="bfloat16")


@pytest.mark.parametrize(
    ("made", "after", "update"),
    [
        ("shadow = [p.detach().clone() for p in model.parameters()]", "shadow = [p.detach().clone().to(torch.float32) for p in model.parameters()]",
         "for s, p in zip(shadow, model.parameters()):\n    s.mul_(0.99).add_(p, alpha=0.01)"),
        ("shadow = [p.bfloat16() for p in model.parameters()]", "shadow = [p.float().clone() for p in model.parameters()]",
         "torch._foreach_lerp_(shadow, [p.float() for p in model.parameters()], 0.01)"),
        ("shadow = torch.zeros(2, dtype=torch.bfloat16)", "shadow = torch.zeros(2, dtype=torch.float32)", "shadow = 0.99 * shadow + 0.01 * x"),
        ("shadow = torch.tensor(0.0)", "shadow = torch.tensor(0.0).to(torch.float32)", "shadow += 0.01"),
    ],
)  # fmt: skip
def test_what_a_line_updates_is_found(made: str, after: str, update: str, tmp_path: Path) -> None:
    """In a list that a loop goes over, in a call for many tensors, in a variable that is computed anew."""
    changed = edited(_stalled(tmp_path, f"{made}\n{update}"), *MAKERS)
    assert after in changed.splitlines()


def test_weights_that_a_program_steps_by_hand_are_the_stalled_tensors(tmp_path: Path) -> None:
    """Then the weights are made float32, as for an optimizer."""
    text = "model = Net().bfloat16()\nfor shadow in model.parameters():\n    shadow -= 0.01 * shadow.grad"
    assert "model = Net().float()" in edited(_stalled(tmp_path, text), *MAKERS)


@pytest.mark.parametrize(
    ("value", "masks"), [("-1e9", True), ("-True", False), ("-'a'", False), ("-1j", False), ("-5", False)]
)
def test_only_numbers_are_taken_for_those_of_a_mask(value: str, masks: bool, tmp_path: Path) -> None:
    """Whatever stands behind a minus."""
    source = program(tmp_path, f"x = {value}").failing_file()
    assert source is not None
    node = next(source.every(ast.Assign)).value
    assert _masks(source, node) is masks


def test_what_float32_is_too_narrow_for_is_made_in_float64(tmp_path: Path) -> None:
    """A count beyond 2**24; what names no dtype is cast, as float32 is the default."""
    text = "hits = torch.zeros(3)\nfor x in batches:\n    hits += (x > 0).to(torch.float32)"
    read = program(tmp_path, text, id="rounded-sum", source="train.py:4", dtype="float32")
    assert edited(read, "updated-in-float32").splitlines() == [
        "hits = torch.zeros(3).to(torch.float64)",
        "for x in batches:",
        "    hits += (x > 0).to(torch.float64)",
    ]
