"""What the instruments tell of gradient scalers."""

from typing import Any

from refusals import Story

from dtypedoctor.trace.events import ScalerState


def unscaling(message: str = "", **values: Any) -> Story:
    """A run in which a scaler unscaled once and that may have ended with ``message``."""
    known = {"scale": 1024.0, "params": {"float32": 4}, "gradients": {"float32": 4}, "names": {}, "frozen": 0, "strangers": 0,
             "optimizer": "AdamW"}  # fmt: skip
    story = Story().saw("unscale", **(known | values))
    if message:
        story.raised(message, kind="ValueError", phase="optimizer")
    return story


def scales(*steps: tuple[float, bool]) -> Story:
    story = Story()
    for number, (scale, skipped) in enumerate(steps, start=1):
        story.add(ScalerState(n=story.n(), step=number, scale=scale, found_inf=skipped, skipped=skipped))
    return story


def scaled_use(use: str = "clipped") -> Story:
    """A run that clips gradients before the scale is taken off."""
    return Story().saw("scaled-use", use=use, source="train.py:9", scale=65536.0, limit=1.0)
