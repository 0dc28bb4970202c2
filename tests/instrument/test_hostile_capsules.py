"""A stranger's capsule is made without `--allow-code` only of what is known: hostile ones run nothing, honest ones replay."""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.eval_frame import skip_code

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.capsule import _described
from dtypedoctor.instrument.capture import Tensors
from dtypedoctor.instrument.live_call import LiveCall
from dtypedoctor.instrument.sources import Sources
from dtypedoctor.replay.capsule import CAPSULE, CAPSULE_TENSORS, Named, read_capsule, why_not
from dtypedoctor.replay.script import CannotBeWrittenError, capsule_script
from dtypedoctor.worker.call_fixes import _computes, call_of, load_capsule

CANARY = "DTYPEDOCTOR_CANARY"
COMMAND = f"touch {CANARY}"


def described(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    tensors = Tensors()
    call = _described(LiveCall.entered(module, "layer.0", args, kwargs), tensors, Sources())
    description = {
        "capsule": 1, "fqn": "layer.0", "class": type(module).__name__, "kind": "nonfinite", "error": "", "relative_error": None,
        "finding": {"id": "float16-overflow", "op": "aten.mul.Tensor", "summary": "It overflows.", "versions": {"torch": "2.13.0"}},
        "call": json.loads(json.dumps(call)), "requires_grad": [], "random": False, "drawn": {}, "cut": [], "data": {"synthetic": True},
        "classes": [], "source": "", "fixes": [],
    }  # fmt: skip
    return description, tensors.named()


def written(folder: Path, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CAPSULE).write_text(json.dumps(description), encoding="utf-8")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / CAPSULE_TENSORS)
    return folder


def replayed(folder: Path) -> Any:
    """What the call of the capsule returns; it is made as a worker makes it."""
    model = load_capsule(folder, torch.float32, torch.device("cpu"))
    call = call_of(model)
    return model(*call.args, **call.kwargs)


EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.send", "shutil.", "os.remove", "os.rename",
            "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "urllib.", "pickle.", "ctypes.dlopen")  # fmt: skip
_watching: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is None:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event.startswith(EXECUTES) or (writes and not str(arguments[0]).endswith(".pyc")):
        _watching.append(f"{event} {arguments!r}"[:200])


@cache
def _listen() -> None:
    """Adds the hook, which stays: Dynamo is told to leave it alone, or it would be compiled among the functions that other tests count."""
    skip_code(_audit.__code__)
    sys.addaudithook(_audit)


@contextmanager
def nothing_runs(folder: Path) -> Iterator[None]:
    """Fails where a process starts, a connection is opened, or a file is written or removed."""
    global _watching
    here = Path.cwd()
    _listen()
    os.chdir(folder)
    os.environ.pop(CANARY, None)
    _watching = events = []
    try:
        yield
    finally:
        _watching = None
        os.chdir(here)
    assert not events
    assert not list(folder.rglob(f"{CANARY}*"))
    assert CANARY not in os.environ


BASE, TENSORS = described(nn.Sequential(nn.Linear(2, 2), nn.GELU()), torch.ones(1, 2))
"""An honest capsule, which each hostile one differs from in one place."""
ANYTHING = {"value": COMMAND}

NAMES = [
    "torch.nn.parallel.distributed:os.system", "torch.nn.modules.module:torch.os.system",
    "torch.nn.functional:importlib.import_module", "torch.nn.functional:warnings.sys.modules",
    "torch.nn.functional:torch.load", "torch.nn.functional:torch.hub.load", "torch:load", "torch.hub:load",
    "torch.serialization:load", "torch.utils.cpp_extension:load_inline", "torch.nn.functional:relu.__globals__",
    "torch.nn.functional:relu.__class__", "torch.nn.functional:boolean_dispatch",
    "torch.nn.functional:handle_torch_function", "torch.nn.functional:__builtins__", "torch.nn.functional:Tensor",
    "torch.nn.functional:", "builtins:eval", "builtins:exec", "builtins:open", "builtins:__import__", "os:system",
    "posix:system", "subprocess:Popen", "subprocess:check_call", "runpy:run_path", "pickle:loads",
    "importlib:import_module", "shutil:rmtree", "pathlib:Path.write_text", "source:sys.exit", "source:torch.load",
    "source:importlib.import_module", "source:found", "source:functools.partial", "functools:partial",
    "functools:reduce", "transformers.models.llama.modeling_llama:torch.hub.load",
    "transformers.utils.hub:cached_file", "transformers.pipelines:pipeline",
    "transformers.dynamic_module_utils:get_class_from_dynamic_module", "transformers:AutoModel.from_pretrained",
    "peft:PeftModel.from_pretrained", "transformers.modeling_utils:load_state_dict",
    "bitsandbytes.cextension:ct.CDLL", "torch.fx.graph_module:GraphModule", "torch.jit._script:ScriptModule",
    "torch.package.package_importer:PackageImporter", "torch.nn.modules.module:Module.load_state_dict",
    "torch.nn.modules.module:register_module_forward_hook", "torch.nn.modules.linear:Linear.__init__",
    "torch.nn.parallel.distributed:DistributedDataParallel", "torch.nn.modules.module:os", "nothing", ":",
]  # fmt: skip
NAMES += ["torch.nn.functional:relu\n", ""]
POSITIONS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "class": lambda call, name: call["recipe"].update({"class": name}),
    "child": lambda call, name: call["recipe"]["children"]["0"].update({"class": name}),
    "forward": lambda call, name: call["recipe"].update(forward=name),
    "attribute": lambda call, name: call["recipe"]["attributes"].update(activation={"function": name}),
    "argument": lambda call, name: call["args"].append({"function": name}),
    "keyword": lambda call, name: call["kwargs"].update(act={"function": name}),
    "partial": lambda call, name: call["args"].append({"partial": {"function": name}, "args": [ANYTHING], "kwargs": {}}),
    "mapping": lambda call, name: call["args"].append({"mapping": name, "values": {"mode": ANYTHING}}),
    "object": lambda call, name: call["args"].append({"object": name, "values": {"dict": {"a": ANYTHING}}}),
    "config": lambda call, name: call["args"].append({"config": name, "values": {"dict": {}}, "chosen": {}}),
    "list": lambda call, name: call["args"].append({"list": [{"tuple": [{"function": name}]}]}),
    "pairs": lambda call, name: call["args"].append({"pairs": [[{"value": 1}, {"function": name}]]}),
    "key": lambda call, name: call["args"].append({"pairs": [[{"function": name}, {"value": 1}]]}),
    "set": lambda call, name: call["kwargs"].update(x={"dict": {"y": {"set": [{"function": name}]}}}),
    "state": lambda call, name: call["state"].update({"sys.exit": {"function": name}}),
}  # fmt: skip
SHADOWS = sorted(
    {*dir(nn.Module), *vars(nn.Module()), "__class__", "__getattr__", "__setstate__", "__dict__", "__del__", "__torch_function__", "_init_flat_weights"}
    - {"training"}
)  # fmt: skip
OPERATORS = [
    "aten.from_file.default", "aten.save.default", "aten.warn.default", "aten._print.default", "aten.add.Tensor,os", "aten.add.Tensor\n",
    "aten.__class__.x", "prim.Print.default", "c10d.allreduce_.default", "aten.add.Tensor;__import__('os').system('x')", "aten.add.Tensor.__call__",
    "aten.list.t", "aten.nothing.default",
]  # fmt: skip
DTYPES = [
    "load", "hub", "ops", "save", "jit", "float32.__class__", "Tensor", "from_file", "__builtins__", "float_power",
    "float999",
]  # fmt: skip
KERNELS = ["owner/kernel", "evil/flash@main", "a/b:c", {"text_config": "a/b"}]


def with_change(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    description = copy.deepcopy(BASE)
    change(description)
    return description


def config(**values: Any) -> dict[str, Any]:
    """A described configuration of Llama."""
    chosen = {name: {"value": values.pop(name)} for name in [*values] if name.startswith("_")}
    held = {name: {"value": value} for name, value in values.items()}
    return {
        "config": "transformers.models.llama.configuration_llama:LlamaConfig", "values": {"dict": held}, "chosen": chosen,
    }  # fmt: skip


def hostile() -> Iterator[tuple[str, dict[str, Any]]]:
    """Hostile descriptions by what is wrong with them."""
    for place, put in POSITIONS.items():
        for name in NAMES:
            yield f"{place} {name}", with_change(lambda d, put=put, name=name: put(d["call"], name))
    relu = {"function": "torch.nn.functional:relu"}
    for name in SHADOWS:
        yield f"shadow {name}", with_change(lambda d, name=name: d["call"]["recipe"]["attributes"].update({name: relu}))
    for name in OPERATORS:
        recipe = {"operator": name}
        yield f"operator {name}", with_change(lambda d, recipe=recipe: d["call"].update(recipe=recipe))
    for name in DTYPES:
        yield f"dtype {name}", with_change(lambda d, name=name: d["call"]["args"].append({"dtype": name}))
        yield f"region {name}", with_change(lambda d, name=name: d["call"].update(autocast=[["cpu", name]]))
        yield f"default {name}", with_change(lambda d, name=name: d["call"].update(default_dtype=name))
        how = {"shape": [2], "dtype": name, "scale": 1, "seed": 0}
        yield f"drawn {name}", with_change(lambda d, how=how: d.update(drawn={"weight.0.bias": how}))
    for name in KERNELS:
        for key in ("_attn_implementation", "attn_implementation", "_experts_implementation", "kernel_config"):
            made = config(**{key: name})
            yield f"{key} {name}", with_change(lambda d, made=made: d["call"]["kwargs"].update(config=made))
    for key in ("to_dict", "__class__", "from_dict", "forward"):
        made = config() | {"chosen": {key: relu}}
        yield f"chosen {key}", with_change(lambda d, made=made: d["call"]["kwargs"].update(config=made))
        held = {"object": "transformers.cache_utils:DynamicCache", "values": {"dict": {"update": relu}}}
        yield f"cache {key}", with_change(lambda d, held=held: d["call"]["kwargs"].update(cache=held))
    yield "source", with_change(lambda d: d.update(source=f"import os\nos.system({COMMAND!r})"))
    yield "state", with_change(lambda d: d["call"].update(state={"found": {"value": 1}}))
    yield "raw value", with_change(lambda d: d["call"]["args"].append({"value": {"attn_implementation": "a/b"}}))
    yield "two kinds", with_change(lambda d: d["call"]["args"].append({"value": 1, "function": "os:system"}))
    yield (
        "object as values",
        with_change(
            lambda d: d["call"]["args"].append({"object": "transformers.cache_utils:DynamicCache", "values": relu})
        ),
    )


HOSTILE = list(hostile())


def refusal_of(folder: Path) -> UsageError | None:
    """Why the capsule is not replayed; None where it is."""
    try:
        replayed(folder)
    except UsageError as error:
        return error
    return None


def test_no_hostile_capsule_runs_anything(tmp_path: Path) -> None:
    """Each names, holds or calls what is not known, in one of the places where a capsule can; each is rejected, and none has run a thing."""
    assert len(HOSTILE) >= 200
    import_module("transformers.models.llama.modeling_llama")  # which starts and reads things of its own
    import_module("peft.tuners.lora.layer")
    accepted = []
    for number, (label, description) in enumerate(HOSTILE):
        folder = written(tmp_path / str(number), description, TENSORS)
        with nothing_runs(folder):
            error = refusal_of(folder)
        if error is None or not ("--allow-code" in (error.hint or "") or "damaged" in error.message):
            accepted.append((label, error))
    assert not accepted


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a description with each key of it."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from spots(value[key])


WRONG: list[Any] = [
    None, True, 0, -1, 1e308, 10**30, "", "x", "os:system", [], {}, [[]], [None], {"": None}, {"value": 1}, {"function": "os:system"}, {"tensor": "weight.0.bias"},
    {"size": [{"value": 1 << 40}]}, {"float": "nan"}, {"pairs": [[1, 2]]}, {"config": "x:y", "values": {}, "chosen": {}}, ["x"], {"operator": "aten.add.Tensor"},
]  # fmt: skip


def test_a_damaged_capsule_is_an_error_in_words_and_runs_nothing(tmp_path: Path) -> None:
    """Each value of the description is replaced by each of many others: the capsule is rejected as a wrong input, or made of what is left."""
    draw = random.Random(31)
    places = len(list(spots(copy.deepcopy(BASE))))
    for number in range(600):
        description = copy.deepcopy(BASE)
        container, key = list(spots(description))[number % places]
        container[key] = draw.choice(WRONG)
        folder = written(tmp_path / str(number), description, TENSORS)
        with nothing_runs(folder), suppress(UsageError):
            model = load_capsule(folder, torch.float32, torch.device("cpu"))
            with suppress(Exception):
                model(*call_of(model).args, **call_of(model).kwargs)


def test_what_torch_shows_to_be_code_is_known_without_torch() -> None:
    """Each operator that takes or gives no tensors, and each attribute that every module has: `--script` warns of them."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    operators = {f"aten.{name if '.' in name else f'{name}.default'}" for name in names}
    assert len(operators) > 2000
    for operator in operators:
        name = operator.split(".")[1]
        if name != name.lower():
            continue  # T, mT: a capsule of these needs --allow-code all the same
        assert bool(why_not(Named(role="operator", name=operator))) != _computes(operator), operator
    for name in SHADOWS:
        assert why_not(Named(role="class", name="torch.nn.modules.linear:Linear", attributes=(name,))), name


def test_a_capsule_that_no_memory_holds_is_not_made(tmp_path: Path) -> None:
    """A tensor of a terabyte that takes no room on the disk, and a shape of a terabyte that is to be drawn."""
    sparse, drawn = written(tmp_path / "sparse", BASE, {}), tmp_path / "drawn"
    header = json.dumps({"input.0": {"dtype": "F16", "shape": [1 << 39], "data_offsets": [0, 1 << 40]}}).encode()
    (sparse / CAPSULE_TENSORS).write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(sparse / CAPSULE_TENSORS, 8 + len(header) + (1 << 40))
    how = {"shape": [1 << 38], "dtype": "float16", "scale": 1.0, "seed": 0}
    written(drawn, with_change(lambda d: d.update(drawn={"weight.0.weight": how})), TENSORS)
    for folder in (sparse, drawn):
        with pytest.raises(UsageError, match="this machine has"):
            replayed(folder)


def test_what_ran_a_command_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """An identity whose forward is the `os.system` that a module of torch imports."""
    forward = {"forward": {"function": "torch.nn.parallel.distributed:os.system"}}
    recipe = {"class": "torch.nn.modules.linear:Identity", "attributes": forward, "parameters": {}, "buffers": {}, "children": {}}  # fmt: skip
    description = with_change(lambda d: d["call"].update(recipe=recipe, args=[{"value": COMMAND}]))
    folder = written(tmp_path / "capsule", description, TENSORS)
    with nothing_runs(folder), pytest.raises(UsageError, match=r"os\.system|attribute forward"):
        replayed(folder)


INJECTIONS = [
    "'); PWNED(); ('", '"); PWNED(); ("', '"""\nPWNED()\n"""', "'''\nPWNED()\n'''", "\nPWNED()\n", "\r\nPWNED()", "\x0cPWNED()", "\x85PWNED()", "\u2028PWNED()",
    "{PWNED()}", "{0.__class__}", "{module}", "\\'); PWNED(); ('", "\\\nPWNED()", "#\nPWNED()", "PWNED()  # @own", "\x00PWNED()", "\ud800PWNED()", "# coding: utf-7\n+AFAAVwBOAEUARA-()",
    "%(PWNED)s", "f'{PWNED()}'", "]; PWNED(); [", "}\nPWNED()\n{", ")\nPWNED()\n(", "T['x']\nPWNED()", "\t\nPWNED()", "'", '"', "\\",
]  # fmt: skip


def places(text: str) -> Iterator[dict[str, Any]]:
    """Descriptions with a text in each place that is written into the script."""
    call: Callable[[dict[str, Any]], dict[str, Any]] = lambda d: d["call"]
    yield with_change(lambda d: d.update(fqn=text))
    yield with_change(lambda d: d.update({"class": text}))
    yield with_change(lambda d: d["finding"].update(id=text))
    yield with_change(lambda d: d["finding"].update(summary=text))
    yield with_change(lambda d: d["finding"].update(versions={"torch": text}))
    yield with_change(lambda d: d.update(requires_grad=[f"input.{text}"]))
    yield with_change(lambda d: d.update(drawn={text: {"shape": [1], "dtype": "float32", "scale": 1, "seed": 0}}))
    yield with_change(lambda d: call(d)["recipe"].update({"class": text}))
    yield with_change(lambda d: call(d)["recipe"].update(forward=text))
    yield with_change(lambda d: call(d)["recipe"]["attributes"].update({text: {"value": 1}}))
    yield with_change(lambda d: call(d)["recipe"]["attributes"].update(a={"value": text}))
    yield with_change(lambda d: call(d)["recipe"]["attributes"].update(a={"float": text}))
    yield with_change(lambda d: call(d)["recipe"]["attributes"].update(a={"dtype": text}))
    yield with_change(lambda d: call(d)["recipe"]["parameters"].update({text: text}))
    yield with_change(lambda d: call(d)["recipe"]["buffers"].update({text: text}))
    yield with_change(lambda d: call(d)["recipe"]["children"].update({text: call(d)["recipe"]["children"]["1"]}))
    yield with_change(lambda d: call(d)["recipe"].update(operator=text))
    yield with_change(lambda d: call(d)["kwargs"].update({text: {"tensor": text}}))
    yield with_change(lambda d: call(d)["args"].append({"mapping": text, "values": {text: {"value": 1}}}))
    yield with_change(lambda d: call(d).update(autocast=[[text, "float16"]]))
    yield with_change(lambda d: call(d).update(autocast=[["cpu", text]]))
    yield with_change(lambda d: call(d)["state"].update({text: {"value": 1}}))
    yield with_change(
        lambda d: d.update(kind="backward") or call(d).update(leaving=[{"what": text, "gradients": {"0": text}}])
    )
    yield with_change(lambda d: d.update(relative_error=text))


def test_no_text_of_a_capsule_becomes_code_of_its_script(tmp_path: Path) -> None:
    """Whatever a text holds, the script that it is written into calls and names the same as without it."""
    count = 0
    folder = written(tmp_path / "capsule", BASE, TENSORS)
    for text in INJECTIONS:
        for description in places(text):
            (folder / CAPSULE).write_text(json.dumps(description), encoding="utf-8")
            count += 1
            with suppress(CannotBeWrittenError, UsageError):
                script = capsule_script(read_capsule(folder), inline=True)
                names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(ast.parse(script))}
                assert "PWNED" not in names, (text, script)
    assert count > 600


class Llama:
    """Parts of a small Llama, and what each is called with."""

    def __init__(self) -> None:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=32,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        cache = DynamicCache(config=config)
        cache.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
        hidden, layer = torch.ones(1, 4, 16), self.model.model.layers[0]
        angles = self.model.model.rotary_emb(hidden, torch.arange(4)[None])
        ids = torch.arange(2)[None]
        self.calls = {
            "mlp": (layer.mlp, (hidden,), {}),
            "norm": (layer.input_layernorm, (hidden,), {}),
            "attention": (layer.self_attn, (hidden,), {"position_embeddings": angles, "attention_mask": None}),
            "layer": (layer, (hidden,), {"position_embeddings": angles}),
            "rotary": (self.model.model.rotary_emb, (hidden, torch.arange(4)[None]), {}),
            "model": (self.model, (ids,), {}),
            "cache": (self.model, (ids,), {"past_key_values": cache}),
        }


def torch_calls() -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    x = torch.ones(2, 4)
    image, sequence = torch.ones(1, 2, 6, 6), torch.ones(1, 3, 4)
    modules: dict[str, tuple[nn.Module, Any]] = {
        "linear": (nn.Linear(4, 4), x), "norm": (nn.LayerNorm(4), x), "rms": (nn.RMSNorm(4), x), "mlp": (nn.Sequential(nn.Linear(4, 4), nn.SiLU()), x),
        "convolution": (nn.Conv2d(2, 2, 3), image), "batch": (nn.BatchNorm2d(2), image), "pool": (nn.MaxPool2d(2), image),
        "dropout": (nn.Dropout(), x), "softmax": (nn.Softmax(-1), x), "lstm": (nn.LSTM(4, 4, batch_first=True), sequence),
        "encoder": (nn.TransformerEncoderLayer(4, 2, batch_first=True), sequence), "gelu": (nn.TransformerEncoderLayer(4, 2, activation="gelu"), sequence),
        "embedding": (nn.Embedding(4, 4), torch.arange(3)),
    }  # fmt: skip
    return {name: (module, (value,), {}) for name, (module, value) in modules.items()}


@pytest.mark.parametrize("make", [torch_calls, lambda: Llama().calls], ids=["torch", "transformers"])
def test_honest_capsules_replay_without_being_asked_about(
    make: Callable[[], dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]], tmp_path: Path
) -> None:
    """Modules of torch and of transformers, with activations, caches and configurations, and return what the call returns."""
    for name, (module, args, kwargs) in make().items():
        description, tensors = described(module, *args, **kwargs)
        expected = module.eval()(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        folder = written(tmp_path / name, description, tensors)
        assert not list(read_capsule(folder).code()), name
        model = load_capsule(folder, torch.float32, torch.device("cpu")).eval()
        call = call_of(model)
        found = model(*call.args, **call.kwargs)
        first = [value if isinstance(value, torch.Tensor) else value[0] for value in (found, expected)]
        torch.testing.assert_close(*first, msg=name)


def test_an_operator_outside_of_modules_is_replayed_without_being_asked_about(tmp_path: Path) -> None:
    """Its recipe names it, and no class."""
    from dtypedoctor.instrument.capture import Operator

    description, tensors = described(Operator("aten.mul.Tensor"), torch.ones(2), 3.0)
    description["operator"] = {"op": "aten.mul.Tensor", "source": "train.py:1", "backward": False}
    folder = written(tmp_path / "operator", description | {"fqn": ""}, tensors)
    assert not list(read_capsule(folder).code())
    assert torch.equal(replayed(folder), torch.full((2,), 3.0))


def test_a_capsule_with_source_is_made_where_its_code_is_allowed(tmp_path: Path) -> None:
    """And only there."""
    source = "class Twice(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    recipe = {"class": "source:Twice", "attributes": {}, "parameters": {}, "buffers": {}, "children": {}}
    description = with_change(lambda d: d.update(source=source) or d["call"].update(recipe=recipe))
    folder = written(tmp_path / "capsule", description, TENSORS)
    with pytest.raises(UsageError, match="source text"):
        replayed(folder)
    model = load_capsule(folder, torch.float32, torch.device("cpu"), allow_code=True)
    assert torch.equal(model(*call_of(model).args), torch.full((1, 2), 2.0))
