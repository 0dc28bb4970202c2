"""Plug-ins of other packages: what is registered, and what becomes of those that cannot be used."""

import os
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


def with_path(*places: Path) -> str:
    """Folders before those where this process finds its packages, which need not be installed beside its interpreter."""
    return os.pathsep.join([*map(str, places), *filter(None, sys.path)])


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
        env={"PATH": "", "PYTHONPATH": with_path(place), **environment},
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


@pytest.mark.release(all_but=3)
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


RULE_OF = (
    "from dtypedoctor.rules import *\n"
    "SPEC = FindingSpec(id='other-failure', title='It fails', family=SILENT, remedies=({remedies}))\n"
    "SAID = Statement(id='{id}', summary='s', cause='c', evidence=())\n"
    "def found(**changed):\n"
    "    return make_finding(SAID, **({{'phase': 'forward', 'step': 1}} | changed))\n"
    "def detect(trace):\n"
    "    {body}\n"
    "RULE = Rule(name='other-failure', specs=(SPEC,), detect=detect)\n"
)
DIAGNOSED = (
    "from nonfinite_examples import overflow\n"
    "from dtypedoctor.diagnosis import diagnose\n"
    "from dtypedoctor.plugins import left_out\n"
    "print([found.id for found in diagnose(overflow().build())])\n"
    "print(*(f'{one.what}: {one.why}' for one in left_out()))\n"
)


def rule_of(body: str, id: str = "other-failure", remedies: str = "") -> str:
    """The module of a plug-in whose rule has this body."""
    return RULE_OF.format(body=body, id=id, remedies=remedies)


def printed(place: Path, code: str, **environment: str) -> list[str]:
    """What a process prints that finds the folder and the examples of the tests."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": with_path(place, Path(__file__).parent), **environment},
    )  # fmt: skip
    return done.stdout.splitlines()


def command(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process that finds the folder."""
    return subprocess.run(
        [sys.executable, "-m", "dtypedoctor", *arguments],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": with_path(place)},
    )  # fmt: skip


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("yield 'text'", "TypeError: it yields str, not Finding; make_finding makes one of a Statement"),
        ("yield SAID", "TypeError: it yields Statement, not Finding; make_finding makes one of a Statement"),
        ("yield found(fqn=3)", "TypeError: fqn of its finding 'other-failure' is int, not str or None"),
        ("yield found(step='1')", "TypeError: step of its finding 'other-failure' is str, not int or None"),
        (
            "import dataclasses; yield dataclasses.replace(found(), evidence=(1,))",
            "TypeError: evidence of its finding 'other-failure' holds int, not str",
        ),
    ],
)  # fmt: skip
def test_a_rule_that_raises_or_yields_no_finding_is_left_out_and_named(body: str, why: str, tmp_path: Path) -> None:
    """The rules of dtypedoctor go on."""
    installed(tmp_path, rule_of(body), rules="bad = other:RULE")
    assert printed(tmp_path, DIAGNOSED)[:2] == [
        "['float16-overflow']",
        f"dtypedoctor.rules plug-in 'other-failure': {why}",
    ]


def test_what_was_left_out_is_in_the_coverage_of_the_report(tmp_path: Path) -> None:
    """Who reads the report only must know that a rule did not look."""
    installed(tmp_path, rule_of("return 1 / 0"), rules="bad = other:RULE")
    code = (
        "from nonfinite_examples import overflow\n"
        "from test_verdict import report_on\n"
        "print(*report_on(overflow().build()).coverage, sep='\\n')"
    )
    assert (
        "dtypedoctor.rules plug-in 'other-failure': it cannot be used: ZeroDivisionError: division by zero"
        in printed(tmp_path, code)
    )


@pytest.mark.parametrize(("fqn", "fixes"), [("'mlp.down'", "['for-mlp']"), ("None", "['for-mlp', 'for-norm']")])
def test_make_finding_without_a_class_proposes_the_corrections_for_it(fqn: str, fixes: str, tmp_path: Path) -> None:
    """The trace knows the class of a module; without a module it may be any."""
    installed(
        tmp_path,
        rule_of(f"yield found(fqn={fqn})")
        + "from dtypedoctor.plugins import Correction\n"
        "BOTH = tuple(Correction(id=i, summary='s', install='other:i', fixes=(('other-failure', c),))\n"
        "             for i, c in (('for-mlp', 'Linear'), ('for-norm', 'SmolNorm')))\n",
        rules="rule = other:RULE", corrections="both = other:BOTH",
    )  # fmt: skip
    code = (
        "from nonfinite_examples import overflow\n"
        "from dtypedoctor.diagnosis import diagnose\n"
        "print([list(one.remedies) for one in diagnose(overflow().build()) if one.id == 'other-failure'][0])"
    )
    assert printed(tmp_path, code) == [fixes]


@pytest.mark.release(all_but=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "why"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("None", "TypeError: render returned NoneType, not str")],
)
def test_a_format_that_fails_is_named_with_its_package(body: str, why: str, tmp_path: Path) -> None:
    """It is not dtypedoctor that failed."""
    installed(
        tmp_path,
        f"from dtypedoctor.plugins import Format\nONE = Format(name='org', suffix='.org', render=lambda document: {body})\n",
        formats="one = other:ONE",
    )
    done = command(tmp_path, "env", "--format", "org")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: --format org: dtypedoctor.formats plug-in 'one' of other 1.2 failed: {why}\n"
    )


@pytest.mark.slow
def test_a_finding_without_a_readable_page_names_the_file_and_the_package(tmp_path: Path) -> None:
    """Installing dtypedoctor again would not help."""
    code = rule_of("return ()").replace("title=", "page='/no/such/page.md', title=")
    installed(tmp_path, code, rules="rule = other:RULE")
    done = command(tmp_path, "explain", "other-failure")
    assert done.returncode == 2
    assert "/no/such/page.md: No such file or directory" in done.stderr
    assert "dtypedoctor.rules plug-in 'rule' of other 1.2" in done.stderr
    assert "Install dtypedoctor again" not in done.stderr


def test_an_unknown_name_says_that_plugins_are_off(tmp_path: Path) -> None:
    """Of a finding, a format, or an id in a scenario: it may be that of a plug-in."""
    scenario = tmp_path / "case.yaml"
    scenario.write_text(
        "name: case\nsummary: s\nsteps: [{workload: {kind: script, path: train.py}}]\nexpect: {findings: [no-such]}\n"
    )
    code = (
        "from pathlib import Path\n"
        "from dtypedoctor.lab.cli.scenario_files import load_checked\n"
        "from dtypedoctor.errors import UsageError\n"
        "from dtypedoctor.diagnosis import page\n"
        "from dtypedoctor.report.formats import format_named\n"
        f"scenario = lambda finding: load_checked(Path({str(scenario)!r}), allow_code=True)\n"
        "for asked in (page, format_named, scenario):\n"
        "    try: asked('no-such')\n"
        "    except UsageError as error:\n"
        "        print('no-such' in error.message, error.hint.endswith(' Plug-ins are off (DTYPEDOCTOR_PLUGINS=0).'))\n"
    )
    assert printed(tmp_path, code, DTYPEDOCTOR_PLUGINS="0") == ["True True"] * 3
    assert printed(tmp_path, code) == ["True False"] * 3


def test_a_correction_that_returns_nothing_is_named_and_not_the_program(tmp_path: Path) -> None:
    """The reason that a trial of it gives."""
    installed(
        tmp_path,
        "from dtypedoctor.plugins import Correction\n"
        "ONE = Correction(id='one', summary='s', install='other:install')\n"
        "def install(model, modules): pass\n",
        corrections="one = other:ONE",
    )
    code = (
        "from torch import nn\n"
        "from dtypedoctor.corrections.contract import put_in\n"
        "try: put_in('one', nn.Linear(1, 1), ())\n"
        "except TypeError as error: print(error)\n"
    )
    assert printed(tmp_path, code) == ["install of one (other:install) returned NoneType, not Installed"]
