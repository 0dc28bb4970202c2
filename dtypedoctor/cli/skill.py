"""``dtypedoctor skill``: what a coding agent has to know to use the program, printed or put where agents look for skills."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import reason
from dtypedoctor.interruptions import say

_NAME = "dtypedoctor"
_IN_A_PROJECT = Path(".claude", "skills")


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="skill", epilog="Example:  dtypedoctor skill --install .claude/skills")(skill)


def skill(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="With --install: folder of skills; without, the project's .claude/skills, else yours.", metavar="DIR"
        ),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Write DIR/dtypedoctor/SKILL.md.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that differs.")] = False,
) -> None:
    """Print what a coding agent has to know to use dtypedoctor, or install it as a skill."""
    text = resources.files("dtypedoctor").joinpath("skills", _NAME, "SKILL.md").read_text("utf-8")
    if not install:
        if folder is not None or force:
            raise UsageError("skill: nothing is written without --install", "Add --install.")
        print(text, end="")
        return
    place = (folder or _usual_folder()) / _NAME / "SKILL.md"
    try:
        _write(place, text, force=force)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: cannot be written ({reason(error)})", "Give another folder.") from error
    say(f"installed: {place}")


def _usual_folder() -> Path:
    """Where Claude Code looks: in the project that the working directory is in, if it has settings of its own, else at home."""
    here = Path.cwd()
    projects = [folder for folder in (here, *here.parents) if (folder / ".claude").is_dir() and folder != Path.home()]
    return (projects[0] if projects else Path.home()) / _IN_A_PROJECT


def _write(place: Path, text: str, *, force: bool) -> None:
    """Write the file, unless somebody else's, edited or of another version, would be lost."""
    if not force and place.exists() and place.read_text("utf-8") != text:
        hint = "Give --force to replace it."
        raise UsageError(f"{place}: differs from the skill of this version of dtypedoctor", hint)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, "utf-8")
