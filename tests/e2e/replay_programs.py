"""Healthy programs that keep state of every kind, and write down all of it at their end: none may change because parts of it are replayed."""

from __future__ import annotations

HEAD = """
import os, pathlib, random, sys, threading, time
import numpy as np
import torch
from torch import nn
torch.manual_seed(0), random.seed(0), np.random.seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def batch():
    return torch.randn(4, 8)
def train(call=None, batches=None, steps=6):
    for step, x in enumerate(batches if batches is not None else (batch() for _ in range(steps))):
        loss = (call or model)(x).float().pow(2).mean() + random.random() * float(np.random.rand())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
"""

TAIL = """
import hashlib, io
def digest(value):
    held = io.BytesIO()
    torch.save(value, held)
    return hashlib.sha256(held.getvalue()).hexdigest()
pathlib.Path("state.txt").write_text("\\n".join([
    digest(model.state_dict()), digest(optimizer.state_dict()), digest(torch.get_rng_state()),
    hashlib.sha256(repr((random.getstate(), np.random.get_state()[1:])).encode()).hexdigest(),
]))
"""

BODIES = {
    "busy-threads": """
        stop = threading.Event()
        counts = [0, 0]
        def count(number):
            while not stop.is_set():
                counts[number] = sum(range(2000)) and counts[number] + 1
        threads = [threading.Thread(target=count, args=(number,)) for number in range(2)]
        [thread.start() for thread in threads]
        train()
        while not all(counts):
            time.sleep(0.001)
        stop.set(), [thread.join() for thread in threads]
        print(all(counts))
    """,
    "modules-in-a-thread": """
        thread = threading.Thread(target=train)
        thread.start(), thread.join()
    """,
    "shared-memory": """
        from multiprocessing import get_context, shared_memory
        shared = torch.zeros(4).share_memory_()
        block = shared_memory.SharedMemory(create=True, size=64)
        def add(shared):
            shared.add_(1)
        for step in range(3):
            child = get_context("fork").Process(target=add, args=(shared,))
            child.start(), child.join()
            train(lambda x: model(x + shared[0]), steps=1)
            block.buf[step] = step + 7
        print(shared.tolist(), bytes(block.buf[:3]))
        block.close(), block.unlink()
    """,
    "fork-hooks": """
        forks = []
        os.register_at_fork(
            before=lambda: forks.append("before"),
            after_in_parent=lambda: forks.append("after"),
            after_in_child=lambda: print("a child", flush=True),
        )
        train()
        print(forks)
    """,
}
"""Each between :data:`HEAD` and :data:`TAIL`, by what it keeps."""


def source_of(name: str) -> str:
    """The whole program."""
    body = BODIES[name].strip("\n").rstrip()
    indent = len(body) - len(body.lstrip())
    return HEAD + "\n".join(line[indent:] for line in body.splitlines()) + "\n" + TAIL
