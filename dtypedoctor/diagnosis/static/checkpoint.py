"""Reads a checkpoint's folder or file: headers, config, quantisation states. No weights are loaded."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtypedoctor.diagnosis.static.model_class import kept_in_float32
from dtypedoctor.diagnosis.static.safetensors_file import Entry, read_entries
from dtypedoctor.diagnosis.static.subject import Intent, QuantState, StaticTensor, Subject
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, reason

CONFIG, ADAPTER = "config.json", "adapter_config.json"
STATE = ".quant_state.bitsandbytes__"
STATE_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
FREQUENCIES = "inv_freq"
LARGEST_TABLE = 65_536
"""Bytes of a table of frequencies that is worth reading."""


def is_checkpoint(path: Path) -> bool:
    """Whether there is anything that :func:`read_checkpoint` can read."""
    if path.is_dir():
        return any((path / name).is_file() for name in (CONFIG, ADAPTER)) or any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors" and path.is_file()


def read_checkpoint(path: Path, intent: Intent | None = None) -> Subject:
    """What the files in ``path`` say.

    Raises:
        UsageError: there is no checkpoint, or one of its files cannot be read.
    """
    if not is_checkpoint(path):
        raise UsageError(
            f"{path}: no checkpoint here", "Give a folder with config.json and *.safetensors files, or one such file."
        )
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
    entries = [entry for file in files for entry in read_entries(file)]
    config = _json(folder / CONFIG)
    quantised = {entry.name.partition(STATE)[0] for entry in entries if STATE in entry.name}
    return Subject(
        name=str(path),
        tensors=tuple(_tensor(entry) for entry in entries if not _is_part(entry.name, quantised)),
        quant_states=tuple(_quant_states(entries)),
        config=config,
        adapter=_json(folder / ADAPTER) if (folder / ADAPTER).is_file() else None,
        keep_in_fp32=kept_in_float32(config),
        intent=intent or Intent(),
        gaps=(*_gaps(folder, files), *_cut(entries)),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse_json(read_file(path, follow=True))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({reason(error)})", "Download it again.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds no settings")
    return value


def _is_part(name: str, quantised: set[str]) -> bool:
    if STATE in name:
        return True
    return any(name.endswith(part) and name.removesuffix(part) in quantised for part in STATE_PARTS)


def _tensor(entry: Entry) -> StaticTensor:
    small = entry.end - entry.begin <= LARGEST_TABLE
    table = small and entry.dtype == "float32" and entry.name.endswith(FREQUENCIES)
    try:
        values = struct.unpack(f"<{(entry.end - entry.begin) // 4}f", entry.read()) if table else ()
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(f"{entry.file}: {entry.name} is no table of float32 ({reason(error)})") from error
    return StaticTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, values=values)


def _quant_states(entries: list[Entry]) -> Iterator[QuantState]:
    """bitsandbytes stores each state as JSON in a tensor of bytes beside the packed weight."""
    for entry in entries:
        weight, mark, kind = entry.name.partition(STATE)
        if not mark:
            continue
        try:
            state = parse_json(entry.read())
            yield QuantState(
                weight=weight, kind=kind, dtype=str(state["dtype"]), nested="nested_dtype" in state
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{entry.file}: {entry.name} is no quantisation state ({reason(error)})") from error


def _shards(index: Path) -> set[str]:
    """The files that an index names."""
    named = _json(index).get("weight_map", {})
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise UsageError(f"{index}: weight_map is no mapping of tensors to files", "Download it again.")
    return set(named.values())


def _cut(entries: list[Entry]) -> Iterator[str]:
    """A header is whole long before its file is: what it names says something, what is not there cannot be loaded."""
    for file in sorted({entry.file for entry in entries if entry.cut}):
        missing = [entry.name for entry in entries if entry.file == file and entry.cut]
        yield f"{file.name}: cut short, {len(missing)} of its tensors are not there, {missing[0][:100]} first"


def _gaps(folder: Path, files: list[Path]) -> Iterator[str]:
    pickled = sorted(
        p.name for pattern in ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern)
    )
    if pickled:
        yield f"{', '.join(pickled[:3])}: a pickle, which is code and cannot be read without running it"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(_shards(index) - {file.name for file in files})
        if missing:
            yield f"{', '.join(missing[:3])}: named in the index and not there"
    if not files:
        yield "weights: there is no safetensors file"
    if not (folder / CONFIG).is_file() and not (folder / ADAPTER).is_file():
        yield f"{CONFIG}: not there, so what the files should hold is not known"
