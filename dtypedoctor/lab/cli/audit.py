"""``dtypedoctor audit``: the kernels that one step of a program calls, on trial."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, Out, ScriptArgument, announce, show

if TYPE_CHECKING:
    from dtypedoctor.lab.audit.verdicts import KernelTried
    from dtypedoctor.runner.run import Run

_STEP_OF_A_MODEL = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
ids = torch.randint(0, model.get_input_embeddings().num_embeddings, (2, 32), generator=torch.Generator().manual_seed(0))
model(input_ids=ids, labels=ids).loss.backward()
"""
"""What is run of a model that is given as a folder."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        name="audit",
        epilog="Example:  dtypedoctor audit train.py --epochs 1",
        context_settings={"allow_interspersed_args": False},
    )(audit)


def audit(
    script: ScriptArgument,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module as `python -m` does.")] = False,
    text: Annotated[bool, typer.Option("-c", help="Run source text as `python -c` does.")] = False,
    out: Out = None,
    format: FormatOption = TERMINAL,
    time_limit: Annotated[
        int, typer.Option("--time-limit", help="Stop the script then.", metavar="SECONDS", min=1)
    ] = 3600,
) -> int:
    """Run a script's first step, or that of a model folder, and try each custom kernel that it calls.

    Custom autograd Functions, operators and compiled regions are called again with their own arguments, with one thing changed each time: the gradient
    against the difference quotient of the forward, memory filled with NaN, the same call twice, other strides, half of the batch, a wider
    dtype, eager instead of compiled. The script ends after its first optimizer step.

    Exits 0 if all kernels pass, 10 if one fails, if there was none, or if the script did not end its step.
    """
    import json

    from dtypedoctor.cli.scripts import first_run, guarded
    from dtypedoctor.errors import ExitCode
    from dtypedoctor.foreign_files import write_file
    from dtypedoctor.lab.cli.audited import audit_document
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.runner.command import Program, name_of, program_of
    from dtypedoctor.runner.directories import new_record

    is_model = not module and not text and (Path(script) / "config.json").is_file()
    target = (
        {"code": _STEP_OF_A_MODEL, "args": [script]}
        if is_model
        else program_of(script, arguments or [], module=module, text=text)
    )
    program = Program(name=name_of(target), **target, time_limit=time_limit)
    announce(f"Auditing {script}", terminal_only=True)
    request = {
        "scenario": program.described(),
        "watch": False,
        "replay": False,
        "capsule_limit": 0,
        "changes": "dtypedoctor.lab.audit.calls:Audit",
    }
    folder = new_record(out, program.name, program.folder)
    with guarded(folder) as guardian:
        run = first_run(program, request, folder, guardian)
        kernels = sorted(_kernels(run), key=lambda kernel: not kernel.verdict)
        document = audit_document(script, redact(kernels), redact(_problem(run)))
        folder.reserve()
        write_file(folder.private / "report.json", json.dumps(document.data(), indent=1, allow_nan=False))
    show(document, format)
    return int(ExitCode.OK if document.good else ExitCode.FINDINGS)


def _kernels(run: "Run") -> "Iterator[KernelTried]":
    """What the processes of a run have recorded; the same kernel of several ranks once, with its fault if one rank has seen one."""
    from dtypedoctor.lab.audit.verdicts import KernelTried
    from dtypedoctor.trace.events import Observation
    from dtypedoctor.trace.records import decode

    known: dict[tuple[object, ...], KernelTried] = {}
    for process in run.processes:
        for record in process.trace.all(Observation):
            if record.kind == KernelTried.KIND:
                kernel = decode(KernelTried, dict(record.values))
                key = (kernel.kernel, kernel.dtype, *kernel.shapes)
                if key not in known or (kernel.verdict and not known[key].verdict):
                    known[key] = kernel
    yield from known.values()


def _problem(run: "Run") -> str:
    """Why the step of a program is not over, in words; empty where it is."""
    from dtypedoctor.analysis import ending_of

    ending = ending_of(run)
    return "" if ending.completed else ending.words
