"""Finds a model that has been downloaded from the Hugging Face hub before, without the network."""

import os
from pathlib import Path

__all__ = ["cached"]


def cached(model_id: str) -> Path | None:
    """The folder of the newest snapshot of ``organisation/name`` (``main`` where there is one); None if it is not there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    model = hub / f"models--{model_id.replace('/', '--')}"
    main = model / "refs" / "main"
    if main.is_file():
        snapshot = model / "snapshots" / main.read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = sorted((model / "snapshots").glob("*/"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None
