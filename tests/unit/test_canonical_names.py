"""One name for each module, where a model was put inside a larger one on the way."""

import json
from pathlib import Path

from traces import tensor

from dtypedoctor.trace.events import Flow, Header, Op, ParameterNote, Root, Site
from dtypedoctor.trace.reader import CanonicalNames, read_trace
from dtypedoctor.trace.writer import TraceWriter

ROOTS = [
    Root(root=0, cls="Llama", modules=3, dtypes={}),
    Root(root=1, cls="Critic", modules=2, dtypes={}),
    Root(root=2, cls="PeftModel", modules=5, dtypes={}, absorbs={"0": "base.model"}),
    Root(root=3, cls="Wrapper", modules=6, dtypes={}, absorbs={"2": "module"}),
]


def site(root: int, fqn: str, kind: str = "output") -> Site:
    return Site(
        id=1, root=root, fqn=fqn, cls="Linear", phase="forward", kind=kind, index="", dtype="float16", shape=[1]
    )


def test_what_no_larger_root_holds_keeps_its_name() -> None:
    """Another model, the largest root, and records without a root."""
    names = CanonicalNames(ROOTS)
    for record in (site(1, "value"), site(3, "module"), Header(), site(0, "layers.0.weight", "param")):
        assert names.of(record) is record


def test_parameters_flows_and_operands_are_renamed_with_their_modules() -> None:
    """Operands that are somebody's parameter carry its name; inputs of the model do not."""
    names = CanonicalNames(ROOTS)
    note = names.of(ParameterNote(n=1, root=0, name="head.weight", dtype="float16", shape=[1]))
    assert note.name == "module.base.model.head.weight"
    flow = Flow(n=1, step=1, call=1, phase="forward", root=0, fqn="head", cls="Linear", inputs=[], outputs=[])
    assert names.of(flow).fqn == "module.base.model.head"
    op = Op(
        n=1, step=1, call=1, phase="forward", fqn="head", op="aten.mm.default", root=0,
        inputs=[tensor(1, name="head.weight", origin="parameter"), tensor(2, name="args.0", origin="input")], outputs=[],
    )  # fmt: skip
    assert [t.name for t in names.of(op).inputs] == ["module.base.model.head.weight", "args.0"]


def test_a_trace_is_read_with_canonical_names(tmp_path: Path) -> None:
    """Sites that were written before the larger root was known."""
    writer = TraceWriter(tmp_path)
    for record in (
        Header(),
        ROOTS[0],
        site(0, "layers.0"),
        Root(root=1, cls="Peft", modules=4, dtypes={}, absorbs={"0": "base"}),
    ):
        writer.write(record)
    writer.write_samples(writer.next_n(), 1, 1, [(1, 2.0, 0, 0)])
    writer.close()
    trace = read_trace(tmp_path)
    assert trace.sites[1].fqn == "base.layers.0"
    assert [record.fqn for record in trace.all(Site)] == ["base.layers.0"]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[2])["fqn"] == "layers.0"
