"""Whether what a scenario needs is there, found out without torch: its device, its models, its workloads.

A worker would find out the same, but only after it has imported torch and the trainers, which takes ten seconds and more. Where
something cannot be told from here, the worker decides.
"""

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.diagnosis.checkpoint import cached
from dtypedoctor.errors import UsageError, require_installed
from dtypedoctor.plugins import Model, Workload, known, registered
from dtypedoctor.replay.capsule import MODEL as CAPSULE
from dtypedoctor.scenario.loading import BUILTIN
from dtypedoctor.scenario.model import Model as ModelSpec
from dtypedoctor.scenario.model import Plugin, Scenario, ScenarioStep
from dtypedoctor.scenario.problems import did_you_mean

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


def require_at_hand(scenario: Scenario) -> None:
    """Checks what can be checked before torch is imported.

    Raises:
        UsageError: a device, a model or a workload of ``scenario`` is certainly not there.
    """
    if scenario.device == "cuda" and (why := why_no_cuda()):
        raise UsageError(f"this scenario needs a CUDA device and there is none: {why}", "Run it with `--device cpu`.")
    for step in scenario.steps:
        if step.model is not None:
            require_model(step.model.name, searched=not scenario.requires)
        if isinstance(step.workload, Plugin) and step.workload.name not in registered(Workload):
            meant = did_you_mean(step.workload.name, registered(Workload))
            raise UsageError(f"there is no workload {step.workload.name!r}{meant}", known(Workload))
        if not scenario.requires:  # else a worker imports from other places, too
            _require_libraries(step)


def _require_libraries(step: ScenarioStep) -> None:
    """The libraries of the extra ``hf`` that a step needs; plug-ins say what they need themselves."""
    workload = step.workload.name if isinstance(step.workload, Plugin) else step.workload.kind
    if workload in registered(Workload):
        require_installed(f"the workload {workload}", registered(Workload)[workload].needs)
    if step.model is not None:
        require_installed(step.model.name, libraries_of(step.model))


def libraries_of(model: ModelSpec) -> list[str]:
    """The packages that a model's builder, its packed weights and its adapters need beside torch."""
    needs: list[str] = []
    if model.name.startswith(BUILTIN):
        builtin = registered(Model).get(model.name.removeprefix(BUILTIN))
        needs += builtin.needs if builtin is not None else ()
    elif not model.name.startswith(CAPSULE) and (os.path.exists(model.name) or ":" not in model.name):
        needs += ["transformers", "accelerate"]  # a folder or a hub id: `from_pretrained(device_map=…)`
    needs += ["accelerate"] if model.device_map is not None and "accelerate" not in needs else []
    needs += ["bitsandbytes"] if model.quantization is not None else []
    needs += ["peft"] if model.lora is not None else []
    return needs


def why_no_cuda() -> str:
    """Why torch cannot have a CUDA device here; empty where it may have one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides all"
    version = _version_of_torch()
    if re.search(r"^hip\b.*= *['\"]", version, re.MULTILINE):
        return ""  # torch calls AMD's devices by the same name
    if re.search(r"^cuda\b.*= *None", version, re.MULTILINE):
        return "the installed torch is built without CUDA"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed" if sys.platform == "linux" else ""
    return ""


def _version_of_torch() -> str:
    """The text of ``torch/version.py``, which says what torch was built for; empty where it is not found."""
    spec = importlib.util.find_spec("torch")  # finds it, and does not import it
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            return Path(folder, "version.py").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return ""


def require_model(name: str, *, searched: bool) -> None:
    """Checks one model.

    Args:
        name: as a scenario or ``--model`` names it.
        searched: whether a worker imports from the same places as this process.

    Raises:
        UsageError: it is certainly not there.
    """
    if name.startswith(CAPSULE):
        return
    if name.startswith(BUILTIN):
        short = name.removeprefix(BUILTIN)
        if short not in registered(Model):
            raise UsageError(
                f"there is no builtin model {short!r}{did_you_mean(short, registered(Model))}", known(Model, BUILTIN)
            )
    elif os.path.exists(name):
        _require_config(Path(name))
    elif ":" in name:
        if searched:
            _require_package(name)
    else:
        _require_on_hub(name)


def _require_config(folder: Path) -> None:
    if folder.is_dir() and not (folder / "config.json").exists():
        raise UsageError(
            f"cannot load the folder {str(folder)!r}: it has no config.json",
            "Give builtin:NAME, a folder with config.json and weights, or a hub id.",
        )


def _require_package(name: str) -> None:
    package = name.partition(":")[0].partition(".")[0]
    here = Path.cwd()  # workers look there, too
    if (here / package).exists() or (here / f"{package}.py").exists() or package in sys.modules:
        return
    try:
        found = importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        meant = did_you_mean(name, _builtins()) or did_you_mean(package, _modules(here))
        raise UsageError(
            f"cannot find the model factory {name}: there is no module {package!r}{meant}",
            "Give package.module:function, importable from the current directory, or builtin:NAME.",
        )


def _require_on_hub(name: str) -> None:
    """A name that no hub id can have, or that is a builtin model's, is refused; so is an id that is not in the cache if the hub is off."""
    hint = "Give builtin:NAME, a folder with config.json and weights, or a hub id that can be reached."
    if name in registered(Model) and cached(name) is None:
        raise UsageError(f"cannot load the model {name!r}; did you mean '{BUILTIN}{name}'?", hint)
    if not _HUB_ID.fullmatch(name):
        meant = did_you_mean(name, map(str, _folders_beside(Path(name))))
        raise UsageError(f"cannot load the folder {name!r}: there is no such folder{meant}", hint)
    offline = next((one for one in _OFFLINE if os.environ.get(one, "").upper() in ("1", "ON", "YES", "TRUE")), None)
    if offline is not None and cached(name) is None:
        raise UsageError(f"cannot load the model id {name!r}: it is not in the cache", f"{hint} {offline} is set.")


def _builtins() -> list[str]:
    return [f"{BUILTIN}{name}" for name in registered(Model)]


def _modules(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.py")]


def _folders_beside(path: Path) -> Iterator[Path]:
    try:
        yield from (other for other in path.parent.iterdir() if other.is_dir())
    except OSError:
        return
