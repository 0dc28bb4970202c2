"""Logs what dtypedoctor finds to TensorBoard, beside the loss; the first layer of this float16 model overflows."""

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import dtypedoctor

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).half()
with torch.no_grad():
    model[0].weight.mul_(4_000)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
writer = SummaryWriter("logs")

with dtypedoctor.watch(model) as watched:
    for step in range(5):
        loss = model(100 * torch.randn(32, 16).half()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        writer.add_scalar("loss", loss.item(), step)

report = watched.report
writer.add_text("dtypedoctor", report.headline)
for finding in report.findings:
    writer.add_text(f"dtypedoctor/{finding.id}", f"{finding.summary}\n\n{finding.cause}")
writer.close()
print(report.headline)
