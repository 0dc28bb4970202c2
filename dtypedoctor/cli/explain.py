"""``dtypedoctor explain``: the page about a finding."""

import sys
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="explain", epilog="Example:  dtypedoctor explain float16-overflow")(explain)


def explain(
    finding: Annotated[
        str | None, typer.Argument(help="Finding id; without it, all ids are listed.", metavar="FINDING_ID")
    ] = None,
) -> None:
    """Print the page about a finding: symptoms, cause, evidence and fixes."""
    from dtypedoctor.diagnosis.registry import by_family, page

    if finding is None:
        for family, specs in by_family().items():
            print(f"{family.id}: {', '.join(spec.id for spec in specs)}")
        print("\nNext: dtypedoctor explain FINDING_ID", file=sys.stderr)
        return
    text = page(finding)
    if text.startswith("---\n"):  # the front matter is for programs
        _, _, text = text.removeprefix("---\n").partition("\n---\n")
    print(text.strip())
