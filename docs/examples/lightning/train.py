"""Trains with Lightning in pure bfloat16, in which small updates are rounded away; the callback reports it."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dtypedoctor.integrations


class Regression(lightning.LightningModule):
    """A scale that is learned too slowly for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        (x,) = batch
        return (x * self.scale - 2 * x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, whose steps are below half of bfloat16's spacing near 1."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


torch.manual_seed(0)
doctor = dtypedoctor.integrations.LightningCallback()
trainer = lightning.Trainer(max_steps=40, max_epochs=-1, precision="bf16-true", accelerator="cpu", callbacks=[doctor],
                            logger=False, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
trainer.fit(Regression(), DataLoader(TensorDataset(torch.randn(128, 64)), batch_size=16))
print(doctor.report.headline)
