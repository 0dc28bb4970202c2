"""Where a fix can be put in: ``explain`` says it, and ``--patch`` says why it has nothing to print."""

import ast
from pathlib import Path

import pytest
from command import in_this_process

from dtypedoctor.examination.fixes import Reach, reaches
from dtypedoctor.plugins import Correction, registered

PACKAGE = Path(__file__).parents[2] / "dtypedoctor"
REACHES = {one.remedy.id: one for one in reaches()}


@pytest.mark.parametrize("name", REACHES)
def test_explain_names_every_command_that_takes_the_fix(name: str) -> None:
    """And no other; what edits a library shows its lines and the releases that it was tried on."""
    reach = REACHES[name]
    text = in_this_process("explain", name).out
    assert (f"dtypedoctor exec {reach.tried_by} train.py" in text) == bool(reach.tried_by)
    assert (f"dtypedoctor treat --with {name} train.py" in text) == reach.kept
    assert (f'dtypedoctor.apply(model, "{name}")' in text) == reach.applied
    assert (f"dtypedoctor explain {name} --patch" in text) == bool(reach.edited)
    assert (f"Tried on {reach.releases}." in text) == bool(reach.edited)
    assert reach.remedy.by_hand in text


def test_explain_knows_the_fix_that_takes_modules() -> None:
    """It stands in no list of fixes, as it is none without a module; `treat` does not take it."""
    for typed, shown in (("keep-float32", "MODULE"), ("keep-float32:layers.0", "layers.0")):
        text = in_this_process("explain", typed).out
        assert f"dtypedoctor exec --try keep-float32:{shown} train.py" in text
        assert f'dtypedoctor.apply(model, "keep-float32:{shown}")' in text
        assert "treat --with" not in text


@pytest.mark.parametrize("reach", [one for one in REACHES.values() if not one.edited], ids=lambda one: one.remedy.id)
def test_a_fix_that_edits_no_library_has_no_patch(reach: Reach) -> None:
    """It says so, and what tells where it is put in."""
    done = in_this_process("explain", reach.remedy.id, "--patch")
    assert done.code == 2
    assert done.out == ""
    assert f"error: --patch: {reach.remedy.id} edits no library\n" in done.err
    assert f"dtypedoctor explain {reach.remedy.id}" in done.err


def test_what_treat_keeps_is_every_correction_that_fits_a_script() -> None:
    """Settings of a script are none of them."""
    fitting = {one.id for one in registered(Correction).values() if one.in_scripts and not one.needs_modules}
    assert {name for name, one in REACHES.items() if one.kept} == fitting


def test_no_module_of_the_core_knows_a_corrected_library_by_name() -> None:
    """Corrections name their libraries; beside them only a report's environment (packages, variables), the functions that make patches, and the projects' issue templates do. Links do not count."""
    names = [library for library in {one.library for one in registered(Correction).values()} if library]
    names = [name for name in names if name not in ("transformers", "trl", "peft")]  # those that trainers are made of
    outside = (
        "lab/corrections/libraries",
        "lab/tickets",
        "instrument/silent/patches.py",
        "worker/environment.py",
        "redaction/secrets.py",
        "report/project_tickets.py",
        "cli/reading.py",
    )
    knowing = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for file in PACKAGE.rglob("*.py")
        if not str(file.relative_to(PACKAGE)).startswith(outside)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "://" not in node.value
        if any(name.partition("_")[0] in node.value.lower() for name in names)
    ]
    assert knowing == []
