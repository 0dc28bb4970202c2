"""``dtypedoctor parity``: why do generator and trainer give the same tokens other log-probabilities?"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, Device, FormatOption, announce, show
from dtypedoctor.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from dtypedoctor.lab.parity.rollouts import Gap, Parity
    from dtypedoctor.report.document import Document, Section

_DTYPES = ("bfloat16", "float16", "float32", "autocast")


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="parity", epilog="Example:  dtypedoctor parity ./policy rollouts.jsonl --with ./generator")(parity)


def parity(
    model: Annotated[str, typer.Argument(help="Folder of the trained weights.", metavar="MODEL")],
    rollouts: Annotated[
        Path,
        typer.Argument(
            help="An object a line: prompt_ids, completion_ids and logprobs of the generator, and temperature, top_p, top_k, min_p where they are not the default.",
            metavar="ROLLOUTS.jsonl",
        ),
    ],
    others: Annotated[
        list[str] | None,
        typer.Option("--with", help="Folder of weights that the generator may have had.", metavar="FOLDER"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="The trainer's.", metavar=f"[{'|'.join(_DTYPES)}]", show_default="as saved"),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Of rows that name none.", min=0)] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Of rows that name none.", min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Of rows that name none; 0 for all tokens.", min=0)] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", help="The trainer's, in rows.", min=1)] = 8,
    rows: Annotated[int, typer.Option("--rows", help="Score so many at most, evenly spaced.", min=1)] = 64,
    device: Device = None,
    format: FormatOption = TERMINAL,
) -> int:
    """Score what a generator has written again, and say what makes its log-probabilities differ from the trainer's.

    One thing is changed each time: temperature and top-p, the weights, padding and positions, the batch, the dtype. What removes the most stays, and
    the rest is tried on top of it.

    Exits 0 if the log-probabilities are the same up to the rounding of the trainer's dtype, else 10.
    """
    from dtypedoctor.lab.cli.verify import answer_of
    from dtypedoctor.lab.parity.rollouts import Parity, Sampling, read_rollouts
    from dtypedoctor.redaction.redact import redact

    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    for folder in (model, *(others or ())):
        if not Path(folder).is_dir():
            raise UsageError(f"{folder}: no such folder", "Give a folder that save_pretrained wrote.")
    every = read_rollouts(rollouts, Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
    announce(
        f"Scoring {min(rows, len(every))} of {len(every)} rollouts of {rollouts} again with {model}", terminal_only=True
    )
    spaced = [every[place * len(every) // rows] for place in range(rows)] if len(every) > rows else every
    request = {
        "rows": list(map(asdict, spaced)),
        "model": model,
        "others": others or [],
        "dtype": dtype,
        "device": device or "auto",
        "batch_size": batch_size,
        "rollouts": str(rollouts),
        "of_rows": len(every),
    }
    hint = "Its messages are above; with too little memory, give a smaller --batch-size or fewer --rows."
    result = Parity.of(answer_of("dtypedoctor.lab.parity.rescoring", request, "scores the rollouts", hint))
    document = parity_document(result if format == TERMINAL else redact(result))
    show(document, format)
    return int(ExitCode.OK if document.good else ExitCode.FINDINGS)


def parity_document(result: "Parity") -> "Document":
    """The document about the gap of a generator and a trainer."""
    from dtypedoctor.lab.parity.rollouts import GAP
    from dtypedoctor.report.document import Check, Document, Outcome

    headline = _headline(result)
    good = result.verdict != GAP
    return Document(
        name=result.rollouts,
        headline=headline,
        status=result.verdict.upper(),
        good=good,
        about=f"Log-probabilities of {result.rows:,} of {result.of_rows:,} rollouts, scored again by dtypedoctor.",
        sections=tuple(_sections(result)),
        checks=(
            Check(name="parity", outcome=Outcome.PASSED if good else Outcome.FAILED, message=headline, text=headline),
        ),
        data=lambda: (
            {"schema": 1, "kind": "parity", "status": "healthy" if good else "findings", "headline": headline}
            | result.data()
        ),
    )


def _headline(result: "Parity") -> str:
    from dtypedoctor.lab.parity.rollouts import ROUNDING, SAME

    gap, causes = result.gap, result.causes
    size = f"mean difference of log-probabilities {gap.mean_abs:.2g}"
    if result.verdict == SAME:
        return f"{gap.tokens:,} tokens have the generator's log-probabilities: {size}."
    measured = f"{gap.outside:.1%} of {gap.tokens:,} tokens have a ratio outside of 0.9 to 1.1 ({size})."
    if gap.nonfinite:
        measured = f"{gap.nonfinite:,} tokens have no finite log-probability; {measured}"
    if causes:
        done, after = " and ".join(change.said for change in causes), causes[-1].gap
        return f"{measured} Proven: scored {done}, {after.outside:.1%} have, and the mean is {after.mean_abs:.2g}."
    if result.verdict == ROUNDING:
        return f"{measured} The rounding of the trainer's dtype makes {result.rounding:.2g}."
    if gap.distance <= 3 * result.of_bfloat16:
        return f"{measured} The rounding of bfloat16 makes {result.of_bfloat16:.2g}, so a generator in bfloat16 explains it."
    return f"{measured} None of {len(result.changes)} changes removes half of it."


def _sections(result: "Parity") -> "Iterator[Section]":
    from dtypedoctor.lab.parity.rollouts import GAP, UNEXPLAINED, WHAT_TO_DO
    from dtypedoctor.report.document import Facts, Items, Section, Table

    facts = [("trainer", result.baseline)]
    if result.verdict == GAP:
        todo = " ".join(WHAT_TO_DO[change.kind] for change in result.causes) or UNEXPLAINED
        facts.append(("do this", todo))
    yield Section("", (Facts(tuple(facts)),), anchor="summary")
    rows = [("as the trainer", *_cells(result.gap), "")]
    rows += [((f"+ {change.said}" if change.on_top_of else change.said), *_cells(change.gap), f"{change.moves.mean_abs:.2g}, {change.moves.outside:.1%}")
             for change in result.changes]  # fmt: skip
    header = ("changed", "outside 0.9-1.1", "mean", "mean size", "largest", "KL", "moves the trainer by")
    caption = "Trainer's minus generator's log-probability of a token; in the last column the mean size of what the change does to the trainer's own."
    yield Section("One thing changed at a time", (Table(header, tuple(rows), caption),), anchor="changes")
    if result.notes:
        yield Section("Measured beside", (Items(tuple(result.notes)),), anchor="notes")
    if result.not_tried:
        yield Section("Not tried", (Items(tuple(result.not_tried)),), anchor="not-tried")


def _cells(gap: "Gap") -> tuple[str, ...]:
    return (
        f"{gap.outside:.1%}" + (f", {gap.nonfinite:,} not finite" if gap.nonfinite else ""),
        f"{gap.mean:+.2g}",
        f"{gap.mean_abs:.2g}",
        f"{gap.largest:.2g}",
        f"{gap.kl:.2g}",
    )
