"""What a worker is asked to do: a scenario, and how closely to look."""

from typing import Literal

from pydantic import Field

from dtypedoctor.scenario.model import Scenario, Strict

REQUEST = "request.json"


class Window(Strict):
    """Where the op trace is on.

    It opens before the outermost module call number ``call`` (or, with ``until: optimizer``, before the optimizer step
    number ``step``) and closes at the next outermost call or backward pass (``next-call``), after the next backward pass
    (``backward``) or after the optimizer step (``optimizer``). An ``early`` one opens when the call before has ended (at the
    start of the program for the first), so that what is computed outside of all modules in between is in it; one that waits
    for an optimizer step opens when the step before is done, and so holds a whole training step. With ``scaled``
    the gradients of the call's backward pass are computed beside it from a loss that is multiplied by a loss scale. An
    ``eager`` one opens no op trace, under which nothing is compiled: the call is made as it is, and again in eager mode.
    """

    call: int = Field(default=0, ge=0)
    step: int = Field(default=0, ge=0)
    until: Literal["next-call", "backward", "optimizer"] = "next-call"
    early: bool = False
    scaled: bool = False
    eager: bool = False


class Capture(Strict):
    """A module whose arguments and results are kept in one call, so that the call can be repeated alone.

    ``call`` is the number of the outermost module call; ``own`` keeps what the modules in it did instead of these.
    """

    module: str
    own: bool
    call: int = Field(ge=1)


class Request(Strict):
    """One run of a worker. The trace goes to the directory that holds the request file.

    ``standby`` has a script leave processes that can go on from moments of its run (:mod:`dtypedoctor.replay`).
    ``repeats`` and ``witness`` are for scripts, which seed their random numbers themselves or not at all: the label of the run whose
    random state this one begins with, and whether a digest of the parameters is taken after each optimizer step.
    """

    scenario: Scenario
    watch: bool = True
    windows: list[Window] = Field(default_factory=list)
    standby: bool = False
    repeats: str | None = None
    witness: bool = False
    capture: Capture | None = None
