"""What goes to other machines, and what stays."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.job import PACKAGE
from dtypedoctor.runner.machines import Where
from dtypedoctor.runner.sending import SENT, packed
from dtypedoctor.scenario.model import Scenario

TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA3b"
RAY = Where(executor="ray")


def scenario(name: str, **changes: object) -> Scenario:
    """One step with the model ``name``."""
    step = {"model": {"name": name}, "workload": {"kind": "forward"}}
    return Scenario.model_validate({"name": "case", "summary": "A case.", "steps": [step], **changes})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a package of the user's, secrets beside and in it, and what git ignores."""
    files = {
        "mine/__init__.py": "",
        "mine/network.py": "def make(): ...\n",
        "mine/keys.py": f"KEY = '{TOKEN}'\n",
        "mine/.env": "A=1",
        "mine/server.pem": "A",
        "mine/hf_token.txt": "A",
        "mine/credentials.json": "{}",
        "mine/id_rsa": "A",
        "mine/.git/config": "A",
        "mine/__pycache__/x.pyc": "A",
        "mine/cache.bin": "A",
        "mine/special_tokens_map.json": "{}",
        "mine/tokenizer.json": "{}",
        "other.py": "A",
        ".env": "A",
        ".gitignore": "*.bin\nweights/\n",
        "weights/config.json": "{}",
        "weights/model.safetensors": "A",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own(files: dict[str, bytes]) -> set[str]:
    """The sent files that are not dtypedoctor's."""
    return {name for name in files if not name.startswith(f"{PACKAGE}/")}


def test_only_what_a_scenario_names_is_sent_and_no_secret_of_it(project: Path) -> None:
    """Hidden files, keys and tokens by name or content, and what git ignores stay; each is listed with its reason."""
    sent = packed([scenario("mine.network:make")], RAY)
    wanted = {"mine/__init__.py", "mine/network.py", "mine/special_tokens_map.json", "mine/tokenizer.json"}
    assert own(sent.files) == wanted
    assert sent.files["mine/network.py"] == b"def make(): ...\n"
    assert set(sent.withheld) == {
        f"mine/{name}"
        for name in (".env", "server.pem", "hf_token.txt", "credentials.json", "id_rsa", "keys.py", "cache.bin")
    }
    assert sent.withheld["mine/cache.bin"] == "ignored by git"
    assert "token" in sent.withheld["mine/keys.py"]
    sent.write(project)
    listed = json.loads((project / SENT).read_text())
    assert set(listed["files"]) == set(sent.files)
    assert listed["withheld"] == sent.withheld
    assert "4 files of yours" in sent.in_words()
    assert ".env" in sent.in_words()


def test_the_package_goes_with_it_and_can_be_imported_from_there(project: Path) -> None:
    """With the pages about findings, which reports quote, where a wheel has them."""
    files = packed([scenario("builtin:gemma4-tiny")], RAY).files
    assert own(files) == set()
    assert f"{PACKAGE}/dtypedoctor/__main__.py" in files
    assert f"{PACKAGE}/dtypedoctor/redaction/gitleaks.json" in files
    assert f"{PACKAGE}/dtypedoctor/data/findings/float16-overflow.md" in files
    assert not [name for name in files if "__pycache__" in name]


def test_variables_that_steer_precision_go_and_no_others(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in the environment stays, and so does what belongs to this machine."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    sent = packed([scenario("builtin:gemma4-tiny")], RAY)
    assert sent.environment["NVIDIA_TF32_OVERRIDE"] == "0"
    assert not {"HF_TOKEN", "CUDA_VISIBLE_DEVICES", "PATH", "HOME"} & set(sent.environment)


def test_a_model_that_git_ignores_is_refused_until_it_is_named(project: Path) -> None:
    """Weights often are; ``--send`` sends them, ``--shared`` leaves them where all machines have them."""
    case = scenario("weights")
    with pytest.raises(UsageError, match="ignored by git") as refused:
        packed([case], RAY)
    assert "--send weights" in refused.value.hint
    sent = packed([case], Where(executor="ray", send=(Path("weights"),)))
    assert own(sent.files) == {"weights/config.json", "weights/model.safetensors"}
    shared = packed([case], Where(executor="ray", shared=(project,)))
    assert own(shared.files) == set()
    model = shared.there(case).steps[0].model
    assert model is not None
    assert model.name == str(project / "weights")


def test_a_named_secret_is_refused_even_where_it_is_asked_for(project: Path) -> None:
    """``--send .env`` says why it is not sent."""
    with pytest.raises(UsageError, match="hidden, or named like a key"):
        packed([scenario("builtin:gemma4-tiny")], Where(executor="ray", send=(Path(".env"),)))
    with pytest.raises(UsageError, match="looks like a password or token"):
        packed([scenario("builtin:gemma4-tiny", summary=f"With {TOKEN}.")], RAY)


def test_what_lies_outside_of_the_working_directory_gets_a_folder_of_its_own(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The scenario names it there by that folder."""
    folder = tmp_path_factory.mktemp("elsewhere") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    case = scenario(str(folder))
    sent = packed([case], RAY)
    (name,) = own(sent.files)
    model = sent.there(case).steps[0].model
    assert model is not None
    assert name == f"{model.name}/config.json"
    assert not Path(name).is_absolute()
    assert ".." not in Path(name).parts


def test_more_than_fits_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option that avoids sending it."""
    monkeypatch.setattr("dtypedoctor.runner.sending.MOST_BYTES", 10)
    with pytest.raises(UsageError, match=r"mine/network\.py: with it more than 0\.0 kB") as refused:
        packed([scenario("mine.network:make")], RAY)
    assert "--shared" in refused.value.hint


def test_nothing_is_sent_to_processes_of_this_machine(project: Path) -> None:
    """They see the working directory itself."""
    sent = packed([scenario("mine.network:make")], Where(jobs=2))
    assert (sent.files, sent.environment) == ({}, {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("notes.txt", f"token {TOKEN}"),
        ("run.log", f"Authorization: {TOKEN}\n"),
        ("book.ipynb", json.dumps({"cells": [{"source": [f"login('{TOKEN}')"]}]})),
        ("settings.json", json.dumps({"hub": TOKEN})),
        ("deploy", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----\n"),
    ],
)
def test_every_text_is_searched_for_secrets_whatever_its_suffix(project: Path, name: str, text: str) -> None:
    """Notebooks, logs, settings, and keys under a name of their own."""
    (project / "mine" / name).write_text(text)
    sent = packed([scenario("mine.network:make")], RAY)
    assert f"mine/{name}" not in sent.files
    assert "token" in sent.withheld[f"mine/{name}"]


def test_weights_are_sent_unsearched(project: Path) -> None:
    """They are binary, or larger than any text of a user's."""
    (project / "mine" / "model.safetensors").write_bytes(b"\0" + TOKEN.encode())
    (project / "mine" / "merges.txt").write_text(TOKEN + " \n" * (1 << 20))
    sent = packed([scenario("mine.network:make")], RAY)
    assert {"mine/model.safetensors", "mine/merges.txt"} <= own(sent.files)


@pytest.mark.parametrize("place", [".ssh", ".ssh/work", ".ssh/work/config", ".config", "link"])
def test_folders_of_keys_and_hidden_ones_stay_even_where_they_are_asked_for(project: Path, place: str) -> None:
    """Whatever their files are called, and by whatever link."""
    for folder in (".ssh/work", ".config"):
        (project / folder).mkdir(parents=True)
        (project / folder / "config").write_text("plain")
    (project / "link").symlink_to(project / ".ssh" / "work")
    with pytest.raises(UsageError, match=r"in a folder of keys|hidden"):
        packed([scenario("builtin:gemma4-tiny")], Where(executor="ray", send=(Path(place),)))


def test_what_another_repository_ignores_stays(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The working directory is in none or in another, and a link leads there."""
    other = tmp_path_factory.mktemp("other")
    subprocess.run(["git", "init", "-q", other], check=True)
    (other / ".gitignore").write_text("*.bin\n")
    (other / "tiny").mkdir()
    for name in ("config.json", "model.bin", ":name.bin"):
        (other / "tiny" / name).write_text("{}")
    (project / "link").symlink_to(other / "tiny")
    for named in (str(other / "tiny"), "link"):
        sent = packed([scenario(named)], RAY)
        assert [Path(name).name for name in own(sent.files)] == ["config.json"]
        assert set(sent.withheld.values()) == {"ignored by git"}


def test_names_that_are_no_utf_8_are_sent_and_withheld(project: Path) -> None:
    """And listed, as far as they can be written."""
    for name in (b"mine/caf\xe9.txt", b"mine/caf\xe9.bin"):
        Path(os.fsdecode(name)).write_text("A")
    sent = packed([scenario("mine.network:make")], RAY)
    assert os.fsdecode(b"mine/caf\xe9.txt") in sent.files
    assert sent.withheld[os.fsdecode(b"mine/caf\xe9.bin")] == "ignored by git"
    sent.write(project)
    assert len(json.loads((project / SENT).read_text())["files"]) == len(sent.files)


def test_nothing_is_sent_where_git_cannot_tell_what_it_ignores(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken repository, or no git; what is asked for by its name does not need git."""
    (project / ".git" / "HEAD").unlink()
    with pytest.raises(UsageError, match="git cannot tell which files it ignores"):
        packed([scenario("mine.network:make")], RAY)
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(UsageError, match="git cannot tell which files it ignores"):
        packed([scenario("mine.network:make")], RAY)
    sent = packed([scenario("builtin:gemma4-tiny")], Where(executor="ray", send=(Path("mine"),)))
    assert "mine/cache.bin" in sent.files


def test_what_cannot_be_read_is_named(project: Path) -> None:
    """A link that leads nowhere; a pipe is passed over, for reading it would not end."""
    os.mkfifo(project / "mine" / "pipe")
    assert packed([scenario("mine.network:make")], RAY).withheld["mine/pipe"] == "not a file"
    (project / "mine" / "gone.txt").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"mine/gone\.txt: cannot be read"):
        packed([scenario("mine.network:make")], RAY)


@pytest.mark.parametrize(("executor", "gpus"), [("local", None), ("slurm", 0)])
def test_scenarios_for_a_cpu_ask_another_machine_for_no_gpu(executor: str, gpus: int | None) -> None:
    """Of this one nothing is asked: `run FOLDER --jobs 2` of such scenarios was refused for an option that nobody had given."""
    one = Scenario.model_validate(scenario("mine.network:make").model_dump() | {"device": "cpu"})
    assert Where(executor=executor, jobs=2).fitting([one]).gpus == gpus
