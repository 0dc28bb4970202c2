"""A script that somebody starts with a launcher, ``torchrun --nproc-per-node 2 train.py``: which words are whose."""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtypedoctor.errors import UsageError

_MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate-launch": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}
"""Launchers by the name of their program, with the module that does the same in this interpreter."""
_LAUNCH = {"accelerate": "launch"}
"""The first word behind a program of several verbs, where it is a launcher."""
_OTHERS = ("mpirun", "mpiexec", "srun", "horovodrun", "ray")
_WITHOUT_PYTHON = frozenset({"--no-python", "--no_python"})
_MODULE = frozenset({"-m", "--module"})
_INTERPRETER = re.compile(r"python[0-9.]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A command line, taken apart.

    Attributes:
        launcher: the launcher's module and its options; empty where there is none.
        script: the script, a module's name, or source text.
        arguments: the script's own.
        module: whether ``script`` is a module's name.
        text: whether it is source text.
    """

    launcher: tuple[str, ...] = ()
    script: str
    arguments: tuple[str, ...]
    module: bool = False
    text: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """What a launcher's options say of several machines.

    Attributes:
        most: how many there are; with ``--nnodes MIN:MAX`` at most.
        number: of this one, where the options say it.
        meeting: what is the same on all of them: the id of the rendezvous, and the port of its endpoint.
    """

    most: int
    number: int | None
    meeting: str


_COUNT, _NUMBER = ("nnodes", "num_machines", "num_nodes"), ("node_rank", "machine_rank")
_ENDPOINT = ("rdzv_endpoint", "master_port", "main_process_port")
"""Options of torchrun, accelerate and deepspeed that mean the same."""


def nodes_of(launcher: Sequence[str], environment: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines that a launcher's options, or torchrun's variables in their place, name; None where it is one, or no launcher."""
    if not launcher:
        return None
    variables = {
        name.removeprefix("PET_").lower(): value
        for name, value in environment.items()
        if value and name.startswith("PET_")
    }
    options = variables | dict(_options(launcher))

    def value(names: Sequence[str]) -> str:
        return next((options[name].rpartition(":")[2] for name in names if name in options), "")

    most, number = value(_COUNT), value(_NUMBER)
    if not most.isdecimal() or int(most) < 2:
        return None
    meeting = (
        f"{value(['rdzv_id'])}:{value(_ENDPOINT)}"  # without the host, which each machine may call by another name
    )
    return Nodes(most=int(most), number=int(number) if number.isdecimal() else None, meeting=meeting)


def _options(launcher: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a launcher, with underscores in their names, and the value of each, if it has one."""
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        option, equals, behind = word.partition("=")
        if option.startswith("-"):
            yield option.lstrip("-").replace("-", "_"), behind if equals else following


def taken_apart(script: str, arguments: Sequence[str], *, module: bool, text: bool) -> Launch:
    """What ``exec SCRIPT ARGUMENTS…`` is to run; a launcher or an interpreter in front of the script is told from it.

    Raises:
        UsageError: a launcher that is not known, or no script behind a known one.
    """
    plain = Launch(script=script, arguments=tuple(arguments), module=module, text=text)
    name = Path(script).name
    if module:
        return _behind(script, arguments, f"-m {script}") if script in _MODULES.values() else plain
    if not text and _INTERPRETER.fullmatch(name) and shutil.which(script):
        return _of_interpreter(script, arguments)
    if text or (os.path.exists(script) and not _is_program(script)):
        return plain
    if name in _LAUNCH and arguments[:1] == [_LAUNCH[name]]:
        return _behind(_MODULES[f"{name}-launch"], arguments[1:], f"{name} launch")
    if name in _MODULES:
        return _behind(_MODULES[name], arguments, name)
    if name in _OTHERS and shutil.which(script):
        hint = f"Let it start the processes: {name} … python -m dtypedoctor exec --out DIR train.py"
        raise UsageError(f"{name}: exec cannot start this launcher", hint)
    return plain


def _is_program(path: str) -> bool:
    """Whether a file is a launcher that lies in a folder of programs, and not somebody's script of that name."""
    return Path(path).name in {*_MODULES, *_LAUNCH} and Path(path).parent.name == "bin"


def _behind(launcher: str, words: Sequence[str], name: str) -> Launch:
    """A known launcher: its options end where the script, or ``-m`` and a module's name, begins."""
    for at, word in enumerate(words):
        if word in _WITHOUT_PYTHON:
            raise UsageError(f"{name} {word}: this starts no Python script", "Leave it out and give the script.")
        if word in _MODULE:
            if at + 1 == len(words) or words[at + 1].startswith("-"):
                raise UsageError(f"{name}: no module behind {word}", f"Give {word} directly before the module's name.")
            return Launch(
                launcher=(launcher, *words[:at]), script=words[at + 1], arguments=tuple(words[at + 2 :]), module=True
            )
        if word.endswith(".py") and not word.startswith("-"):
            return Launch(launcher=(launcher, *words[:at]), script=word, arguments=tuple(words[at + 1 :]))
    raise UsageError(f"{name}: no script", f"dtypedoctor exec {name} … train.py, a name that ends in .py, or -m MODULE")


def _of_interpreter(program: str, words: Sequence[str]) -> Launch:
    """``python`` in front of a script; it must be the one that dtypedoctor is installed in."""
    found = shutil.which(program)
    release = ".".join(map(str, sys.version_info[:2]))
    is_ours = release.startswith(Path(program).name.removeprefix("python"))  # python, python3 or python3.11
    if found is None or not is_ours or Path(found).parent.resolve() != Path(sys.executable).parent.resolve():
        raise UsageError(
            f"{program}: this is another Python than dtypedoctor's ({found})",
            "Install dtypedoctor into it, and start dtypedoctor from there.",
        )
    if not words or (words[0].startswith("-") and words[0] not in ("-", "-m", "-c")):
        option = f"{program} {words[0]}" if words else program
        raise UsageError(
            f"{option}: give the script without the interpreter",
            "dtypedoctor exec train.py; options of Python as variables of the environment, PYTHONUNBUFFERED=1.",
        )
    if words[0] in ("-m", "-c"):
        if len(words) == 1:
            raise UsageError(f"{program} {words[0]}: nothing behind it", "dtypedoctor exec -m MODULE")
        return taken_apart(words[1], words[2:], module=words[0] == "-m", text=words[0] == "-c")
    return taken_apart(words[0], words[1:], module=False, text=False)
