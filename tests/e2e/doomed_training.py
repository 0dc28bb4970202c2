"""Trains a tiny Llama, and ends as ``doom.json`` in its working directory says. What it was doing stands in ``truth.bin``.

The file is written by hooks of the script's own, so it is the ground truth against which the doctor's evidence is held: how
many module calls were entered and left, which module was entered last, how often each was left, and in which step.
"""

import ctypes
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections import deque
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEAD = struct.Struct("<QQII")
COUNT = struct.Struct("<I")
SIZE = 8192
FINISHED = struct.Struct("<Q")
FINISHED_AT = SIZE - FINISHED.size
"""Where the number of module calls stands whose work a GPU has done."""


def fail():
    """Raises."""
    raise RuntimeError("doomed")


def take_memory():
    """Takes memory until somebody ends this process."""
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1)) * (8 << 20))


def hang():
    """Does nothing any more, and says so."""
    Path("hangs").touch()
    while True:
        time.sleep(60)


def fail_on_the_device():
    """Indexes with a number that only the device can see."""
    table = torch.zeros(4, 4, device="cuda")
    table[torch.full((8,), 99, device="cuda")].sum()


def write_anywhere():
    """Lets a kernel write where it must not."""
    from wild_kernel import write_somewhere

    write_somewhere(torch.zeros(1, device="cuda"))


FATES = {
    "exception": fail,
    "os._exit": lambda: os._exit(3),
    "abort": os.abort,
    "null pointer": lambda: ctypes.string_at(0),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "out of memory": take_memory,
    "hang": hang,
    "device-side assert": fail_on_the_device,
    "illegal address": write_anywhere,
    "out of device memory": lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"),
}
"""What ends this process, or at least this training; what is not listed comes from outside."""


class Truth:
    """Where the training is, for whoever looks at the file afterwards."""

    def __init__(self, model, plan):
        self.plan = plan
        self.names = [name for name, _ in model.named_modules()]
        Path("names.json").write_text(json.dumps(self.names))
        with open("truth.bin", "wb+") as file:
            file.write(bytes(SIZE))
            file.flush()
            self.page = mmap.mmap(file.fileno(), SIZE)
        self.flying = deque()
        if plan["device"] == "cuda":
            threading.Thread(target=self.follow_the_device, daemon=True).start()
        self.entered = self.left = self.step = 0
        self.last = 0
        for number, module in enumerate(model.modules()):
            module.register_forward_pre_hook(lambda *_, number=number: self.enter(number))
            module.register_forward_hook(lambda *_, number=number: self.leave(number))

    def enter(self, number):
        """A module is called."""
        self.entered += 1
        self.last = number
        self.note()
        if self.plan["where"] == "enter":
            self.come_to_the_end(self.entered)

    def leave(self, number):
        """A module has returned."""
        self.left += 1
        place = HEAD.size + COUNT.size * number
        COUNT.pack_into(self.page, place, COUNT.unpack_from(self.page, place)[0] + 1)
        if self.plan["device"] == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.flying.append(event)
        self.note()
        if self.plan["where"] == "leave":
            self.come_to_the_end(self.left)

    def follow_the_device(self):
        """Counts the module calls whose work has been done; stops when the device does not answer."""
        done = 0
        while True:
            try:
                while self.flying and self.flying[0].query():
                    self.flying.popleft()
                    done += 1
            except RuntimeError:
                return
            FINISHED.pack_into(self.page, FINISHED_AT, done)
            time.sleep(0.001)

    def note(self):
        """Writes down where it is."""
        HEAD.pack_into(self.page, 0, self.entered, self.left, self.step, self.last)

    def come_to_the_end(self, counted):
        """Meets its fate once it has come so far."""
        if counted == self.plan["after"]:
            FATES[self.plan["kind"]]()


def main():
    """Trains."""
    plan = json.loads(Path("doom.json").read_text())
    torch.manual_seed(plan["seed"])
    wide = 32 if plan["device"] == "cpu" else 1024
    config = LlamaConfig(vocab_size=64, hidden_size=wide, intermediate_size=2 * wide, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=512, attn_implementation="eager")  # fmt: skip
    model = LlamaForCausalLM(config).to(plan["device"])
    truth = Truth(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradient = model.lm_head.weight
    if plan["where"] == "backward":
        gradient.register_post_accumulate_grad_hook(lambda _: truth.come_to_the_end(truth.step))
    for step in range(1, plan["steps"] + 1):
        truth.step = step
        truth.note()
        if step == plan["overflow_in"]:
            with torch.no_grad():
                weight = model.model.layers[1].mlp.down_proj.weight.detach()
                # through NumPy no operator can be seen: since torch 2.15 even a number that is put in is one
                (weight.numpy() if plan["device"] == "cpu" else weight)[0, 0] = float("inf")
        tokens = torch.randint(64, (2, 16 if plan["device"] == "cpu" else 512), device=plan["device"])
        model(input_ids=tokens, labels=tokens).loss.backward()
        if plan["where"] == "optimizer":
            truth.come_to_the_end(step)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
