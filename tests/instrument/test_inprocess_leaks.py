"""What a program that watches itself writes down leaks nothing of what the program has said, was given, or runs as."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from secret_texts import HOST, SECRETS, TOKENS, USER
from small_trainers import plain
from torch import Tensor, nn
from transformers import TrainerCallback

import dtypedoctor
from dtypedoctor.report.files import read_report
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.run_document import public_run

Way = Callable[[nn.Module, str, Path], None]


def in_a_block(net: nn.Module, said: str, out: Path) -> None:
    """``watch()`` around a call, and an exception in it."""

    def block() -> None:
        with dtypedoctor.watch(net, out=out):
            net(torch.full((2, 4), 300.0).half())
            raise ConnectionError(said)

    with pytest.raises(ConnectionError):
        block()


def in_a_trainer(net: nn.Module, said: str, out: Path) -> None:
    """The callback in a trainer whose step ends in an exception."""

    class Says(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            net(torch.full((2, 4), 300.0).half())
            raise ConnectionError(said)

    watching = dtypedoctor.DtypeDoctorCallback(out)
    with pytest.raises(ConnectionError) as caught:
        plain(out.with_name("trainer"), watching, Says()).train()
    watching.finish(caught.value)


class Squares(nn.Module):
    """Leaves the range of float16."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def named(name: str) -> nn.Module:
    """A model with an overflow in a module, and of a class, of this name."""
    net = nn.Sequential()
    net.add_module(name.replace(".", "-"), type(name, (Squares,), {})())
    return net


def everything_public(directory: Path) -> dict[str, str]:
    """The files that are attached to tickets, and every format that ``dtypedoctor report`` prints."""
    report = read_report(directory)
    files = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("report.*")}
    return files | {style: format_named(style).render(public_run(report)) for style in (one.name for one in FORMATS)}


@pytest.fixture
def _somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's machine."""
    monkeypatch.setenv("LOGNAME", USER)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)


@pytest.mark.release
@pytest.mark.usefixtures("_somewhere")
@pytest.mark.parametrize(("way", "share"), [(in_a_block, 20), (in_a_trainer, 60)], ids=["watch", "callback"])
def test_no_format_shows_a_secret(way: Way, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in exceptions, given as arguments and as environment, and in the names of files, modules and classes."""
    folder = tmp_path / "home" / USER
    for index, some in enumerate(SECRETS[start : start + share] for start in range(0, len(SECRETS), share)):
        texts = [text for text, _ in some]
        monkeypatch.setattr(sys, "argv", [f"/home/{USER}/{TOKENS[0]}.py", *texts])
        monkeypatch.setenv("DEPLOY_PASSWORD", "correct-horse-battery")
        out = folder / f"run{index}"
        way(named(TOKENS[index % len(TOKENS)]), " ".join([*texts, "correct-horse-battery"]), out)
        public = everything_public(out)
        assert len(public) == 2 + len(FORMATS)
        assert all("ConnectionError" in shown for shown in public.values())
        assert "float16-overflow" in public["report.json"]
        needles = [*(needle for _, needle in some), TOKENS[index % len(TOKENS)], TOKENS[0], "correct-horse-battery"]
        leaks = [(name, needle) for name, shown in public.items() for needle in needles if needle in shown]
        assert leaks == []
