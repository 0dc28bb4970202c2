"""Edits of a program's source: what each maker changes, and what is never read or shown."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import finding_ids, spec_of
from dtypedoctor.diagnosis.edits import MAKERS, edits_for
from dtypedoctor.diagnosis.rule import Confidence, Edit, Finding, Link, Severity
from dtypedoctor.diagnosis.scene import Scene, masked_line, safe_line
from dtypedoctor.trace.events import Raised

FINDING = Finding(
    id="domain-error", severity=Severity.ERROR, confidence=Confidence.LIKELY, summary="", cause="", dtype="float16",
    op="aten.log.default", source="train.py:2",
)  # fmt: skip


def scene(tmp_path: Path, *lines: str, op: str = "aten.log.default", folder: Path | None = None) -> Scene:
    script = tmp_path / "train.py"
    script.write_text("\n".join(("import torch", *lines)) + "\n")
    return Scene(replace(FINDING, op=op), TraceBuilder().build(), (folder or tmp_path,), script)


def first_edits(read: Scene, makers: Sequence[str]) -> tuple[tuple[Edit, ...], str]:
    return next(edits_for(read, makers))


@pytest.mark.parametrize(
    ("maker", "op", "old", "new"),
    [
        ("keep-in-domain", "aten.log.default", "y = torch.log(a + b)", "y = torch.log((a + b).clamp_min(1e-6))"),
        ("keep-in-domain", "aten.log.default", "y = x.log()", "y = x.clamp_min(1e-6).log()"),
        ("keep-in-domain", "aten.div.Tensor", "y = a / b.sum(1)", "y = a / torch.where((d := b.sum(1)) == 0, 1e-4, d)"),
        ("keep-in-domain", "aten.div.Tensor", "y = a / b.abs().sum(1)", "y = a / b.abs().sum(1).clamp_min(1e-4)"),
        ("keep-in-domain", "aten.sqrt.default", "y = math.sqrt(2) * torch.sqrt(b)", "y = math.sqrt(2) * torch.sqrt(b.clamp_min(0))"),
        ("keep-in-domain", "aten.div.Tensor", "y = d.sum(-1).sqrt()", "y = d.sum(-1).clamp_min(1e-6).sqrt()"),
        ("half-to-bfloat16", "aten.mul.Tensor", "m = m.half()", "m = m.bfloat16()"),
        ("half-to-bfloat16", "aten.mul.Tensor", "m = m.to(torch.float16)", "m = m.to(torch.bfloat16)"),
        ("half-to-bfloat16", "aten.mul.Tensor", "m = load('x', dtype='float16')", "m = load('x', dtype='bfloat16')"),
        ("half-to-bfloat16", "aten.mul.Tensor", "m = load('x', variant='fp16').half()", "m = load('x', variant='fp16').bfloat16()"),
        ("half-to-bfloat16", "aten.mul.Tensor", "a = Arguments(fp16=True)", "a = Arguments(bf16=True)"),
        ("half-to-bfloat16", "aten.mul.Tensor", "a = Arguments(fp16=True, bf16=False)", "a = Arguments(fp16=False, bf16=True)"),
        ("half-to-float32", "aten.mul.Tensor", "a = Arguments(fp16=True)", "a = Arguments(fp16=False)"),
        ("bfloat16-to-float32", "aten.mul.Tensor", "a = Arguments(bf16=True)", "a = Arguments(bf16=False)"),
        ("bfloat16-to-float32", "aten.mul.Tensor", "t = Trainer(precision='bf16-true')", "t = Trainer(precision='32-true')"),
        ("half-to-bfloat16", "aten.mul.Tensor", "t = Trainer(precision='16-mixed')", "t = Trainer(precision='bf16-mixed')"),
        ("bfloat16-to-float32", "aten.mul.Tensor", "m = load('x', dtype='bfloat16')", "m = load('x', dtype='float32')"),
        ("finite-mask", "aten._softmax.default", "s = a.masked_fill(k, -torch.inf)", "s = a.masked_fill(k, torch.finfo(torch.float16).min)"),
        ("without-scaler", "aten.mul.Tensor", "s = torch.amp.GradScaler('cpu')", "s = torch.amp.GradScaler('cpu', enabled=False)"),
        ("region-without-cache", "aten.mm.default", "c = torch.autocast('cpu')", "c = torch.autocast('cpu', cache_enabled=False)"),
        ("compiled-for-any-size", "aten.mm.default", "f = torch.compile(m, dynamic=False)", "f = torch.compile(m, dynamic=True)"),
        ("without-compiler", "aten.mm.default", "f = torch.compile(m, dynamic=False)", "f = m"),
    ],
)  # fmt: skip
def test_an_edit_holds_the_line_as_it_is_and_as_it_should_be(
    maker: str, op: str, old: str, new: str, tmp_path: Path
) -> None:
    """One line, as it stands in the file, and what it should be."""
    found, _ = first_edits(scene(tmp_path, old, op=op), [maker])
    assert found == (Edit(file="train.py", line=2, old=old, new=new),)


@pytest.mark.parametrize("made", ["GradScaler()", "torch.amp.GradScaler(\n    'cuda'\n)", "Scaler()"])
def test_an_edit_to_bfloat16_switches_the_scaler_off(made: str, tmp_path: Path) -> None:
    """Whatever the class is called in the file."""
    lines = ("m = m.half()", "from torch.amp import GradScaler as Scaler", f"s = {made}")
    found = scene(tmp_path, *lines, op="aten.mul.Tensor")
    edits, _ = first_edits(found, ["half-to-bfloat16"])
    assert any("enabled=False" in edit.new for edit in edits)


def test_a_line_with_what_may_be_a_secret_is_not_shown(tmp_path: Path) -> None:
    """An edit quotes its whole line."""
    assert first_edits(scene(tmp_path, "y = x.log(); login(password='hunter2')"), ["keep-in-domain"])[0] == ()
    assert first_edits(scene(tmp_path, f"y = x.log(); say('{'word ' * 20}')"), ["keep-in-domain"])[0] == ()
    of_two_lines = scene(tmp_path, 't = """Patient', 'has pneumonia""" + str(x.half())')
    assert first_edits(of_two_lines, ["half-to-bfloat16"])[0] == ()


@pytest.mark.parametrize(
    "line",
    [
        "login(password='hunter2')",
        "api_key = \"abc\"",
        "h = {'authorization_token': 'abc'}",
        "os.environ['HF_TOKEN'] = 'abc'",
        "t = 'hf_" + "aBcD1234" * 5 + "'",
        "x = 'the patient said " + "something private " * 3 + "'",
    ],
)  # fmt: skip
def test_texts_that_may_be_secret_are_elided(line: str) -> None:
    """By the name that they are given, by their shape, by their length."""
    shown = safe_line(line)
    assert shown != line
    assert not any(secret in shown for secret in ("hunter2", "'abc'", '"abc"', "aBcD1234", "patient"))


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    """A trace may name any file: only Python files below the given folders are opened, and none through a link."""
    inside = tmp_path / "inside"
    inside.mkdir()
    outside = scene(tmp_path, "y = x.log()", folder=inside)
    assert first_edits(outside, ["keep-in-domain"])[0] == ()
    (inside / "link.py").symlink_to(tmp_path / "train.py")
    assert outside.source(inside / "link.py") is None
    (inside / "notes.txt").write_text("x = 1\n")
    assert outside.source(inside / "notes.txt") is None
    (inside / "plain.py").write_text("x = 1\n")
    assert outside.source(inside / "plain.py") is not None


def test_what_cannot_be_read_as_python_is_left_alone(tmp_path: Path) -> None:
    """A script of another version, say."""
    assert first_edits(scene(tmp_path, "y = x.log("), ["keep-in-domain"])[0] == ()


def test_every_maker_that_a_spec_names_is_there() -> None:
    """And each template takes the values that a finding has."""
    for spec in map(spec_of, finding_ids()):
        assert set(spec.edits) <= set(MAKERS)
        values = dict.fromkeys(
            ("module", "op", "dtype", "other", "alike", "device", "cost", "bound", "scores", "wider"), "x"
        )
        assert spec.do_this.format(**values) is not None


def test_texts_of_an_excerpt_are_masked_letter_by_letter(tmp_path: Path) -> None:
    """So that the caret still stands under what failed; words such as `cpu` and `float16` stay, also in the middle of a long text nothing does."""
    read = scene(
        tmp_path,
        "raise ValueError(f'né {batch[\"é\"]} for velvet-otter', 'Jané Doe', 'cpu', 'float16', b'key')",
        'text = """Patient',
        'has pneumonia""" + x.half()',
    )
    source = read.source(tmp_path / "train.py")
    assert source is not None
    shown = [masked_line(source, line) for line in (2, 3, 4)]
    assert [len(line) for line in shown] == [len(line) for line in source.data.decode().splitlines()[1:]]
    assert shown[0].startswith("raise ValueError(***")
    assert "'cpu', 'float16'" in shown[0]
    assert shown[2].endswith(" + x.half()")
    assert not any(word in line for line in shown for word in ("otter", "Jan", "key", "Patient", "pneumonia"))


def test_a_file_that_was_written_after_the_run_began_is_not_read(tmp_path: Path) -> None:
    """Its lines are not those that ran; one that has become shorter has no such line at all."""
    read = scene(tmp_path, "y = x.log()")
    assert read.script is not None
    began = read.script.stat().st_mtime
    assert first_edits(replace(read, began=began, _read={}), ["keep-in-domain"])[0]
    os.utime(read.script, (began + 60, began + 60))
    assert first_edits(replace(read, began=began, _read={}), ["keep-in-domain"])[0] == ()
    assert read.line_at("train.py:2") is not None
    assert read.line_at("train.py:3") is None


def test_a_file_in_another_encoding_is_left_alone(tmp_path: Path) -> None:
    """Columns are told in bytes of UTF-8."""
    read = scene(tmp_path)
    assert read.script is not None
    read.script.write_bytes(b"# -*- coding: latin-1 -*-\nimport torch\nx = load('caf\xe9').half()\n")
    assert first_edits(read, ["half-to-bfloat16", "without-scaler", "lower-learning-rate"]) == ((), "")


@pytest.mark.parametrize(
    ("line", "op", "dtypes", "new"),
    [
        ("F.linear(x, w, b)", "aten.addmm.default", ["bfloat16", "float32", "bfloat16"], "F.linear(x.to(torch.bfloat16), w, b)"),
        ("torch.mm(x, w)", "aten.mm.default", ["float32", "bfloat16"], "torch.mm(x.to(torch.bfloat16), w)"),
        ("F.layer_norm(x, s, w, b, e)", "aten.native_layer_norm.default", ["float32", "bfloat16", "bfloat16"], None),
    ],
)  # fmt: skip
def test_the_argument_that_is_the_odd_operand_is_cast(
    line: str, op: str, dtypes: list[str], new: str | None, tmp_path: Path
) -> None:
    """Operators have their operands in an order of their own; where they cannot be told apart nothing is changed."""
    read = scene(tmp_path, line)
    builder = TraceBuilder()
    operands = [
        tensor(number, dtype=dtype, origin=None if dtype == "float32" else "parameter")
        for number, dtype in enumerate(dtypes)
    ]
    builder.op(op, "", operands, [], error="same dtype")
    builder.add(
        Raised(n=builder.n(), step=1, call=1, phase="forward", type="RuntimeError", message="same dtype", modules=[],
               frames=[f"{read.script}:2 forward"], spans=[[2, 2, 0, len(line)]])
    )  # fmt: skip
    read = replace(read, finding=replace(read.finding, dtype="float32"), trace=builder.build())
    found, _ = first_edits(read, ["cast-operand"])
    assert [edit.new for edit in found] == ([new] if new else [])


@pytest.mark.parametrize(
    ("names", "modules", "maker", "new"),
    [
        (["args.1.0", "args.1.1"], 1, "cast-operand", "r(x, tuple(t.to(torch.bfloat16) for t in h))"),
        (["args.0", "args.1"], 1, "cast-operand", "r(x.to(torch.bfloat16), h.to(torch.bfloat16))"),
        (["args.0"], 2, "cast-operand", "r(x.to(torch.bfloat16), h)"),
        ([None], 2, "cast-argument", "r(x.to(torch.bfloat16), h)"),
        (["args.1", None], 1, "cast-argument", "r(x, h.to(torch.bfloat16))"),
    ],
)
def test_all_odd_operands_are_cast_that_a_module_is_called_with(
    names: list[str | None], modules: int, maker: str, new: str, tmp_path: Path
) -> None:
    """The experiment on the operator shows that it helps only where each of its odd operands is an argument."""
    read = scene(tmp_path, "r(x, h)")
    builder = TraceBuilder()
    odd = [replace(tensor(n, dtype="float32", origin="input"), name=name) for n, name in enumerate(names, 1)]
    builder.op("aten.mm.default", "", [tensor(9, dtype="bfloat16", origin="parameter"), *odd], [], error="same dtype")
    inside = [
        f"/site-packages/torch/nn/{frame}"
        for frame in ("module.py:1 _wrapped_call_impl", "module.py:2 _call_impl", "linear.py:3 forward")
    ] * modules
    builder.add(
        Raised(n=builder.n(), step=1, call=1, phase="forward", type="RuntimeError", message="same dtype", modules=[],
               frames=[f"{read.script}:2 <module>", *inside], spans=[[2, 2, 0, 7]] + [[1, 1, 0, 1]] * len(inside))
    )  # fmt: skip
    finding = replace(read.finding, id="model-input-dtype", dtype="float32")
    found, made_by = first_edits(replace(read, finding=finding, trace=builder.build()), ["cast-operand"])
    assert ([edit.new for edit in found], made_by) == ([new], maker)


@pytest.mark.parametrize(
    ("signature", "line", "new"),
    [
        ("self, x", "return self.weight * h.to(x.dtype)", "return (self.weight * h.to(x.dtype)).to(x.dtype)"),
        ("self, x", "return h.to(x.dtype) * self.weight", "return (h.to(x.dtype) * self.weight).to(x.dtype)"),
        ("self, x", "return self.scaled(h)", "return self.scaled(h).to(x.dtype)"),
        ("self, h", "return self.weight * h.bfloat16()", "return (self.weight * h.bfloat16()).to(torch.bfloat16)"),
        ("self, x", "h = self.weight * h", None),
    ],
)
def test_what_a_norm_returns_is_cast_to_the_dtype_of_its_input(
    signature: str, line: str, new: str | None, tmp_path: Path
) -> None:
    """On the line that promotes; the input's dtype is named where the input is assigned to, and nothing is changed where nothing is returned."""
    read = scene(
        tmp_path,
        "class Norm:",
        f"    def forward({signature}):",
        "        h = (x if 0 else h).float()",
        f"        {line}",
    )
    links = (
        Link(fqn="attn", op="aten.mm.default", dtype_in="float32", dtype_out=None, source="train.py:2"),
        Link(fqn="norm", op="aten.mul.Tensor", dtype_in="bfloat16", dtype_out="float32", source="train.py:5"),
    )
    met = (Link(fqn="attn", op="load-dtype", dtype_in=None, dtype_out="bfloat16", source=None),)
    read = replace(read, finding=replace(read.finding, dtype="float32", provenance=links, met=met))
    found, _ = first_edits(read, ["cast-promoted-output"])
    assert [edit.new.strip() for edit in found] == ([new] if new else [])
    assert [edit.line for edit in found] == [5] * len(found)
