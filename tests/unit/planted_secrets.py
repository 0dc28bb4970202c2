"""Secrets of some sixty services in the forms in which programs write them; every one is made up, and the same in each run."""

import base64
import json
import random
import string
from collections.abc import Callable, Iterator

CHANCE = random.Random(3407)
B62, B36, HEX, UPPER = (
    string.ascii_letters + string.digits,
    string.ascii_lowercase + string.digits,
    "0123456789abcdef",
    string.ascii_uppercase + string.digits,
)
B64 = string.ascii_letters + string.digits + "-_"


def some(alphabet: str, length: int) -> str:
    """Random characters, a digit and a letter among them."""
    return (
        "".join(CHANCE.choice(alphabet) for _ in range(length - 2))
        + CHANCE.choice([c for c in "2345670" if c in alphabet] or alphabet)
        + CHANCE.choice([c for c in alphabet if c.isalpha()])
    )


def jwt() -> str:
    """Three parts in base64."""
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")
        for part in ({"alg": "HS256", "typ": "JWT"}, {"sub": some(B62, 20), "admin": True})
    ]
    return ".".join([*parts, some(B62, 43)])


SHAPES: dict[str, Callable[[], str]] = {
    "hugging face": lambda: "hf_" + some(string.ascii_letters, 34), "hugging face organisation": lambda: "api_org_" + some(string.ascii_letters, 34),
    "github": lambda: "ghp_" + some(B62, 36), "github oauth": lambda: "gho_" + some(B62, 36), "github app": lambda: "ghs_" + some(B62, 36),
    "github fine": lambda: "github_pat_" + some(B62, 22) + "_" + some(B62, 59), "gitlab": lambda: "glpat-" + some(B64, 20),
    "aws id": lambda: "AKIA" + some("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16), "aws session": lambda: "ASIA" + some("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16),
    "aws secret": lambda: some(B62, 19) + "/" + some(B62, 20), "google": lambda: "AIza" + some(B62, 35), "google oauth": lambda: "ya29." + some(B62, 60),
    "openai": lambda: "sk-" + some(B62, 20) + "T3BlbkFJ" + some(B62, 20), "openai project": lambda: "sk-proj-" + some(B62, 48),
    "anthropic": lambda: "sk-ant-api03-" + some(B62, 93) + "AA", "openrouter": lambda: "sk-or-v1-" + some(HEX, 64), "deepseek": lambda: "sk-" + some(HEX, 32),
    "slack bot": lambda: f"xoxb-{some(string.digits + 'a', 12)}-{some(B62, 24)}", "slack user": lambda: f"xoxp-1234567890-{some(B62, 30)}",
    "slack webhook": lambda: f"https://hooks.slack.com/services/T{some(UPPER, 9)}/B{some(UPPER, 9)}/{some(B62, 24)}",
    "discord webhook": lambda: f"https://discord.com/api/webhooks/123456789012345678/{some(B64, 68)}",
    "stripe": lambda: "sk_live_" + some(B62, 24), "stripe restricted": lambda: "rk_live_" + some(B62, 24), "square": lambda: "sq0atp-" + some(B62, 22),
    "twilio": lambda: "SK" + some(HEX, 32), "sendgrid": lambda: f"SG.{some(B62, 22)}.{some(B62, 43)}", "mailgun": lambda: "key-" + some(HEX, 32),
    "mailchimp": lambda: some(HEX, 32) + "-us12", "npm": lambda: "npm_" + some(B36, 36), "pypi": lambda: "pypi-AgEIcHlwaS5vcmc" + some(B64, 60),
    "rubygems": lambda: "rubygems_" + some(HEX, 48), "docker": lambda: "dckr_pat_" + some(B62, 27), "digitalocean": lambda: "dop_v1_" + some(HEX, 64),
    "databricks": lambda: "dapi" + some(HEX, 32), "shopify": lambda: "shpat_" + some(HEX, 32), "grafana": lambda: "glsa_" + some(B62, 32) + "_" + some(HEX, 8),
    "grafana cloud": lambda: "glc_" + some(B62, 40), "doppler": lambda: "dp.pt." + some(B62, 43), "linear": lambda: "lin_api_" + some(B62, 40),
    "notion": lambda: "ntn_" + some(string.digits + "a", 11) + some(B62, 35), "postman": lambda: f"PMAK-{some(HEX, 24)}-{some(HEX, 34)}",
    "new relic": lambda: "NRAK-" + some(UPPER, 27), "vault": lambda: "hvs." + some(B62, 95), "terraform": lambda: f"{some(B62, 14)}.atlasv1.{some(B62, 64)}",
    "telegram": lambda: f"{CHANCE.randrange(10**9, 10**10 - 1)}:AA{some(B64, 33)}", "replicate": lambda: "r8_" + some(B62, 37), "groq": lambda: "gsk_" + some(B62, 52),
    "perplexity": lambda: "pplx-" + some(B62, 48), "xai": lambda: "xai-" + some(B62, 80), "nvidia": lambda: "nvapi-" + some(B62, 64),
    "pinecone": lambda: f"pcsk_{some(B62, 6)}_{some(B62, 63)}", "langsmith": lambda: f"lsv2_pt_{some(HEX, 32)}_{some(HEX, 10)}",
    "wandb": lambda: some(HEX, 40), "wandb new": lambda: "wandb_v1_" + some(B62, 77), "sentry": lambda: "sntrys_" + some(B62, 80),
    "age": lambda: "AGE-SECRET-KEY-1" + some("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58), "jwt": jwt,
    "private key": lambda: f"-----BEGIN RSA PRIVATE KEY-----\n{some(B62, 64)}\n{some(B62, 64)}\n-----END RSA PRIVATE KEY-----",
    "pgp": lambda: f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{some(B62, 64)}\n-----END PGP PRIVATE KEY BLOCK-----",
    "planetscale": lambda: "pscale_tkn_" + some(B62, 43), "prefect": lambda: "pnu_" + some(B36, 36), "pulumi": lambda: "pul-" + some(HEX, 40),
    "figma": lambda: "figd_" + some(B62, 40), "azure": lambda: some(B62, 3) + "8Q~" + some(B62, 34), "unknown": lambda: some(B62, 64),
}  # fmt: skip
"""What a token of a service looks like; it is found wherever it stands."""

NAMED: tuple[str, ...] = (
    "MY_SERVICE_KEY={}", "export DB_PASS={}", "FTP_PASSWORD={}", "CARD_PIN={}", "ALERT_WEBHOOK={}", "BASIC_AUTH={}", "X_TOKEN={}",
    "SOME_SECRET={}", "AWS_CREDENTIALS={}", "SENTRY_DSN={}", "postgres://bob:{}@db/prod", "https://{}@github.com/a/b", "password: {}",
    "{{'api_key': '{}', 'lr': 3}}", "('password', '{}')", "Login(user='bob', password='{}', n=3)", "token=('{}', 'bearer')",
    "[('secret', '{}')]", "curl -u bob:{} https://x.y", "machine x.y login bob password {}", "Authorization: Bearer {}1",
    "train.py --token {}", "train.py --api-key={}", "{{\"client_secret\": \"{}\"}}", "AccountKey={};EndpointSuffix=core",
)  # fmt: skip
"""Where a secret that looks like nothing stands beside a name that tells."""


def planted() -> Iterator[tuple[str, str]]:
    """Texts, and the secret in each: every shape in four places, and every telling name with two secrets."""
    carriers = (
        "{}",
        "could not log in with {}.",
        "{{'a': '{}'}}",
        "wrong ({}), try again",
        "x={} y",
        "[{}]",
        'got "{}"\nin line 2',
    )
    for number, make in enumerate(SHAPES.values()):
        for place in range(4):
            secret = make()
            yield (
                carriers[(number + place) % len(carriers)].format(secret),
                secret.split("\n")[-2] if "\n" in secret else _needle(secret),
            )
    for name in NAMED:
        for _ in range(2):
            secret = "plain" + some(string.ascii_lowercase, 6)
            yield name.format(secret), secret


def _needle(secret: str) -> str:
    """The part that must not be shown: of a URL what stands behind its last slash."""
    return secret.rpartition("/")[2] if secret.startswith("https") else secret
