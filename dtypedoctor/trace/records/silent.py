"""What the silent checks see where nothing raises and everything is finite. An observation's ``fqn`` is the module that it is about."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflowed:
    """An op whose finite operands made inf or NaN in a narrow dtype, and finite values in float32.

    Attributes:
        fqn: module that it ran in; None outside of modules.
        dtype: of its result.
        operands: largest magnitudes of its operands.
        float32: largest magnitude of the result in float32.
        bad: elements of the result that are not finite.
        squares: whether it multiplied a tensor with itself.
        of_gradients: whether an operand is the gradient of a parameter, as where a norm is computed to clip by.
        negative: whether all it made was ``-inf``, as masks do.
        rounded: elements that it has rounded to 0, of which a later operator made inf or NaN; 0 where it has overflowed itself.
        made_by, made_at: that operator and its line.
    """

    op: str
    fqn: str | None
    source: str | None
    dtype: str
    operands: list[float]
    float32: float
    bad: int
    elements: int
    squares: bool
    negative: bool
    of_gradients: bool = False
    rounded: int = 0
    made_by: str = ""
    made_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed:
    """An overflow that ends in finite values.

    Attributes:
        op, source: the op that ended it.
        scalars: its numbers, as text.
        relative_error: largest difference of its result from the float32 one, over the largest magnitude of the latter.
        rescued: elements that were not finite in its operands.
        elements: of its result.
        bounds: largest magnitudes of its other operands.
        by_mask: whether a test for finiteness came between.
        through: the ops from the overflow to that op, this included.
        born: the op that overflowed.
    """

    KIND: ClassVar[str] = "absorbed"

    op: str
    source: str | None
    scalars: list[str]
    relative_error: float
    rescued: int
    elements: int
    bounds: list[float] = field(default_factory=list)
    by_mask: bool
    through: list[str]
    born: Overflowed


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleCopy:
    """A layer that computes with an old copy of its weight, which autocast keeps.

    Attributes:
        weight: name of the weight.
        dtype: of the copy.
        relative_error: largest difference of the layer's result from one without the cache, over the largest magnitude of the latter.
        region: ``file:line`` that opened the outermost region.
    """

    KIND: ClassVar[str] = "autocast-cache"

    weight: str
    dtype: str
    relative_error: float
    region: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterChoice:
    """A selection among half-precision scores that something is looked up with in the same call.

    Attributes:
        op, source: of the selection.
        scores_op, scores_source, dtype: of the product that the scores are.
        experts: how many there are to choose from.
        chosen: experts per token.
        tokens: how many chose.
        flipped: tokens whose set of experts differs from float32's.
        tied: tokens with equal scores on both sides of the border.
    """

    KIND: ClassVar[str] = "router"

    op: str
    source: str | None
    scores_op: str
    scores_source: str | None
    dtype: str
    experts: int
    chosen: int
    tokens: int
    flipped: int
    tied: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpatched:
    """A class with a method that a patch did not replace; the observation's ``fqn`` is the first module of that class.

    Attributes:
        class_: name of the class.
        attribute: name of the backup of what still runs; empty where there is none.
        method: name of what was to be replaced.
        source: ``file:line`` of the function that runs.
        patcher: name of the function that prepared the patch; empty where that is not known, and the rest as well.
        replacement: ``file:line`` of the function that was to run instead.
        surplus: parameters that it takes and the method does not, with commas between them.
        missing: parameters that the method takes and it does not.
        refused_by: dotted name of the function that was asked to make the patch and answered that it did not; empty where none is known.
    """

    KIND: ClassVar[str] = "unpatched"

    class_: str
    attribute: str
    method: str
    source: str | None
    patcher: str = ""
    replacement: str = ""
    surplus: str = ""
    missing: str = ""
    refused_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Twins:
    """Two models of the same weights that were called on the same tokens: one that is trained, and its reference or generator.

    Attributes:
        trainer, generator: numbers of the outermost modules, where known.
        rows: distributions compared, or log-probabilities of single tokens.
        choices: length of each; 1 for those of single tokens.
        largest_gap: largest difference of a log-probability, of distributions among those above 0.1 %.
        mean_gap: mean magnitude of these differences, without dropout.
        trainer_autocast, generator_autocast: dtype of the autocast region that the call was made in, or that its ``forward`` opens.
        moved: how far log-probabilities of the wider one move in the dtype of the other.
        apart: largest difference between the two that is left then.
    """

    KIND: ClassVar[str] = "twins"

    trainer: int | None
    generator: int | None
    trainer_dtype: str
    generator_dtype: str
    rows: int
    choices: int
    largest_gap: float
    mean_gap: float
    moved: float
    apart: float
    trainer_autocast: str | None = None
    generator_autocast: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedCopies:
    """Copies of weights that decoding takes, and that were not updated with the weights.

    Attributes:
        number: of copies.
        module, attribute: of the first: dotted name of the module whose weight it is of, and by which name it is kept.
        stored_at: the line that keeps it, where one file does.
        before, after: mean difference of log-probabilities of tokens decoded again, and with the copies updated.
    """

    number: int
    module: str
    attribute: str
    stored_at: str | None
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTokens:
    """Tokens of which a model says something else when it gets them one at a time than when it gets them all at once, with the same weights.

    Attributes:
        model: number of the outermost module, where known.
        dtype: of most of its parameters.
        tokens: compared.
        largest_gap, mean_gap: differences of their log-probabilities.
        rounding: mean difference of the call at once from the same in float32; None where that could not be made.
        copies: the stale copies that make the difference, where that was shown.
    """

    KIND: ClassVar[str] = "decoded-tokens"

    model: int | None
    dtype: str
    tokens: int
    largest_gap: float
    mean_gap: float
    rounding: float | None
    copies: UpdatedCopies | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRatio:
    """The first ratio of a policy's loss whose backward pass begins.

    Attributes:
        elements: of the ratio.
        off: those that are not 1.
        largest_gap, mean_gap: of the log-ratio's magnitude, over the elements near 1.
        clipped: elements beyond the bounds.
        bounds: of the clipping, lower and upper; empty without one around 1.
        random: whether a module that is training drops elements, or normalizes by its batch.
    """

    KIND: ClassVar[str] = "first-ratio"

    elements: int
    off: int
    largest_gap: float
    mean_gap: float
    clipped: int
    bounds: list[float]
    random: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedLogprobs:
    """Log-probabilities that a loss compares with others of the same tokens, and that went through half precision on the way.

    Attributes:
        dtype: in half precision.
        sides: which of the two did, ``new`` (trained) and ``old``.
        how: ``cast`` where the cast was seen, ``computed`` where they were computed so, ``given`` where they came like that.
        rounded_at: the line of either.
        used_at, use: where they are compared, by a ``difference`` or a ``quotient`` of probabilities, or a ``divergence`` of distributions.
        elements: compared.
        largest: magnitude of a log-probability; of a divergence its largest error.
        largest_gap: of the two; the mean divergence.
        error, mean_error: what rounding has moved their difference by, largest and mean; of a divergence the mean.
        measured: whether that was measured against the values before; otherwise it is half a step of the dtype.
    """

    KIND: ClassVar[str] = "rounded-logprobs"

    dtype: str
    sides: list[str]
    how: str
    rounded_at: str | None
    used_at: str | None
    use: str
    elements: int
    largest: float
    largest_gap: float
    error: float
    mean_error: float
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatToInt:
    """A lossy cast of activations to integers that are used as numbers and never as indices.

    Attributes:
        op, source: of the cast.
        from_, to: dtypes.
        relative_error: of the integers, in the Euclidean norm.
        elements: how many were cast.
        used_by, used_at: the op that made a number of it, and its line.
    """

    KIND: ClassVar[str] = "float-to-int"

    op: str
    source: str | None
    from_: str
    to: str
    relative_error: float
    elements: int
    used_by: str = ""
    used_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Cast:
    """A cast of finite values to float8 that loses much more than it would with a scale.

    Attributes:
        op, source: of the cast.
        from_, to: dtypes.
        elements: how many were cast.
        clipped: of these, larger than the dtype's largest value, which they become.
        vanished: not 0 before and 0 after.
        absmax: largest magnitude before the cast.
        relative_error: of the result, in the Euclidean norm.
        scaled_error: the same with the dtype's largest value over ``absmax`` as a scale.
    """

    KIND: ClassVar[str] = "float8-cast"

    op: str
    source: str | None
    from_: str
    to: str
    elements: int
    clipped: int
    vanished: int
    absmax: float
    relative_error: float
    scaled_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """A table of rotary frequencies that is rounded, and read.

    Attributes:
        name: of the buffer.
        dtype: it has.
        rounded_to: it equals its own rounding to this dtype.
        length: values in it.
        first, last: of them.
        deviation: largest relative deviation from the geometric progression through its values.
        angle_error: what that amounts to at ``position``, in radians.
        position: the last one that the model has, where that is known; 4096 in older traces.
        read: whether an operator was seen to read it; None where none was looked at.
        source: ``file:line`` of the cast that rounded it, where a module was cast; None otherwise.
        used: the largest position that this run has multiplied it by, of the calls that were looked at; None where that was not seen.
    """

    KIND: ClassVar[str] = "rotary-table"

    name: str
    dtype: str
    rounded_to: str
    length: int
    first: float
    last: float
    deviation: float
    angle_error: float
    position: int = 4096
    read: bool | None = None
    source: str | None = None
    used: float | None = None

    @property
    def here(self) -> tuple[float, float]:
        """The last position that counts, that of this run where it is known, and the error of an angle there."""
        at = self.position if self.used is None else min(self.used, self.position)
        return at, self.angle_error * at / self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedIndices:
    """Whole numbers that are others after they went through half precision.

    Attributes:
        source: the line that casts them to ``dtype``.
        used_at: the line that casts them back.
        elements, changed: how many there are, and how many of them have changed, or may have.
        before, after: the first of these, or one that may be.
        counted: whether ``source`` counts in ``dtype``, and casts nothing.
        arrived: whether they have come in ``dtype``, so that which of them are others is not known.
    """

    KIND: ClassVar[str] = "rounded-indices"

    source: str
    used_at: str
    dtype: str
    elements: int
    changed: int
    before: int
    after: int
    counted: bool = False
    arrived: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedUse:
    """A line that does something else with values in half precision than with what the same operators make in float64, as it stood at the end of the run.

    Attributes:
        use: ``decision``, ``integer`` (a cast to whole numbers), ``state`` (memory that outlives the call is inf), or ``restored`` (what was added is taken away
            again, and what was there does not come back).
        op, source: the operator that uses them and its line.
        made_by, made_at: the operator whose rounding moves them most, and its line.
        dtype: that it rounded to.
        value, exact: the first element that differs, of the call in which most do, and what float64 makes of it.
        changed, of: elements that differ, and how many that is judged beside: of a mask, those of the fewer of its two values.
        elements: all that were compared.
        nonfinite: whether the values that are used are inf or NaN, or inf or NaN has led to them.
        used_by, used_at: the operator and the line that use what ``op`` has made, where these are others.
        difference: whether a difference of near numbers has led to them.
        terms: how much the largest number of that difference is rounded by, where they are no copies of each other; else 0.
    """

    KIND: ClassVar[str] = "rounded-use"

    use: str
    op: str
    source: str
    made_by: str
    made_at: str
    dtype: str
    value: str
    exact: str
    changed: int
    of: int
    nonfinite: bool = False
    used_by: str = ""
    used_at: str = ""
    elements: int = 0
    difference: bool = False
    terms: float = 0.0

    def is_off(self, roundings: int = 1) -> bool:
        """Whether a difference of near numbers is off by more than that many roundings of these: a variance by E[x²] - E[x]²."""
        return 0 < self.terms * roundings < abs(float(self.value) - float(self.exact))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingShare:
    """What rounding in a module's own operators makes of the loss and of gradients, to first order; means of the backward passes that were measured.

    Attributes:
        passes: how many these are.
        loss: by how much it has changed the loss, over the loss.
        expected: how much that would be if the elements were rounded at random: the root of the sum of their squares.
        gradients: norm of the error of the gradients that its operators pass on, over the norm of these; None where none could be computed again.
        op, source: the operator and line that have changed the loss most.
    """

    KIND: ClassVar[str] = "rounding-share"

    passes: int
    loss: float
    expected: float
    gradients: float | None
    op: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedAngles:
    """Angles of sines and cosines that half precision has rounded.

    Attributes:
        op, source: of the cast of whole numbers, or of the sine.
        dtype: that rounded them.
        largest: largest angle, in radians; or the largest whole number that was cast.
        error: of an angle, in radians.
        apart: largest difference of the whole numbers and what is used; None where none were cast.
    """

    KIND: ClassVar[str] = "rounded-angles"

    op: str = ""
    source: str | None = None
    dtype: str
    largest: float
    error: float
    apart: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """Elements of one gradient, and those of them that are zero."""

    zeros: int
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientZeros:
    """Gradients that are zero for the most part before an optimizer step where float16 is at work, by parameter."""

    KIND: ClassVar[str] = "gradient-zeros"

    parameters: Mapping[str, Zeros]


CLIPPED, TWICE, STEPPED = "clipped", "twice", "stepped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledUse:
    """Gradients, or a loss, that a program uses as if the loss scale were not on them.

    Attributes:
        use: ``clipped`` before the scale was taken off, scaled ``twice``, or ``stepped`` without the scaler.
        source: the line that does it.
        scale: the loss scale.
        limit: norm or magnitude to which the scaled gradients are limited; 0 where they are not clipped.
    """

    KIND: ClassVar[str] = "scaled-use"

    use: str
    source: str
    scale: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGradient:
    """One gradient, of the loss and of the multiplied loss.

    Attributes:
        elements: of the gradient.
        zeros: as the program computes it.
        zeros_scaled: of the gradient of the multiplied loss, those counted in that overflowed.
        largest: largest magnitude of what came back, divided by the scale.
    """

    elements: int
    zeros: int
    zeros_scaled: int
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledBackward:
    """A backward pass that was made twice, of the loss and of the loss multiplied by ``scale``.

    Attributes:
        parameters: those that have a gradient in both passes, by name.
        error: why that failed, where it did; then there are no parameters.
        of: what was multiplied: the loss, or in a call that the program itself made again the gradient of what it returns.
    """

    KIND: ClassVar[str] = "scaled-backward"

    scale: float
    parameters: Mapping[str, ScaledGradient] = field(default_factory=dict)
    error: str | None = None
    of: str = "the loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedGradient:
    """A gradient that float16 rounds to zero as a whole where it takes it over, in a step in which all gradients of the parameters are zero.

    Attributes:
        source: the line that is differentiated there, if it is known.
        elements: of the gradient.
        absmax: the largest before.
        scale: what it was multiplied by, to be handed to float16 once more.
        revived: elements that are not zero then.
    """

    KIND: ClassVar[str] = "flushed-gradient"

    source: str | None
    elements: int
    absmax: float
    scale: float
    revived: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledParameter:
    """A parameter that loses most of its updates, over all steps that were checked.

    Attributes:
        wanted: elements that move in float32.
        lost: those of them that did not move.
        dtype: of the parameter.
        absmax: largest finite weight of the elements that were compared.
        update: largest float32 update of these.
        elements: compared in a step; None in older traces.
        asked: weights of it that move in float32 in a checked step; those that were not compared are counted in proportion. 0 in older traces.
        still: those of them that are, after the last checked step, bitwise what they were before the first one.
        steady: how much the signs of an element's gradients agree over the checked steps, from 0 to 1, averaged; None in older traces.
        parameters: how many of this name there are, in several outermost modules.
    """

    wanted: int
    lost: int
    dtype: str
    absmax: float
    update: float
    elements: int | None = None
    asked: int = 0
    still: int = 0
    steady: float | None = None
    parameters: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWrites:
    """A line that updates half-precision tensors and leaves them as they are.

    Attributes:
        source: the line.
        dtype: of the tensors.
        tensors: how many lose nearly all of it; 0 withdraws what was written of the line before.
        compared: how many were checked as often.
        checks: writes of one of them that were checked.
        wanted: elements that the same operator moves in float32, over all checks.
        lost: those of them that did not move.
        absmax: largest magnitude of a tensor that stands still.
        change: largest change of it in float32.
        in_place: whether they are written in place, and not computed anew.
        optimizer: of whose state they are; empty for all else.
        narrower: whether they are narrower than the parameters of that optimizer.
        way: how far float64 would take them in all steps of it, beside their size, as it does in those that were looked at; 0 where that is not known.
    """

    KIND: ClassVar[str] = "lost-writes"

    source: str
    dtype: str
    tensors: int
    compared: int
    checks: int
    wanted: int
    lost: int
    absmax: float
    change: float
    in_place: bool = True
    optimizer: str = ""
    narrower: bool = False
    way: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedSum:
    """A sum in half precision that has become wrong because what is added to it is rounded away.

    Attributes:
        source: the line that adds.
        dtype: of the sum.
        added: additions so far.
        begins: what the sum was where these additions began, if others that were not looked at came before; else None.
        exact: the sum of the same terms in float64, of the element that is most off.
        value: what it is.
        error: the difference.
        in_place: whether the sum is a tensor that is written to, which keeps its dtype whatever is added.
    """

    KIND: ClassVar[str] = "rounded-sum"

    source: str
    dtype: str
    added: int
    exact: float
    value: float
    error: float
    in_place: bool = False
    begins: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OvershotParameter:
    """A parameter that an optimizer step moves much further than its operators move it in float64.

    Attributes:
        elements: compared in this step.
        overshot: those of them that moved too far.
        dtype: of the parameter.
        moved: largest finite change of an element that moved too far.
        update: largest change of these in float32.
    """

    elements: int
    overshot: int
    dtype: str
    moved: float
    update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overshoots:
    """An optimizer's step that moves parameters much further than its operators move them in float64.

    Attributes:
        optimizer: its class.
        lr: its learning rate.
        compared: parameters that were compared in this step.
        parameters: the worst of those that overshoot, by name.
    """

    KIND: ClassVar[str] = "overshoots"

    optimizer: str
    lr: float
    compared: int
    parameters: Mapping[str, OvershotParameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """An optimizer's steps on parameters that lose most of their updates, beside the same in float64.

    Attributes:
        optimizer: its class.
        lr: its learning rate.
        checks: number of the last step that was checked.
        first_step: the first of them.
        wanted, lost: sums over all parameters.
        parameters: the worst of those that have lost at least half, by name.
        compared: parameters that were compared.
        finite: those of them with at least one update that is finite; the others hold or get inf or NaN.
    """

    KIND: ClassVar[str] = "updates"

    optimizer: str
    lr: float
    checks: int
    first_step: int
    wanted: int
    lost: int
    parameters: Mapping[str, StalledParameter]
    compared: int = 0
    finite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalState:
    """A setting of the whole process that is another one than at the call before.

    Attributes:
        setting: its name in words.
        before, after: its values as text.
        source: the line that has set it, ``module:line`` where that is a library's.
        called_at: the program's own line that was running.
        by_library: whether no line of the program's own has set it.
        has_run: whether the program had called a module before.
        error: how far a float32 product is moved by it, of its largest magnitude, on the model's device.
    """

    KIND: ClassVar[str] = "global-state"

    setting: str
    before: str
    after: str
    source: str
    called_at: str | None
    by_library: bool
    has_run: bool
    error: float
