"""Secrets as scripts leave them in texts, and reports that carry them in every field."""

import random
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from report_builders import mismatch, overflow

from dtypedoctor.report.model import Report
from dtypedoctor.report.picture import FlowLine, ModulePicture, OpLine, Picture, Series, TensorLine

USER, HOST = "marguerite", "gpu-box-17"
_DRAW = random.Random(20260101)
_ALNUM = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def _random(length: int, alphabet: str = _ALNUM) -> str:
    # one of each kind, so that the token looks like a real one whatever is drawn
    return (
        "aB3" + "".join(_DRAW.choice(alphabet) for _ in range(length - 3))
        if alphabet == _ALNUM
        else "".join(_DRAW.choice(alphabet) for _ in range(length))
    )


TOKENS = [
    f"hf_{_random(34)}",
    f"ghp_{_random(36)}",
    f"gho_{_random(36)}",
    f"github_pat_{_random(22)}_{_random(59)}",
    f"glpat-{_random(20)}",
    f"sk-{_random(48)}",
    f"sk-proj-{_random(20)}-{_random(20)}",
    f"sk-ant-api03-{_random(40)}",
    f"AKIA{_random(16, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567')}",
    f"ASIA{_random(16, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567')}",
    f"{_random(19)}/{_random(20)}",
    _random(40, "0123456789abcdef"),
    f"eyJ{_random(33)}.eyJ{_random(40)}.{_random(43)}",
    f"xoxb-{_random(12, '0123456789')}-{_random(24)}",
    f"AIza{_random(35)}",
    f"npm_{_random(36)}",
]
CONTEXTS = [
    "{}",
    "401 Client Error for url https://huggingface.co/api/whoami?token={}&x=1",
    "headers: Authorization: Bearer {}",
    'request body {{"model": "m", "api_key": "{}"}} was refused',
    "WANDB_API_KEY={} python train.py --steps 3",
]
IDENTITIES = [
    (f'File "/home/{USER}/my project/train step.py", line 3, in main', f"home/{USER}"),
    (f"cannot open /home/{USER}/.cache/huggingface/token", f"home/{USER}"),
    (f"/Users/{USER}/Documents/run.yaml:3: wrong", "/Users/"),
    (f"C:\\Users\\{USER}\\AppData\\Local\\x.py", "AppData"),
    (f"file:///home/{USER}/x.html", f"home/{USER}"),
    (f"cd ~{USER}/work && ls", f"~{USER}"),
    (f"{USER} ran it on {HOST}", USER),
    (f"ssh {USER}@{HOST}.cluster.example.org", HOST),
    (f"the node {HOST} has no GPU", HOST),
    ("master is ip-10-20-30-40.ec2.internal now", "10-20-30-40"),
    ("rendezvous at 10.1.2.3:29500 failed", "10.1.2.3"),
    ("write to marguerite.d@example.org", "@example.org"),
    ("https://user:hunter2secret@pypi.example.org/simple", "hunter2secret"),
    ("git+ssh://oauth2:hunter2secret@example.org/repo", "hunter2secret"),
    ("postgres://admin:hunter2secret@db/x", "hunter2secret"),
    ("--hub-token hunter2secret --steps 8", "hunter2secret"),
    ("--password=hunter2secret", "hunter2secret"),
    ("password: hunter2secret", "hunter2secret"),
    ("{'client_secret': 'hunter2secret'}", "hunter2secret"),
    ("MY_COMPANY_SETTING=internalname python x.py", "internalname"),
    ("export CLUSTER=internalname; run", "internalname"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIhunter2secret\n-----END RSA PRIVATE KEY-----", "hunter2secret"),
]
SECRETS = [(context.format(token), token) for token in TOKENS for context in CONTEXTS] + IDENTITIES
"""Texts, each with the part of it that must not be seen again."""


def rich_report() -> Report:
    """A report with something in every field that formats show."""
    base = overflow()
    module = ModulePicture(
        root=0,
        fqn="model.layers.0.mlp",
        cls="MLP",
        series=(Series(lane="forward", dtype="float16", absmax=array("d", [1.0, 2.0]), nonfinite={1: (0, 3)}),),
        tensors=(TensorLine(what="output", phase="forward", dtype="float16", shape=(2, 3), absmax=2.0, num_nan=0, num_inf=3),),
        flows=(FlowLine(phase="forward", step=1, inputs=("float16",), weights=("float32",), outputs=("float32",),
                        autocast=None, why="promoted"),),
    )  # fmt: skip
    op = OpLine(fqn="model.layers.0.mlp", phase="forward", step=2, op="aten.mul.Tensor", inputs=("f16 2×3",), outputs=("f16 2×3",),
                source="modeling.py:3", notes=("in place",), born=True)  # fmt: skip
    return replace(
        base,
        findings=(*base.findings, *mismatch().findings),
        bisection={"culprits": ["model.layers.0"], "corrections": ["c"], "probes": 3, "one_minimal": True,
                   "verdicts": [{"mode": "m", "outcome": "fail", "phase": "forward", "fqn": "model", "absmax": 2.0}]},
        pictures=(Picture(label="before", columns=("1", "2"), modules=(module,), ops=(op,), notes=("a note",)),),
    )  # fmt: skip


def planted(value: Any, secret: str) -> Any:
    """``value`` with ``secret`` added to every text in it, keys included; enums and registered words stay."""
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return f"{value} {secret}"
    if is_dataclass(value) and not isinstance(value, type):
        keep = ("lane",)  # one of a closed set of words that the program itself writes
        changed = {f.name: planted(getattr(value, f.name), secret) for f in fields(value) if f.name not in keep}
        return replace(value, **changed)
    if isinstance(value, Mapping):
        return {planted(key, secret): planted(item, secret) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(planted(item, secret) for item in value)
    return value


def texts(value: Any) -> Iterator[str]:
    """Every text in ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from texts(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)
