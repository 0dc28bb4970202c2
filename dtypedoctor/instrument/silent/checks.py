"""All silent checks of one process, wired to the moments at which they look."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.float32_program import Originals
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.shadows import Shadows
from dtypedoctor.instrument.silent.angles import AngleCheck
from dtypedoctor.instrument.silent.decoding import DecodingCheck
from dtypedoctor.instrument.silent.float8 import Float8Casts
from dtypedoctor.instrument.silent.float32_shadows import AbsorbedOverflows, OverflowsOutside, RouterFlips
from dtypedoctor.instrument.silent.loading import LoadingCheck
from dtypedoctor.instrument.silent.logprobs import LogprobCheck, is_followed
from dtypedoctor.instrument.silent.look import RoutineLook
from dtypedoctor.instrument.silent.patches import PatchCheck
from dtypedoctor.instrument.silent.policies import RatioCheck
from dtypedoctor.instrument.silent.reruns import CacheCheck, EagerReplay
from dtypedoctor.instrument.silent.resuming import ResumeCheck
from dtypedoctor.instrument.silent.rounding import IntegerCasts, PositionCheck, RotaryTables
from dtypedoctor.instrument.silent.scaling import ScaleCheck
from dtypedoctor.instrument.silent.sums import SumCheck, is_built_up
from dtypedoctor.instrument.silent.twins import TwinCheck, question_of
from dtypedoctor.instrument.silent.updates import GradientCheck, UpdateCheck
from dtypedoctor.instrument.silent.writes import WriteCheck
from dtypedoctor.instrument.whereabouts import Whereabouts
from dtypedoctor.trace.records.execution import AutocastRegion


class SilentChecks:
    """Looks for failures that raise nothing and leave finite values behind.

    Args:
        session: where the observations go.
        originals: what half-precision tensors were before they were cast; shared with the op trace.
        look: take the routine look.

    Attributes:
        shadows: follows what half precision rounds, also outside of modules.
        scales: follows the loss scale to where gradients are used.
        writes: looks at what is written in place outside of modules.
        logprobs: follows log-probabilities, also outside of modules.
        overflows: follows what overflows outside of modules to where it is finite again.
    """

    def __init__(self, session: Session, originals: Originals, *, look: bool = True) -> None:
        whereabouts = Whereabouts(session)
        self._loading = LoadingCheck(session, originals)
        self._resuming = ResumeCheck(session)
        self._rotary = RotaryTables(session, self._loading.rounded_at)
        self.logprobs = LogprobCheck(session)
        self.overflows = OverflowsOutside(session, Whereabouts(session))
        self.shadows = Shadows(session)
        self._float8 = Float8Casts(session, whereabouts)
        seeing = (
            self.shadows,
            AbsorbedOverflows(session, whereabouts),
            IntegerCasts(session, whereabouts),
            self._float8,
            RouterFlips(session, whereabouts),
            PositionCheck(session, whereabouts),
            AngleCheck(session, whereabouts, self.shadows),
            self._rotary,
            self.logprobs,
        )
        self._looks = look
        self._look = RoutineLook(seeing, session, self.shadows, lambda: self.shadows.accumulates)
        self._cache = CacheCheck(session)
        self._updates = UpdateCheck(session)
        self.scales = ScaleCheck(session)
        self.writes = WriteCheck(session)
        self._sums = SumCheck(session)
        self._gradients = GradientCheck(session, self._look.look_again)
        self._twins = TwinCheck(session)
        self._decoding = DecodingCheck(session)
        self._ratios = RatioCheck(session)
        self._patches = PatchCheck(session)
        self._eager = EagerReplay(session)

    def start(self) -> None:
        """Begins to look."""
        self._loading.start()
        self._resuming.start()

    def stop(self) -> None:
        """Stops looking."""
        self._look.after_call()
        self._cache.after_call()
        self._loading.stop()
        self._patches.stop()
        self._resuming.stop()
        self.shadows.stop()
        self.writes.stop()
        self._sums.stop()
        self.logprobs.finish()
        self._twins.finish()

    def make_again(self, calls: Iterable[int]) -> None:
        """The outermost calls with these numbers are made once more in eager mode; for the second pass."""
        self._eager.calls.update(calls)

    def scaled_backward(self, tensors: list[Tensor]) -> None:
        """The experiment of :class:`GradientCheck`, for the second pass."""
        self._gradients.scaled_backward(tensors)

    def when_zeros(self, listener: Callable[[], None]) -> None:
        """Has ``listener`` called where gradients are zero for the most part before an optimizer step, and float16 is at work."""
        self._gradients.on_zeros.append(listener)

    def look_again(self) -> None:
        """Something has been found not to be finite."""
        self._look.look_again()

    def follow_pretrained(self) -> None:
        """transformers has been imported."""
        self._loading.follow_pretrained()

    def follow_patchers(self, module: str, names: Sequence[str]) -> None:
        """A module with functions of these names, which make patches, has been imported."""
        self._patches.follow_patchers(module, names)

    def entered(self, region: AutocastRegion) -> None:
        """An autocast region is entered."""
        self._gradients.entered(region)

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins."""
        self.logprobs.before_call()
        self._patches.before_call(module)
        self._rotary.before_call(module)
        self._cache.before_call(module)
        if self._looks:
            self._look.before_call(module)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned."""
        self._twins.returned(module, args, kwargs, output)
        self.logprobs.returned(question_of(args, kwargs), output)
        self._decoding.returned(module, args, kwargs, output)
        self._eager.returned(module, args, kwargs, output)

    def after_call(self, module: nn.Module) -> None:
        """An outermost call has ended, in whatever way."""
        self.logprobs.after_call(module)
        self._look.after_call()
        self._cache.after_call()
        self._rotary.after_call()

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """An operator outside of modules has run for which :func:`is_followed` or :func:`is_built_up` is true."""
        if is_followed(func):
            self.logprobs.ran(func, arguments, result)
        if is_built_up(func):
            self._sums.ran(func, *arguments, result)
        elif str(func) == "aten._to_copy.default":
            self._float8.cast(arguments, result)

    def before_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``generate`` of transformers is called."""
        self._decoding.before_generate(args, kwargs)

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins at ``tensors``."""
        self._look.after_call()  # a backward pass inside of a call would leave its mode in another order
        self._ratios.before_backward(tensors)
        self.logprobs.before_backward(tensors)
        self.scales.before_backward(tensors)

    def writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator outside of modules is about to write to its operands."""
        self.scales.writing(func, args)
        return self.writes.before(func, args, kwargs)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer step begins."""
        self._ratios.before_step()
        self.scales.before_step(optimizer)
        self._loading.before_step(optimizer)
        self._resuming.before_step(optimizer)
        self._gradients.before_step(optimizer)
        self._updates.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer step has ended."""
        self._updates.after_step(optimizer)
        self._cache.after_step(optimizer)
