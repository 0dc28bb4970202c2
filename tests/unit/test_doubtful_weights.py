"""Which packed weights are compared with what is multiplied, though nothing complained."""

import pytest
from traces import TraceBuilder

from dtypedoctor.diagnosis.nonfinite_origin import doubtful_weights, is_unsettled
from dtypedoctor.trace.events import Observation, ParameterNote, Sample, Site
from dtypedoctor.trace.model import Trace


def models(*states: str | None, compared: int | None = None, again: int | None = None) -> Trace:
    """A trace of models called one after the other, twice each, with these dtypes in their quantisation states; call ``again`` was made again."""
    trace = TraceBuilder()
    sites, samples = {}, []
    for root, state in enumerate(states):
        quant = {"kind": "nf4", "dtype": state} if state else None
        trace.add(ParameterNote(n=trace.n(), root=root, name="w", dtype="uint8", shape=[8, 1], quant=quant))
        sites[root] = Site(
            id=root, root=root, fqn="", cls="M", phase="forward", kind="output", index="", dtype="float32", shape=[2]
        )
        samples += [Sample(n=trace.n(), step=1, call=2 * root + i, site=root, absmax=1.0) for i in (1, 2)]
    if compared is not None:
        values = {
            "of": 1,
            "operand": 1,
            "weight": "w",
            "dtype": "float16",
            "quant_dtype": "float16",
            "relative_error": 0.0,
        }
        trace.add(Observation(n=trace.n(), step=1, call=compared, phase="forward", kind="packed-weight", values=values))
    if again is not None:
        values = {"why": "packed", "compared": True}
        trace.add(Observation(n=trace.n(), step=1, call=again, phase="forward", kind="replayed-call", values=values))
    built = trace.build()
    return Trace(records=built.records, samples=tuple(samples), sites=sites)


@pytest.mark.parametrize(
    ("states", "call"),
    [
        pytest.param(("bfloat16", "float16"), 3, id="another dtype than the model before"),
        pytest.param(("bfloat16", None, "float16"), 5, id="an unpacked model in between does not matter"),
        pytest.param(("bfloat16", "bfloat16", "float16"), 5, id="the third one differs"),
        pytest.param(("float32",), 1, id="no 16-bit dtype"),
    ],
)
def test_the_first_call_of_a_doubtful_model_is_looked_at(states: tuple[str | None, ...], call: int) -> None:
    """Until it has been: then nothing is left to look at."""
    assert doubtful_weights(models(*states))
    assert is_unsettled(models(*states))
    looked_at = models(*states, compared=call)
    assert not doubtful_weights(looked_at)
    assert not is_unsettled(looked_at)


@pytest.mark.parametrize("states", [("bfloat16",), ("float16", "float16"), (None, "bfloat16"), (None, None), ()])
def test_models_of_one_dtype_are_not_doubted(states: tuple[str | None, ...]) -> None:
    """The buffer that they share, and the kernel, are right for all of them."""
    assert not doubtful_weights(models(*states))


def test_a_call_made_again_without_a_product_to_compare_with_leaves_nothing_open() -> None:
    """A custom operator multiplies with the packed weights itself: an op trace has been there, and shows no product of torch."""
    trace = models("float32", again=1)
    assert not doubtful_weights(trace)
    assert not is_unsettled(trace)
