"""``%load_ext dtypedoctor`` in a real kernel: what ``%%doctor`` leaves under a cell, and what of the cell stays as it is."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow

LOADS = "%load_ext dtypedoctor\nimport torch\nfrom torch import nn"
MISMATCH = """%%doctor
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
model(torch.ones(2, 4))"""
HEALTHY = """%%doctor --out kept
x = 20
nn.Linear(4, 4)(torch.ones(2, 4))
x + 1"""
OVERFLOW_MODEL = """class Pooling(nn.Module):
    def forward(self, x):
        return torch.exp(2 * x)
pooled = nn.Sequential(nn.Linear(4, 4, bias=False), Pooling())
nn.init.eye_(pooled[0].weight)
pooled = pooled.half()
x = torch.full((2, 4), 9.0, dtype=pooled[0].weight.dtype)"""
GATED_MODEL = """class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)
    def forward(self, x, t):
        return x * self.gate(t.float())
gated = Gated().half()"""
CELLS = (
    LOADS, HEALTHY, MISMATCH, "%%doctor\nx;", "%%doctor --step 2\n1", "%%doctor --out kept\n1", "%reload_ext dtypedoctor",
    "%%doctor --no-replay\nx", OVERFLOW_MODEL, "%%doctor\npooled(x)",
    GATED_MODEL, "%%doctor --out gated\ngated(x, x)",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel's working directory."""
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def cells(folder: Path) -> Sequence[Any]:
    """The cells after their kernel has run them one after the other."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    client = nbclient.NotebookClient(
        notebook,
        allow_errors=True,
        timeout=int(PATIENCE),
        startup_timeout=int(PATIENCE),
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook.cells


def outputs(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


@pytest.mark.release
def test_a_healthy_cell_keeps_its_value_and_its_names(cells: Sequence[Any], folder: Path) -> None:
    """The last expression is its result; a name that it sets is there in later cells; the report is where it was wanted."""
    (result,) = outputs(cells[1], "execute_result")
    assert result["data"]["text/plain"] == "21"
    (shown,) = outputs(cells[1], "display_data")
    assert shown["data"]["text/plain"].startswith("healthy: Nothing found")
    assert (folder / "kept" / "report.json").is_file()
    assert not outputs(cells[3], "execute_result"), "a semicolon hides the value"
    (again,) = outputs(cells[7], "execute_result")
    assert again["data"]["text/plain"] == "20"


@pytest.mark.release
def test_a_cell_that_raises_shows_the_finding_under_its_traceback(cells: Sequence[Any], folder: Path) -> None:
    """The error is the cell's own, without frames of the doctor; then the finding, with its operator; the kernel goes on."""
    kinds = [output.output_type for output in cells[2].outputs]
    assert kinds.index("error") < kinds.index("display_data")
    (error,) = outputs(cells[2], "error")
    assert error["ename"] == "RuntimeError"
    frames = "\n".join(error["traceback"])
    assert "doctor/inprocess" not in frames
    assert "model(torch.ones(" in plain(frames)
    (shown,) = outputs(cells[2], "display_data")
    headline, advice = shown["data"]["text/plain"].splitlines()[:2]
    assert headline == "findings: `addmm` in model[1] gets float16 and float32 and raises."
    assert advice.startswith("  do this: ")
    page = shown["data"]["text/html"]
    assert page.startswith("<iframe srcdoc=")
    assert "operand-dtype-mismatch" in page
    assert str(Path.home()) not in page, "a notebook is passed on"
    assert list(folder.glob("runs/notebook-*/capsule"))


def test_a_finding_names_the_cell_and_the_line_and_the_edit_of_it(cells: Sequence[Any]) -> None:
    """The temporary name under which a kernel compiles a cell tells nobody anything."""
    (shown,) = outputs(cells[9], "display_data")
    text = shown["data"]["text/plain"]
    assert "cell In[9]:3" in text
    assert "-pooled = pooled.half()" in text
    assert "+pooled = pooled.bfloat16()" in text
    assert 'dtypedoctor.apply(model, "keep-float32:1")' in text
    page = shown["data"]["text/html"]
    assert "ipykernel_launcher" not in page


@pytest.mark.release
def test_a_model_of_earlier_cells_gets_the_edit_its_cells_and_a_capsule(cells: Sequence[Any], folder: Path) -> None:
    """Where models are defined, cast and used in cells of their own, and torch is imported in another."""
    (shown,) = outputs(cells[11], "display_data")
    assert "+        return x * self.gate(t.float().to(torch.float16))" in shown["data"]["text/plain"]
    report = (folder / "gated" / "report.md").read_text()
    assert "parameter bias (Gated().half()) in gate at cell In[11]:7" in report
    assert "RuntimeError at cell In[11]:6 in step 1" in report
    assert (folder / "gated" / "capsule").is_dir()


def test_wrong_options_are_refused_without_a_traceback(cells: Sequence[Any]) -> None:
    """An unknown option names the known ones."""
    (unknown,) = outputs(cells[4], "stream")
    assert unknown["text"] == (
        "UsageError: %%doctor: unrecognized arguments: --step 2. Known: --out DIR, --no-replay\n"
    )


@pytest.mark.release
def test_a_cell_that_is_run_again_records_beside_the_first_time(cells: Sequence[Any], folder: Path) -> None:
    """A run is never overwritten, and running a cell again is what notebooks are for."""
    assert outputs(cells[5], "stream")[0]["text"].endswith("report in kept-2\n")
    assert (folder / "kept" / "report.json").is_file()
    assert (folder / "kept-2" / "report.json").is_file()


def plain(text: str) -> str:
    """A traceback without its colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
