"""A reproduction script holds texts that others wrote: they are data in it, and never source."""

import ast
from typing import Any

import pytest

from dtypedoctor.replay.script import CannotBeWrittenError, Claim, script_text

PAYLOAD = "open('owned', 'w')"
HOSTILE = (
    f'""" ; {PAYLOAD} ; """',
    f"''' ; {PAYLOAD} ; '''",
    f'"\n{PAYLOAD}\n"',
    f"\r{PAYLOAD}\r\n{PAYLOAD}",
    f"\x0c{PAYLOAD}\x1c\x85\u2028{PAYLOAD}\u2029{PAYLOAD}",
    f"\\\n{PAYLOAD}",
    "C:\\new\\users\\N{BULLET}\\x\\u12 \\N{nothing of this name}",
    "a null \0 byte, an escape \x1b]0;title\x07, \u202e backwards",
    "a lone surrogate \ud800",
    "-*- coding: utf-7 -*- +AAo-import os",
    "{0.__class__} {} }} {{ %s %(a)s",
    '"' * 7 + "'" * 7 + "\\" * 7,
)


def captured(text: str) -> dict[str, Any]:
    """A description of a call in which every text is this one."""
    value = {"value": text}
    return {
        "leaving": [{"gradients": {"0": text}}],
        "kwargs": {text: value, "plain": {"config": text, "values": {"dict": {text: value}}, "chosen": {text: value}}},
        "args": [{"tensor": text}, {"float": text}, {"dtype": "float16"}, {"device": text}, {"function": text},
                 {"mapping": text, "values": {text: value}}, {"object": text, "values": {"dict": {text: value}}},
                 {"pairs": [[value, value]]}, {"tuple": [value]}, {"list": [value]}],
        "grad": text,
        "autocast": [[text, "float16"]],
        "recipe": {
            "class": text,
            "attributes": {text: value, "opaque": {"config": text, "values": value, "chosen": {}}},
            "parameters": {text: {"packed": text, "state": {text: text}}},
            "buffers": {text: text},
            "children": {text: None},
            "forward": text,
        },
    }  # fmt: skip


def script_of(text: str) -> str:
    """The script with this text in every place that takes one."""
    claim = Claim(title=text, about=(text, text), check=text, limit=0.01, made_with=text)
    return script_text(captured(text), claim, configs=True)


def shape(source: str) -> list[str]:
    """The kinds of all nodes of the source, in order."""
    return [type(node).__name__ for node in ast.walk(ast.parse(source.encode("utf-8", "strict")))]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_text_is_only_data_in_a_script(text: str) -> None:
    """The script compiles, and has the very structure that it has with an ordinary word in place of the text."""
    found = script_of(text)
    compile(found.encode("utf-8"), "repro.py", "exec")
    assert shape(found) == shape(script_of("a word with spaces"))
    names = {node.func.id for node in ast.walk(ast.parse(found)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert "open" not in names


@pytest.mark.parametrize("name", ["load", "hub", "float32.__class__", "float16\n", "", 1, None])
def test_a_dtype_that_is_none_is_not_looked_up_in_torch(name: Any) -> None:
    """Neither among the values of a call nor of its regions: `torch.load` is no dtype."""
    claim = Claim(title="", about=(), check="forward", limit=1, made_with="torch")
    for change in ({"args": [{"dtype": name}]}, {"autocast": [["cpu", name]]}):
        with pytest.raises(CannotBeWrittenError, match="no dtype"):
            script_text(captured("word") | change, claim, configs=True)


def test_a_script_is_redacted() -> None:
    """Tokens, passwords and home directories of a message or a configuration stay on the machine."""
    token = "hf_" + "aB3dE5" * 6
    capture = captured(f"login with {token} in /home/bertrand/models")
    capture["recipe"]["attributes"] = {
        "api_token": {"value": "blue"},
        "options": {"dict": {"password": {"value": "red"}}},
    }
    capture["recipe"] |= {"class": "a:B", "forward": "a:b", "parameters": {}, "buffers": {}, "children": {}}
    capture |= {"leaving": [], "autocast": [], "args": [capture["args"][-1]], "kwargs": {}}
    claim = Claim(
        title=token, about=(f"Bearer {token}", "/home/bertrand/models"), check="forward", limit=1, made_with="torch"
    )
    found = script_text(capture, claim, configs=True)
    for secret in (token, "bertrand", "blue", "'red'"):
        assert secret not in found
