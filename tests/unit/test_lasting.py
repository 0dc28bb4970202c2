"""Hooks of the interpreter that stay: who listens hears what it has asked for, and the rest costs one call."""

import sys
from types import FrameType

from dtypedoctor.unpatched import at_audit, audited


class Listener:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def hear(self, event: str, details: object) -> None:
        self.heard.append(event)


def calls_for(event: str) -> int:
    """How many Python functions the hook calls for an event, itself included."""
    called = []

    def note(frame: FrameType, kind: str, _: object) -> None:
        if kind == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        audited(event, ())
    finally:
        sys.setprofile(None)
    return len(called)


def test_a_listener_hears_the_events_that_it_has_asked_for() -> None:
    """By how their names begin, while it lives."""
    listener = Listener()
    at_audit(listener.hear, "dtypedoctor.asked")
    for event in ("dtypedoctor.asked", "dtypedoctor.asked.more", "dtypedoctor.other"):
        sys.audit(event)
    assert [event for event in listener.heard if event.startswith("dtypedoctor.")][:2] == [
        "dtypedoctor.asked",
        "dtypedoctor.asked.more",
    ]


def test_an_event_that_nobody_has_asked_for_costs_one_call() -> None:
    """Importing torch makes thousands of them."""
    listener = Listener()
    at_audit(listener.hear, "dtypedoctor.asked")
    assert calls_for("dtypedoctor.asked") > 1
    assert calls_for("builtins.id") == 1
    assert "builtins.id" not in listener.heard
