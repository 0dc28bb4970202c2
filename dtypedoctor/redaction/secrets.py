"""What is secret in a text: tokens (:mod:`.shapes`), credentials in URLs and headers, and values that stand beside a telling name."""

import re
from collections.abc import Callable

from dtypedoctor.redaction.shapes import SECRET, without_shapes

__all__ = ["ALLOWED_VARIABLES", "SECRET", "names_a_secret", "without_secrets"]


ALLOWED_VARIABLES = frozenset({
    "ACCELERATE_MIXED_PRECISION", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE",
    "KMP_BLOCKTIME", "LOCAL_RANK", "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_PROTO", "NO_COLOR", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "TOKENIZERS_PARALLELISM",
    "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCH_LOGS", "TRANSFORMERS_OFFLINE",
    "UNSLOTH_ENABLE_LOGGING", "UNSLOTH_FORCE_FLOAT32", "WORLD_SIZE",
})  # fmt: skip
"""Environment variables whose values steer precision and identify nobody."""
_IDENTITY = frozenset(
    {"HOME", "HOST", "HOSTNAME", "LOGNAME", "MAIL", "PATH", "PWD", "OLDPWD", "SHELL", "TMPDIR", "USER"}
)

_NAME = (
    r"(?:token|secret|password|passwd|passphrase|passcode|pwd|credentials?|cookie|authorization|dsn|sas|webhook(?:[-_]?url)?|"
    r"(?:api|access|account|auth|secret|private|signing|encryption|shared|license|deploy|master|service|app|admin|hf|wandb|openai)[-_]?"
    r"key(?:[-_]?id)?|(?:db|smtp|user|root|admin|ssh|ftp|mail|redis|proxy|basic|http)[-_]?pass|connection[-_]?string)"
)
_VARIABLE = re.compile(
    r"(?:[A-Z0-9_]+_)?(?:[A-Z0-9]*KEY|PASS|PASSWD|PASSWORD|PIN|WEBHOOK(?:_URL)?|AUTH|PWD|CREDS|JWT|SALT|SIGNATURE)"
)
"""Names of environment variables that are telling in capitals only: ``backward_pass`` and ``sort_key`` hold no secrets."""
_TELLING = re.compile(rf"(?:^|[^a-z]){_NAME}s?$|[a-z0-9]{_NAME}$", re.IGNORECASE)
_LONGEST_NAME = 100
_VOCABULARY = re.compile(
    r"(?:^|[-_])(?:pad|eos|bos|unk|sep|cls|mask|image|audio|video|new|per|max|num|extra|special)[-_]tokens?$",
    re.IGNORECASE,
)
_TRIVIAL = re.compile(
    r"[-+]?\d{1,6}(?:\.\d+)?(?:e[-+]?\d+)?|true|false|on|off|yes|no|none|null|auto|<[^<>]*>", re.IGNORECASE
)
"""Values that tell nothing: small numbers, switches, and what a former redaction has left."""

_QUOTES = ("'\"'\"'", '\\"', "\\'", '"', "'")
"""What may stand around names and values: a quote as a shell (``shlex.join``) or a string literal writes it in another, or itself."""
_QUOTE = "|".join(map(re.escape, _QUOTES))
_VALUE = re.compile(
    rf"""(?:[({{\[][^(){{}}\[\]\n]{{0,2000}}[)}}\]])|({_QUOTE})(?:(?!\1)[^\n])*\1|(?!\\["'])[^\s"',;&)\]}}|]+"""
)
_ASSIGNED = re.compile(rf"""(?<![\w.-])((?:{_QUOTE})?)([\w.-]++)\1(\s*+(?:=|:(?!:|//))\s*+)""")
_OPTION = re.compile(r"(?<![\w-])(?P<option>--?[\w-]++)\s++(?!-)")
_PAIR = re.compile(rf"""({_QUOTE})(?P<option>[\w.-]{{2,60}})\1\s*+,\s*+(?={_QUOTE})""")
"""A name and its value as two items of a tuple or a list."""
_BEGINNING = re.compile(r"\s*+")

_HASH = (
    r"(?<![A-Za-z0-9/@+])(?<!commit/)(?<!tree/)(?<!blob/)(?<!commit[ :=])(?<!revision[ :=])(?<!commit: )(?<!revision: )"
    r"(?<!version: )(?<!version': ')(?<!commit': ')(?<!revision': ')(?<!revision=')(?<!HEAD is at )"
    r"[0-9a-f]{40}(?![A-Za-z0-9])"
)
"""A key of Weights & Biases looks like the hash of a commit; what stands before it tells them apart."""
_SHAPES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)", SECRET),
        (r"(?i)(\bmachine\s+\S+\s+login\s+\S+\s+password\s+)(?!<)\S+", rf"\1{SECRET}"),
        (r"(?i)((?:discord(?:app)?\.com/api/webhooks|hooks\.slack\.com/(?:services|workflows|triggers))/)(?!<)[^\s\"'<>)]+", rf"\1{SECRET}"),
        (r"(?i)(?<![\w-])([\w-]{1,60}\.webhook\.office\.com/)(?!<)[^\s\"'<>)]+", rf"\1{SECRET}"),
        (r"(?<!\d)\d{8,10}:AA[\w-]{30,}", SECRET),
        (r"(?<![A-Za-z0-9])key-[0-9a-f]{32}(?![A-Za-z0-9])|(?<![A-Za-z0-9])[0-9a-f]{32}-us\d{1,2}(?!\d)", SECRET),
        (r"(?<![\w.])(-u|--user)([ =])(?!<)[^\s:/'\"]+:(?!//)[^\s'\"]+", rf"\1\2{SECRET}"),
        (r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/\"'<>]+@", rf"\1{SECRET}@"),
        (r"(?i)([?&](?:x-amz-[\w-]+|x-goog-[\w-]+|sig|signature|token|key|auth|access_token|se|sp|sv)=)(?!<)[^&\s\"']+", rf"\1{SECRET}"),
        (r"(?i)\b(bearer|digest|token)(\s+)(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}", rf"\1\2{SECRET}"),
        (r"\b((?i:basic)\s+)(?=[A-Za-z0-9+/]*[A-Z0-9])[A-Za-z0-9+/]{8,}={0,2}(?![\w])", rf"\1{SECRET}"),
        (r"(?<![A-Za-z0-9])eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?", SECRET),
        (r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{16,}", SECRET),
        (r"(?<![A-Za-z0-9])(?:gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,})", SECRET),
        (r"(?<![A-Za-z0-9])[srp]k[-_](?=[\w-]{0,99}\d)[\w-]{16,}", SECRET),
        (r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA)[0-9A-Z]{12,}", SECRET),
        (r"(?<![A-Za-z0-9])wandb_v\d+_\w{16,}", SECRET),
        (r"(?<![A-Za-z0-9])xox[a-z]-[\w-]{10,}", SECRET),
        (r"(?<![A-Za-z0-9])AIza[\w-]{30,}", SECRET),
        (r"(?<![A-Za-z0-9])(?:npm_|gsk_|r8_|nvapi-|pypi-|dop_v1_|tok_|dckr_pat_|lin_api_|pcsk_|xai-|pplx-|glc_|glsa_|ntn_|figd_|sntrys_|NRAK-|wandb_)(?=[\w-]{0,99}\d)[\w-]{16,}", SECRET),
        (_HASH, SECRET),
        (r"(?<![\w/+=.-])(?=[\w/+]*[a-z])(?=[\w/+]*[A-Z])(?=[\w/+]*\d)[A-Za-z0-9/+]{40}(?![\w/+=])", SECRET),
        (r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]+\.)+[A-Za-z]{2,}\b", "<email>"),
    )
)  # fmt: skip


def names_a_secret(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret (``HF_TOKEN``, ``--api-key``, but not ``pad_token``)."""
    name = name[-_LONGEST_NAME:]
    return bool(_VARIABLE.fullmatch(name) or _TELLING.search(name)) and not _VOCABULARY.search(name)


def without_secrets(text: str) -> str:
    """``text`` with every secret replaced by a word in angle brackets; doing it twice changes nothing more."""
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    text = without_shapes(text)
    text = _without_values(text, _ASSIGNED, _assigns_a_secret)
    text = _without_values(text, _OPTION, lambda head: names_a_secret(head["option"]))
    return _without_values(text, _PAIR, lambda head: names_a_secret(head["option"]))


def _without_values(text: str, heads: re.Pattern[str], is_secret: Callable[[re.Match[str]], bool]) -> str:
    """``text`` with the values replaced that stand behind ``heads`` and are secret.

    What another value holds is looked at too: in ``ValueError: password=blue`` it is the password that matters.
    """
    parts, done, at = [], 0, 0
    while (head := heads.search(text, at)) is not None:
        at = head.end()
        if not is_secret(head):
            continue
        value = _VALUE.match(text, at)
        if value is None or _TRIVIAL.fullmatch(value[0].strip("\"'\\")):
            continue
        quote = value[1] or ""
        parts += [text[done:at], f"{quote}{SECRET}{quote}"]
        done = at = value.end()
    return "".join(parts) + text[done:]


def _assigns_a_secret(head: re.Match[str]) -> bool:
    quote, name, sign = head.groups()
    if names_a_secret(name):
        running_text = ":" in sign and not quote and name.lower() in ("token", "tokens")
        return not running_text or _looks_like_a_token(head)
    return "=" in sign and _is_variable(head, name) and name not in ALLOWED_VARIABLES


def _looks_like_a_token(head: re.Match[str]) -> bool:
    """Whether what follows is long and has a digit, as no word of a sentence does."""
    value = _VALUE.match(head.string, head.end())
    return value is not None and len(value[0]) >= 8 and any(c.isdigit() for c in value[0])


def _is_variable(head: re.Match[str], name: str) -> bool:
    """Whether an assignment is to an environment variable and not, say, a figure in a sentence (``DTYPE=float16``)."""
    if not name.replace("_", "").isalnum() or not name.isupper():
        return False
    if "_" in name or name in _IDENTITY or _BEGINNING.fullmatch(head.string, 0, head.start()):
        return True
    return head.string[max(0, head.start() - 12) : head.start()].endswith(("export ", "declare -x ", "env "))
