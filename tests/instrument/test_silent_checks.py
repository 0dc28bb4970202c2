"""The silent checks around optimizer steps, autocast regions, models and files."""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from observed import observed as on_disk
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.silent.loading import header_dtypes
from dtypedoctor.instrument.silent.patches import PATCHERS
from dtypedoctor.trace.events import NotWatched, Observation
from dtypedoctor.trace.model import Trace


def observed(directory: Path, kind: str, work: Callable[[Any], Any]) -> list[Observation]:
    return on_disk(watched(directory, work), kind)


def defects(trace: Trace) -> list[str]:
    """What dtypedoctor could not measure by a mistake of its own."""
    return [unseen.why for unseen in trace.all(NotWatched) if "dtypedoctor failed" in unseen.why]


def trained(dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer], steps: int = 3) -> Callable[[Any], None]:
    """Training of weights of one with gradients of about one."""

    def work(_: object) -> None:
        net = nn.LayerNorm(32).to(dtype)
        optimizer = make(net.parameters())
        for _ in range(steps):
            net(torch.randn(8, 32, dtype=dtype)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-5),
        lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=False),
        lambda p: torch.optim.SGD(p, lr=1e-7, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=1e-5),
        lambda p: torch.optim.Adafactor(p, lr=1e-6),
    ],
    ids=["AdamW foreach", "AdamW", "SGD", "RMSprop", "Adafactor"],
)
def test_updates_that_bfloat16_rounds_away_are_counted_by_a_float32_copy_of_the_optimizer(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """All of a weight of ones, in each of the first steps."""
    last = observed(tmp_path, "updates", trained(torch.bfloat16, make))[-1]
    weight = last.values["parameters"]["weight"]
    assert weight["wanted"] == weight["lost"] == 96
    assert (last.values["checks"], last.values["first_step"]) == (3, 1)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("dtype", "lr"),
    [(torch.float32, 1e-7), (torch.bfloat16, 0.1), (torch.bfloat16, 0.0)],
    ids=["float32", "fast", "still"],
)
def test_float32_weights_large_steps_and_a_learning_rate_of_zero_do_not_stall(
    tmp_path: Path, dtype: torch.dtype, lr: float
) -> None:
    """A float32 copy moves where the weight does, and does not where it does not; a weight beside it that stalls is told of."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.stalls = nn.LayerNorm(32).to(dtype), nn.LayerNorm(32).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.to(dtype)).float() + self.stalls(x.bfloat16()).float()

    def work(_: object) -> None:
        net = Beside()
        groups = [{"params": net.norm.parameters(), "lr": lr}, {"params": net.stalls.parameters(), "lr": 1e-7}]
        optimizer = torch.optim.SGD(groups)  # type: ignore[arg-type]
        for _ in range(3):
            net(torch.randn(8, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    told = {name for o in observed(tmp_path, "updates", work) for name in o.values["parameters"]}
    assert "stalls.weight" in told
    assert "norm.weight" not in told


class _Tokens(nn.Module):
    """An embedding of which each batch uses other rows, so that gradients of elements are zero now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def _trains_on_tokens(dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], None]:
    def work(_: object) -> None:
        torch.manual_seed(0)
        net = _Tokens().to(dtype)
        optimizer = make(net.parameters())
        for _ in range(4):
            x = torch.randint(0, 64, (8, 16))
            nn.functional.cross_entropy(net(x).float().flatten(0, 1), x.roll(1).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.isfinite().all() for p in net.parameters())

    return work


def test_a_fused_step_that_divides_by_a_second_moment_of_zero_is_compared_with_float32_state(tmp_path: Path) -> None:
    """The fused AdamW stores its second moments in float16: rows that a batch leaves out jump, and nothing is ever inf or NaN."""
    work = _trains_on_tokens(torch.float16, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
    (seen,) = observed(tmp_path, "overshoots", work)
    worst = seen.values["parameters"]["embed.weight"]
    assert worst["moved"] > 1.0 > 100 * worst["update"]
    assert worst["overshot"] >= 0.01 * worst["elements"]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("dtype", "make"),
    [
        (torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
        (torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
        (torch.float16, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, eps=1.0)),
        (torch.float16, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (torch.bfloat16, lambda p: torch.optim.NAdam(p, lr=1e-3)),
        (torch.bfloat16, lambda p: torch.optim.RMSprop(p, lr=1e-3)),
        (torch.bfloat16, lambda p: torch.optim.Adamax(p, lr=1e-3)),
    ],
    ids=["bfloat16", "float32", "large epsilon", "SGD", "NAdam", "RMSprop", "Adamax"],
)
def test_steps_that_go_as_far_as_in_float32_do_not_overshoot(
    tmp_path: Path, dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """Rounding of the parameters and of the state moves no element 16 times as far."""
    assert observed(tmp_path, "overshoots", _trains_on_tokens(dtype, make)) == []


def test_an_optimizer_that_was_begun_before_the_watch_is_not_compared(tmp_path: Path) -> None:
    """Its float16 state may have been zero for long: nobody knows what float32 state would be."""
    net = _Tokens().half()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step(x: Tensor) -> None:
        nn.functional.cross_entropy(net(x).float(), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(torch.arange(32))
    assert observed(tmp_path, "overshoots", lambda _: [step(torch.arange(32) + 32) for _ in range(3)]) == []


def _clips_after(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    @torch.no_grad()
    def clip(*_: object) -> None:
        for p in net.parameters():
            p.clamp_(-0.01, 0.01)

    optimizer.register_step_post_hook(clip)
    return lambda: None


def _clears_between(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return optimizer.state.clear


def _empties_between(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def empty() -> None:
        for state in optimizer.state.values():
            state["square_avg"].zero_()

    return empty


def _loads_between(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    begun = optimizer.state_dict()
    return lambda: optimizer.load_state_dict(begun)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("change", "lr"), [(_clips_after, 5e-5), (_clears_between, 1e-2), (_empties_between, 1e-2), (_loads_between, 1e-2)]
)
def test_what_a_program_does_around_steps_is_no_overshoot(
    tmp_path: Path, change: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], None]], lr: float
) -> None:
    """A hook that clips the weights; state that is cleared, zeroed or loaded between steps of which the first had the largest gradients."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        net = nn.Linear(64, 64).bfloat16()
        optimizer = torch.optim.RMSprop(net.parameters(), lr=lr)
        between = change(net, optimizer)
        for scale in (100.0, 0.01, 0.01, 0.01):
            (net(torch.randn(8, 64).bfloat16()).float() * scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            between()

    assert observed(tmp_path, "overshoots", work) == []


def test_zeros_in_float16_gradients_are_counted(tmp_path: Path) -> None:
    """Of a model with a small loss; none is left of the gradient of its output."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).half()

    def work(_: object) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        (net(torch.ones(2, 4).half()).float().sum() * 1e-9).backward()
        optimizer.step()

    trace = watched(tmp_path, work)
    (zeros,) = on_disk(trace, "gradient-zeros")
    assert zeros.values["parameters"]["0.weight"] == {"zeros": 32, "elements": 32}
    # no call that is made again has another gradient: it is 0 where the first one gets it
    (found,) = [finding for finding in diagnose(trace) if finding.id == "gradient-underflow"]
    assert found.summary.startswith(
        "All gradients are zero: what comes back from the loss, up to 1e-09, is flushed to zero in float16"
    )


def folder(parent: Path, name: str) -> Path:
    """A new folder for another trace."""
    path = parent / name
    path.mkdir()
    return path


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("silently", [False, True], ids=["optimizer", "data"])
@pytest.mark.parametrize(
    ("net", "layers"),
    [(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), {"0", "1"}), (nn.Linear(4, 1), {""})],
    ids=["layers", "alone"],
)
def test_a_layer_that_autocast_gives_an_old_weight_is_run_again_without_the_cache(
    tmp_path: Path, net: nn.Module, layers: set[str], silently: bool
) -> None:
    """Also where the change went through `.data`, which counts no version, and where the layer is all that is called."""

    def work(_: object) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.ones(2, 4)).float().sum().backward()
            if silently:
                for p in net.parameters():
                    p.data.add_(1)
            else:
                optimizer.step()
            net(torch.ones(2, 4))

    found = observed(tmp_path, "autocast-cache", work)
    assert {o.fqn or "" for o in found} == layers
    assert all(o.values["relative_error"] > 0.01 for o in found)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("cached", [True, False], ids=["two regions", "no cache"])
def test_a_region_of_its_own_or_no_cache_is_healthy(tmp_path: Path, cached: bool) -> None:
    """The copy is made anew."""
    net = nn.Linear(4, 1)

    def work(_: object) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for _ in range(2 if cached else 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                for _ in range(1 if cached else 2):
                    net(torch.ones(2, 4)).float().sum().backward()
                    optimizer.step()

    assert observed(tmp_path, "autocast-cache", work) == []


class Rotary(nn.Module):
    """Turns pairs of features; which of its tables it reads is up to it."""

    def __init__(self, table: Tensor, spare: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("turns", table)
        self.register_buffer("spare", spare)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.outer(torch.arange(8.0), self.turns.float()).cos()


FREQUENCIES = 10000.0 ** (-torch.arange(0, 32, 2) / 32)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("table", "found"),
    [
        (FREQUENCIES.bfloat16(), "bfloat16"),
        (FREQUENCIES.bfloat16().float(), "bfloat16"),
        (FREQUENCIES.half(), "float16"),
        (FREQUENCIES, None),
        (2.0 ** -torch.arange(16.0), None),
        (torch.linspace(1, 0.1, 16).bfloat16(), None),
    ],
    ids=["bfloat16", "restored", "float16", "healthy", "powers of two", "no progression"],
)
def test_a_table_is_known_by_its_values(tmp_path: Path, table: Tensor, found: str | None) -> None:
    """Geometric, and equal to its own rounding without being exact."""
    seen = observed(tmp_path, "rotary-table", lambda _: Rotary(table)(torch.ones(8, 16)))
    assert [o.values["rounded_to"] for o in seen] == ([found] if found else [])
    assert [o.values["used"] for o in seen] == ([7.0] if found else [])  # also where a copy of the table is multiplied


def test_the_position_is_of_the_part_that_has_the_table(tmp_path: Path) -> None:
    """A model of pictures and text has a configuration for each, and none of them is its own."""
    net = nn.Sequential(Rotary(FREQUENCIES.bfloat16()))
    net.config = SimpleNamespace(text_config=None)  # type: ignore[assignment]
    net[0].config = SimpleNamespace(max_position_embeddings=64)  # type: ignore[assignment]
    (seen,) = observed(tmp_path, "rotary-table", lambda _: net(torch.ones(8, 16)))
    assert seen.values["position"] == 64


def test_a_rounded_table_that_nobody_reads_is_not_observed(tmp_path: Path) -> None:
    """A backup is no failure."""
    net = Rotary(FREQUENCIES, FREQUENCIES.bfloat16())
    assert observed(tmp_path, "rotary-table", lambda _: net(torch.ones(8, 16))) == []


class Passing(Rotary):
    """Passes a cast on, as a base class of a library does."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Only passes it on."""
        return super().to(*args, **kwargs)


def test_the_line_that_rounded_a_table_is_named_also_after_a_cast_back(tmp_path: Path) -> None:
    """Not a method of the module that passes the cast on; a table that was made rounded has no such line."""
    outer = nn.Sequential(Passing(FREQUENCIES), Rotary(FREQUENCIES.bfloat16()))

    def work(_: object) -> None:
        outer[0].to(torch.bfloat16)
        outer.float()
        outer(torch.ones(8, 16))

    first, second = observed(tmp_path, "rotary-table", work)
    line = work.__code__.co_firstlineno + 1
    assert (first.values["dtype"], first.values["source"]) == ("float32", f"test_silent_checks.py:{line}")
    assert second.values["source"] is None


def test_a_weight_that_is_inf_does_not_end_the_count_of_lost_updates(tmp_path: Path) -> None:
    """The magnitudes are those of the finite weights; NaN and inf are no JSON."""

    def work(_: object) -> None:
        table = nn.Embedding(8, 32, dtype=torch.bfloat16)
        with torch.no_grad():
            table.weight.fill_(1.0)
            table.weight[7] = torch.inf  # a row that no step trains
        optimizer = torch.optim.SGD(table.parameters(), lr=1e-7)
        for _ in range(3):
            table(torch.arange(4)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, work)
    assert defects(trace) == []
    weight = on_disk(trace, "updates")[-1].values["parameters"]["weight"]
    assert (weight["wanted"], weight["lost"], weight["absmax"]) == (384, 384, 1.0)


class Places(nn.Module):
    """Does something with the places of a text of 400 words."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("use", "found"),
    [
        (lambda x: torch.arange(400).to(x.dtype) * 0.01, "rounded-result"),
        (lambda x: torch.arange(400, dtype=x.dtype) * 0.01, "rounded-result"),
        (lambda x: (torch.arange(400).float().type_as(x)[None] + 1).expand(2, 400).sin(), "rounded-rotary-buffer"),
    ],
    ids=["cast", "made so", "shifted"],
)
def test_positions_that_bfloat16_rounds_together_are_found(
    tmp_path: Path, use: Callable[[Tensor], Tensor], found: str
) -> None:
    """Of 400 whole numbers 329 are left: all up to 256, and every second one from there on."""
    trace = watched(tmp_path, lambda _: Places(use)(torch.ones(4).bfloat16()))
    assert [(one.id, one.confidence) for one in diagnose(trace)] == [(found, "proven")]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.arange(400.0) * x.float().sum(),
        lambda x: torch.arange(250).to(x.dtype) * 0.01,
        lambda x: torch.arange(0, 500, 2).to(x.dtype) * 0.01,
        lambda x: torch.ones(400).to(x.dtype) / (torch.arange(400).to(x.dtype) + 1),
        lambda x: torch.arange(400).to(x.dtype) < 100,
    ],
    ids=["float32", "few", "every second", "means", "compared"],
)
def test_positions_that_stay_apart_and_counts_that_divide_are_no_finding(
    tmp_path: Path, use: Callable[[Tensor], Tensor]
) -> None:
    """Nothing is lost, or nothing but a rounding error of the usual size."""
    assert diagnose(watched(tmp_path, lambda _: Places(use)(torch.ones(4).bfloat16()))) == ()


class Policy(nn.Module):
    """Scores moves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(16, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, state: Tensor) -> Tensor:
        return self.net(state)


def asked(trainer: nn.Module, generator: nn.Module, other: int = 0) -> Callable[[Any], None]:
    """Both are asked the same, or not."""

    def work(_: object) -> None:
        state = torch.arange(8)
        with torch.no_grad():
            generator(state)
        trainer(state + other)

    return work


def test_a_twin_that_overflows_has_no_distance(tmp_path: Path) -> None:
    """Its log-probabilities are NaN, which JSON has no number for; the check goes on with the next call."""
    trainer, generator = Policy(), Policy().half()
    with torch.no_grad():
        trainer.net[0].weight.fill_(3.0)
        trainer.net[2].weight.fill_(4000.0)
    generator.load_state_dict(trainer.state_dict())
    trace = watched(tmp_path, asked(trainer, generator))
    assert on_disk(trace, "twins") == []
    assert defects(trace) == []


def test_a_state_that_is_cast_to_a_smaller_range_is_counted(tmp_path: Path) -> None:
    """One element becomes inf, one zero."""
    state = {"weight": torch.tensor([[70000.0, 1.0], [1e-9, 0.5]], dtype=torch.bfloat16)}
    work = lambda _: nn.Linear(2, 2, bias=False).half().load_state_dict(state)
    (one,) = observed(tmp_path, "state-loaded", work)
    assert (one.values["became_inf"], one.values["became_zero"], one.values["elements"]) == (1, 1, 4)
    assert one.values["casts"] == {"bfloat16->float16": 4}


def test_the_dtypes_of_a_file_are_read_from_its_header(tmp_path: Path) -> None:
    """No tensor is needed, and something else is refused."""
    header = {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "n": {"dtype": "I64", "shape": [4]},
              "__metadata__": {"format": "pt"}}  # fmt: skip
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    assert header_dtypes(file) == {"bfloat16": 6}
    file.write_bytes(b"\xff" * 16)
    with pytest.raises(ValueError, match="not a safetensors file"):
        header_dtypes(file)


def test_a_backup_of_a_method_that_still_runs_is_observed(tmp_path: Path) -> None:
    """The patch was prepared and refused; one that is in place is fine."""

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    class Patched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    Half._original_forward = Half.forward  # type: ignore[attr-defined]
    Patched._original_forward = Patched.forward  # type: ignore[attr-defined]
    Patched.forward = lambda self, x: x.float().square().to(x.dtype)  # type: ignore[method-assign]
    (one,) = observed(tmp_path, "unpatched", lambda _: nn.Sequential(Half(), Patched())(torch.ones(2)))
    assert (one.fqn, one.values["class"], one.values["method"]) == ("0", "Half", "forward")


class Product(nn.Module):
    """Something that a patch is prepared for."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * x * scale


def test_the_function_that_was_to_replace_a_method_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a patcher in another module the replacement nearest to the method's parameters is taken, with the difference."""
    text = """
def patch_product(owners):
    Product = owners.Product
    def forward(x): pass
    def forward(self, x, cache=None, *rest): return x
    Product._original_forward = Product.forward


def unrelated(Product):
    return Product
"""
    patches = ModuleType("patches_of_a_library")
    exec(compile(text, "/somewhere/patches_of_a_library.py", "exec"), vars(patches))  # noqa: S102
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    patches.patch_product(sys.modules[__name__])
    try:
        (one,) = observed(tmp_path, "unpatched", lambda _: Product()(torch.ones(2)))
    finally:
        del Product._original_forward  # type: ignore[attr-defined]
    assert (one.values["patcher"], one.values["replacement"]) == ("patch_product", "patches_of_a_library.py:5")
    assert (one.values["surplus"], one.values["missing"]) == ("cache, *rest", "scale")


ZOO = """
def patch_function(target_obj, attr_name, new_func, force = False):
    if target_obj.forward.__code__.co_varnames[:2] != new_func.__code__.co_varnames[:2]: return False
    setattr(target_obj, attr_name, new_func)
    return True


def patch_function_past_key_values(target_obj, attr_name, new_functions):
    return any(patch_function(target_obj, attr_name, function) for function in new_functions)
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("takes", "answered"), [(("h",), False), (("h", "x"), True), (("x",), True)])
def test_a_patch_that_unsloth_zoo_answers_it_did_not_make_is_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: tuple[str, ...], answered: bool
) -> None:
    """No original is kept then. Where one of several replacements fits, or the class is not the model's, there is nothing to say."""

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    class Elsewhere(Squares):
        def forward(self, x: Tensor) -> Tensor:
            return x

    [name] = PATCHERS
    zoo = ModuleType(name)
    exec(ZOO, vars(zoo))  # noqa: S102
    monkeypatch.setitem(sys.modules, name, zoo)
    original = zoo.patch_function
    choices = {"h": lambda self, h: h, "x": lambda self, x: x}

    def program(instruments: Instruments) -> None:
        chosen = [choices[one] for one in takes]
        assert zoo.patch_function_past_key_values(Squares, "forward", chosen) is answered
        zoo.patch_function(Elsewhere, "forward", choices["h"])
        Squares()(torch.ones(2))

    found = observed(tmp_path, "unpatched", program)
    assert zoo.patch_function is original
    assert [(one.values["class"], one.values["surplus"], one.values["missing"]) for one in found] == (
        [] if answered else [("Squares", "h", "x")]
    )


def fused(graph: Any, inputs: Any) -> Any:
    """A compiler that keeps float32 between operations, as real ones do."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        return tuple(r.to(args[0].dtype) for r in graph.forward(*(a.float() for a in args)))

    return run


class Deviation(nn.Module):
    """Stands at a cliff: a product that eager mode rounds to one."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.sqrt(a * b - 1)


def test_a_compiled_call_is_made_again_in_eager_mode(tmp_path: Path) -> None:
    """NaN compiled, zero in eager mode."""
    net = torch.compile(Deviation(), backend=fused)
    a, b = torch.tensor([1 + 2**-7]).bfloat16(), torch.tensor([1 - 2**-7]).bfloat16()

    def work(instruments: Any) -> None:
        instruments.replay_failures(None)
        net(a, b)

    (one,) = on_disk(watched(tmp_path, work), "eager-replay")
    assert (one.values["finite"], one.values["eager_finite"]) == (False, True)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("layer", ["functional", "outside"])
def test_a_bias_before_a_softmax_does_not_stall(tmp_path: Path, layer: str) -> None:
    """All scores of a row get it, so its gradients cancel, also where no module's output shows that; the loss trains on."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.head = nn.Linear(16, 1, bias=layer == "functional"), nn.Linear(16, 3)
            self.shift = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            bias = self.shift.view(1) if self.score.bias is None else self.score.bias
            return self.head((nn.functional.linear(x, self.score.weight, bias).softmax(1) * x).sum(1))

    def work(_: object) -> None:
        torch.manual_seed(0)
        net = Pooled().bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
        for _ in range(8):
            x, y = torch.randn(32, 12, 16).bfloat16(), torch.randint(0, 3, (32,))
            nn.functional.cross_entropy(net(x).float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, work)
    assert [f.summary for f in diagnose(trace) if f.id == "update-stall"] == []
