"""The document about the kernels of a program that were on trial."""

from collections.abc import Sequence
from dataclasses import asdict

from dtypedoctor.lab.audit.verdicts import WHAT_TO_DO, KernelTried
from dtypedoctor.report.document import Block, Check, Document, Facts, Items, Outcome, Paragraph, Section, Table, named
from dtypedoctor.text import counted


def audit_document(name: str, kernels: Sequence[KernelTried], problem: str = "") -> Document:
    """The document about the kernels of a program.

    Args:
        name: of the program.
        kernels: after their trials.
        problem: why the program was not run to the end of its first step; empty where it was.
    """
    faulty = [kernel for kernel in kernels if kernel.verdict]
    undecided = [kernel for kernel in kernels if not kernel.verdict and not kernel.passed]
    status, headline = _verdict(kernels, faulty, undecided, problem)
    good = status == "HEALTHY"
    return Document(
        name=name,
        headline=headline,
        status=status,
        good=good,
        about="Kernels, tried by dtypedoctor.",
        sections=tuple(_sections(kernels, faulty)),
        checks=(
            Check(name="audit", outcome=Outcome.PASSED if good else Outcome.FAILED, message=headline, text=headline),
        ),
        data=lambda: {
            "schema": 1,
            "kind": "audit",
            "status": {"HEALTHY": "healthy", "FOUND": "findings"}.get(status, "unknown"),
            "headline": headline,
            "kernels": [asdict(kernel) for kernel in kernels],
        },
    )


def _verdict(
    kernels: Sequence[KernelTried], faulty: Sequence[KernelTried], undecided: Sequence[KernelTried], problem: str
) -> tuple[str, str]:
    if faulty:
        more = f" {counted(len(faulty) - 1, 'more kernel')} failed." if len(faulty) > 1 else ""
        return "FOUND", f"{faulty[0].line}.{more}"
    if problem:
        return "UNKNOWN", f"The program did not end its first step: {problem}."
    if not kernels:
        return (
            "NOTHING MEASURED",
            "No custom autograd Function, operator or compiled region was called in this process.",
        )
    if undecided:
        reason = "; ".join(undecided[0].not_tried)
        return "UNKNOWN", f"No trial of {undecided[0].kernel} could be made: {reason}."
    unchecked = [
        k.kernel for k in kernels if any(reason.startswith(("direction: ", "eager: ")) for reason in k.not_tried)
    ]
    tried = f"{counted(len(kernels), 'kernel')} tried, and none failed a trial"
    if unchecked:
        return "UNKNOWN", f"{tried}, but the gradients of {', '.join(unchecked)} could not be checked."
    return "HEALTHY", f"{tried}."


def _sections(kernels: Sequence[KernelTried], faulty: Sequence[KernelTried]) -> list[Section]:
    sections = []
    for number, kernel in enumerate(faulty, 1):
        facts: list[Block] = [
            Facts((("verdict", kernel.verdict), ("shown by", kernel.said), ("do this", WHAT_TO_DO[kernel.verdict]))),
        ]
        sections.append(Section(f"{number}. {kernel.kernel}", tuple(facts), anchor=f"kernel-{number}"))
    if kernels:
        rows = tuple(
            (named(kernel.kernel), kernel.kind, kernel.dtype, kernel.verdict or "passed", ", ".join(kernel.passed))
            for kernel in kernels
        )
        blocks: list[Block] = [Table(("kernel", "kind", "dtype", "verdict", "passed"), rows)]
        if missing := [f"{kernel.kernel}: {reason}" for kernel in kernels for reason in kernel.not_tried]:
            blocks += [Paragraph("Not tried:"), Items(tuple(missing))]
        sections.append(Section("Kernels", tuple(blocks), anchor="kernels"))
    return sections
