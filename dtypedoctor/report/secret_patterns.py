"""What secrets look like: tokens of known services, credentials in URLs, and values that stand beside a telling name."""

import re
from collections.abc import Callable

__all__ = ["ALLOWED_VARIABLES", "SECRET", "names_a_secret", "without_secrets"]

SECRET = "<secret>"

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
    r"(?:token|secret|password|passwd|passphrase|pwd|credentials?|cookie|authorization|dsn|sas|"
    r"(?:api|access|account|secret|private|signing|encryption|shared)[-_]?key(?:[-_]?id)?|connection[-_]?string)"
)
_TELLING = re.compile(rf"(?:^|[^a-z]){_NAME}s?$|[a-z0-9]{_NAME}$", re.IGNORECASE)
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
_VALUE = re.compile(rf"""({_QUOTE})(?:(?!\1)[^\n])*\1|(?!\\["'])[^\s"',;&)\]}}|]+""")
_ASSIGNED = re.compile(rf"""(?<![\w.-])((?:{_QUOTE})?)([\w.-]++)\1(\s*+(?:=|:(?!:|//))\s*+)""")
_OPTION = re.compile(r"(?<![\w-])(?P<option>--?[\w-]++)\s++(?!-)")
_BEGINNING = re.compile(r"\s*+")

_SHAPES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", SECRET),
        (r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/\"'<>]+@", rf"\1{SECRET}@"),
        (r"(?i)([?&](?:x-amz-[\w-]+|x-goog-[\w-]+|sig|signature|token|key|auth|access_token|se|sp|sv)=)(?!<)[^&\s\"']+", rf"\1{SECRET}"),
        (r"(?i)\b(bearer|digest|token)(\s+)(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}", rf"\1\2{SECRET}"),
        (r"\b((?i:basic)\s+)(?=[A-Za-z0-9+/]*[A-Z0-9])[A-Za-z0-9+/]{8,}={0,2}(?![\w])", rf"\1{SECRET}"),
        (r"(?<![A-Za-z0-9])eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?", SECRET),
        (r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{16,}", SECRET),
        (r"(?<![A-Za-z0-9])(?:gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,})", SECRET),
        (r"(?<![A-Za-z0-9])[srp]k[-_](?=[\w-]*\d)[\w-]{16,}", SECRET),
        (r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA)[0-9A-Z]{12,}", SECRET),
        (r"(?<![A-Za-z0-9])wandb_v\d+_\w{16,}", SECRET),
        (r"(?<![A-Za-z0-9])xox[a-z]-[\w-]{10,}", SECRET),
        (r"(?<![A-Za-z0-9])AIza[\w-]{30,}", SECRET),
        (r"(?<![A-Za-z0-9])(?:npm_|gsk_|r8_|nvapi-|pypi-|dop_v1_|tok_)(?=[\w-]*\d)[\w-]{16,}", SECRET),
        (r"(?<![A-Za-z0-9/])(?<!commit/)(?<!tree/)(?<!blob/)[0-9a-f]{40}(?![A-Za-z0-9])", SECRET),
        (r"(?<![\w/+=.-])(?=[\w/+]*[a-z])(?=[\w/+]*[A-Z])(?=[\w/+]*\d)[A-Za-z0-9/+]{40}(?![\w/+=])", SECRET),
        (r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]+\.)+[A-Za-z]{2,}\b", "<email>"),
    )
)  # fmt: skip


def names_a_secret(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret (``HF_TOKEN``, ``--api-key``, but not ``pad_token``)."""
    return bool(_TELLING.search(name)) and not _VOCABULARY.search(name)


def without_secrets(text: str) -> str:
    """``text`` with every secret replaced by a word in angle brackets; doing it twice changes nothing more."""
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    text = _without_values(text, _ASSIGNED, _assigns_a_secret)
    return _without_values(text, _OPTION, lambda head: names_a_secret(head["option"]))


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
        value = _VALUE.match(head.string, head.end()) if running_text else None
        return not running_text or (value is not None and len(value[0]) >= 8 and any(c.isdigit() for c in value[0]))
    return "=" in sign and _is_variable(head, name) and name not in ALLOWED_VARIABLES


def _is_variable(head: re.Match[str], name: str) -> bool:
    """Whether an assignment is to an environment variable and not, say, a figure in a sentence (``DTYPE=float16``)."""
    if not name.replace("_", "").isalnum() or not name.isupper():
        return False
    if "_" in name or name in _IDENTITY or _BEGINNING.fullmatch(head.string, 0, head.start()):
        return True
    return head.string[max(0, head.start() - 12) : head.start()].endswith(("export ", "declare -x ", "env "))
