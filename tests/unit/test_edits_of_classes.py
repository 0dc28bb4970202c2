"""What each maker of edits does to the program of its class, in other words than the corpus has; and where it leaves a program alone."""

import subprocess
import textwrap
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_edits import first_edits
from traces import TraceBuilder, tensor

from dtypedoctor.diagnosis import spec_of
from dtypedoctor.diagnosis.dtype_edits import changes_most_weights
from dtypedoctor.diagnosis.edits import advise, edits_for
from dtypedoctor.diagnosis.rule import Confidence, Edit, Finding, Link, Severity
from dtypedoctor.diagnosis.scene import Scene
from dtypedoctor.examination.examine import edited_files
from dtypedoctor.report.build import patch_of
from dtypedoctor.rules.silent.rounding import PARTS_READ
from dtypedoctor.trace.events import Observed, ParameterNote, Raised
from dtypedoctor.trace.records.execution import Unscaled
from dtypedoctor.trace.records.silent import RoundedUse

FINDING = Finding(
    id="a", severity=Severity.ERROR, confidence=Confidence.LIKELY, summary="", cause="", dtype="float32", source="train.py:2"
)  # fmt: skip
CALL = "_wrapped_call_impl"


def program(
    tmp_path: Path, text: str, builder: TraceBuilder | None = None, *parameters: ParameterNote, **finding: Any
) -> Scene:
    script = tmp_path / "train.py"
    script.write_text("import torch\n" + textwrap.dedent(text).lstrip("\n"))
    trace = (builder or TraceBuilder()).add(*parameters).build()
    return Scene(replace(FINDING, **finding), trace, (tmp_path,), script)


def parameter(name: str, dtype: str, span: tuple[int, int, int, int] | None = None, **more: Any) -> ParameterNote:
    """A parameter, and the expression of the script that gave it its dtype."""
    return ParameterNote(
        n=1, root=0, name=name, dtype=dtype, shape=[2, 2], requires_grad=True, set_span=list(span or ()), **more
    )


def failing(tmp_path: Path, *lines: tuple[int, str, str], **op: Any) -> TraceBuilder:
    """An operator that raises, below expressions of the script: their lines, their texts, and the function that runs inside of each."""
    text = (tmp_path / "train.py").read_text().splitlines()
    builder = TraceBuilder()
    name = op.pop("op", "aten.mm.default")
    builder.op(name, op.pop("fqn", ""), op.pop("inputs", []), [], error="they differ", **op)
    frames, spans = [], []
    for line, expression, inside in lines:
        begin = text[line - 1].index(expression)
        frames += [
            f"{tmp_path}/train.py:{line} f",
            *([f"/site-packages/torch/nn/modules/module.py:1 {inside}"] if inside else []),
        ]
        spans += [[line, line, begin, begin + len(expression)], *([[1, 1, 0, 1]] if inside else [])]
    return builder.add(
        Raised(n=builder.n(), step=1, call=1, phase="forward", type="RuntimeError", message="they differ", modules=[], frames=frames, spans=spans)
    )  # fmt: skip


def edited(read: Scene, *makers: str) -> str:
    """The script after its edits, without its first line; empty where there are none."""
    assert read.script is not None
    edits, _ = first_edits(read, makers)
    lines = read.script.read_text().splitlines()
    for edit in edits:
        assert lines[edit.line - 1] == edit.old
        lines[edit.line - 1] = edit.new
    return "\n".join(line for line in "\n".join(lines).splitlines()[1:] if line) if edits else ""


def lines(text: str) -> str:
    """A text as :func:`edited` gives it."""
    return "\n".join(line for line in textwrap.dedent(text).splitlines() if line)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("s = torch.where(keep, s, float('-inf'))", "s = torch.where(keep, s, LOW)"),
        ("s = torch.where(gone, torch.tensor(-torch.inf), q @ k)", "s = torch.where(gone, torch.tensor(LOW), q @ k)"),
        ("s[gone] = float('-inf')", "s[gone] = LOW"),
        ("m = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)", "m = torch.full((n, n), LOW, dtype=x.dtype).triu(1)"),
        ("m = torch.full_like(x, fill_value=-math.inf)", "m = torch.full_like(x, fill_value=LOW)"),
        ("if best == -math.inf: print(best)", ""),
        ("best = torch.where(a, b, c)", ""),
    ],
)  # fmt: skip
def test_a_mask_is_finite_however_it_is_filled(old: str, new: str, tmp_path: Path) -> None:
    """With the smallest number of the dtype in which it went wrong."""
    assert edited(program(tmp_path, old), "finite-mask") == new.replace("LOW", "torch.finfo(torch.float32).min")


@pytest.mark.parametrize(
    ("dtype", "op", "old", "new"),
    [
        ("float16", "exp", "y = torch.exp(x)", "y = torch.exp(x.clamp(max=11))"),
        ("bfloat16", "exp", "y = torch.exp(x)", "y = torch.exp(x.clamp(max=88))"),
        ("float16", "div", "y = torch.div(a, n.norm())", "y = torch.div(a, n.norm().clamp_min(1e-4))"),
        ("float32", "div", "y = a.div(n.norm())", "y = a.div(n.norm().clamp_min(1e-6))"),
    ],
)
def test_a_bound_is_one_that_the_dtype_can_hold(dtype: str, op: str, old: str, new: str, tmp_path: Path) -> None:
    """exp(80) is inf in float16, and 1 - 1e-6 is 1 in bfloat16."""
    assert edited(program(tmp_path, old, op=f"aten.{op}.default", dtype=dtype), "keep-in-domain") == new


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", ["exp", "acos", "asin"])
def test_a_bound_takes_nothing_from_a_domain_that_the_dtype_can_tell(dtype: str, op: str, tmp_path: Path) -> None:
    """Values that had a finite result keep it, but for a rounding."""
    line = edited(program(tmp_path, f"y = x.{op}()", op=f"aten.{op}.default", dtype=dtype), "keep-in-domain")
    kind = getattr(torch, dtype)
    inside = torch.tensor([10.0] if op == "exp" else [-1.0, 1.0])
    border = torch.tensor([torch.finfo(kind).max]).log().floor() if op == "exp" else inside
    x = torch.cat((inside, border, border * 0.5)).to(kind)
    names = {"x": x}
    exec(line, {"torch": torch}, names)  # noqa: S102  # the edit itself
    assert names["y"].isfinite().all()
    close = 0.0 if op == "exp" else 4 * torch.finfo(kind).eps
    assert torch.allclose(names["y"].cos() if op == "acos" else names["y"].sin() if op == "asin" else names["y"],
                          x if op != "exp" else x.exp(), rtol=close, atol=close)  # fmt: skip


def test_a_cast_to_the_dtype_of_integers_becomes_one_to_float32(tmp_path: Path) -> None:
    """Whichever of the dtypes that the line takes from tensors is the integer one; what is cast on from it keeps its dtype."""
    read = program(tmp_path, "y = x.to(self.weight.dtype).to(x.dtype)", id="float-to-int-cast", dtype="uint8")
    ways = {edits[0].new for edits, _ in edits_for(read, ("in-wider-dtype",))}
    assert ways == {"y = x.to(torch.float32).to(x.dtype)", "y = x.to(self.weight.dtype).to(torch.float32)"}


WHOLE = "dict(batch) if hasattr(batch, 'keys') else batch"


@pytest.mark.parametrize(
    ("head", "made", "values"),
    [
        ("for x, y in loader:", (), "[x, y]"),
        ("for i, (x, y) in enumerate(loader):", (), "[x, y]"),
        ("for i, batch in enumerate(loader):", ("y = batch['labels']",), WHOLE),
    ],
)
def test_a_batch_with_nan_is_left_out_of_the_loop_that_trains(
    head: str, made: tuple[str, ...], values: str, tmp_path: Path
) -> None:
    """Whatever a batch is; the loops around it and those that do not train stay as they are."""
    body = [
        "for epoch in range(2):",
        f"    {head}",
        *(f"        {line}" for line in made),
        "        loss(net).backward()",
        "for z in loader:",
        "    net(z)",
    ]
    after = edited(program(tmp_path, "\n".join(body)), "skip-batch").splitlines()
    assert after[2:4] == [
        f"        if not all(x.isfinite().all() for x in [x for x in torch.utils._pytree.tree_leaves({values}) if torch.is_tensor(x)]):",
        "            continue  # inf or NaN in the data",
    ]
    assert [line for line in after if line not in after[2:4]] == body


def test_what_a_function_returns_gets_the_dtype_that_it_has_been_called_with(tmp_path: Path) -> None:
    """Others call it with another one: no dtype is written into it where all operands of the line have that of the failing one."""
    text = "def unit(x, eps=1e-8):\n    return x / (x.norm() + eps)"
    finding = {"id": "rounds-out-of-domain", "dtype": "float16", "op": "aten.div.Tensor", "source": "train.py:3"}
    known = TraceBuilder()
    known.op("aten.div.Tensor", "", [tensor(1, dtype="float16")], [tensor(2, dtype="float16")], source="train.py:3")
    cast = "    return (x.to(torch.float32) / (x.to(torch.float32).norm() + eps)).to({})"
    assert cast.format("x.dtype") in edited(program(tmp_path, text, known, **finding), "in-wider-dtype")
    assert cast.format("torch.float16") in edited(program(tmp_path, text, **finding), "in-wider-dtype")


@pytest.mark.parametrize("made", ["x", "[x, 1]", "(x,)", "{'x': x, 'name': 'a'}", "UserDict(x=x)"])
def test_a_batch_that_is_passed_on_whole_is_left_out_whatever_it_is(made: str, tmp_path: Path) -> None:
    """The edit, run: of two batches the one with NaN is not trained on, be they tensors, lists, tuples or mappings."""
    import torch

    text = f"for batch in [{made} for x in (good, bad)]:\n    seen.append(batch)\n    net(batch).backward()"
    (tmp_path / "own").mkdir()
    after = edited(program(tmp_path / "own", text), "skip-batch")
    seen: list[object] = []
    names = {"good": torch.ones(2), "bad": torch.tensor([1.0, torch.nan]), "seen": seen, "UserDict": UserDict}
    exec(after, names | {"torch": torch, "net": lambda _: torch.ones(1, requires_grad=True)})  # noqa: S102  (the text is what this test wrote)
    assert len(seen) == 1, after


def test_an_optimizer_is_made_after_each_statement_that_may_change_the_model(tmp_path: Path) -> None:
    """The last first: whether something between uses the optimizer the trial shows."""
    text = """
        net = make()
        opt = torch.optim.SGD(net.parameters(), lr=1)
        net.head = torch.nn.Linear(2, 2)
        net.blocks[0] = torch.nn.Linear(2, 2)
        scaler = torch.amp.GradScaler()
        scaler.step(opt)
    """
    program(tmp_path, text)
    read = program(tmp_path, text, failing(tmp_path, (7, "scaler.step(opt)", "")))
    ways = [[edit.line for edit in edits] for edits, _ in edits_for(read, ["optimizer-after-model"])]
    assert ways == [[3, 6], [3, 5]]


@pytest.mark.parametrize(("optimizers", "strangers"), [(2, 0), (1, 0), (2, 3)])
def test_a_step_without_gradients_is_skipped_where_others_have_some(
    optimizers: int, strangers: int, tmp_path: Path
) -> None:
    """One optimizer alone would never step, nor one that holds another model's parameters: nothing is advised there."""
    text = "".join(f"o{i} = torch.optim.SGD(p{i})\n" for i in range(optimizers)) + "scaler.step(o0)\n"
    program(tmp_path, text)
    builder = failing(tmp_path, (optimizers + 2, "scaler.step(o0)", ""))
    seen = Unscaled(scale=1.0, optimizer="SGD", params={"float32": 4}, gradients={}, names={}, strangers=strangers)
    builder.add(Observed(n=builder.n(), step=1, call=1, phase="optimizer", fqn=None, what=seen))
    after = edited(program(tmp_path, text, builder), "step-where-gradients")
    assert ("\n    scaler.step(o0)" in after) == (optimizers == 2 and not strangers)


@pytest.mark.parametrize(
    ("line", "call", "op", "tensors", "cast"),
    [
        ("y = (e - q).inverse()", "(e - q).inverse()", "aten.linalg_inv_ex.default", 1, "y = (e.to(torch.float32) - q.to(torch.float32)).inverse()"),
        ("y = -torch.cdist(a, b)", "torch.cdist(a, b)", "aten._cdist_forward.default", 2, "y = -torch.cdist(a.to(torch.float32), b.to(torch.float32))"),
        ("y = torch.fft.fft(x, dim=-1).real", "torch.fft.fft(x, dim=-1)", "aten.fft_fft.default", 1, "y = torch.fft.fft(x.to(torch.float32), dim=-1).real"),
    ],
    ids=["a method of another name", "two operands", "a namespace inside of torch"],
)  # fmt: skip
def test_all_operands_of_what_lacks_a_dtype_are_cast(
    tmp_path: Path, line: str, call: str, op: str, tensors: int, cast: str
) -> None:
    """However the call is written; its result is cast back there, or where the statement is done with it."""
    program(tmp_path, line)
    builder = failing(tmp_path, (2, call, ""), op=op, inputs=[tensor(n + 1, dtype="bfloat16") for n in range(tensors)])
    read = program(tmp_path, line, builder, id="unsupported-dtype", dtype="bfloat16")
    ways = ["".join(edit.new for edit in edits) for edits, _ in edits_for(read, ("in-wider-dtype",))]
    assert cast in ways
    value = cast.removeprefix("y = ")
    assert ways[0] in (f"y = {value}.to(torch.bfloat16)", f"y = ({value}).to(torch.bfloat16)")


@pytest.mark.parametrize(
    ("line", "cast"),
    [
        ("y = torch.clamp(x, min=1e-10).log10()", "y = torch.clamp(x.to(torch.float32), min=1e-10).log10().to(torch.float16)"),
        ("y = x / (self.net(x).norm() + 1e-8)", "y = (x.to(torch.float32) / (self.net(x).to(torch.float32).norm() + 1e-8)).to(torch.float16)"),
        ("y = float(self.ratio) / len(rows)", ""),
    ],
    ids=["clamped", "an epsilon", "numbers"],
)  # fmt: skip
def test_an_argument_whose_guard_is_rounded_away_is_computed_in_float32_first(
    tmp_path: Path, line: str, cast: str
) -> None:
    """From the tensors that it begins with, be they what a module returns; a bound, which changes values that were right, comes after it."""
    read = program(tmp_path, line, id="rounds-out-of-domain", dtype="float16", source="train.py:2")
    assert edited(read, "in-wider-dtype") == cast


@pytest.mark.parametrize(
    ("text", "line", "ways"),
    [
        (
            """
            def deviation(x, dim=-1):
                mean = x.mean(dim)
                return (x.pow(2).mean(dim) - mean * x.mean(dim)).sqrt()
            """,
            4,
            [
                """
                def deviation(x, dim=-1):
                    mean = x.mean(dim)
                    return (x.to(torch.float64).pow(2).mean(dim) - mean * x.to(torch.float64).mean(dim)).sqrt().to(torch.float32)
                """,
                """
                def deviation(x, dim=-1):
                    x = x.to(torch.float64)
                    mean = x.mean(dim)
                    return (x.pow(2).mean(dim) - mean * x.mean(dim)).sqrt().to(torch.float32)
                """,
            ],
        ),
        (
            """
            def spread(x):
                width = (x * x - 1).sqrt()
                return width + 1 if x.dim() else width
            """,
            3,
            [
                """
                def spread(x):
                    width = (x.to(torch.float64) * x.to(torch.float64) - 1).sqrt().to(torch.float32)
                    return width + 1 if x.dim() else width
                """,
                """
                def spread(x):
                    width = (x.to(torch.float64) * x.to(torch.float64) - 1).sqrt()
                    return (width + 1 if x.dim() else width).to(torch.float32)
                """,
                """
                def spread(x):
                    x = x.to(torch.float64)
                    width = (x * x - 1).sqrt()
                    return (width + 1 if x.dim() else width).to(torch.float32)
                """,
            ],
        ),
        (
            "width = (x * x - 1).sqrt()",
            2,
            [
                "width = (x.to(torch.float64) * x.to(torch.float64) - 1).sqrt().to(torch.float32)",
                "width = (x.to(torch.float64) * x.to(torch.float64) - 1).sqrt()",
            ],
        ),
    ],
    ids=["function", "variable", "script"],
)  # fmt: skip
def test_what_float32_rounds_is_computed_in_float64_and_never_bounded(
    tmp_path: Path, text: str, line: int, ways: list[str]
) -> None:
    """From the argument of the line up to the end of its statement, up to what the function returns, or all of the function."""
    read = program(
        tmp_path, text, id="rounds-out-of-domain", dtype="float32", source=f"train.py:{line}", op="aten.sqrt.default"
    )
    script = (tmp_path / "train.py").read_text().splitlines()
    made = []
    for edits, _ in edits_for(read, spec_of("rounds-out-of-domain").edits):
        lines = list(script)
        for edit in edits:
            lines[edit.line - 1] = edit.new
        made.append("\n".join(lines[1:]))
    assert {textwrap.dedent(way).strip("\n") for way in ways} <= set(made)
    assert not any("clamp" in way for way in made)


def test_the_argument_that_the_operand_is_is_cast(tmp_path: Path) -> None:
    """The state of a recurrent cell, not its input; a loss with weights in a buffer casts what it is given."""
    program(tmp_path, "state = cell(x, state)")
    operands = [
        tensor(1, dtype="float32", name="args.1", origin="input"),
        tensor(2, dtype="bfloat16", origin="parameter"),
    ]
    builder = failing(tmp_path, (2, "cell(x, state)", CALL), inputs=operands)
    read = program(tmp_path, "state = cell(x, state)", builder, id="model-input-dtype")
    assert edited(read, "cast-operand") == "state = cell(x, state.to(torch.bfloat16))"
    program(tmp_path, "loss = criterion(logits, labels)")
    operands = [tensor(1, dtype="bfloat16"), tensor(2, dtype="float32", origin="buffer")]
    builder = failing(tmp_path, (2, "criterion(logits, labels)", CALL), inputs=operands)
    read = program(tmp_path, "loss = criterion(logits, labels)", builder, id="model-input-dtype", dtype="bfloat16")
    assert edited(read, "cast-operand") == "loss = criterion(logits.to(torch.float32), labels)"


def test_what_a_wider_operand_makes_is_cast_back(tmp_path: Path) -> None:
    """Where most weights have the narrower dtype, the next operator expects it."""
    program(tmp_path, "y = torch.mm(x, w)")
    operands = [tensor(1, dtype="bfloat16"), tensor(2, dtype="float32", origin="parameter")]
    builder = failing(tmp_path, (2, "torch.mm(x, w)", ""), inputs=operands)
    most = [parameter(name, "bfloat16") for name in ("a", "b")]
    read = program(tmp_path, "y = torch.mm(x, w)", builder, *most, parameter("w", "float32"), dtype="bfloat16")
    assert edited(read, "cast-operand") == "y = torch.mm(x.to(torch.float32), w).to(torch.bfloat16)"


@pytest.mark.parametrize("made", ["factory", "cache: attn.k", "attribute: attn.k", "buffer: attn.k"])
def test_of_other_tensors_that_are_made_beside_the_odd_one_none_is_changed(made: str, tmp_path: Path) -> None:
    """In the step, or before it in a cache. A sum that needs float32 and positions that are whole numbers stay; keys and values are made alike."""
    link = Link(fqn="", op=made, dtype_in=None, dtype_out="float32", source="train.py:4")
    met = Link(fqn="", op="load-dtype", dtype_in=None, dtype_out="bfloat16", source=None)
    lines = ["total = torch.zeros(100)", "at = torch.arange(9)", "k = torch.zeros(3)", "v = torch.zeros(3)"]
    narrow = "torch.zeros(3, dtype=torch.bfloat16)"
    script = "\n".join([*lines[:2], "k, v = torch.zeros(3), torch.zeros(3)", "other = torch.zeros(3)"])
    function = "\n    ".join(["def f():", lines[0], *lines[2:], lines[1]])
    for text, expected in (
        (script, script.replace("k, v = torch.zeros(3), torch.zeros(3)", f"k, v = {narrow}, {narrow}")),
        (function, function.replace("torch.zeros(3)", narrow)),
    ):
        assert (
            edited(program(tmp_path, f"{text}\n", provenance=(link,), met=(met,)), "make-in-dtype").strip() == expected
        )


def test_a_dtype_in_a_variable_is_changed_where_it_is_assigned(tmp_path: Path) -> None:
    """What the variable casts besides the model follows; a variable of the model alone gets a cast behind it."""
    set_at = {"set_at": f"{tmp_path}/train.py:3"}
    read = program(
        tmp_path,
        "d = getattr(torch, name)\nm = net.to(d)\ny = m(x.to(d))",
        None,
        parameter("w", "float16", (3, 3, 4, 13), **set_at),
    )
    assert edited(read, "set-float32") == "d = torch.float32\nm = net.to(d)\ny = m(x.to(d))"
    read = program(
        tmp_path,
        "d = getattr(torch, name)\nm = net.to(d)\ny = m(x)",
        None,
        parameter("w", "float16", (3, 3, 4, 13), **set_at),
    )
    assert edited(read, "set-float32") == "d = getattr(torch, name)\nm = net.to(d).to(torch.float32)\ny = m(x)"


@pytest.mark.parametrize(("end", "file"), [("\n", "train.py"), ("\r\n", "train.py"), ("\n", "my pkg/a net.py")])
def test_a_diff_with_lines_more_and_lines_less_applies(
    end: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`patch -p0` makes of the file what the edits say, wherever lines were added before, and so does a trial; lines end as they did."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    before = [f"a{number} = {number}" for number in range(1, 8)]
    (tmp_path / file).write_bytes(f"{end.join(before)}{end}".encode())
    edits = (
        Edit(file=file, line=2, old=before[1], new="x = 1\ny = 2\na2 = 2"),
        Edit(file=file, line=4, old=before[3], new=""),
        Edit(file=file, line=6, old=before[5], new="a6 = 66"),
    )
    (tried,) = edited_files(edits).values()
    subprocess.run(["patch", "-p0"], input=patch_of(edits).encode(), cwd=tmp_path, check=True, capture_output=True)
    after = [before[0], "x = 1", "y = 2", "a2 = 2", before[2], before[4], "a6 = 66", before[6]]
    assert (tmp_path / file).read_bytes().decode() == tried == "".join(line + end for line in after)


def test_a_call_of_several_lines_is_replaced_in_its_first(tmp_path: Path) -> None:
    """With what follows it; the others go."""
    text = "f = torch.compile(\n    net,\n    dynamic=True,\n).eval()\ng = torch.compile(\n    net,\n)"
    after = edited(program(tmp_path, text), "without-compiler")
    assert after == "f = net.eval()\ng = net"
    after = edited(program(tmp_path, text), "compiled-for-any-size")
    assert (
        after
        == "f = torch.compile(\n    net,\n    dynamic=True,\n).eval()\ng = torch.compile(\n    net, dynamic=True,\n)"
    )


@pytest.mark.parametrize(("fill", "value"), [("NEG", -1e9), ("-1e9", -1e9), ('float("-inf")', -float("inf"))])
@pytest.mark.parametrize("in_another_file", [True, False])
def test_a_mask_is_finite_in_the_dtype_that_it_is_cast_to(
    fill: str, value: float, in_another_file: bool, tmp_path: Path
) -> None:
    """On the line that fills it, which may be in a module beside the script: float32's smallest number is -inf in float16."""
    line = "bias = torch.zeros(4).masked_fill(gone, {})"
    text = f"NEG = -1e9\ndef mask(gone, dtype):\n    {line.format(fill)}\n    return bias.to(dtype)\n"
    made_in = "masking.py" if in_another_file else "train.py"
    (tmp_path / "masking.py").write_text(f"import torch\n{text}")
    infinite = value < -1e38
    builder = TraceBuilder()
    filled = tensor(2, abs(value) if not infinite else 0.0, dtype="float32", num_neginf=4 if infinite else 0)
    builder.op(
        "aten.masked_fill.Scalar",
        "",
        [tensor(1, dtype="float32")],
        [filled],
        scalars=[str(value)],
        source=f"{made_in}:4",
    )
    builder.op("aten._to_copy.default", "", [filled], [tensor(3, num_neginf=4)], source=f"{made_in}:5")
    softmax = builder.op(
        "aten._softmax.default", "", [tensor(3, num_neginf=4)], [tensor(4, nan=4)], source="train.py:2"
    )
    read = program(tmp_path, "w = s.softmax(-1)" if in_another_file else text, builder, op=softmax.op)
    edits, _ = first_edits(read, ["finite-mask"])
    assert [(edit.file, edit.new) for edit in edits] == [
        (made_in, f"    {line.format('torch.finfo(torch.float16).min')}")
    ]


def test_an_operand_of_several_products_is_cast_before_all_of_them(tmp_path: Path) -> None:
    """The second way: the next line would raise as the first one did."""
    text = "def backward(g, w, h):\n    a = g @ w\n    b = g.t() @ h\n    return a, b\n"
    program(tmp_path, text)
    operands = [tensor(1, dtype="float32"), tensor(2, dtype="bfloat16", origin="parameter")]
    read = program(tmp_path, text, failing(tmp_path, (3, "g @ w", ""), inputs=operands))
    ways = [edit.new for edits, _ in edits_for(read, ["cast-operand"]) for edit in edits]
    assert ways == ["    a = g.to(torch.bfloat16) @ w", "    g = g.to(torch.bfloat16)\n    a = g @ w"]


def lerped(tmp_path: Path, *lines: str, takes: list[str], root: int = -1) -> Scene:
    """``lerp_`` of bfloat16 into float32 on the last of these lines, outside of modules."""
    text = "\n".join(lines)
    program(tmp_path, text)
    operands = [tensor(1, dtype="float32"), tensor(2, dtype="bfloat16", name="weight", origin="parameter")]
    call = lines[-1].strip()
    builder = failing(
        tmp_path,
        (len(lines) + 1, call, ""),
        op="aten.lerp_.Scalar",
        inputs=operands,
        inplace=True,
        takes=takes,
        root=root,
    )
    weights = parameter("weight", "bfloat16", (2, 2, 8, 32), set_at=f"{tmp_path}/train.py:2")
    met = (Link(op="load-dtype: weight", fqn=None, dtype_in=None, dtype_out="bfloat16", source="train.py:2"),)
    return program(tmp_path, text, builder, weights, id="operand-dtype-mismatch", dtype="float32", met=met)


def test_only_an_argument_that_was_seen_to_be_a_tensor_is_cast(tmp_path: Path) -> None:
    """The weight of an average is a number of Python's, whatever expression it is; where it is not known which one is a tensor, none is cast."""
    made = ("model = net.to(torch.bfloat16)", "average.lerp_(p, 1 - decay)")
    read = lerped(tmp_path, *made, takes=["tensor", "tensor", "float"])
    assert edited(read, "cast-operand").endswith("average.lerp_(p.to(average.dtype), 1 - decay)")
    assert first_edits(read, ["cast-operand"])[1] == "cast-written"
    unknown = lerped(tmp_path, *made, takes=[])
    assert first_edits(unknown, ["cast-operand"]) == ((), "cast-written")  # in words, whatever can be shown


def test_weights_keep_their_dtype_where_they_meet_another_outside_of_modules(tmp_path: Path) -> None:
    """An average of the weights in float32 asks for a cast where it is updated, not for a float32 model."""
    made = ("model = net.to(torch.bfloat16)", "average.lerp_(p, 1 - decay)")
    assert edited(lerped(tmp_path, *made, takes=["tensor"] * 3), "cast-met-weights") == ""


@pytest.mark.parametrize(("others_at", "is_wide"), [(2, True), (9, False)])
def test_a_line_that_gave_most_weights_their_dtype_is_changed_last(
    others_at: int, is_wide: bool, tmp_path: Path
) -> None:
    """To cast what one layer gets is less than a model in float32; a line that makes this layer alone changes no more than that."""
    lines_set = (2, others_at, others_at, others_at)
    weights = [
        parameter(f"layers.{i}.weight", "bfloat16", (2, 2, 8, 32), set_at=f"{tmp_path}/train.py:{line}")
        for i, line in enumerate(lines_set)
    ]
    met = (Link(op="load-dtype: layers.0.weight", fqn=None, dtype_in=None, dtype_out="bfloat16", source="train.py:2"),)
    read = program(tmp_path, "model = Net().to(torch.bfloat16)", None, *weights, dtype="float32", met=met)
    there, elsewhere = (Edit(file="train.py", line=line, old="", new="") for line in (2, 1))
    assert changes_most_weights(read, [there]) is is_wide
    assert not changes_most_weights(read, [elsewhere])


def test_of_other_writes_to_the_same_rows_only_what_a_call_returns_is_cast(tmp_path: Path) -> None:
    """A flag that is set for these rows is no tensor."""
    text = "def f(self, x, rows):\n    out[rows] = self.a(x)\n    more[rows] = self.b(x)\n    done[rows] = True\n"
    program(tmp_path, text)
    builder = failing(tmp_path, (3, "out[rows]", ""), op="aten.index_put_.default", inplace=True)
    after = edited(program(tmp_path, text, builder), "cast-operand")
    assert "out[rows] = self.a(x).to(out.dtype)" in after
    assert "more[rows] = self.b(x).to(more.dtype)" in after
    assert "done[rows] = True\n" in f"{after}\n"


def test_a_dtype_is_changed_in_all_files_of_a_program(tmp_path: Path) -> None:
    """The model is cast in one file, its input in another."""
    (tmp_path / "parts.py").write_text("import torch\n\ndef batch(x):\n    return x.half()\n")
    read = program(tmp_path, "import parts\nnet = net.half()\ny = net(parts.batch(x))\n")
    edits, _ = first_edits(read, ["half-to-bfloat16"])
    assert [(edit.file, edit.new.strip()) for edit in edits] == [
        ("train.py", "net = net.bfloat16()"),
        ("parts.py", "return x.bfloat16()"),
    ]


TABLE = 'DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}\n'


@pytest.mark.parametrize(
    ("maker", "given", "after"),
    [
        ("bfloat16-to-float32", 'fit(DTYPES["bf16"], precision="bf16")', 'fit(DTYPES["fp32"], precision="fp32")'),
        ("bfloat16-to-float32", 'add("--dtype", default="bf16", choices=["bf16", "fp32"])', 'add("--dtype", default="fp32", choices=["bf16", "fp32"])'),
        ("half-to-bfloat16", 'def fit(p="fp16"):\n    net.to(DTYPES[p])', 'def fit(p="bf16"):\n    net.to(DTYPES[p])'),
    ],
)  # fmt: skip
def test_a_table_of_precisions_stays_true(maker: str, given: str, after: str, tmp_path: Path) -> None:
    """What the program gives as a key becomes the key of the other dtype; where it gives none, the entry is what can be changed."""
    dtype = maker.partition("-")[0].replace("half", "float16")
    assert edited(program(tmp_path, TABLE + given, dtype=dtype), maker) == TABLE + after
    unknown = "fit(DTYPES[args.p])"
    assert edited(program(tmp_path, TABLE + unknown, dtype=dtype), maker) not in ("", TABLE + unknown)


def test_a_counter_of_another_class_stays_as_it_is(tmp_path: Path) -> None:
    """A class without ``forward`` is no module; a loop over a range counts in whole numbers; more sizes do not help."""
    text = """
        class Meter:
            def begin(self):
                self.age = "warmup"
        for step in range(9):
            net.soft.age = step
    """
    told = ("f was compiled again: self._modules['soft'].age == 0; self._modules['soft'].age == 1",)
    read = program(tmp_path, text + "    net = torch.compile(net)\n", evidence=told)
    after = edited(read, "counter-in-tensor", "compiled-for-any-size")
    assert "net.soft.age = torch.tensor(step)" in after
    assert 'self.age = "warmup"' in after
    assert edited(program(tmp_path, "net = torch.compile(net)", evidence=told), "compiled-for-any-size") == ""


def test_a_sum_and_indices_are_mended_where_they_get_half_precision(tmp_path: Path) -> None:
    """The tensor that is added to, and the cast of what looks something up."""
    text = """
        hits, n = torch.zeros((), dtype=torch.bfloat16), 0
        hits += same.sum().to(torch.bfloat16)
    """
    read = program(tmp_path, text, id="rounded-sum", dtype="bfloat16", source="train.py:3")
    (edits, _), *_ = edits_for(read, spec_of("rounded-sum").edits)
    assert [edit.new for edit in edits] == [
        "hits, n = torch.zeros((), dtype=torch.float32), 0",
        "hits += same.sum().to(torch.float32)",
    ]
    text = "batch = {name: values.to(torch.float16) for name, values in batch.items()}"
    read = program(tmp_path, text, id="rounded-indices", dtype="float16", source="train.py:2")
    (edits, _), *_ = edits_for(read, spec_of("rounded-indices").edits)
    assert [edit.new for edit in edits] == [text.replace("float16", "float32")]


@pytest.mark.parametrize(
    ("line", "dtype", "ways"),
    [
        ("times = values.view(2).to(net.dtype)", "float16", ["times = values.view(2).to(torch.float32)"]),
        ("times = torch.linspace(0, 1, n, dtype=kind)", "float16", ["times = torch.linspace(0, 1, n, dtype=torch.float32)"]),
        ("rows = torch.zeros(2, dtype=torch.long)", "float16", []),
        ("average.mul_(decay)", "float16", []),
        ("update(average, weights)", "float16", []),
        ("torch._foreach_mul_(averages, decay)", "float16", []),
        ("near = far - origin", "float32", ["near = far.to(torch.float64) - origin.to(torch.float64)", "near = far.to(torch.float64) - origin"]),
        (
            "rows = (torch.cumsum(mask, 1).type_as(mask) * mask).long()",
            "bfloat16",
            [
                "rows = (torch.cumsum(mask, 1).to(torch.float32) * mask).long()",
                "rows = (torch.cumsum(mask.to(torch.float32), 1).to(torch.float32) * mask.to(torch.float32)).long()",
            ],
        ),
    ],
)  # fmt: skip
def test_a_line_that_rounds_is_computed_wider_by_the_dtype_that_it_takes_or_by_its_operands(
    line: str, dtype: str, ways: list[str], tmp_path: Path
) -> None:
    """Whatever names the dtype: an attribute of something, a variable, another tensor; without any, the cast of what is computed with."""
    read = program(tmp_path, line, id="rounded-result", dtype=dtype, source="train.py:2")
    made = [edits[0].new for edits, _ in edits_for(read, ("in-wider-dtype",)) if edits]
    assert made[: len(ways)] == ways
    assert ways or not made


def test_what_a_function_computes_wider_it_returns_as_before(tmp_path: Path) -> None:
    """What calls the function goes on in the dtype that it has got until now."""
    text = """
        def noised(x, noise, t):
            table = alphas.to(x.dtype)
            return table[t] * x + noise
    """
    read = program(tmp_path, text, id="rounded-result", dtype="bfloat16", source="train.py:3")
    _, (edits, _), *_ = edits_for(read, ("in-wider-dtype",))
    assert [edit.new.strip() for edit in edits] == [
        "table = alphas.to(torch.float32)",
        "return (table[t] * x + noise).to(torch.bfloat16)",
    ]


def test_what_float32_is_too_narrow_for_is_computed_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and edit name the same dtype; without an edit the words say what else helps."""
    monkeypatch.chdir(tmp_path)
    read = program(tmp_path, "near = torch.cdist(cars, stops)", id="rounded-result", source="train.py:2")
    (advice,), _ = advise((read.finding,), read.trace, "train.py", began=0.0, own_files=True)
    assert "in float64" in advice.text
    assert advice.edits[0].new == "near = torch.cdist(cars.to(torch.float64), stops.to(torch.float64))"
    (advice,), _ = advise((read.finding,), read.trace, "train.py", began=0.0, own_files=False)
    assert advice.text.startswith("Take away what all values have in common")


def test_the_line_that_uses_what_another_has_rounded_is_tried_behind_it(tmp_path: Path) -> None:
    """The dtype may be right where the values are kept, and too narrow for what is computed from them."""
    text = "kept = values.to(torch.bfloat16)\nrest = weight - kept @ kept"
    builder = TraceBuilder()
    used = RoundedUse(
        use="input", op="aten.sub.Tensor", source="train.py:3", made_by="aten._to_copy.default", made_at="train.py:2",
        dtype="bfloat16", value="1", exact="2", changed=1, of=1,
    )  # fmt: skip
    builder.add(Observed(n=builder.n(), step=1, call=1, phase="forward", fqn=None, what=used))
    read = program(tmp_path, text, builder, id="rounded-result", dtype="bfloat16", source="train.py:2")
    lines = [edits[0].line for edits, _ in edits_for(read, ("in-wider-dtype",))]
    assert lines == sorted(lines)
    assert set(lines) == {2, 3}


def test_what_is_said_of_an_edit_to_float32_does_not_say_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence of the finding does, and stands beside the edit to bfloat16."""
    monkeypatch.chdir(tmp_path)
    read = program(tmp_path, "net = net.half()", id="float16-overflow", dtype="float16", source="train.py:2")
    (advice,), _ = advise((read.finding,), read.trace, "train.py", began=0.0, own_files=True)
    said = {way.maker: "bfloat16" in way.text for way in (advice, *advice.others)}
    assert said == {"half-to-bfloat16": True, "half-to-float32": False}


@pytest.mark.parametrize("written", ["x.uniform_(0, 1)", "x[0] = 1", "x += 1", "fill(x)"])
def test_no_copy_takes_the_place_of_an_argument_that_a_function_writes_to(written: str, tmp_path: Path) -> None:
    """What is written would be lost with it, and with it what the finding is about."""
    text = f"def made(x, y):\n    {written}\n    z = x - y\n    return z"
    read = program(tmp_path, text, id="rounded-result", dtype="bfloat16", source="train.py:4")
    ways = ["\n".join(edit.new for edit in edits) for edits, _ in edits_for(read, ("in-wider-dtype",))]
    assert any("y = y.to(torch.float32)" in way for way in ways)
    assert not any("x = x.to(" in way for way in ways)


def test_no_wider_dtype_is_advised_for_an_imaginary_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 cuts it off as float32 does."""
    monkeypatch.chdir(tmp_path)
    read = program(tmp_path, "y = z.to(torch.float32)", id="rounded-result", proven_by=PARTS_READ)
    (advice,), _ = advise((read.finding,), read.trace, "train.py", began=0.0, own_files=True)
    assert "complex" in advice.text
    assert not advice.edits


def test_a_dtype_that_a_function_is_given_becomes_wider_for_all_that_it_makes(tmp_path: Path) -> None:
    """Of two tables of the same dtype the other would be rounded as before."""
    text = """
        def kernel(width, dtype=None):
            '''A table.'''
            at = torch.arange(width, dtype=dtype) / width
            return at + torch.arange(2, dtype=dtype)[:, None]
    """
    read = program(tmp_path, text, id="rounded-result", dtype="float16", source="train.py:4")
    (edits, _), *_ = edits_for(read, ("in-wider-dtype",))
    assert [edit.new.strip() for edit in edits] == [
        "dtype = torch.float32\n    at = torch.arange(width, dtype=dtype) / width"
    ]
