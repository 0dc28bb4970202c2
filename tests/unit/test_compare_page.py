"""What is said about two compared runs, and in which forms."""

import io
from dataclasses import replace

import pytest
from compared import compared, saved, three_modules
from goldens import assert_golden
from rich.console import Console
from traces import TraceBuilder

from dtypedoctor.lab.compare.comparison import TraceComparison
from dtypedoctor.lab.compare.document import comparison_document, headline, reasons
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.to_terminal import print_document
from dtypedoctor.trace.events import Environment, Header, Metric, ProbeLogProbs, Raised


def shown(found: TraceComparison, width: int = 80) -> str:
    stream = io.StringIO()
    print_document(comparison_document(found), Console(file=stream, width=width, legacy_windows=False))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def written(format: str, found: TraceComparison) -> str:
    """The comparison in a format, as the command line writes it."""
    return format_named(format).render(comparison_document(redact(found)))


def overflow() -> TraceComparison:
    """float16 against bfloat16: a small drift, then inf, an exception, and a longer second run."""
    a, b = TraceBuilder(), TraceBuilder()
    for trace, dtype in ((a, "float16"), (b, "bfloat16")):
        trace.add(Environment(values={"device": "cpu", "versions": {"torch": "2.13.0"}}))
        trace.sample("model.embed_tokens", 0.53, dtype=dtype)
        trace.sample("model.layers.0.mlp.up_proj", 333.2 if dtype == "float16" else 312.0, dtype=dtype)
        trace.add(Metric(n=trace.n(), step=1, values={"loss": -0.18, "grad_norm": 1.4}))
        trace.add(ProbeLogProbs(n=trace.n(), step=1, values=[-5.5, -5.25 if dtype == "float16" else -5.0]))
    a.sample("model.layers.0.mlp", 56256.0, inf=8, step=2, cls="Gemma4TextMLP", phase="generate")
    b.sample("model.layers.0.mlp", 57344.0, dtype="bfloat16", step=2, cls="Gemma4TextMLP", phase="generate")
    b.sample("model.layers.0.mlp", 1e-3, dtype="bfloat16", step=2, kind="grad_output", phase="backward")
    b.add(Metric(n=b.n(), step=2, values={"loss": -0.2, "grad_norm": 1.5}))
    a.add(Raised(n=a.n(), step=2, call=3, phase="generate", type="RuntimeError", message="inf", frames=[], modules=[]))
    steps = [[{"model": {"dtype": dtype}}] for dtype in ("float16", "bfloat16")]
    return compared(
        saved(a.build(outcome="raised"), label="runs/x/before", steps=steps[0]),
        saved(b.build(), label="runs/x/reference", steps=steps[1]),
    )


def test_eighty_columns_show_what_is_expected() -> None:
    """The whole page, as a person with a narrow terminal sees it."""
    assert_golden("compare.terminal.txt", shown(overflow()))


def test_the_markdown_form_is_what_is_expected() -> None:
    """Tables and lists that GitHub renders."""
    assert_golden("compare.md", written("md", overflow()))


def test_equal_runs_are_called_equal_without_reasons_against_it() -> None:
    """The headline says how much was compared and how well it agrees."""
    exact = compared(three_modules().build(), three_modules().build())
    assert headline(exact) == "EQUAL: 3 measurements in both runs are equal to the precision of the trace."
    close = compared(three_modules().build(), three_modules(scale=1.005).build())
    assert "agree within 0.01 (1 equal to the precision of the trace)" in headline(close)
    assert reasons(exact) == reasons(close) == []


@pytest.mark.parametrize(
    ("kind", "phase", "said"),
    [
        (
            "grad_output",
            "backward",
            "the gradient of the output of layers.1 is the first to differ, in step 1 (backward)",
        ),
        ("grad", "backward", "the gradient of layers.1 is"),
        ("param", "optimizer", "the parameter layers.1 is the first to differ, in step 1 (parameter)"),
        ("loss", "forward", "the loss is"),
    ],
)
def test_the_headline_names_what_differs(kind: str, phase: str, said: str) -> None:
    """Gradients, parameters and the loss are told apart from outputs."""
    found = compared(*(three_modules(absmax=m, kind=kind, phase=phase).build() for m in (1.0, 2.0)))
    assert said in headline(found)


def test_a_comparison_without_anything_in_common_is_headed_nothing_compared() -> None:
    """Two traces that share nothing are not merely incomplete."""
    empty = TraceBuilder().build()
    assert headline(compared(empty, three_modules().build())) == "NOTHING COMPARED: no tensor was measured in A"
    unwatched = TraceBuilder().add(Header(watched=False)).build()
    assert "A was not instrumented" in headline(compared(unwatched, three_modules().build()))


def test_every_gap_is_a_reason() -> None:
    """Modules, tensors, calls, steps, the end and damage: each has a sentence."""
    a = three_modules().sample("only", 1.0).sample("layers.0", 1.0, phase="recompute").sample("layers.0", 2.0, step=2)
    a.add(Metric(n=70, step=3, values={"loss": 1.0}))
    whole = a.build()
    cut = replace(whole, records=whole.records[:-1], damage=("1 unreadable line(s): 3",))
    text = "\n".join(reasons(compared(cut, three_modules().build())))
    for sentence in (
        "1 module or parameter measured in A only",
        "1 tensor of modules that both have measured in A only",
        "1 measurement of A without a counterpart",
        "only one run reports its numbers for step 3",
        "the trace of A is cut short",
        "the trace of A is damaged: 1 unreadable line(s): 3",
    ):
        assert sentence in text


@pytest.mark.parametrize("format", [one.name for one in FORMATS])
def test_nothing_private_leaves_in_a_form_that_is_attached_to_tickets(format: str) -> None:
    """Home directories and tokens are replaced in labels, settings and the way a run ended."""
    secret = "hf_" + "A1b2C3d4" * 4
    raised = Raised(
        n=9, step=1, call=1, phase="forward", type="OSError", message=f"/home/alice/x {secret}", frames=[], modules=[]
    )
    run = saved(three_modules().add(raised).build(), label="/home/alice/runs/before", steps=[{"token": secret}])
    text = written(format, compared(run, three_modules().build()))
    assert "alice" not in text
    assert secret not in text
