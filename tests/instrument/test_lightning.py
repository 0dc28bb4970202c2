"""``LightningCallback`` around a real Lightning Trainer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess_parts import report_in, trace_in
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dtypedoctor
from dtypedoctor.trace.events import Metric

pytestmark = pytest.mark.slow

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
CSVLogger = pytest.importorskip("lightning.pytorch.loggers").CSVLogger


class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Two layers; ``weight`` scales the second."""

    def __init__(self, weight: float = 1.0, *, raises: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self._raises = raises
        with torch.no_grad():
            self.net[1].weight.mul_(weight)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self._raises and index == 1:
            raise ConnectionError("the loader is gone")
        with torch.autocast("cpu", dtype=torch.float16):
            return self.net(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(folder: Path, model: Regression, *callbacks: Any, **settings: Any) -> Any:
    """Three steps."""
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=CSVLogger(folder / "logs"), log_every_n_steps=1, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=list(callbacks), **settings,
    )  # fmt: skip
    trainer.fit(model, DataLoader([torch.ones(4)] * 6, batch_size=2))
    return trainer


def test_a_fit_is_the_same_with_the_callback(tmp_path: Path) -> None:
    """Weights are bitwise equal; steps are counted; modules are named from the LightningModule on."""
    alone, watched = Regression(), Regression()
    fit(tmp_path / "alone", alone)
    fit(tmp_path / "watched", watched, dtypedoctor.LightningCallback(tmp_path / "run"))
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), watched.parameters(), strict=True))
    report = report_in(tmp_path / "run")
    assert report["status"] == "healthy", report["headline"]
    assert [metric.step for metric in trace_in(tmp_path / "run").all(Metric)] == [1, 2, 3]
    assert "net.1" in {site.fqn for site in trace_in(tmp_path / "run").sites.values()}


def test_an_overflow_is_found(tmp_path: Path) -> None:
    """A second fit has its own report."""
    callback = dtypedoctor.LightningCallback(tmp_path / "run")
    fit(tmp_path, Regression(1e6), callback)
    assert callback.report is not None
    assert callback.report.findings[0].fqn == "net.1"
    fit(tmp_path / "again", Regression(), callback)
    assert report_in(tmp_path / "run-2")["status"] == "healthy"


def test_an_exception_is_in_the_report(tmp_path: Path) -> None:
    """Lightning passes it on to callbacks, and then to the program."""
    callback = dtypedoctor.LightningCallback(tmp_path / "run")
    with pytest.raises(ConnectionError, match="the loader is gone"):
        fit(tmp_path, Regression(raises=True), callback)
    assert "ConnectionError" in report_in(tmp_path / "run")["before"]["ended"]


def test_the_package_does_not_import_lightning() -> None:
    """Listing the names does not either."""
    code = "import dtypedoctor, sys; assert 'LightningCallback' in dir(dtypedoctor); print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
