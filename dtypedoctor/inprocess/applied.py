"""``dtypedoctor.apply``: a fix in a live model, in one line of the program, counted and undone."""

from types import TracebackType
from typing import Self

from torch import nn

from dtypedoctor.corrections.contract import Installed, put_in
from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import KEEP_FLOAT32, correction_named


class Applied:
    """A fix that is in place in a model, from :func:`apply` to :meth:`undo` or to the end of a ``with`` block.

    Attributes:
        fix: as it was named.
        target: dotted names of what was replaced.
        proof: how it is known to be in place, in words.
    """

    def __init__(self, fix: str, installed: Installed) -> None:
        self.fix = fix
        self.target = installed.target
        self.proof = installed.proof
        self._installed = installed

    @property
    def hits(self) -> int:
        """How often the corrective code has run; of ``bfloat16`` how many tensors were cast. Does not wait for the device."""
        return self._installed.counters.hits

    @property
    def clamped(self) -> int:
        """Elements that were clamped to the narrower dtype's max. Waits for the device."""
        return self._installed.counters.elements("clamped")

    @property
    def replaced(self) -> int:
        """Elements that were inf or NaN and were replaced by finite values. Waits for the device."""
        return self._installed.counters.elements("rescued")

    def undo(self) -> None:
        """Puts back what was replaced; a second time it does nothing."""
        self._installed.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<{self.fix}: {self.hits} hits, {self.clamped} elements clamped, {self.replaced} replaced>"


def apply(model: nn.Module, fix: str) -> Applied:
    """Puts a fix into a live model, e.g. what ``dtypedoctor bisect`` has found.

    Call it when the model is loaded and on its device, before the optimizer is made: some fixes change the dtype of parameters.

    Args:
        model: the model that the program calls.
        fix: ``keep-float32:layers.3.mlp`` (more modules behind commas; ``::self`` behind a name for its own operators alone),
            ``bfloat16`` (float16 weights and inputs become bfloat16), or the id of a correction.

    Raises:
        UsageError: there is no such fix, no module is named for ``keep-float32``, or ``model`` is no module.
        TargetMismatchError: the model is not what the fix was written for, or has no such module; it is as it was.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"dtypedoctor.apply: {type(model).__name__} is not a torch.nn.Module", "Pass the model first.")
    name, modules = correction_named(fix)
    if name == KEEP_FLOAT32 and not modules:
        raise UsageError("keep-float32: which modules?", 'Name them: apply(model, "keep-float32:layers.3.mlp").')
    return Applied(fix, put_in(name, model, modules))
