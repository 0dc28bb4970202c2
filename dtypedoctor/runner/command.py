"""What a user's command is, and the environment in which the Python processes that it starts find the hook of this package."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

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
        watch_every: every module is measured in each so many steps, the first included.
        overhead_budget: the share of the time that measuring may take.
        fixes: ids of fixes to try on it in further runs.
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
    watch_every: int = 1
    overhead_budget: str = "off"
    fixes: Sequence[str] = ()

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

    def described(self) -> dict[str, Any]:
        """The program as a scenario of one script, which is what requests and report.json hold."""
        target: dict[str, Any] = {"path": self.path, "module": self.module, "code": self.code}
        target = {name: value for name, value in target.items() if value is not None}
        words = {name: list(value) for name, value in (("args", self.args), ("command", self.command)) if value}
        options: dict[str, Any] = {"time_limit": self.time_limit} if self.time_limit != OF_A_SCENARIO else {}
        options["deterministic"] = False
        options |= {"watch_every": self.watch_every} if self.watch_every != 1 else {}
        options |= {"overhead_budget": self.overhead_budget} if self.overhead_budget != "off" else {}
        options |= {"distributed": {"processes": self.processes}} if self.processes else {}
        options |= {"remedies": list(self.fixes)} if self.fixes else {}
        steps = [{"workload": {"kind": "script", **target, **words}}]
        return {"name": self.name, "summary": self.summary, "steps": steps, **options}

    def request(self, capsule_limit: int) -> dict[str, Any]:
        """What its processes are asked for when it is recorded once."""
        return {"scenario": self.described(), "watch": True, "replay": True, "capsule_limit": capsule_limit}


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
