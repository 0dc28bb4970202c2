"""``compile-only-nonfinite``: NaN or inf that the same call does not give in eager mode."""

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.incidents import Incident
from dtypedoctor.diagnosis.nonfinite_origin import finite_in_eager_mode
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.trace.reader import Trace

__all__ = ["judge_compiled"]

COMPILED = "_orig_mod"


def judge_compiled(trace: Trace, incident: Incident) -> Finding | None:
    """The verdict on an incident whose call was made again in eager mode and was finite there."""
    again = finite_in_eager_mode(trace, incident)
    if again is None:
        return None
    site = incident.site
    fqn = ".".join(part for part in site.fqn.split(".") if part != COMPILED) if site is not None else None
    said = Statement(
        id="compile-only-nonfinite",
        proven_by="the same call on the same input in eager mode is finite",
        summary=f"{short(fqn)} returns NaN or inf in step {incident.step} only because it is compiled.",
        cause=(
            "Compiled code keeps intermediate values in float32 and rounds once at the end, where eager mode rounds after each "
            "operation. That is closer to exact arithmetic and changes results at cliffs (a root of 1 - 1, say); a defect of the "
            "compiler looks the same. `torch._inductor.config.emulate_precision_casts` tells them apart."
        ),
        evidence=(
            f"The same call on the same input in eager mode is finite, absmax {again.eager_absmax:.6g}.",
            "With the op trace on, under which nothing is compiled, the failure did not come back either.",
        ),
    )
    dtype = site.dtype if site is not None else None
    return located(said, phase="compile", step=incident.step, fqn=fqn, dtype=dtype)
