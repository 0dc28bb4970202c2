"""What is secret in a text: tokens, credentials in URLs and headers, values that stand beside a telling name, and the values that are secret
in this process: from its environment, its arguments and the user's netrc. Those are taken where a run is recorded, so that what was secret
there is masked in whatever is written, whoever renders it later.

What tokens look like, whoever issued them, says the table of https://github.com/gitleaks/gitleaks (MIT), made by
``tools/gitleaks_rules.py``, beside a rule for letters and digits that no name is made of. A rule is compiled when a text first
holds one of its words, so that a process which has nothing to hide pays a search for words and nothing else.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from dtypedoctor.unpatched import from_json, to_json

SECRET = "<secret>"

_TABLE = Path(__file__).with_name("gitleaks.json")

_WORD = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9][A-Za-z0-9_+=-]{18,}")
"""What may be a token of a service that no table knows."""
_PREFIX = re.compile(r"[A-Za-z]{2,8}[0-9]?[-_](?=[A-Za-z0-9]{8})")
"""How many services begin their tokens."""
_HEX = re.compile(
    r"(?<![A-Za-z0-9])(?!sha|md5|blob|tree|commit|rev|git)[a-z][a-z0-9]{1,8}[-_](?:[a-z0-9]{1,6}[-_]){0,2}[0-9a-f]{32,}(?![A-Za-z0-9])"
)
"""Tokens with a prefix whose rest is hexadecimal."""
_RUN = re.compile(r"[a-z]{3,}")
_PIECE = 1 << 14
"""Characters that the rules look at together; their engine takes quadratic time for some texts."""
_BREAK = re.compile(r"\s")


def without_shapes(text: str) -> str:
    """``text`` with every token in it replaced."""
    return "".join(map(_without, _pieces(text)))


def _pieces(text: str) -> Iterator[str]:
    """The text, cut at spaces where it is long."""
    while len(text) > _PIECE:
        at = next((m.start() for m in _BREAK.finditer(text, _PIECE // 2, _PIECE)), _PIECE)
        yield text[:at]
        text = text[at:]
    yield text


def _without(text: str) -> str:
    low = text.lower()
    for number in {number for word, number in _words() if word in low}:
        pattern, group = _rule(number)
        text = pattern.sub(lambda match, group=group: _masked(match, group), text)  # type: ignore[misc]
    text = _HEX.sub(SECRET, text)
    return _WORD.sub(lambda match: SECRET if _is_random(match[0]) else match[0], text)


def _masked(match: re.Match[str], group: int) -> str:
    """The match without its secret: the group that holds it, else the first that holds anything, else all."""
    group = group or next((number for number, held in enumerate(match.groups(), start=1) if held), 0)
    begin, end = match.span(group)
    return match.string[match.start() : begin] + SECRET + match.string[end : match.end()]


@cache
def _document() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = from_json(_TABLE.read_bytes())["rules"]
    return rules


@cache
def _words() -> tuple[tuple[str, int], ...]:
    """A word of which whatever a rule finds holds one, and the rule's number."""
    return tuple((word, number) for number, rule in enumerate(_document()) for word in rule["keywords"])


@cache
def _rule(number: int) -> tuple[re.Pattern[str], int]:
    rule = _document()[number]
    return re.compile(rule["regex"], re.ASCII), int(rule["group"])


def _is_random(word: str) -> bool:
    """Whether letters and digits follow each other as nobody would write them.

    Of 56,278 long names in the sources of torch, transformers, peft, trl and bitsandbytes one is taken for random. Of random texts 12%
    are not at 32 characters and 0.5% at 64; with a prefix, as most services have, 6% and 1%.
    """
    look = _Look(word)
    if len(look.kinds) < 20 or min(look.capitals, look.small) < 2:
        return False
    if prefix := _PREFIX.match(word):
        body = _Look(word[prefix.end() :])
        if len(body.kinds) >= 16 and min(body.capitals, body.small, body.digits + 1) >= 2:
            return body.readable < 0.36 and body.turns >= 0.4
    # Digits and changes of case stand where no word has them
    readable, turns = (0.4, 0.42) if look.digits >= 4 else (0.22, 0.45)
    return look.digits >= 2 and look.readable < readable and look.turns >= turns


class _Look:
    """Figures of a word: its letters and digits by kind, the share that stands in runs of small letters, and that of changes of kind."""

    def __init__(self, word: str) -> None:
        self.kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in word if c.isalnum()]
        self.digits, self.capitals, self.small = (self.kinds.count(kind) for kind in "dul")
        self.readable = sum(map(len, _RUN.findall(word))) / max(1, len(self.kinds))
        turns = sum(a != b for a, b in zip(self.kinds, self.kinds[1:], strict=False))
        self.turns = turns / max(1, len(self.kinds) - 1)


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
    r"[-+]?\d{1,6}(?:\.\d+)?(?:e[-+]?\d+)?|true|false|on|off|yes|no|none|null|auto|all|any|default|debug|info|<[^<>]*>",
    re.IGNORECASE,
)
"""Values that tell nothing: small numbers, switches, and what a former redaction has left."""

_QUOTES = ("'\"'\"'", '\\"', "\\'", '"', "'")
"""What may stand around names and values: a quote as a shell (``shlex.join``) or a string literal writes it in another, or itself."""
_QUOTE = "|".join(map(re.escape, _QUOTES))
_VALUE = re.compile(
    rf"""(?:[\w.]{{0,100}}[({{\[][^(){{}}\[\]\n]{{0,2000}}[)}}\]]\w{{0,100}})|({_QUOTE})(?:(?!\1)[^\n])*\1|(?!\\["'])[^\s"',;&)\]}}|]+"""
)
_ASSIGNED = re.compile(rf"""(?<![\w.-])((?:{_QUOTE})?)([\w.-]++)\1((?:(?<=["'])\s*+\])?\s*+(?:=|:(?!:|//))\s*+)""")
_OPTION = re.compile(r"(?<![\w-])(?P<option>--?[\w-]++)\s++(?!-)")
_PAIR = re.compile(rf"""({_QUOTE})(?P<option>[\w.-]{{2,60}})\1\s*+,\s*+(?={_QUOTE})""")
"""A name and its value as two items of a tuple or a list."""
_BEGINNING = re.compile(r"\s*+")
_CALL = re.compile(r"torch(?:\.[A-Za-z_]+)+\([A-Za-z_.]*[,)]")
"""What a sampled token is assigned in a line of code: ``next_tokens = torch.multinomial(probs, …)``."""
_ARITHMETIC = re.compile(r"-\(")
"""What no value begins with: ``BCE = -(x * …``."""

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
        if value is None or _TRIVIAL.fullmatch(value[0].strip("\"'\\")) or _is_code(head, text, at):
            continue
        quote = value[1] or ""
        parts += [text[done:at], f"{quote}{SECRET}{quote}"]
        done = at = value.end()
    return "".join(parts) + text[done:]


def _is_code(head: re.Match[str], text: str, at: int) -> bool:
    """Whether a result of torch or of arithmetic is assigned, and not a value."""
    sampled = head[0].endswith("= ") and re.fullmatch(r"(?:next_)?tokens?", head[2]) is not None
    return (sampled and _CALL.match(text, at) is not None) or _ARITHMETIC.match(text, at) is not None


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
    if "_" in name or name in _IDENTITY:
        return True
    # A shell puts no space before the sign: ``K = x @ weight`` is code
    if not head[3][0].isspace() and _BEGINNING.fullmatch(head.string, 0, head.start()):
        return True
    return head.string[max(0, head.start() - 12) : head.start()].endswith(("export ", "declare -x ", "env "))


_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""Variables of the shell that sound like passwords; paths are shortened wherever they stand."""
_SHORTEST = 4
_PLAIN = re.compile(
    r"(?:bf|fp|tf|u?int|float|bfloat)\d+|true|false|yes|none|null|auto|cuda|cpu|main|default|debug|info|[./].*|\d{1,3}",
    re.IGNORECASE,
)
"""Values that would take words out of a report which nobody means to hide: dtypes, switches, paths."""
_PASSWORD_OPTIONS = frozenset({"-p", "--pass"})
_USER_OPTIONS = frozenset({"-u", "--user"})
_NETRC_LIMIT = 1 << 16
_NETRC = re.compile(r"\bpassword\s+(\S+)")


class Literals:
    """Values that are replaced wherever they stand, as they are, quoted as in a URL, or inside of a literal of Python's or JSON's.

    Args:
        values: the secrets; those that are too short, or words that a report needs, are passed over.
    """

    def __init__(self, values: Iterator[str]) -> None:
        forms = set()
        for value in values:
            if len(value) >= _SHORTEST and not _PLAIN.fullmatch(value):
                forms |= {value, repr(value)[1:-1], to_json(value)[1:-1], quote(value, safe="")}
        patterns = []
        for form in sorted(forms, key=len, reverse=True):
            # A short one, or a number, is no part of a longer word
            is_whole = len(form) < 8 or form.isdigit()
            patterns.append(rf"(?<![A-Za-z0-9]){re.escape(form)}(?![A-Za-z0-9])" if is_whole else re.escape(form))
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def are_in(self, text: str) -> bool:
        """Tell whether a text, or a line of JSON, holds one."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def masked(self, text: str) -> str:
        """``text`` without them."""
        return self._pattern.sub(SECRET, text) if self._pattern is not None else text


def masked(text: str) -> str:
    """``text`` without anything that is secret in this process or looks like a token or a password anywhere."""
    return _without_literals(text, literals_of_process())


def masked_by(literals: Literals) -> Callable[[str], str]:
    """The same for many texts, by values that are looked up once."""
    return lambda text: _without_literals(text, literals)


@lru_cache(maxsize=4096)
def _without_literals(text: str, literals: Literals) -> str:
    return without_secrets(literals.masked(text))


def literals_of_process() -> Literals:
    """Those of the present environment, which a program may have added to since it began."""
    global _recent
    _recent = _literals(tuple(sorted(os.environ.items())), tuple(sys.argv))
    return _recent


def recent_literals() -> Literals:
    """Those of the environment when it was last looked at: for what is asked thousands of times a second."""
    return _recent if _recent is not None else literals_of_process()


_recent: Literals | None = None


@lru_cache(maxsize=2)
def _literals(environment: tuple[tuple[str, str], ...], arguments: tuple[str, ...]) -> Literals:
    return Literals(iter([*_of_environment(dict(environment)), *_of_arguments(arguments), *_of_netrc()]))


def _of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if name not in _FOLDERS and names_a_secret(name):
            yield value
        elif "://" in value and (password := _password_of(value)):
            yield password


def _password_of(url: str) -> str:
    try:
        return urlsplit(url).password or ""
    except ValueError:
        return ""


def _of_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Values behind telling options; what has the shape of a token is found without."""
    before = ""
    for argument in arguments:
        option, _, value = argument.partition("=")
        if before and is_password(before, argument):
            yield argument.rpartition(":")[2] if before in _USER_OPTIONS else argument
        elif value and option.startswith("-") and (names_a_secret(option) or option in _PASSWORD_OPTIONS):
            yield value
        before = argument


def is_password(option: str, value: str) -> bool:
    """Whether what stands behind an option of a command is secret: ``--token X``, ``-p X``, ``-u user:X``."""
    if not option.startswith("-") or value.startswith("-"):
        return False
    if option in _USER_OPTIONS:
        return ":" in value and "://" not in value
    return names_a_secret(option) or (
        option in _PASSWORD_OPTIONS and not _PLAIN.fullmatch(value) and not value.isdigit()
    )


def _of_netrc() -> Iterator[str]:
    with contextlib.suppress(OSError, ValueError):
        path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from _NETRC.findall(file.read(_NETRC_LIMIT))
