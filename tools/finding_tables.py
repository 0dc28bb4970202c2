"""Writes the list of findings in ``docs/findings/README.md`` and the tables of fixes in ``docs/remedies.md``, from their specs, and the counts of public
items in ``docs/known-failures.md``, from ``docs/demand.tsv``.

    python tools/finding_tables.py

Each table stands between two comments. A test says when one is stale.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis import by_family
from dtypedoctor.diagnosis.rule import FindingSpec
from dtypedoctor.examination.fixes import Reach, reaches

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- findings: made by tools/finding_tables.py -->", "<!-- end of findings -->"


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
    """Every fix once: by what it changes, a script or model, a released library, or kernels of dtypedoctor's own scenarios."""
    every = reaches()
    library = [reach for reach in every if reach.edited]
    own = [reach for reach in every if not reach.edited and (reach.tried_by or reach.remedy.by_hand)]
    rest = [reach for reach in every if reach not in library and reach not in own]
    return "\n".join(
        [
            "### Of a script or model",
            "",
            "| fix | what it changes | option of `exec` | by hand |",
            "|---|---|---|---|",
            *(
                f"| {_name(reach)} | {reach.remedy.summary} | {_option(reach)} | {reach.remedy.by_hand or '–'} |"
                for reach in own
            ),
            "",
            "### Of a released library",
            "",
            "| fix | what it changes | releases tried |",
            "|---|---|---|",
            *(f"| {_name(reach)} | {reach.remedy.summary} | {reach.releases} |" for reach in library),
            "",
            "### Of the built-in scenarios",
            "",
            ", ".join(map(_name, rest)),
        ]
    )


def _name(reach: Reach) -> str:
    return f"`{reach.remedy.id}`" + ("" if reach.remedy.safe else " (unsafe)")


def _option(reach: Reach) -> str:
    kept = ", `treat --with`" if reach.kept else ""
    return f"`{reach.tried_by.split()[0]}`{kept}" if reach.tried_by else "–"


DEMAND = ROOT / "docs" / "demand.tsv"
NOT_COVERED = "-"
TRIED = ("right", "wrong", "not tried")


def items() -> list[dict[str, str]]:
    """The public items, by the names in the first line of the file."""
    with DEMAND.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def demand() -> str:
    """How many public items each family has, the largest first, how many of them something covers, and what came of those that were tried."""
    families: dict[str, list[dict[str, str]]] = {}
    for item in items():
        families.setdefault(item["family"], []).append(item)
    ordered = sorted(families.items(), key=lambda each: (-len(each[1]), each[0]))
    rows = [_counts(name, known) for name, known in ordered]
    rows.append(_counts("all", items()))
    return "\n".join(("| family | items | covered | " + " | ".join(TRIED) + " |", "|---|" + "--:|" * 5, *rows))


def _counts(name: str, known: list[dict[str, str]]) -> str:
    covered = sum(item["covered by"] != NOT_COVERED for item in known)
    tried = (sum(item["tried"] == result for item in known) for result in TRIED)
    return f"| {name} | {len(known)} | {covered} | " + " | ".join(map(str, tried)) + " |"


def tables() -> Iterator[tuple[Path, str, str]]:
    """Each file with a table, its text, and its text with the table made anew.

    Raises:
        ValueError: a file does not have the two comments.
    """
    made = {"docs/findings/README.md": index(), "docs/remedies.md": fixes(), "docs/known-failures.md": demand()}
    for name, table in made.items():
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
