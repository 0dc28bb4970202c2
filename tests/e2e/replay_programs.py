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
    "plain": "train()",
    "accumulated": """
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        for step in range(4):
            for _ in range(2):
                model(batch()).pow(2).mean().backward()
            print(step, nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            optimizer.step(), schedule.step(), optimizer.zero_grad()
    """,
    "three-threads": """
        torch.set_num_threads(3)
        noise = torch.randn(600_001)
        train(lambda x: model(x * noise.sum() / 1000))
        print(torch.get_num_threads(), noise.sum().item())
    """,
    "worker-thread": """
        import queue
        asked, answers = queue.Queue(), queue.Queue()
        def serve():
            while (size := asked.get()) is not None:
                answers.put(np.full((4, 8), size, dtype=np.float32))
        worker = threading.Thread(target=serve)
        worker.start()
        def batches():
            for size in range(6):
                asked.put(size)
                yield torch.from_numpy(answers.get())
        train(batches=batches())
        asked.put(None), worker.join()
        print(threading.active_count())
    """,
    "thread-pool": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            train(batches=pool.map(lambda size: torch.full((4, 8), float(size)), range(6)))
    """,
    "busy-threads": """
        stop = threading.Event()
        counts = [0, 0]
        def count(number):
            while not stop.is_set():
                counts[number] = sum(range(2000)) and counts[number] + 1
        threads = [threading.Thread(target=count, args=(number,)) for number in range(2)]
        [thread.start() for thread in threads]
        train()
        stop.set(), [thread.join() for thread in threads]
        print(all(counts))
    """,
    "modules-in-a-thread": """
        thread = threading.Thread(target=train)
        thread.start(), thread.join()
    """,
    "data-loader": """
        from torch.utils.data import DataLoader
        data = [torch.full((8,), float(i)) for i in range(24)]
        train(batches=DataLoader(data, batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork"))
    """,
    "persistent-loader": """
        from torch.utils.data import DataLoader
        data = [torch.full((8,), float(i)) for i in range(12)]
        loader = DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
        for epoch in range(2):
            train(batches=loader)
    """,
    "checkpointing": """
        from torch.utils.checkpoint import checkpoint
        train(lambda x: model[3](checkpoint(model[:3], x, use_reentrant=False)))
    """,
    "reentrant-checkpointing": """
        from torch.utils.checkpoint import checkpoint
        train(lambda x: model[3](checkpoint(model[:3], x.requires_grad_(), use_reentrant=True)))
    """,
    "generation": """
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        language = LlamaForCausalLM(config)
        for step in range(3):
            made = language.generate(torch.randint(3, 32, (2, 4)), max_new_tokens=4, do_sample=step > 0)
            print(made.tolist())
        train(steps=2)
    """,
    "own-cache": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.keys, self.cache, self.length = nn.Linear(8, 8), torch.zeros(16, 8), 0
            def forward(self, x):
                self.cache[self.length] = self.keys(x)[0].detach()
                self.length += 1
                return (x @ self.cache[: self.length].T).softmax(-1) @ self.cache[: self.length]
        attention = Attention()
        train(lambda x: model(attention(x)))
        print(attention.length, attention.cache.sum().item())
    """,
    "functional": """
        from torch.func import functional_call, grad, vmap
        weights = dict(model.named_parameters())
        model.eval()
        def loss(weights, x):
            return functional_call(model, weights, (x,)).pow(2).mean()
        for step in range(4):
            gradients = vmap(grad(loss), in_dims=(None, 0))(weights, batch())
            print(sum(g.sum().item() for g in gradients.values()))
        train(steps=2)
    """,
    "jacobian": """
        from torch.func import jacrev, jvp
        model.eval()
        for step in range(3):
            x = batch()[0]
            print(jacrev(model)(x).sum().item(), jvp(model, (x,), (x,))[1].sum().item())
        train(steps=2)
    """,
    "own-function": """
        calls = []
        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, by):
                calls.append("forward")
                ctx.by = by
                return x * by
            @staticmethod
            def backward(ctx, gradient):
                calls.append("backward")
                return gradient * ctx.by, None
        class Scaled(nn.Module):
            def forward(self, x):
                return Scale.apply(x, 0.5)
        scaled = Scaled()
        train(lambda x: scaled(model(x)))
        print(calls)
    """,
    "own-hooks": """
        seen = []
        model[0].register_forward_pre_hook(lambda m, args: seen.append("before") or (args[0] * 2,))
        model[0].register_forward_hook(lambda m, args, out: seen.append(float(out.detach().sum())))
        model.register_full_backward_hook(lambda m, gi, go: seen.append(len(go)))
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        train()
        print(seen)
    """,
    "global-hooks": """
        from torch.nn.modules.module import register_module_forward_hook
        seen = []
        handle = register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
        train()
        handle.remove()
        print(seen)
    """,
    "in-place-buffers": """
        class Counted(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(8)
                self.register_buffer("calls", torch.zeros(()))
            def forward(self, x):
                self.calls += 1
                return self.norm(x).mul_(2)
        counted = Counted()
        train(lambda x: model(counted(x)))
        print(counted.calls, counted.norm.running_mean.sum().item(), counted.norm.num_batches_tracked.item())
    """,
    "averaged-weights": """
        from torch.optim.swa_utils import AveragedModel
        averaged = AveragedModel(model)
        for _ in range(4):
            train(steps=1)
            averaged.update_parameters(model)
        print(averaged(batch()).sum().item())
    """,
    "lbfgs": """
        model.eval()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        x = batch()
        def closure():
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss
        for _ in range(2):
            print(optimizer.step(closure).item())
    """,
    "signals": """
        import signal
        got = []
        for name in ("SIGUSR1", "SIGCHLD", "SIGTERM"):
            signal.signal(getattr(signal, name), lambda number, _: got.append(number))
        for step in range(4):
            train(steps=1)
            os.kill(os.getpid(), signal.SIGUSR1)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        print(got, signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """,
    "alarms": """
        import signal
        ticks = []
        signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        train()
        while not ticks:
            time.sleep(0.01)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(bool(ticks))
    """,
    "socket-pair": """
        import socket
        ours, theirs = socket.socketpair()
        for step in range(4):
            ours.sendall(b"x" * (step + 1))
            train(steps=1)
            print(theirs.recv(64))
        ours.close()
        print(theirs.recv(64))
    """,
    "server": """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        def answer():
            while True:
                connection, _ = server.accept()
                with connection:
                    if (said := connection.recv(64)) == b"end":
                        return
                    connection.sendall(said.upper())
        thread = threading.Thread(target=answer)
        thread.start()
        def ask(text):
            with socket.create_connection(server.getsockname()) as connection:
                connection.sendall(text)
                return connection.recv(64)
        for step in range(4):
            train(steps=1)
            print(ask(b"hello"))
        ask(b"end"), thread.join(), server.close()
    """,
    "files": """
        pathlib.Path("lines.txt").write_text("".join(f"{i}\\n" for i in range(6)))
        lines, log = open("lines.txt"), open("log.txt", "a")
        for step in range(6):
            log.write(next(lines))
            train(steps=1)
            torch.save(model.state_dict(), "model.pt")
        print(log.tell(), lines.read(), sorted(os.listdir()))
        log.close()
    """,
    "locked-file": """
        import fcntl
        for step in range(4):
            with open("lock", "r+" if step else "w+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                train(steps=1)
        print("locked")
    """,
    "memory-map": """
        table = np.memmap("table.bin", dtype="float32", mode="w+", shape=(6, 8))
        for step in range(6):
            with torch.no_grad():
                table[step] = model(batch())[0].numpy()
        table.flush()
        train(batches=[torch.from_numpy(np.array(table[:4]))])
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
    "at-exit": """
        import atexit, weakref
        atexit.register(lambda: pathlib.Path("ended.txt").write_text("once"))
        class Held: pass
        held = Held()
        weakref.finalize(held, lambda: pathlib.Path("finalized.txt").open("a").write("once"))
        train()
    """,
    "temporary-folders": """
        import tempfile
        with tempfile.TemporaryDirectory(dir=".") as folder, tempfile.NamedTemporaryFile(dir=folder) as file:
            for step in range(4):
                train(steps=1)
                file.write(b"line"), file.flush()
                print(len(os.listdir(folder)), os.path.getsize(file.name))
        print([name for name in os.listdir() if name.startswith("tmp")])
    """,
    "subprocesses": """
        import subprocess
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for step in range(4):
            train(steps=1)
            print(subprocess.run(["echo", str(step)], capture_output=True, text=True, check=True).stdout)
            cat.stdin.write(f"{step}\\n"), cat.stdin.flush()
            print(cat.stdout.readline())
        cat.stdin.close()
        print(cat.wait())
    """,
    "children": """
        for step in range(4):
            child = os.fork()
            if child == 0:
                os._exit(step)
            train(steps=1)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
        try:
            os.wait()
        except ChildProcessError:
            print("no child")
    """,
    "pool": """
        from multiprocessing import get_context
        with get_context("fork").Pool(2) as pool:
            for step in range(4):
                train(steps=1)
                print(pool.map(abs, [-step, step]))
    """,
    "compiled": """
        compiled = torch.compile(model, backend="aot_eager")
        model.eval()
        train(compiled)
    """,
    "recompiled": """
        compiled = torch.compile(model, backend="eager", dynamic=False)
        model.eval()
        for size in (2, 3, 4, 2, 5):
            print(compiled(torch.randn(size, 8)).sum().item())
        train(compiled, steps=2)
        print(torch.compiler.is_compiling())
    """,
    "autocast": """
        scaler = torch.amp.GradScaler("cpu")
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch()).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
            print(loss.item(), scaler.get_scale())
    """,
    "database": """
        import sqlite3
        base = sqlite3.connect("runs.db")
        base.execute("create table runs (step integer, size real)")
        for step in range(4):
            train(steps=1)
            base.execute("insert into runs values (?, ?)", (step, float(model[0].weight.detach().sum())))
            base.commit()
        print(base.execute("select * from runs").fetchall())
        base.close()
        os.remove("runs.db")
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
    "logging": """
        import logging, logging.handlers, queue
        records = queue.Queue()
        listener = logging.handlers.QueueListener(records, logging.FileHandler("log.txt"))
        listener.start()
        logger = logging.getLogger("train")
        logger.addHandler(logging.handlers.QueueHandler(records)), logger.setLevel(logging.INFO)
        for step in range(4):
            train(steps=1)
            logger.info("step %d", step)
        listener.stop()
    """,
    "coroutines": """
        import asyncio
        async def step(number):
            await asyncio.sleep(0)
            train(steps=1)
        async def main():
            await asyncio.gather(*(step(number) for number in range(4)))
            process = await asyncio.create_subprocess_exec("true")
            print(await process.wait())
        asyncio.run(main())
    """,
    "exceptions": """
        class Fragile(nn.Module):
            def forward(self, x):
                if len(x) > 4:
                    raise ValueError("too many")
                return x
        fragile = Fragile()
        for size in (4, 5, 4, 6, 4):
            try:
                print(model(fragile(torch.randn(size, 8))).sum().item())
            except ValueError as error:
                print(error, error.__context__)
        train(steps=2)
    """,
    "attributes": """
        class Lazy(nn.Module):
            def forward(self, x):
                if not hasattr(self, "scale"):
                    self.scale = torch.rand(())
                self.calls = getattr(self, "calls", 0) + 1
                return x * self.scale
        lazy = Lazy()
        train(lambda x: model(lazy(x)))
        print(lazy.calls, lazy.scale.item(), sorted(vars(lazy)))
    """,
    "audited": """
        heard = []
        sys.addaudithook(lambda event, _: heard.append(event) if event in ("os.kill", "os.remove", "signal.pthread_kill") else None)
        train()
        print(heard)
    """,
    "profiled": """
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            train(steps=3)
        print(len(profiled.events()) > 10)
    """,
    "generators": """
        own = torch.Generator().manual_seed(5)
        shuffled = np.random.default_rng(3)
        train(batches=(torch.randn(4, 8, generator=own) + float(shuffled.normal()) for _ in range(6)))
        print(own.initial_seed(), torch.randn(1, generator=own).item(), shuffled.normal())
    """,
}
"""Each between :data:`HEAD` and :data:`TAIL`, by what it keeps."""

USE_TRANSFORMERS = frozenset({"generation"})


def source_of(name: str) -> str:
    """The whole program."""
    body = BODIES[name].strip("\n").rstrip()
    indent = len(body) - len(body.lstrip())
    return HEAD + "\n".join(line[indent:] for line in body.splitlines()) + "\n" + TAIL
