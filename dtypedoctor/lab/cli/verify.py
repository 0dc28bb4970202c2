"""``dtypedoctor verify``: is the saved model the trained one?"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, announce, show
from dtypedoctor.errors import ExitCode, UsageError, WorkerDiedError

if TYPE_CHECKING:
    from dtypedoctor.lab.verify.verdicts import Verification
    from dtypedoctor.report.document import Document, Section

_SHOWN = 20
"""Tensors of one kind that a table lists."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="verify", epilog="Example:  dtypedoctor verify ./merged --of ./adapter")(verify)


def verify(
    saved: Annotated[
        str, typer.Argument(help="Model folder, adapter folder, or file of a state dict.", metavar="SAVED")
    ],
    of: Annotated[
        str,
        typer.Option(
            "--of",
            help="What was trained: FILE.py:FUNCTION that returns the model, a script that leaves it in a variable, or another saved model.",
            metavar="LIVE|FOLDER",
        ),
    ],
    format: FormatOption = TERMINAL,
) -> int:
    """Load a saved model as its users do, and compare it with the trained one.

    Parameters that no file fills are named, each tensor is compared after the casts it has gone through, a merged adapter with W + s·BA, quantized
    weights dequantized, then ties, buffers and the outputs for the same inputs. Pickles are read with weights_only.

    Exits 0 if the model is the same up to the rounding of its dtype, 10 if it differs or something could not be compared.
    """
    announce(f"Comparing {saved} with {of}", terminal_only=True)
    # Has a process of its own import torch, load both models and compare them
    from dtypedoctor.lab.verify.verdicts import Verification
    from dtypedoctor.redaction.redact import redact

    request = {"saved": saved, "of": of}
    hint = "Its messages are above: correct the script, or give it more memory."
    verification = Verification.of(answer_of("dtypedoctor.lab.verify.verifying", request, "compares the models", hint))
    document = verification_document(verification if format == TERMINAL else redact(verification))
    show(document, format)
    return int(ExitCode.OK if document.good else ExitCode.FINDINGS)


def answer_of(module: str, request: dict[str, Any], what: str, hint: str) -> dict[str, Any]:
    """Runs a module in a process of its own, which reads a request from its standard input and writes an answer to the request's ``result``.

    Args:
        module: what is run.
        request: what it gets, without ``result``.
        what: it does, in words.
        hint: what to do where it leaves no answer.

    Raises:
        UsageError: the answer is that the request cannot be met.
        WorkerDiedError: the process left no answer.
    """
    from dtypedoctor.foreign_files import parse_json, read_file

    with tempfile.TemporaryDirectory(prefix="dtypedoctor-") as folder:
        answer = Path(folder, "answer.json")
        asked = json.dumps(request | {"result": str(answer)})
        # -P: a torch.py in the working directory must not be taken for the real one. What a script prints is no part of the report
        command = [sys.executable, "-P", "-m", module]
        # What transformers warns of is what is measured
        quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(command, input=asked, text=True, stdout=sys.stderr.fileno(), env=quiet, check=False)
        try:
            data: dict[str, Any] = parse_json(read_file(answer))
        except (OSError, ValueError) as error:
            raise WorkerDiedError(f"the process that {what} ended with status {done.returncode}", hint) from error
    if "message" in data:
        raise UsageError(data["message"], data["hint"])
    return data


def verification_document(verification: "Verification") -> "Document":
    """The document about a saved model."""
    from dtypedoctor.lab.verify.verdicts import DIFFERS, SAME
    from dtypedoctor.report.document import Check, Document, Outcome

    verdict = verification.verdict
    headline = _headline(verification)
    good = verdict == SAME
    return Document(
        name=verification.saved,
        headline=headline,
        status=verdict.upper(),
        good=good,
        about="A saved model, compared by dtypedoctor.",
        sections=tuple(_sections(verification)),
        checks=(
            Check(name="verify", outcome=Outcome.PASSED if good else Outcome.FAILED, message=headline, text=headline),
        ),
        data=lambda: (
            {
                "schema": 1,
                "kind": "verification",
                "status": {SAME: "healthy", DIFFERS: "findings"}.get(verdict, "unknown"),
                "verdict": verdict,
                "headline": headline,
            }
            | verification.data()
        ),
    )


def _headline(verification: "Verification") -> str:
    from dtypedoctor.lab.verify.verdicts import DIFFERS, SAME
    from dtypedoctor.text import counted

    counts = verification.counts
    same = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    if verification.verdict == DIFFERS:
        first, *others = verification.differences
        where = f"{first.tensor}: " if first.tensor else ""
        more = f" {counted(len(others), 'more difference')}." if others else ""
        return f"{where}{first.kind}: {first.said}.{more}"
    if verification.verdict == SAME:
        return f"{verification.saved} is {verification.reference}: {counted(sum(counts.values()), 'tensor')}, {same}."
    return f"{verification.unknown[0] if verification.unknown else 'the models have no tensor in common'}."


def _sections(verification: "Verification") -> "Iterator[Section]":
    from dtypedoctor.lab.verify.verdicts import WHAT_TO_DO
    from dtypedoctor.report.document import Block, Facts, Items, Paragraph, Section, Table, named

    for number, kind in enumerate(dict.fromkeys(difference.kind for difference in verification.differences), 1):
        several = [difference for difference in verification.differences if difference.kind == kind]
        rows = tuple((named(difference.tensor or "the model"), difference.said) for difference in several[:_SHOWN])
        blocks: list[Block] = [Facts((("do this", WHAT_TO_DO[kind]),)), Table(("tensor", "measured"), rows)]
        if len(several) > _SHOWN:
            blocks.append(Paragraph(f"{len(several) - _SHOWN} more are in `--format json`."))
        yield Section(f"{number}. {kind}", tuple(blocks), anchor=f"difference-{number}")
    if verification.notes:
        yield Section("Measured beside", (Items(tuple(verification.notes)),), anchor="notes")
    if verification.unknown:
        yield Section("Not compared", (Items(tuple(verification.unknown)),), anchor="unknown")
