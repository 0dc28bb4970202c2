"""Training in processes that a script spawns is followed: each leaves a trace of its own, and the report is about all of them."""

import textwrap
from pathlib import Path

import pytest
from command import dtypedoctor, forked, report_of

TRAINING = """
    import sys, torch
    from torch import nn

    def train(rank, bad):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
        nn.init.constant_(model[0].weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            scale = 60000.0 if bad and rank == 1 and step == 1 else 1.0
            loss = (model(torch.full((2, 4), scale).half()) * 2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if bad == 2:
            nn.Linear(2, 2)(torch.ones(1, 2).half())
        print("rank", rank, "done", flush=True)
"""
WAYS = {
    "mp.spawn": """
    if __name__ == "__main__":
        import torch.multiprocessing
        torch.multiprocessing.spawn(train, (BAD,), nprocs=2)
    """,
    "process": """
    if __name__ == "__main__":
        import multiprocessing
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=train, args=(rank, BAD)) for rank in range(2)]
        for child in children:
            child.start()
            child.join()
        sys.exit(max(child.exitcode for child in children))
    """,
    "forkserver": """
    if __name__ == "__main__":
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context
        with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
            for rank in range(2):
                pool.submit(train, rank, BAD).result()
    """,
}


def spawning(folder: Path, way: str, bad: int) -> Path:
    """A script that trains in processes that it spawns."""
    path = folder / "train.py"
    source = textwrap.dedent(TRAINING) + textwrap.dedent(WAYS[way]).replace("BAD", str(bad))
    path.write_text(source)
    return path


@pytest.mark.release
@pytest.mark.parametrize("way", ["mp.spawn", "forkserver"])
def test_training_in_spawned_processes_is_measured(way: str, tmp_path: Path) -> None:
    """A healthy one is healthy because its processes were measured, and prints what it prints alone."""
    path = spawning(tmp_path, way, 0)
    done = forked("exec", "--out", "run", path, cwd=tmp_path)
    report = report_of(tmp_path / "run")
    assert (done.code, report["status"]) == (0, "healthy"), report["headline"]
    assert report["measured"]["module_calls"] == [18, 18]
    assert report["measured"]["gradients"] == [24, 24]
    assert sorted(done.out.splitlines()) == ["rank 0 done", "rank 1 done"]


def test_an_overflow_in_a_spawned_process_is_found_there(tmp_path: Path) -> None:
    """It is proven by a replay in that process, and the report says which one it is.

    Forks have torch before multiprocessing names them, and take their numbers in the order in which they come: it needs interpreters.
    """
    done = dtypedoctor("exec", "--once", "--out", "run", spawning(tmp_path, "mp.spawn", 1), cwd=tmp_path)
    report = report_of(tmp_path / "run")
    finding = report["findings"][0]
    assert (done.code, finding["id"], finding["step"], finding["confidence"]) == (10, "float16-overflow", 2, "proven")
    assert "Seen in spawned process 2 of 2." in finding["evidence"]


POOL = """
    import multiprocessing, torch
    from torch import nn

    def work(number):
        torch.manual_seed(number)
        net = nn.Linear(4, 4)
        with torch.no_grad():
            return net(torch.ones(1, 4)).sum().item()

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            print(round(sum(pool.map(work, range(4))), 4))
"""


@pytest.mark.release
def test_a_process_that_its_program_ends_is_no_unfinished_run(tmp_path: Path) -> None:
    """A pool ends its workers when it needs them no more; what was measured of them until then is named."""
    path = tmp_path / "pool.py"
    path.write_text(textwrap.dedent(POOL))
    done = dtypedoctor("exec", "--out", "run", path, cwd=tmp_path)
    report = report_of(tmp_path / "run")
    assert (done.code, report["status"]) == (0, "healthy"), report["headline"]
    assert any("the program has ended spawned process 1" in gap for gap in report["coverage"])
