"""Trains a tiny network for as many steps as its argument says, and prints how its memory grew."""

import gc
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

SETTLED = 500
"""Steps after which everything that is made once has been made."""


def resident():
    """Bytes of memory that this process has resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def main(steps):
    """Trains."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    settled, began = 0, time.perf_counter()
    for step in range(steps):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SETTLED:
            gc.collect()
            settled = resident()
    gc.collect()
    print(json.dumps({"growth": resident() - settled, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
