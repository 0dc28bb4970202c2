"""A report as an issue of another project: the headings of its template, its own environment block, and our finding where it asks for it.

Headings, labels and questions of peft, transformers, unsloth, pytorch and axolotl are those of ``.github/ISSUE_TEMPLATE`` as a public copy of each repository
has it (of no known date; labels without their links). Those of trl were written from memory: the copy had an older template. Environment blocks have the fields of what the template
asks to run (``transformers env``, ``trl env``, ``collect_env.py``), filled from what was recorded of the failing process: nothing is run again, and
a field that was not recorded says so. Boxes to tick and questions about the person stay open.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

from dtypedoctor import __version__
from dtypedoctor.errors import UsageError
from dtypedoctor.report.advice import do_this, where_it_shows
from dtypedoctor.report.document import Block, Code, Document, Heading, Items, Line, Paragraph, Section, named
from dtypedoctor.report.model import Report
from dtypedoctor.report.run_facts import cures, ended_with
from dtypedoctor.report.surveys import reproduction_script
from dtypedoctor.report.text import one_line
from dtypedoctor.report.to_markdown import prose, render_markdown
from dtypedoctor.scenario.problems import did_you_mean
from dtypedoctor.values import dataclass

_Blocks = Iterator[Block | str]
"""What stands below a heading; a text is Markdown of our own, in which nothing recorded may stand unless it is escaped."""
_Field = tuple[str, Callable[[Report], _Blocks]]

NOT_RECORDED = "not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The bug report of a project.

    Attributes:
        address: where it is filled in.
        fields: its headings, in order, and what stands below each.
    """

    address: str
    fields: tuple[_Field, ...]


_LARGEST = 20_000
"""Bytes of one field: the three that can be long fit into GitHub's limit together."""


def ticket(report: Report, project: str) -> str:
    """``report``, which should be redacted, as Markdown under the headings of a project's template.

    Raises:
        UsageError: there is no template for this project.
    """
    fields = ((heading, _drawn(fill(report))) for heading, fill in template_of(project).fields)
    return "\n\n".join(f"### {heading}\n\n{text}" if heading else text for heading, text in fields) + "\n"


def _drawn(parts: _Blocks) -> str:
    texts: list[str] = []
    for are_texts, some in groupby(parts, lambda part: isinstance(part, str)):
        if are_texts:
            texts += [part for part in some if isinstance(part, str)]
            continue
        blocks = tuple(part for part in some if not isinstance(part, str))
        page = Document(name="", sections=(Section("", blocks),), data=dict)
        texts.append(render_markdown(page, _LARGEST).rstrip("\n"))
    return "\n\n".join(texts)


def template_of(project: str) -> Template:
    """The template of a project.

    Raises:
        UsageError: there is none.
    """
    if project not in TEMPLATES:
        meant = did_you_mean(project, TEMPLATES)
        raise UsageError(f"--for: there is no template for {project!r}{meant}", f"Known: {', '.join(TEMPLATES)}.")
    return TEMPLATES[project]


def _finding(report: Report) -> _Blocks:
    """What is wrong, where, why, and what was measured."""
    yield Paragraph(report.headline)
    if error := ended_with(report):
        yield Code(error, "text")
    if report.findings:
        first = report.findings[0]
        yield from where_it_shows(report.excerpts)
        yield from (Heading("cause"), Paragraph(first.cause))
        if first.evidence:
            yield from (Heading("evidence"), Items(first.evidence))
    yield Paragraph(f"Diagnosed by dtypedoctor {__version__}.")


def _solution(report: Report) -> _Blocks:
    """What to change, and which fixes were tried with success."""
    if report.do_this:
        yield from do_this(report.do_this[0])
    fixed: tuple[Line, ...] = tuple((named(line.id), f": {line.change}") for line in cures(report))
    if fixed:
        yield from (Heading("fixes that were tried and work"), Items(fixed))
    if not report.do_this and not fixed:
        yield Paragraph("None known.")


def _diagnosis(report: Report) -> _Blocks:
    yield from _finding(report)
    yield from _solution(report)


def _reproduction(report: Report) -> _Blocks:
    """A script that fails by itself where one was kept, else what was run and how to install the same versions."""
    if script := (report.capsule or {}).get("script"):
        yield Paragraph("The failing call by itself, extracted from the run:")
        yield Code(script, "python")
    elif script := reproduction_script(report):
        yield Code(script, "sh")
    elif report.command:
        yield Code(report.command, "sh")
    if needs_capsule(report):
        yield Paragraph("The attached capsule holds the failing call by itself, with its tensors.")


def needs_capsule(report: Report) -> bool:
    """Whether the failing call was kept, and is too large for a script in the issue."""
    kept = report.capsule or {}
    return "directory" in kept and not kept.get("script")


def _reproduction_and_finding(report: Report) -> _Blocks:
    yield from _reproduction(report)
    yield from _diagnosis(report)


def _finding_and_reproduction(report: Report) -> _Blocks:
    yield from _diagnosis(report)
    yield from _reproduction(report)


def _expected(report: Report) -> _Blocks:
    fixed = cures(report)
    how = f", as with {fixed[0].id}" if fixed else ""
    how += f" ({fixed[0].result})" if fixed and fixed[0].result else ""
    yield Paragraph(f"The run completes without this failure{how}.")


def _nobody(report: Report) -> _Blocks:
    yield NO_ANSWER


NO_ANSWER = "_No response_"
"""What GitHub writes below the heading of a field that was left empty."""


def _boxes(
    *labels: str, ticked: Callable[[Report, str], bool] = lambda report, label: False
) -> Callable[[Report], _Blocks]:
    """Boxes for the person to tick; those that the report answers are ticked."""

    def fill(report: Report) -> _Blocks:
        yield "\n".join(f"- [{'x' if ticked(report, label) else ' '}] {label}" for label in labels)

    return fill


class _Facts:
    """What was recorded of the failing process, in other people's terms; :data:`NOT_RECORDED` where it was not."""

    def __init__(self, report: Report) -> None:
        environment = report.environment
        self._versions: Mapping[str, Any] = environment.get("versions") or {}
        self._gpu: Mapping[str, Any] = environment.get("gpu") or {}
        self._environment = environment
        variables: Mapping[str, Any] = environment.get("variables") or {}
        processes = str(variables.get("WORLD_SIZE") or 1)
        distributed = (report.scenario or {}).get("distributed") or {}
        self.processes = str(distributed.get("processes") or processes)
        self.gpus = f"{self._gpu['count']} × {self._gpu['name']}" if self._gpu else ""

    def of(self, key: str) -> str:
        """A value by its key in the environment."""
        value = self._environment.get(key)
        return NOT_RECORDED if value is None else one_line(str(value))

    def version(self, package: str, absent: str = "not installed") -> str:
        """The version of a package; all installed ones of a list are recorded, so ``absent`` says of the others that they are not."""
        if not self._versions:
            return NOT_RECORDED
        return one_line(str(self._versions.get(package, absent)))

    def gpu(self, key: str) -> str:
        """A property of the GPU."""
        return one_line(str(self._gpu.get(key, NOT_RECORDED)))

    def pip(self) -> Iterator[str]:
        """The packages as ``collect_env.py`` lists them."""
        return (one_line(f"[pip3] {name}=={version}") for name, version in self._versions.items())


def _block(rows: Mapping[str, str]) -> _Blocks:
    yield Code("\n".join(f"- {name}: {value}" for name, value in rows.items()), "text")
    yield Paragraph(_RECORDED)


_RECORDED = f"Recorded from the failing process by dtypedoctor {__version__}."


def _transformers_env(report: Report) -> _Blocks:
    facts = _Facts(report)
    with_gpu = {
        "Using GPU in script?": "yes" if facts.of("device").startswith("cuda") else "no",
        "GPU type": facts.gpus,
    }
    return _block({
        "`transformers` version": facts.version("transformers"),
        "Platform": facts.of("platform"),
        "Python version": facts.of("python"),
        "Huggingface_hub version": facts.version("huggingface_hub", NOT_RECORDED),
        "Safetensors version": facts.version("safetensors"),
        "Accelerate version": facts.version("accelerate"),
        "Accelerate config": NOT_RECORDED,
        "DeepSpeed version": facts.version("deepspeed"),
        "PyTorch version (accelerator?)": f"{facts.version('torch')} ({'CUDA' if facts.gpus else 'NA'})",
        "Using distributed or parallel set-up in script?": "no" if facts.processes == "1" else f"{facts.processes} processes",
        **(with_gpu if facts.gpus else {}),
    })  # fmt: skip


def _trl_env(report: Report) -> _Blocks:
    facts = _Facts(report)
    return _block({
        "Platform": facts.of("platform"),
        "Python version": facts.of("python"),
        "TRL version": facts.version("trl"),
        "PyTorch version": facts.version("torch"),
        "accelerator(s)": facts.gpus or "cpu",
        "Transformers version": facts.version("transformers"),
        "Accelerate version": facts.version("accelerate"),
        "Accelerate config": NOT_RECORDED,
        "Datasets version": facts.version("datasets"),
        "HF Hub version": facts.version("huggingface_hub", NOT_RECORDED),
        "bitsandbytes version": facts.version("bitsandbytes"),
        "DeepSpeed version": facts.version("deepspeed"),
        "Liger-Kernel version": facts.version("liger_kernel"),
        "PEFT version": facts.version("peft"),
        "vLLM version": facts.version("vllm"),
    })  # fmt: skip


def _peft_system(report: Report) -> _Blocks:
    facts = _Facts(report)
    versions = {name: facts.version(name) for name in ("peft", "accelerate", "transformers", "torch", "bitsandbytes")}
    return _block({
        **versions,
        "platform": facts.of("platform"),
        "python": facts.of("python"),
        "accelerator": facts.gpus or "cpu",
    })  # fmt: skip


def _collect_env(report: Report) -> _Blocks:
    """The fields of torch's ``collect_env.py`` that were recorded, in its order and its words."""
    facts = _Facts(report)
    rows = {
        "PyTorch version": facts.version("torch"),
        "CUDA used to build PyTorch": facts.of("cuda"),
        "Python version": facts.of("python"),
        "Python platform": facts.of("platform"),
        "Is CUDA available": str(bool(facts.gpus)),
        "GPU models and configuration": facts.gpus or "none used",
        "Nvidia driver version": facts.of("driver"),
        "cuDNN version": facts.gpu("cudnn"),
        "CPU capability": facts.of("cpu_capability"),
    }
    lines = [f"{name}: {value}" for name, value in rows.items()]
    yield Code("\n".join([*lines, "", "Versions of relevant libraries:", *facts.pip()]), "text")
    yield Paragraph(_RECORDED)


def _python_version(report: Report) -> _Blocks:
    yield Paragraph(_Facts(report).of("python"))


def _axolotl_version(report: Report) -> _Blocks:
    yield Paragraph(_Facts(report).version("axolotl"))


def _runs_on(report: Report, system: str) -> bool:
    return _Facts(report).of("platform").startswith(system.replace("macOS", "Darwin"))


def _unsloth_questions(report: Report) -> _Blocks:
    """The numbered questions of unsloth's template, with the answers that were recorded."""
    facts = _Facts(report)
    versions = ", ".join(
        f"{name} {facts.version(name)}" for name in ("unsloth", "unsloth_zoo", "trl", "transformers", "torch")
    )
    answers = (
        "Did you update? `pip install --upgrade unsloth unsloth_zoo`:",
        "`Colab` or `Kaggle` or local / cloud:",
        f"Number GPUs used, use `nvidia-smi`: {prose(facts.gpus or 'none')}",
        "Which notebook? Please link!",
        f"Which Unsloth version, TRL version, transformers version, PyTorch version? {prose(versions)}",
        "Which trainer? `SFTTrainer`, `GRPOTrainer` etc:",
    )
    yield "\n".join(f"{number}. {answer}" for number, answer in enumerate(answers, 1))
    yield from _reproduction(report)
    yield from _diagnosis(report)


TEMPLATES: Mapping[str, Template] = {
    "trl": Template(
        address="https://github.com/huggingface/trl/issues/new?template=bug-report.yml",
        fields=(
            ("Reproduction", _reproduction_and_finding),
            ("System Info", _trl_env),
            (
                "Checklist",
                _boxes(
                    "I have checked that my issue isn't already filed (see open issues)",
                    "I have included my system information",
                    "Any code provided is minimal, complete, and reproducible",
                    "Any code provided is properly formatted in code blocks",
                    "Any traceback provided is complete",
                ),
            ),
        ),
    ),
    "peft": Template(
        address="https://github.com/huggingface/peft/issues/new?template=bug-report.yml",
        fields=(
            ("System Info", _peft_system),
            ("Who can help?", _nobody),
            ("Reproduction", _reproduction_and_finding),
            ("Expected behavior", _expected),
        ),
    ),
    "transformers": Template(
        address="https://github.com/huggingface/transformers/issues/new?template=bug-report.yml",
        fields=(
            ("System Info", _transformers_env),
            ("Who can help?", _nobody),
            ("Information", _boxes("The official example scripts", "My own modified scripts")),
            (
                "Tasks",
                _boxes(
                    "An officially supported task in the `examples` folder (such as GLUE/SQuAD, ...)",
                    "My own task or dataset (give details below)",
                ),
            ),
            ("Reproduction", _reproduction_and_finding),
            ("Expected behavior", _expected),
        ),
    ),
    "unsloth": Template(
        address="https://github.com/unslothai/unsloth/issues/new?template=bug---issue.md",
        fields=(("", _unsloth_questions),),
    ),
    "pytorch": Template(
        address="https://github.com/pytorch/pytorch/issues/new?template=bug-report.yml",
        fields=(("🐛 Describe the bug", _finding_and_reproduction), ("Versions", _collect_env)),
    ),
    "axolotl": Template(
        address="https://github.com/axolotl-ai-cloud/axolotl/issues/new?template=bug-report.yaml",
        fields=(
            (
                "Please check that this issue hasn't been reported before.",
                _boxes("I searched previous Bug Reports didn't find any similar reports."),
            ),
            ("Expected Behavior", _expected),
            ("Current behaviour", _finding),
            ("Steps to reproduce", _reproduction),
            ("Possible solution", _solution),
            ("Which Operating Systems are you using?", _boxes("Linux", "macOS", "Windows", ticked=_runs_on)),
            ("Python Version", _python_version),
            ("axolotl branch-commit", _axolotl_version),
            (
                "Acknowledgements",
                _boxes(
                    "My issue title is concise, descriptive, and in title casing.",
                    "I have searched the existing issues to make sure this bug has not been reported yet.",
                    "I am using the latest version of axolotl.",
                    "I have provided enough information for the maintainers to reproduce and diagnose the issue.",
                ),
            ),
        ),
    ),
}
"""By the name that is typed behind ``--for``."""
