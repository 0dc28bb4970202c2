"""What a worker is asked to do: a scenario, and how closely to look."""

from typing import Literal

from pydantic import Field

from dtypedoctor.scenario.model import Scenario, Strict

REQUEST = "request.json"


class Window(Strict):
    """Where the op trace is on.

    It opens before the outermost module call number ``call`` (or, with ``until: optimizer``, before the optimizer step
    number ``step``) and closes at the next outermost call or backward pass (``next-call``), after the next backward pass
    (``backward``) or after the optimizer step (``optimizer``).
    """

    call: int = Field(default=0, ge=0)
    step: int = Field(default=0, ge=0)
    until: Literal["next-call", "backward", "optimizer"] = "next-call"


class Request(Strict):
    """One run of a worker. The trace goes to the directory that holds the request file.

    The last two are for scripts, which seed their random numbers themselves or not at all: the label of the run whose
    random state this one begins with, and whether a digest of the parameters is taken after each optimizer step.
    """

    scenario: Scenario
    watch: bool = True
    window: Window | None = None
    repeats: str | None = None
    witness: bool = False
