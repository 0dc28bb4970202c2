"""What a user's command is, and the environment in which the Python processes that it starts find the hook of this package."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

from dtypedoctor.errors import UsageError

BEGIN = "DTYPEDOCTOR_BEGIN"
"""Environment variable with a ``module:function`` that each Python process calls, in the place of recording itself."""
HOME = str(Path(__file__).resolve().parents[2])
"""Where this package is found: it may be a checkout that is not installed."""
_HOOK = str(Path(__file__).resolve().parents[1] / "worker" / "inherited")
"""Folder with the ``sitecustomize.py`` that Python runs first."""


def hooked(variables: Mapping[str, str], *paths: str) -> dict[str, str]:
    """This process's environment with ``variables``, in which each Python runs the hook; ``paths`` stand behind the user's own in ``PYTHONPATH``."""
    named = os.environ.get("PYTHONPATH")
    return os.environ | {**variables, "PYTHONPATH": os.pathsep.join([_HOOK, *([named] if named else []), *paths])}


WEEK, OF_A_SCENARIO = 604_800, 600
"""Seconds: the longest that a program may run, and what a scenario is given that does not say how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A user's program as it is started, and how it is to be measured.

    Attributes:
        name: of its runs.
        summary: what it is, one sentence.
        path, module, code: one of them: a script (``-`` for standard input), what stands after ``python -m``, source text after ``-c``.
        args: of it.
        command: another program that starts it, a launcher, say, with all arguments; ``path`` or ``module`` only names the script then.
        processes: how many ranks torchrun starts of it; 0 without torchrun.
        time_limit: seconds.
        overhead_budget: the share of the time that measuring may take.
        fixes: ids of fixes to try on it in further runs.
        error_budget: whether to measure how much rounding error each module makes.
    """

    name: str
    summary: str = "A script, run unchanged."
    path: str | None = None
    module: str | None = None
    code: str | None = None
    args: Sequence[str] = ()
    command: Sequence[str] = ()
    processes: int = 0
    time_limit: int = WEEK
    overhead_budget: str = "off"
    fixes: Sequence[str] = ()
    error_budget: bool = False

    @property
    def words(self) -> list[str]:
        """The command that starts it, as a shell would."""
        target = (
            ["-m", self.module]
            if self.module is not None
            else ["-c", self.code]
            if self.code is not None
            else [str(self.path)]
        )
        words = [*self.command] or [sys.executable, *target, *self.args]
        return [*torchrun(self.processes), *words[1:]] if self.processes else words

    @property
    def folder(self) -> Path | None:
        """Where its script lies."""
        return Path(self.path).resolve().parent if self.path not in (None, "-") else None

    def described(self) -> dict[str, Any]:
        """The program as a scenario of one script, which is what requests and report.json hold."""
        target: dict[str, Any] = {"path": self.path, "module": self.module, "code": self.code}
        target = {name: value for name, value in target.items() if value is not None}
        words = {name: list(value) for name, value in (("args", self.args), ("command", self.command)) if value}
        options: dict[str, Any] = {"time_limit": self.time_limit} if self.time_limit != OF_A_SCENARIO else {}
        options["deterministic"] = False
        options |= {"overhead_budget": self.overhead_budget} if self.overhead_budget != "off" else {}
        options |= {"distributed": {"processes": self.processes}} if self.processes else {}
        options |= {"remedies": list(self.fixes)} if self.fixes else {}
        steps = [{"workload": {"kind": "script", **target, **words}}]
        return {"name": self.name, "summary": self.summary, "steps": steps, **options}

    def request(self, capsule_limit: int) -> dict[str, Any]:
        """What its processes are asked for when it is recorded once."""
        asked = {"scenario": self.described(), "watch": True, "replay": True, "capsule_limit": capsule_limit}
        return asked | ({"error_budget": True} if self.error_budget else {})


def is_described(ran: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a value from a file has the shape of what was run, as far as that is read."""
    try:
        steps = [(step["workload"].get("steps", 0) + 0, (step.get("model") or {}).get("name")) for step in ran["steps"]]
        return bool(steps) and isinstance(ran["name"], str) and not isinstance(ran.get("remedies", []), str)
    except (AttributeError, KeyError, TypeError):
        return False


def torchrun(count: int) -> list[str]:
    """With this many processes; ``-P`` because Python would look for torch in the working directory first."""
    return [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]


def scenario_name(program: str) -> str:
    """A scenario's name made from that of a script or module."""
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(program).name.removesuffix(".py").lower())
    return words.strip("-_.")[:100] or "script"


def program_of(script: str, arguments: list[str], *, module: bool, text: bool) -> dict[str, Any]:
    """What to run, as fields of a scenario's ``script``.

    Raises:
        UsageError: there is no such script and no such program.
    """
    if module and text:
        raise UsageError("give either -m or -c", "-m runs a module, -c source text.")
    if module:
        return {"module": script, "args": arguments}
    if text:
        return {"code": script, "args": arguments}
    if script == "-":
        return {"path": script, "args": arguments}
    program = None if script.endswith(("-", ".py")) else _program(script)
    if program is not None:
        # The script that a launcher is given, which names the run and is edited; nothing else depends on which word it is
        at = next((at for at, word in enumerate(arguments) if word.endswith(".py") and os.path.isfile(word)), -1)
        return {
            "command": [*program, *arguments],
            "path": arguments[at] if at >= 0 else script,
            "args": arguments[at + 1 :],
        }
    if not os.path.exists(script):
        hint = "Give a file, -m and the name of a module, or a command such as torchrun."
        raise UsageError(f"{script}: no such script{_meant_beside(script)}", hint)
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"{script}: a directory without a __main__.py", "Give the script in it that is to be run.")
    if script.endswith(".ipynb"):
        hint = f"Put `%%doctor` on top of its cells, or run what `jupyter nbconvert --to script {script}` makes of it."
        raise UsageError(f"{script}: a notebook is no script of Python", hint)
    # Python takes what begins with a dash for options
    return {"path": f"./{script}" if script.startswith("-") else script, "args": arguments}


_MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
"""Programs by name, with the module that does the same where they are installed in another environment than the package."""


def _program(name: str) -> list[str] | None:
    """A program: one of this environment first, which need not be activated; None for a script of Python, or if there is none."""
    beside = shutil.which(name, path=os.path.dirname(sys.executable))
    if beside is None and name in _MODULES and find_spec(_MODULES[name].partition(".")[0]) is not None:
        return [sys.executable, "-m", _MODULES[name]]
    found = beside or shutil.which(name)
    return [found] if found is not None else None


def name_of(target: dict[str, Any]) -> str:
    """The name of the run of a program."""
    if "code" in target:
        return "command"
    return "stdin" if target.get("path") == "-" else scenario_name(target.get("path") or target["module"])


def _meant_beside(script: str) -> str:
    """The end of a sentence that names the script of that folder which may be meant; empty where none is near."""
    from dtypedoctor.text import did_you_mean

    try:
        return did_you_mean(script, [str(path) for path in Path(script).parent.glob("*.py")])
    except OSError:
        return ""
