"""What is quoted of an exception's message: its template, without the data of a training that was put into it.

Where the program wrote the message, the template stands in its source, and only what fills it can be data. Where C code did, as for all
of torch's kernels, or where no template is found, what looks like data goes: long literals, containers, printed tensors. Numbers, dtypes,
shapes and names stay. The whole message is on the program's own standard error.
"""

import ast
import dis
import linecache
import re
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType, TracebackType

from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.secrets import masked

LONGEST = 2000
"""Characters of a message that are kept."""
_READ = 20_000
ELIDED = "…"
_NAME = r"[A-Za-z_<][\w.:<>*/\[\]-]*"
_HARMLESS = re.compile(
    rf"(?:torch\.Size)?[\[(]?\s*(?:[-+]?\d[\d.xe+-]*|None|{_NAME})(?:\s*(?:,|x|!=|==|and|or)\s*(?:[-+]?\d[\d.xe+-]*|None|{_NAME}))*,?\s*[\])]?"
)
"""Numbers, shapes, dtypes and names, one or several."""
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
_FLOAT = re.compile(r"-?\d+\.\d*(?:e[-+]?\d+)?|nan|inf")
_QUOTED = re.compile(r"""(?<![\w])([bru]{0,2})('(?:[^'\\\n]|\\.){0,4000}'|"(?:[^"\\\n]|\\.){0,4000}")(?!\w)""")
_INNERMOST = re.compile(r"(\b\w+)?([(\[{])([^()\[\]{}]*)([)\]}])")
_PRINTED = frozenset({
    "tensor", "Tensor", "array", "Parameter", "DataFrame", "Series", "Dataset", "dict", "OrderedDict", "defaultdict", "BatchEncoding",
})  # fmt: skip
_MOST_NUMBERS, _LONGEST_NAME, _LONGEST_HOLE, _LEAST_TEMPLATE, _FRAMES = 8, 200, 60, 6, 4
_ABOUT_DTYPES = re.compile(
    r"\b(?:dtype|c10::|torch\.|[Hh]alf|bfloat16|float16|float32|BFloat16|scalar type|CUDA|cuBLAS|overflow|non-?finite|[Nn]a[Nn]|inf)\b"
)
_METADATA = re.compile(r"(?:'(?:shape|dtype|device)': [^'\"]{1,100}(?:'\w+'[\2\4\6])?(?:, )?)+")
"""What torch's checkpointing says of a tensor; brackets in it are marked already."""
_IDENTIFIER = re.compile(r"[\w.:*/<>@+-]+")


_TIME = r"\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?"
_LENGTH = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_UNIT = r"(?:(?:[nuµm]?s|secs?|seconds?|min(?:ute)?s?|h|hours?)\b(?!/)|\w+/s\b|s/\w+)"
_VALUE = rf"\s*[:=]?\s*(?:(?:nan|inf|none|tensor)\b|[-+.]?(?>{_LENGTH})(?!\s?{_UNIT}))"
"""What follows the name of a value, ``min -2.0``, and not a unit: a number that is no length of time itself, as it is in ``1 min 30 s``."""
_VOLATILE = tuple(
    (re.compile(pattern, re.IGNORECASE), instead)
    for pattern, instead in (
        (r"(?<![\w/.])/(?:tmp|var/tmp|dev/shm|run/user/\d+)/[^\s'\"`:,;()\[\]<>]+", "<temporary>"),
        (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<id>"),
        (r"\b0x[0-9a-f]+", "0x"),
        (rf"\b\d{{4}}-\d\d-\d\d(?:[T _]{_TIME})?(?:Z\b|[+-]\d\d:?\d\d\b)?|\b\d{{8}}[-_]\d{{4,6}}\b", "<time>"),
        (
            r"((?:\b(?:\d{1,3}\.){3}\d{1,3}|\blocalhost|//[\w.-]+|\[[0-9a-f:]*:[0-9a-f:]*\]|\[(?:\d{1,3}\.){3}\d{1,3}\]):)\d{1,5}\b",
            r"\1<port>",
        ),
        (rf"(?<![\w.:]){_TIME}(?![\w:])", "<time>"),
        (r"\b((?:ports?|p?pid|tid|(?:process|thread)(?: id)?)(?:'?\s*[=:#(]\s*|\s+))\d+\b", r"\1<number>"),
        (rf"(?<![\w.]){_LENGTH}({_UNIT}|[ \t]{_UNIT}(?!{_VALUE}))", r"<duration>\1"),
        (r"(?<![\w.])1[4-9]\d{8}(?:\.(?!0+\b)\d+|(?:\d{3}|\d{6}|\d{9})(?:\.\d+)?)\b(?!\.\d)", "<time>"),
    )
)
"""What differs from process to process though nothing else does: temporary files, identifiers, addresses, times, ports, processes."""


def without_volatile(text: str, process: int = 0) -> str:
    """``text`` with what no two processes have in common replaced, so that the texts of two runs can be compared.

    Args:
        text: a message, or what a program prints.
        process: its number; one of a few digits is replaced only where the text says what it is.
    """
    if process > 999:
        text = re.sub(rf"(?<![\w.]){process}(?![\w.]\w)", "<process>", text)
    for pattern, instead in _VOLATILE:
        text = pattern.sub(instead, text)
    return text


def message_of(error: BaseException) -> str:
    """The message of an exception that was raised, without data and secrets; empty where it has none, or fails to say it."""
    with contained() as failed:  # it runs code of the exception's class
        text = str(error)[:_READ]
    if failed.error is not None:
        return ""
    with contained() as failed:
        quoted = _of_source(text, error.__traceback__)
    if failed.error is not None:  # whatever the program has made of its source, its message is judged by its looks
        quoted = elided(text)
    return masked(quoted)[:LONGEST]


def elided(text: str) -> str:
    """``text`` without what looks like data in it."""
    text = _QUOTED.sub(_quoted, text)
    while True:
        shorter = _INNERMOST.sub(_bracketed, text)
        if shorter == text:
            break
        text = shorter
    return text.translate(_UNMARKS)


def _quoted(match: re.Match[str]) -> str:
    inside = match[2][1:-1]
    if len(inside) <= _LONGEST_NAME and (
        _IDENTIFIER.fullmatch(inside) or _HARMLESS.fullmatch(inside) or not inside.strip()
    ):
        return match[0]
    return match[1] + match[2][0] + ELIDED + match[2][0]


_MARKS = str.maketrans({"(": "\1", ")": "\2", "[": "\3", "]": "\4", "{": "\5", "}": "\6"})
_UNMARKS = {ord(mark): sign for sign, mark in _MARKS.items()}


def _bracketed(match: re.Match[str]) -> str:
    """A pair of brackets that holds no other: kept, and marked as done, or without its content."""
    before, opening, inside, closing = match[1] or "", match[2], match[3], match[4]
    kept = inside if _is_harmless(before, opening, inside) else ELIDED
    return before + (opening + kept + closing).translate(_MARKS)


def _is_harmless(before: str, opening: str, inside: str) -> bool:
    if inside.strip() in ("", ELIDED):
        return True
    if opening == "{" and ":" in inside:
        return _METADATA.fullmatch(inside) is not None
    if before in _PRINTED or len(inside) > 600:
        return False
    if opening != "(" and not {"'", '"'}.isdisjoint(inside) and not _is_names(inside):
        return False
    return len(_NUMBER.findall(inside)) <= _MOST_NUMBERS and len(_FLOAT.findall(inside)) < 3


def _is_names(inside: str) -> bool:
    """Whether a list holds names only, as a list of modules or of missing keys does."""
    return all(
        _IDENTIFIER.fullmatch(item.strip().strip("'\"")) and len(item) <= 100
        for item in inside.split(",")
        if item.strip()
    )


def _of_source(text: str, traceback: TracebackType | None) -> str:
    frames: list[FrameType] = []
    instruction = 0
    while traceback is not None:
        frames.append(traceback.tb_frame)
        instruction, traceback = traceback.tb_lasti, traceback.tb_next
    # What a function raises that is called in C has no source
    if not frames or dis.opname[frames[-1].f_code.co_code[instruction]] not in ("RAISE_VARARGS", "RERAISE"):
        return elided(text)
    if frames[-1].f_globals.get("__name__", "").partition(".")[0] == "torch":
        return elided(text)  # its messages tell of tensors by shape and dtype, which a detector needs
    last = frames[-_FRAMES:]
    for frame in reversed(last):
        for template in _templates(frame.f_code):
            found = re.fullmatch(template, text, re.DOTALL)
            if found is not None:
                return _filled(text, found)
    return elided(text) if _ABOUT_DTYPES.search(text) else elided(_without_locals(text, last))


@lru_cache(maxsize=64)
def _templates(code: CodeType) -> tuple[str, ...]:
    """Expressions for the texts that a function's source makes, those with the most text of their own first."""
    lines = linecache.getlines(code.co_filename)
    if not lines or len(lines) > 50_000:
        return ()
    tree = ast.parse("".join(lines))
    scopes = [node for node in ast.walk(tree) if _begins_at(node, code.co_firstlineno)] or [tree]
    found = {made for scope in scopes for node in ast.walk(scope) if (made := _template(node)) is not None}
    return tuple(template for _, template in sorted(found, reverse=True))


def _begins_at(node: ast.AST, line: int) -> bool:
    """Whether a node is a function whose first line, that of a decorator included, is this one."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    first: int = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return first == line


def _template(node: ast.AST) -> tuple[int, str] | None:
    """How much text of its own a node has, and the expression for what it makes; None where it makes no text."""
    if isinstance(node, ast.JoinedStr):
        return _of_parts([str(part.value) if isinstance(part, ast.Constant) else None for part in node.values])
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # a text and the holes that ``%`` or ``format`` fill in it
        parts: list[str | None] = []
        for piece in re.split(r"(%(?:\(\w+\))?[-+ #0]*[\d.]*[diouxXeEfFgGcrsa]|\{[^{}]*\})", node.value):
            hole = re.fullmatch(r"%.*[diouxXeEfFgGcrsa]|\{[^{}]*\}", piece) is not None
            parts.append(None if hole else piece)
        return _of_parts(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined(node)
    return None


def _of_parts(parts: Sequence[str | None]) -> tuple[int, str] | None:
    """The same for a text in parts, of which None is a hole; None where too little of it is text."""
    own = sum(len(part) for part in parts if part is not None)
    if own < _LEAST_TEMPLATE:
        return None
    return own, "".join("(.*)" if part is None else re.escape(part) for part in parts)


def _joined(node: ast.BinOp) -> tuple[int, str] | None:
    """Two texts that are added; what is no text in the source is a hole."""
    sides = [_template(side) for side in (node.left, node.right)]
    if sides == [None, None]:
        return None
    return sum(side[0] for side in sides if side), "".join(side[1] if side else "(.*)" for side in sides)


def _filled(text: str, found: re.Match[str]) -> str:
    """The text with each hole judged by itself."""
    parts, at = [], 0
    for number in range(1, len(found.groups()) + 1):
        begin, end = found.span(number)
        hole = found[number]
        kept = len(hole) <= _LONGEST_HOLE and (_HARMLESS.fullmatch(hole) or _IDENTIFIER.fullmatch(hole))
        parts += [text[at:begin], hole if kept or not hole else elided(hole) if len(elided(hole)) <= 3 else ELIDED]
        at = end
    return "".join(parts) + text[at:]


def _without_locals(text: str, frames: list[FrameType]) -> str:
    """The text without the values of texts that the functions on the stack have."""
    for frame in frames:
        for value in list(frame.f_locals.values()):
            if type(value) is str and len(value) >= 12 and value in text and not _IDENTIFIER.fullmatch(value):
                text = text.replace(value, ELIDED)
    return text[:600]
