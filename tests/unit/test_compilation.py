"""Findings about what torch.compile gave up on."""

import pytest
from compilation_examples import BREAK, COUNTS, LIMIT, PRINT, RECOMPILE, UNSUPPORTED, trace
from traces import TraceBuilder

from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.rules.compiling import detect_compilation
from dtypedoctor.trace.events import Raised


def found(built: TraceBuilder) -> list[Finding]:
    return list(detect_compilation(built.build()))


def test_the_function_that_calls_what_breaks_and_breaks_alike_is_the_source() -> None:
    """A helper of another package breaks most often; the code to change is the one that calls it at each break."""
    helper = BREAK | {
        "frames": ["/home/me/model.py:40 forward", "lib/kernel.py:7 dequantize", "other/ptr.py:3 get_ptr"]
    }
    rest = "torch_dynamo_resume_in_dequantize_at_7"
    itself = BREAK | {"frames": ["/home/me/model.py:40 forward", f"lib/kernel.py:9 {rest}"], "count": 2}
    (finding,) = found(trace(COUNTS, ("graph-break", helper), ("graph-break", itself)))
    assert finding.source == "lib/kernel.py:7"
    assert finding.summary.endswith("first of all at other/ptr.py:3 (get_ptr), called by lib/kernel.py:7 (dequantize).")
    (alone,) = found(trace(COUNTS, ("graph-break", helper), ("graph-break", PRINT)))
    assert alone.source == "other/ptr.py:3"


@pytest.mark.parametrize(
    "told",
    [
        "builtin `<unknown module>._SimpleCData.__new__.`",  # torch 2.9, as the next
        "builtin `<unknown module>.CFuncPtr.__new__.`",
        "method `__new__` of class `PyCSimpleType`",
        "method `__call__` of class `_FuncPtr`",
    ],
)
def test_a_c_function_is_known_by_the_words_of_each_torch_and_corrected_in_its_library(told: str) -> None:
    """A correction of the library that calls it comes before the operator that hides C functions in general, also where a limit was hit."""
    explained = BREAK | {"explanation": f"Dynamo does not know how to trace the {told}", "context": ""}
    (plain,) = found(trace(COUNTS, ("graph-break", explained)))
    assert (plain.severity, plain.remedies) == (Severity.WARNING, ("nf4-custom-op",))
    in_library = explained | {"frames": ["/site-packages/axolotl/kernels/quantize.py:143 dequantize"]}
    both = found(trace(COUNTS, ("graph-break", in_library), ("recompile-limit", LIMIT)))
    assert {one.id: one.remedies for one in both} == {
        "compile-graph-break": ("axolotl-compiled-dequantize",),
        "recompile-limit": ("axolotl-compiled-dequantize",),
    }


def test_a_limit_that_was_hit_quotes_the_guard() -> None:
    """And says which functions were compiled how often, Dynamo's advice left out."""
    breaks, limit = found(trace(COUNTS, ("graph-break", BREAK), ("recompile", RECOMPILE), ("recompile-limit", LIMIT)))
    assert (breaks.id, limit.id, limit.severity) == ("compile-graph-break", "recompile-limit", Severity.WARNING)
    assert limit.summary == (
        "Dynamo gives up compiling the rest of forward after line 40 after 8 versions of it; the guard that failed last: "
        "tensor 'A' dtype mismatch. expected Float, actual Byte."
    )
    assert limit.evidence == (
        "recompile_limit (8) was hit by the rest of forward after line 40, model.py:40.",
        "get_ptr, bitsandbytes/functional.py:405, was compiled again 5 times: tensor 'A' size mismatch at index 0. expected 64, actual 32; x == 3",
    )


def test_a_refused_break_is_an_error_told_from_the_exception() -> None:
    """The place is the user's innermost line, not torch's."""
    built = trace(COUNTS)
    built.add(
        Raised(
            n=built.n(),
            step=1,
            call=1,
            phase="forward",
            type="Unsupported",
            message=UNSUPPORTED,
            frames=[],
            modules=[""],
        )
    )
    (finding,) = found(built)
    assert (finding.severity, finding.source) == (Severity.ERROR, "model.py:130")
    assert "cannot compile the model at model.py:130: Unsupported method call" in finding.summary
    assert finding.remedies == ("nf4-custom-op",)
