"""Private names of torch stand in one module of the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtypedoctor

PACKAGE = Path(dtypedoctor.__file__).parent
HOME = PACKAGE / "_torch_private.py"
OTHERS = frozenset(
    {
        *("_getframe", "_current_frames", "_exit"),  # of sys and os
        "_run_exitfuncs",  # of atexit
        *("_DummyThread", "_active", "_target", "_bootstrap_inner"),  # of threading
        *("_forkserver", "_forkserver_pid", "_stop"),  # of multiprocessing.forkserver
        *("_replace", "_asdict", "_fields"),  # of named tuples
        *("_attn_implementation", "_experts_implementation"),  # of configurations of transformers
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_model_mapping"),  # of models of transformers
    }
)
"""Private names that are not torch's."""
PATH = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")


def private_names(source: str) -> Iterator[str]:
    """Private names of torch in Python code: imports, attributes, text that names one. Those of ``self`` are the class's own."""
    tree = ast.parse(source)
    own = {name for node in ast.walk(tree) for name in _defined(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if PATH.fullmatch(alias.name))
        elif isinstance(node, ast.ImportFrom):
            paths = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (path for path in paths if PATH.fullmatch(path))
        elif isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in own and ast.unparse(node.value) not in ("self", "cls"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "attrgetter"):
            texts = (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))
            yield from (text for text in texts if any(is_private(part) for part in text.split(".")))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value):
            yield node.value


def is_private(name: str) -> bool:
    """Whether a name is private, and none of :data:`OTHERS`."""
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that the code gives to what is its own: functions, and attributes of ``self``."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import _len_torch_dispatch_stack",
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "torch._C._set_grad_enabled(True)",
        "tensor._version",
        "getattr(scaler, '_scale', None)",
        "'torch._dynamo.convert_frame' in sys.modules",
    ],
)
def test_every_use_of_a_private_name_of_torch_is_found(code: str) -> None:
    """An import, an attribute, an attribute that is asked for by text and a module that is named by text are found."""
    assert list(private_names(code))


def test_one_module_alone_names_private_names_of_torch() -> None:
    """Nothing but ``_torch_private.py`` uses a private name of torch."""
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != HOME and (names := sorted(set(private_names(path.read_text("utf-8")))))
    }
    assert not found
