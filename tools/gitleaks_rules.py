"""Makes ``dtypedoctor/redaction/gitleaks.json`` of gitleaks' table of rules: what tokens of some two hundred services look like.

Usage: python tools/gitleaks_rules.py CHECKOUT_OF_GITLEAKS

Go's expressions are written as Python's: a flag that holds from its place on becomes a group, a class of POSIX its letters.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "dtypedoctor" / "redaction" / "gitleaks.json"
LEFT_OUT = {
    "generic-api-key": "it looks for names such as key and token, of which code for training is full; names are judged by secrets.py",
    "kubernetes-secret-yaml": "a whole document of YAML",
    "curl-auth-user": "commands and their options are judged by arguments.py, and this one takes Python's engine long",
    "curl-auth-header": "the same",
}
POSIX = {"[:alnum:]": "A-Za-z0-9", "[:alpha:]": "A-Za-z", "[:digit:]": "0-9", "[:xdigit:]": "0-9A-Fa-f"}
END = r"""(?:[\x60'"\s;]|\\[nr]|$)"""
"""What has to follow a token in source code. In a sentence a comma, a bracket or a full stop may."""
PREFIX = r"[\w.-]{0,50}?"
"""What may stand before a telling name: of no use where only the secret itself is looked for, and slow."""
_TOKEN = re.compile(r"\\.|\[(?:\\.|\[:\w+:\]|[^\]\\])+\]|\(\?[a-z-]+\)|\(\?[^()\s]*?:|\(\?P?<\w+>|[()|]|.", re.DOTALL)


def python_pattern(pattern: str) -> str:
    """The expression as Python has it."""
    opened: list[list[str]] = [[]]  # for each group around this place the flags that were switched on in it
    written: list[str] = []
    for token in _TOKEN.findall(pattern):
        if re.fullmatch(r"\(\?[a-z-]+\)", token):
            opened[-1].append(token[:-1] + ":")
            written.append(token[:-1] + ":")
        elif token == "|":
            written += [")" * len(opened[-1]), "|", *opened[-1]]
        elif token == ")":
            written.append(")" * (len(opened.pop()) + 1))
        else:
            if token.startswith("("):
                opened.append([])
            written.append(_class(token) if token.startswith("[") else {"\\z": "\\Z"}.get(token, token))
    return "".join(written) + ")" * len(opened[0])


def _class(token: str) -> str:
    for name, letters in POSIX.items():
        token = token.replace(name, letters)
    return "[" + token[1:-1].replace("[", "\\[").replace("\\\\[", "\\[") + "]"


def rules(table: str) -> list[dict[str, object]]:
    """The rules that look at text, each with its words in small letters, of which one stands in whatever it finds."""
    found = []
    for rule in tomllib.loads(table)["rules"]:
        if "regex" not in rule or rule["id"] in LEFT_OUT:
            continue
        pattern = python_pattern(rule["regex"].replace(PREFIX, "", 1).replace(END, "(?![A-Za-z0-9])"))
        re.compile(pattern, re.ASCII)
        found.append(
            {
                "id": rule["id"],
                "regex": pattern,
                "group": rule.get("secretGroup", 0),
                "keywords": rule.get("keywords", []),
            }
        )
    return found


def main(checkout: Path) -> None:
    """Writes the file."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    show = [subprocess.run([*git, "show", f"HEAD:{name}"], capture_output=True, text=True, check=True).stdout
            for name in ("config/gitleaks.toml", "LICENSE")]  # fmt: skip
    document = {
        "source": "https://github.com/gitleaks/gitleaks",
        "commit": commit,
        "license": show[1],
        "rules": rules(show[0]),
    }
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(document['rules'])} rules in {TARGET}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
