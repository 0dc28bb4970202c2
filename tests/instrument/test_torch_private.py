"""What this package needs of torch beyond its public names, asked of the torch that is installed."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from dtypedoctor import _torch_private as private

HOME = Path(private.__file__)


def clamped() -> Any:
    """The autograd node of a clamp."""
    return torch.ones(1, requires_grad=True).exp().clamp(0.5, 1.5).grad_fn


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def context() -> Any:
    """The context of a custom function that ``custom_fwd`` is around, which is its node."""
    return Doubled.apply(torch.ones(1, requires_grad=True)).grad_fn


def jagged() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def of_module(name: str) -> Callable[[], Any]:
    return lambda: import_module(name)


def sharded(name: str) -> Callable[[], Any]:
    """A module of FSDP2, which is imported for the test alone."""
    return of_module(f"torch.distributed.fsdp._fully_shard.{name}")


HOLDERS: dict[str, Callable[[], Any]] = {
    "_version": lambda: torch.ones(1),
    "_base": lambda: torch.ones(1),
    "_is_zerotensor": lambda: torch.ones(1),
    "_backward_hooks": lambda: torch.ones(1),
    "_register_hook_dict": clamped,
    "_sequence_nr": clamped,
    "_input_metadata": clamped,
    "_saved_self": clamped,
    "_saved_min": clamped,
    "_saved_max": clamped,
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_new_with_weak_ptr": lambda: torch.UntypedStorage,
    "_is_torch_function_all_disabled": lambda: torch._C,
    "_get_current_function_mode_stack": of_module("torch.overrides"),
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_parameters": lambda: nn.Linear(1, 1),
    "_buffers": lambda: nn.Linear(1, 1),
    "_modules": lambda: nn.Linear(1, 1),
    "_non_persistent_buffers_set": lambda: nn.Linear(1, 1),
    "_apply": lambda: nn.Module,
    "_call_impl": lambda: nn.Module,
    "_compiled_call_impl": lambda: nn.Module,
    "_orig_mod": lambda: torch.compile(nn.Linear(1, 1)),
    "_torchdynamo_disable": lambda: torch.compiler.disable(clamped),
    "_values": lambda: torch.ones(1).to_sparse(),
    "_lengths": jagged,
    "_should_skip_dynamo": lambda: torch.utils._python_dispatch.TorchDispatchMode,
    "_enabled": lambda: torch.autocast("cpu"),
    "_fwd_used_autocast": context,
    "_scale": lambda: torch.amp.GradScaler("cpu"),
    "_init_scale": lambda: torch.amp.GradScaler("cpu"),
    "_growth_factor": lambda: torch.amp.GradScaler("cpu"),
    "_backoff_factor": lambda: torch.amp.GradScaler("cpu"),
    "_per_optimizer_states": lambda: torch.amp.GradScaler("cpu"),
    "_step_supports_amp_scaling": lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True),
    "_lazy_init_scale_growth_tracker": lambda: torch.amp.GradScaler,
    "_op_dk": lambda: torch.ops.aten.linear.default,
    "_dispatch_tls_local_exclude_set": lambda: torch._C,
    "_dispatch_tls_local_include_set": lambda: torch._C,
    "_dispatch_tls_set_dispatch_key_included": lambda: torch._C,
    "_ForceDispatchKeyGuard": lambda: torch._C,
    "_destroy": lambda: torch.library.Library,
    "_defs": lambda: torch.library,
    "_qualified_op_name": lambda: torch.ops.aten.add,
    "_start_coalescing": lambda: dist.ProcessGroup,
    "_end_coalescing": lambda: dist.ProcessGroup,
    "_get_fsdp_state": lambda: sharded("_fully_shard")().FSDPModule,
    "_get_current_function_mode": lambda: torch.overrides,
    "_backward_cls": lambda: torch.autograd.Function,
    "_get_current_dispatch_mode_stack": lambda: torch.utils._python_dispatch,
    "_pop_mode": lambda: torch.utils._python_dispatch,
    "_push_mode": lambda: torch.utils._python_dispatch,
    "_disable_current_modes": lambda: torch.utils._python_dispatch,
    "_has_any_global_hook": lambda: nn.modules.module,
    "_global_forward_pre_hooks": lambda: nn.modules.module,
    "_global_forward_hooks": lambda: nn.modules.module,
    "_global_backward_pre_hooks": lambda: nn.modules.module,
    "_global_backward_hooks": lambda: nn.modules.module,
    "_global_forward_hooks_with_kwargs": lambda: nn.modules.module,
    "_callback_from_stance": of_module("torch._dynamo.eval_frame"),
    "_foreach_copy_": lambda: torch,
    "_foreach_norm": lambda: torch,
    "_to_copy": lambda: torch.ops.aten,
    "_fused_sdp_choice": lambda: torch,
    "_forward_pre_hooks": lambda: nn.Linear(1, 1),
    "_forward_hooks": lambda: nn.Linear(1, 1),
    "_enable_profiler": lambda: torch.autograd.profiler,
    "_disable_profiler": lambda: torch.autograd.profiler,
    "_execution_engine": lambda: torch.autograd.Variable,
}
"""Something that has the attribute, by the attribute."""

WRITTEN_IN: dict[str, Callable[[], Any]] = {
    "_local_tensor": of_module("torch.distributed.tensor._api"),
    "_module_fqn": sharded("_fsdp_param_group"),
    "_mp_policy": sharded("_fsdp_state"),
    "_cast_forward_inputs": sharded("_fsdp_state"),
    "_is_fsdp_managed_module": of_module("torch.distributed.fsdp._dynamo_utils"),
    "_fsdp_use_orig_params": of_module("torch.distributed.fsdp._dynamo_utils"),
}
"""The module whose code gives an object the attribute, by the attribute: such objects need several processes."""

FILES = {"_fsdp_param_group.py": sharded("_fsdp_param_group")}
"""Modules by the names of their files."""

PARTS = frozenset({"_C", "_ops", "_saved_"})
"""Parts of the paths and names that are tried whole."""


PRIVATE = re.compile(r"(\w+\.)*_[a-zA-Z]\w*(\.\w+)*")


def slots(tree: ast.Module) -> set[str]:
    """Attributes of the module's own classes, which are no names of torch."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    named = [node for cls in classes for node in cls.body if isinstance(node, ast.Assign)]
    return {
        name for node in named if ast.unparse(node.targets[0]) == "__slots__" for name in ast.literal_eval(node.value)
    }


def texts() -> Iterator[str]:
    """Attributes and paths with a component that begins with an underscore, in the module that holds them all."""
    tree = ast.parse(HOME.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr
        elif isinstance(node, ast.FunctionDef) and node.name == "_should_skip_dynamo":
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
            yield node.value


def imported() -> Iterator[tuple[str, str]]:
    """What that module imports of private modules of torch, inside of its functions too."""
    for node in ast.walk(ast.parse(HOME.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from ((str(node.module), alias.name) for alias in node.names)


NAMES = sorted(set(texts()) - PARTS - slots(ast.parse(HOME.read_text("utf-8"))))
ATTRIBUTES = [name for name in NAMES if name in HOLDERS]
MODULES = [name for name in NAMES if name.startswith("torch.")]
PATHS = [name for name in NAMES if name.startswith(("_C.", "nn.")) and name != "_C._cuda_getCurrentRawStream"]
"""Paths below torch; a build without CUDA has no streams."""


def test_every_private_name_of_torch_is_tried_by_a_test() -> None:
    """Every private name in the module is tried by one of the tests below."""
    tried = {*ATTRIBUTES, *MODULES, *PATHS, *WRITTEN_IN, *FILES, "_C._cuda_getCurrentRawStream"}
    assert sorted(set(NAMES) - tried) == []
    assert sorted({*HOLDERS, *WRITTEN_IN, *FILES} - set(NAMES) - {"_saved_self", "_saved_min", "_saved_max"}) == []


def test_no_private_name_is_missing_from_the_installed_torch() -> None:
    """Nothing goes unwatched on the torch that is installed because a private name of it is gone."""
    assert private.LOST == {}


@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_of_torch_has_the_private_attribute(name: str) -> None:
    """The object has the attribute."""
    if name == "_should_skip_dynamo" and "__init_subclass__" not in vars(private.DispatchMode.__base__):
        pytest.skip("this torch wraps no mode, so it need not ask (2.9.1)")
    assert hasattr(HOLDERS[name](), name)


@pytest.mark.parametrize("path", PATHS)
def test_path(path: str) -> None:
    """It stands where it is looked for below torch."""
    assert attrgetter(path)(torch) is not None


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    """The module can be imported, and those that hold classes of tensors hold them."""
    module = import_module(name)
    for holder, cls in private._CLASSES.values():
        assert holder != name or hasattr(module, cls)


@pytest.mark.parametrize(("module", "name"), sorted(imported()))
def test_import(module: str, name: str) -> None:
    """The module has what is imported of it."""
    assert hasattr(import_module(module), name)


@pytest.mark.parametrize("name", WRITTEN_IN)
def test_torch_gives_its_objects_the_private_attribute(name: str) -> None:
    """The code that makes such objects gives them the attribute."""
    if name == "_cast_forward_inputs" and torch.__version__ < "2.12":
        pytest.skip("this torch casts inside of another function; cast_for_unit does it itself (2.9.1, 2.11.0)")
    assert name in inspect.getsource(WRITTEN_IN[name]())


@pytest.mark.parametrize("name", FILES)
def test_file(name: str) -> None:
    """The code stands in a file of that name."""
    assert Path(str(FILES[name]().__file__)).name == name


def test_a_lost_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is gone gives its fallback, and what is lost for it is kept."""
    monkeypatch.setattr(private, "LOST", {})
    assert private._optional("_C._gone", "the moon", 3) == 3
    assert private.LOST == {"the moon": "_C._gone"}


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", None), ("2.15.0", None), ("2.16.0.dev20270101", "2.16"), ("3.0.0a0", "3.0")]
)
def test_a_torch_newer_than_any_that_was_tested_is_told_apart(version: str, release: str | None) -> None:
    """Only minor releases count: nightlies and release candidates of a tested one are not told."""
    assert private.untested_release(version) == release


@pytest.mark.parametrize("side_by_side", [True, False])
def test_norms_come_in_one_vector(monkeypatch: pytest.MonkeyPatch, side_by_side: bool) -> None:
    """Those that the fused operator of CUDA leaves in one piece of memory are not copied, any others are."""
    tensors = [torch.full((2,), float(number)) for number in range(3)]
    norms = torch.tensor([0.0, 1.0, 2.0])
    if side_by_side:
        monkeypatch.setattr(private, "norm_of_each", lambda tensors, order: norms.unbind())
    found = private.norms_of(tensors, inf)
    assert found.tolist() == [0.0, 1.0, 2.0]
    assert (found.data_ptr() == norms.data_ptr()) is side_by_side
    monkeypatch.undo()
    assert private.norms_of(tensors[1:2], inf).tolist() == [1.0]
