"""Writes the tables of findings in ``README.md`` and ``docs/findings/README.md``, and that of fixes in ``docs/remedies.md``, from their specs.

    python tools/finding_tables.py

Each table stands between two comments. A test says when one is stale.
"""

from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis.registry import by_family
from dtypedoctor.diagnosis.rule import FindingSpec
from dtypedoctor.trials.remedies import Reach, reaches

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- findings: made by tools/finding_tables.py -->", "<!-- end of findings -->"


def overview() -> str:
    """README's table: a row for each family, a link for each finding that any program may have."""
    rows = ["| family | findings, each with a page and an example that runs |", "|---|---|"]
    for family, specs in by_family().items():
        links = ", ".join(f"[`{spec.id}`](docs/findings/{spec.id}.md)" for spec in specs if spec.in_any_program)
        rows.append(f"| {family.label} | {links} |")
    return "\n".join(rows)


def index() -> str:
    """The index of the pages: a section for each family, a line for each finding."""
    sections = (
        f"## {family.title}\n\n{family.summary}\n\n" + "\n".join(map(_line, specs))
        for family, specs in by_family().items()
    )
    return "\n\n".join(sections)


def _line(spec: FindingSpec) -> str:
    also = f"; also called {', '.join(f'`{alias}`' for alias in spec.aliases)}" if spec.aliases else ""
    return f"- [{spec.id}]({spec.id}.md) ({spec.severity}): {spec.title}{also}"


def fixes() -> str:
    """Where each fix can be put in: a row for each."""
    rows = [
        "| fix | `exec` | `treat --with` | `apply` | `explain --patch` | in your own script |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *map(_row, reaches())])


def _row(reach: Reach) -> str:
    tried = f"`{reach.tried_by.split()[0]}`" if reach.tried_by else "–"
    released = f"; in a released library: {', '.join(f'`{name}`' for name in reach.released)}" if reach.released else ""
    by_hand = reach.remedy.by_hand or ("–" if reach.tried_by else f"only our scenarios{released}")
    kept, applied = ("yes" if here else "–" for here in (reach.kept, reach.applied))
    return f"| `{reach.remedy.id}` | {tried} | {kept} | {applied} | {reach.releases or '–'} | {by_hand} |"


def tables() -> Iterator[tuple[Path, str, str]]:
    """Each file with a table, its text, and its text with the table made anew.

    Raises:
        ValueError: a file does not have the two comments.
    """
    for name, table in (("README.md", overview()), ("docs/findings/README.md", index()), ("docs/remedies.md", fixes())):
        text = (ROOT / name).read_text(encoding="utf-8")
        before, start, rest = text.partition(START)
        _, end, after = rest.partition(END)
        if not (start and end):
            raise ValueError(f"{name}: the table has to stand between {START} and {END}")
        yield ROOT / name, text, f"{before}{START}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    for path, old, new in tables():
        if old != new:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
