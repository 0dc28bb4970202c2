"""Plug-ins of other packages: what is registered, and what becomes of those that cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest

ASK = (
    "from dtypedoctor.plugins import *; import sys\n"
    "print(sorted(registered({kind})))\n"
    "print(*(f'{{one.what}}: {{one.why}}' for one in left_out()), sep='\\n')\n"
    "print('torch' in sys.modules)"
)


def installed(place: Path, code: str, **entry_points: str) -> None:
    """A distribution `other 1.2` in a folder, as an installer leaves it: a module and the metadata with its entry points."""
    (place / "other.py").write_text(code, encoding="utf-8")
    metadata = place / "other-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.2\n", encoding="utf-8")
    lines = [f"[dtypedoctor.{group}]\n{entry}\n" for group, entry in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def asked(place: Path, kind: str, **environment: str) -> list[str]:
    """What a process that finds the folder says about one kind: its names, what was left out, whether torch was imported."""
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(kind=kind)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": str(place), **environment},
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Format", "junit"), ("Model", "llama-tiny"), ("Workload", "train"), ("Correction", "keep-float32")],
)
def test_what_comes_with_dtypedoctor_is_declared_without_torch(kind: str, name: str, tmp_path: Path) -> None:
    """The command line lists it; the code behind it is imported by the worker."""
    names, left_out, torch = asked(tmp_path, kind)
    assert f"'{name}'" in names
    assert (left_out, torch) == ("", "False")


def test_a_package_adds_one_or_several(tmp_path: Path) -> None:
    """An entry point names a dataclass, or a tuple of them."""
    installed(
        tmp_path,
        "from dtypedoctor.plugins import Model\n"
        "ONE = Model(name='one', build='other:build')\n"
        "MORE = (Model(name='two', build='other:build'), Model(name='three', build='other:build'))\n",
        models="one = other:ONE\nmore = other:MORE",
    )
    names, left_out, _ = asked(tmp_path, "Model")
    assert {"'one'", "'two'", "'three'", "'llama-tiny'"} <= set(names.strip("[]").split(", "))
    assert left_out == ""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_library\nX = 1", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("X = 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('closed')", "SystemExit: closed"),
        ("Y = 1", "AttributeError: module 'other' has no attribute 'X'"),
        ("X = 'a model'", "TypeError: other:X is str, not dtypedoctor.plugins.Model"),
        (
            "from dtypedoctor.plugins import Model\nX = Model(name='llama-tiny', build='other:build')",
            "'llama-tiny' is registered already; give it another name",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_left_out_and_named(code: str, why: str, tmp_path: Path) -> None:
    """With its distribution and the reason; everything else goes on."""
    installed(tmp_path, code, models="bad = other:X")
    names, left_out, _ = asked(tmp_path, "Model")
    assert names == asked(tmp_path, "Model", DTYPEDOCTOR_PLUGINS="0")[0]
    assert left_out == f"dtypedoctor.models plug-in 'bad' of other 1.2: {why}"


def test_plugins_can_be_switched_off(tmp_path: Path) -> None:
    """Then nothing of them is imported."""
    installed(tmp_path, "raise SystemExit('imported')", models="bad = other:X")
    assert asked(tmp_path, "Model", DTYPEDOCTOR_PLUGINS="0")[1:] == ["", "False"]


def test_a_kind_that_nobody_asks_for_is_not_imported(tmp_path: Path) -> None:
    """Formats are loaded without the models of the same package."""
    installed(tmp_path, "raise SystemExit('imported')", models="bad = other:X")
    assert asked(tmp_path, "Format")[1:] == ["", "False"]


def test_a_rule_that_raises_finds_nothing_and_is_named(tmp_path: Path) -> None:
    """The rules of dtypedoctor go on."""
    installed(
        tmp_path,
        "from dtypedoctor.rules import SILENT, FindingSpec, Rule\n"
        "SPEC = FindingSpec(id='other-failure', title='It fails', family=SILENT)\n"
        "RULE = Rule(name='other-failure', specs=(SPEC,), detect=lambda trace: 1 / 0)\n",
        rules="bad = other:RULE",
    )
    code = (
        "from nonfinite_examples import overflow\n"
        "from dtypedoctor.diagnosis import diagnose\n"
        "from dtypedoctor.diagnosis.registry import spec_of\n"
        "from dtypedoctor.plugins import left_out\n"
        "print(spec_of('other-failure').title, [found.id for found in diagnose(overflow().build())])\n"
        "print(*(f'{one.what}: {one.why}' for one in left_out()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}"},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "It fails ['float16-overflow']",
        "dtypedoctor.rules plug-in 'other-failure': ZeroDivisionError: division by zero",
    ]
