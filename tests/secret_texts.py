"""Secrets as scripts leave them in texts."""

import json
import random

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
    ("write to marguerite.d@example.org", "marguerite.d"),
    ("https://user:hunter2secret@pypi.example.org/simple", "hunter2secret"),
    ("git+ssh://oauth2:hunter2secret@example.org/repo", "hunter2secret"),
    ("postgres://admin:hunter2secret@db/x", "hunter2secret"),
    ("--hub-token hunter2secret --steps 8", "hunter2secret"),
    ("--password=hunter2secret", "hunter2secret"),
    ("ConnectionError: --password=hunter2secret", "hunter2secret"),
    ("note: text='api_key=hunter2secret'", "hunter2secret"),
    ("password: hunter2secret", "hunter2secret"),
    ("{'client_secret': 'hunter2secret'}", "hunter2secret"),
    (json.dumps(json.dumps({"client_secret": "hunter2secret"})), "hunter2secret"),
    ("MY_COMPANY_SETTING=internalname python x.py", "internalname"),
    ("export CLUSTER=internalname; run", "internalname"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIhunter2secret\n-----END RSA PRIVATE KEY-----", "hunter2secret"),
]
SECRETS = [(context.format(token), token) for token in TOKENS for context in CONTEXTS] + IDENTITIES
"""Texts, each with the part of it that must not be seen again."""
