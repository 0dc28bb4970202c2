"""Kernels with a seeded fault, and healthy ones: the truth that the trials of ``dtypedoctor audit`` are measured against.

Written before the trials were first run on it. Each kernel is ordinary code of a hand-written backward; a fault is one line of it.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

GRADIENT, UNINITIALIZED, ROUNDING, RANGE, RACE, BATCH, STRIDES = (
    "gradient is not that of the forward",
    "reads uninitialized memory",
    "rounding",
    "range",
    "race",
    "depends on the batch",
    "depends on the strides",
)

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Seeded:
    name: str
    verdict: str
    make: Callable[[], Made]


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """``apply`` of a Function made of the two."""
    return type("Kernel", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply


def rand(
    *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, seed: int = 0, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_(grad)


SEEDED: list[Seeded] = []
HEALTHY: dict[str, Callable[[torch.dtype], Made]] = {}


def seeded(verdict: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        SEEDED.append(Seeded(make.__name__, verdict, make))
        return make

    return keep


def healthy(make: Callable[[torch.dtype], Made]) -> Callable[[torch.dtype], Made]:
    HEALTHY[make.__name__] = make
    return make


# Faulty: gradients ---------------------------------------------------------------------------------------------------------------------


@seeded(GRADIENT)
def wrong_scale() -> Made:
    return function(lambda ctx, x: x * 3, lambda ctx, g: g * 2), (rand(6, 10),)


@seeded(GRADIENT)
def wrong_sign() -> Made:
    return function(lambda ctx, x: -x, lambda ctx, g: g), (rand(6, 10),)


def rms_forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
    ctx.save_for_backward(x, w)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * w


def rms_backward(
    ctx: Any, g: Tensor, *, project: bool = True, rows: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
) -> Any:
    x, w = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    xf, gf = x.to(wide), g.to(wide)
    r = (xf.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gw = rows((gf * xf * r).reshape(-1, x.shape[-1]))
    gx = gf * w.to(wide)
    dx = r * (gx - (xf * (gx * xf).mean(-1, keepdim=True) * r * r if project else 0))
    return dx.to(x.dtype), gw.to(w.dtype)


@seeded(GRADIENT)
def rms_norm_without_its_projection() -> Made:
    return function(rms_forward, lambda ctx, g: rms_backward(ctx, g, project=False)), (rand(6, 10), rand(10, seed=1))


@seeded(GRADIENT)
def weight_gradient_is_a_mean() -> Made:
    return function(rms_forward, lambda ctx, g: rms_backward(ctx, g, rows=lambda t: t.mean(0))), (
        rand(6, 10),
        rand(10, seed=1),
    )


def layer_norm(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


@seeded(GRADIENT)
def layer_norm_without_the_mean_term() -> Made:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        centered = x - x.mean(-1, keepdim=True)
        r = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        n = centered * r
        return r * (g - n * (g * n).mean(-1, keepdim=True))

    return function(layer_norm, backward), (rand(6, 10),)


@seeded(GRADIENT)
def mean_loss_with_the_gradient_of_a_sum() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    return function(forward, lambda ctx, g: g * 2 * ctx.saved_tensors[0]), (rand(6, 10),)


def losses(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
    p = torch.softmax(x, -1)
    ctx.save_for_backward(p, target)
    return torch.nn.functional.cross_entropy(x, target, reduction="none", ignore_index=-100)


def losses_backward(ctx: Any, g: Tensor, *, mask: bool = True) -> Any:
    p, target = ctx.saved_tensors
    d = p.clone()
    d[torch.arange(len(target)), target.clamp(min=0)] -= 1
    d = d * g[:, None]
    return (d * (target >= 0)[:, None] if mask else d), None


@seeded(GRADIENT)
def losses_of_rows_scaled_by_the_first_upstream_gradient() -> Made:
    return function(losses, lambda ctx, g: losses_backward(ctx, g[:1].expand(len(g)))), (rand(6, 10), torch.arange(6))


@seeded(GRADIENT)
def ignored_rows_get_a_gradient() -> Made:
    target = torch.tensor([0, -100, 2, -100, 4, 5])
    return function(losses, lambda ctx, g: losses_backward(ctx, g, mask=False)), (rand(6, 10), target)


def affine(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    ctx.save_for_backward(x, w)
    return x @ w.t() + b


@seeded(GRADIENT)
def bias_gradient_is_a_mean() -> Made:
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x, g.mean(0)

    return function(affine, backward), (rand(6, 10), rand(7, 10, seed=1), rand(7, seed=2))


@seeded(GRADIENT)
def weight_gets_no_gradient() -> Made:
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.saved_tensors[1], None, g.sum(0)

    return function(affine, backward), (rand(6, 10), rand(7, 10, seed=1), rand(7, seed=2))


@seeded(GRADIENT)
def square_weight_gradient_is_transposed() -> Made:
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, x.t() @ g, g.sum(0)

    return function(affine, backward), (rand(6, 10), rand(10, 10, seed=1), rand(10, seed=2))


@seeded(GRADIENT)
def gradients_of_a_product_are_swapped() -> Made:
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    return function(forward, lambda ctx, g: (g * ctx.saved_tensors[0], g * ctx.saved_tensors[1])), (
        rand(6, 10),
        rand(6, 10, seed=1),
    )


@seeded(GRADIENT)
def writes_to_what_it_has_saved() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        out = x.square()
        ctx.x.mul_(0.5)
        return out

    return function(forward, lambda ctx, g: g * 2 * ctx.x), (rand(6, 10),)


@seeded(GRADIENT)
def softmax_without_its_sum() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = torch.softmax(x, -1)
        ctx.save_for_backward(p)
        return p

    return function(forward, lambda ctx, g: g * ctx.saved_tensors[0]), (rand(6, 10),)


@seeded(GRADIENT)
def swiglu_with_the_derivative_of_a_sigmoid() -> Made:
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a) * b

    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return g * b * s * (1 - s), g * a * s

    return function(forward, backward), (rand(6, 10), rand(6, 10, seed=1))


@seeded(GRADIENT)
def tanh_gelu_without_its_cube() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.nn.functional.gelu(x, approximate="tanh")

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (x + 0.044715 * x**3))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c)

    return function(forward, backward), (rand(6, 10),)


@seeded(GRADIENT)
def upstream_gradient_is_not_used() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x / x.numel())
        return x.square().mean()

    return function(forward, lambda ctx, g: ctx.saved_tensors[0]), (rand(6, 10),)


@seeded(GRADIENT)
def dropout_draws_another_mask_in_the_backward_pass() -> Made:
    def mask(shape: Any) -> Tensor:
        return (torch.rand(shape) > 0.5).float() * 2

    return function(lambda ctx, x: x * mask(x.shape), lambda ctx, g: g * mask(g.shape)), (rand(6, 10),)


@seeded(GRADIENT)
def rotary_turns_the_gradient_the_same_way() -> Made:
    def turn(x: Tensor, angle: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(ctx: Any, x: Tensor, angle: Tensor) -> Tensor:
        ctx.save_for_backward(angle)
        return turn(x, angle)

    return function(forward, lambda ctx, g: (turn(g, ctx.saved_tensors[0]), None)), (
        rand(6, 10),
        rand(6, 5, grad=False, seed=1),
    )


@seeded(GRADIENT)
def operator_with_half_a_gradient() -> Made:
    name = f"corpus::half_gradient_{next(_NUMBERS)}"
    operator = torch.library.custom_op(name, lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor")

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    operator.register_autograd(lambda ctx, g: 0.5 * g * ctx.saved_tensors[0].cos(), setup_context=setup)
    return operator, (rand(6, 10),)


_NUMBERS = itertools.count()

# Faulty: memory ------------------------------------------------------------------------------------------------------------------------


@seeded(UNINITIALIZED)
def masked_rows_are_not_written() -> Made:
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        out = torch.empty_like(x)
        out[keep] = x[keep] * 2
        return out

    keep = torch.tensor([True, True, False, True, False, True])
    return function(forward, lambda ctx, g: (g * 2 * ctx.saved_tensors[0][:, None], None)), (rand(6, 10), keep)


@seeded(UNINITIALIZED)
def last_block_is_not_written() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        for begin in range(0, len(x) // 4 * 4, 4):
            out[begin : begin + 4] = x[begin : begin + 4].exp()
        ctx.save_for_backward(out)
        return out

    return function(forward, lambda ctx, g: g * ctx.saved_tensors[0]), (rand(6, 10),)


@seeded(UNINITIALIZED)
def accumulates_into_empty_memory() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        total = torch.empty(x.shape[1:], dtype=x.dtype)
        for row in x:
            total += row
        return total

    return function(forward, lambda ctx, g: g.expand(ctx.rows, -1)), (rand(6, 10),)


@seeded(UNINITIALIZED)
def weight_gradient_begins_with_what_was_there() -> Made:
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        gw = torch.empty_like(w)
        gw.addmm_(g.t(), x)
        return g @ w, gw, g.sum(0)

    return function(affine, backward), (rand(6, 10), rand(7, 10, seed=1), rand(7, seed=2))


@seeded(UNINITIALIZED)
def reads_a_whole_block_beyond_the_end() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape
        return x.as_strided((16,), (1,), x.storage_offset()).sum()

    return function(forward, lambda ctx, g: g.expand(ctx.size)), (torch.randn(64)[:10].requires_grad_(),)


@seeded(UNINITIALIZED)
def reads_beyond_a_row_and_multiplies_by_0() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape
        block = x.as_strided((6, 16), (10, 1), x.storage_offset())
        return (block * (torch.arange(16) < 10)).sum(1)

    return function(forward, lambda ctx, g: g[:, None].expand(ctx.size)), (
        torch.randn(100)[:60].view(6, 10).requires_grad_(),
    )


# Faulty: numbers -----------------------------------------------------------------------------------------------------------------------


@seeded(ROUNDING)
def saves_its_input_in_bfloat16() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16())
        return x.square()

    return function(forward, lambda ctx, g: g * 2 * ctx.saved_tensors[0]), (rand(6, 10),)


@seeded(ROUNDING)
def saves_statistics_in_float16() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y.half())
        return y

    def backward(ctx: Any, g: Tensor) -> Tensor:
        y = ctx.saved_tensors[0].to(g.dtype)
        return y * (g - (g * y).sum(-1, keepdim=True))

    return function(forward, backward), (rand(6, 100),)


@seeded(ROUNDING)
def accumulates_4096_terms_in_bfloat16() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape
        total = torch.zeros(len(x), dtype=x.dtype)
        for column in x.t():
            total += column
        return total

    return function(forward, lambda ctx, g: g[:, None].expand(ctx.size)), (
        (rand(4, 4096, grad=False).abs() + 1).bfloat16().requires_grad_(),
    )


@seeded(ROUNDING)
def variance_as_a_difference_of_squares() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().mean(-1) - x.mean(-1).square()

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g[:, None] * 2 * (x - x.mean(-1, keepdim=True)) / x.shape[-1]

    return function(forward, backward), ((rand(6, 100, grad=False) + 1000).requires_grad_(),)


@seeded(ROUNDING)
def operates_in_bfloat16_on_float32() -> Made:
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        half = torch.bfloat16 if x.dtype is torch.float32 else x.dtype
        return (x.to(half) @ w.to(half)).to(x.dtype)

    return function(forward, lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g)), (
        rand(6, 10),
        rand(10, 7, seed=1),
    )


@seeded(RANGE)
def softmax_without_the_maximum() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        e = x.exp()
        y = e / e.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))

    return function(forward, backward), (rand(6, 10, dtype=torch.float16, scale=8),)


@seeded(RANGE)
def squares_overflow_float16() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        r = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, r)
        return x * r

    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, r = ctx.saved_tensors
        return r * (g - x * (g * x).mean(-1, keepdim=True) * r * r)

    return function(forward, backward), (rand(6, 10, dtype=torch.float16, scale=400),)


@seeded(RANGE)
def gradient_is_scaled_through_the_subnormals() -> Made:
    return function(lambda ctx, x: x * 2, lambda ctx, g: (g * 1e-9) * 2e9), (rand(6, 10, dtype=torch.float16),)


@seeded(RANGE)
def logarithm_of_a_sum_of_exponentials() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp().sum(-1).log()

    return function(forward, lambda ctx, g: g[:, None] * torch.softmax(ctx.saved_tensors[0], -1)), (
        rand(6, 10, scale=60),
    )


@seeded(RACE)
def keeps_a_buffer_between_calls() -> Made:
    count = itertools.count(1)
    return function(lambda ctx, x: x * next(count), lambda ctx, g: g), (rand(6, 10),)


@seeded(RACE)
def whoever_writes_last_wins() -> Made:
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        order = torch.randperm(len(x), generator=_UNSEEDED)  # as threads of a GPU come
        out = torch.zeros(3, x.shape[1], dtype=x.dtype)
        for row in order.tolist():
            out[index[row]] = x[row]
        ctx.save_for_backward(index)
        return out

    return function(forward, lambda ctx, g: (g[ctx.saved_tensors[0]], None)), (rand(9, 10), torch.arange(9) % 3)


_UNSEEDED = torch.Generator()


@seeded(RACE)
def adds_without_atomics() -> Made:
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        out = torch.zeros(3, x.shape[1], dtype=x.dtype)
        for row in range(len(x)):
            seen = (
                out[index[row]].clone()
                if torch.rand((), generator=_UNSEEDED) > 0.3
                else torch.zeros(x.shape[1], dtype=x.dtype)
            )
            out[index[row]] = seen + x[row]
        ctx.save_for_backward(index)
        return out

    return function(forward, lambda ctx, g: (g[ctx.saved_tensors[0]], None)), (rand(9, 10), torch.arange(9) % 3)


@seeded(BATCH)
def rows_beyond_a_multiple_of_4_are_left_out() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        whole = len(x) // 4 * 4
        ctx.whole = whole
        return torch.cat([x[:whole] * 2, x[whole:]])

    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.cat([g[: ctx.whole] * 2, g[ctx.whole :]])

    return function(forward, backward), (rand(6, 10),)


@seeded(BATCH)
def divides_by_the_number_of_rows() -> Made:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / len(g)

    return function(lambda ctx, x: x / len(x), backward), (rand(6, 10),)


@seeded(BATCH)
def goes_another_way_for_more_than_4_rows() -> Made:
    def factor(x: Tensor) -> float:
        return 1.01 if len(x) > 4 else 1.0

    return function(lambda ctx, x: x.mul(factor(x)), lambda ctx, g: g * factor(g)), (rand(6, 10),)


@seeded(STRIDES)
def reads_its_input_as_if_it_were_contiguous() -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) * 2

    return function(forward, lambda ctx, g: g * 2), (rand(10, 6, grad=False).t().requires_grad_(),)


@seeded(STRIDES)
def reads_the_upstream_gradient_as_if_it_were_contiguous() -> Made:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        storage = torch.zeros(g.numel(), dtype=g.dtype)
        held = g.as_strided(
            (min(g.numel(), g.untyped_storage().nbytes() // g.element_size()),), (1,), g.storage_offset()
        )
        storage[: len(held)] = held
        return storage.view(g.shape) * 2

    return function(lambda ctx, x: x * 2, backward), (rand(6, 10),)


# Healthy -------------------------------------------------------------------------------------------------------------------------------


@healthy
def scale(dtype: torch.dtype) -> Made:
    return function(lambda ctx, x: x * 3, lambda ctx, g: g * 3), (rand(6, 10, dtype=dtype),)


@healthy
def rms_norm(dtype: torch.dtype) -> Made:
    return function(rms_forward, rms_backward), (rand(6, 10, dtype=dtype), rand(10, dtype=dtype, seed=1))


@healthy
def rms_norm_of_three_dimensions(dtype: torch.dtype) -> Made:
    return function(rms_forward, rms_backward), (rand(6, 3, 64, dtype=dtype), rand(64, dtype=dtype, seed=1))


@healthy
def layer_norm_with_a_float32_weight(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        wide = torch.promote_types(x.dtype, w.dtype)
        return (torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:]) * w.to(wide)).to(x.dtype)

    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, w.dtype)
        xf, gf = x.to(wide), g.to(wide)
        centered = xf - xf.mean(-1, keepdim=True)
        r = (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        n, gx = centered * r, gf * w.to(wide)
        dx = r * (gx - gx.mean(-1, keepdim=True) - n * (gx * n).mean(-1, keepdim=True))
        return dx.to(x.dtype), (gf * n).sum(0).to(w.dtype)

    return function(forward, backward), (rand(6, 10, dtype=dtype), rand(10, seed=1))


@healthy
def softmax(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))

    return function(forward, backward), (rand(6, 50, dtype=dtype, scale=3),)


@healthy
def log_softmax(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.log_softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    return function(forward, lambda ctx, g: g - ctx.saved_tensors[0].exp() * g.sum(-1, keepdim=True)), (
        rand(6, 10, dtype=dtype),
    )


@healthy
def cross_entropy_of_rows(dtype: torch.dtype) -> Made:
    return function(losses, losses_backward), (rand(6, 10, dtype=dtype), torch.tensor([0, -100, 2, 3, -100, 9]))


@healthy
def fused_linear_cross_entropy(dtype: torch.dtype) -> Made:
    """As Liger's: the gradients are computed in the forward pass, into the memory of the logits."""

    def forward(ctx: Any, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32))
        loss = torch.nn.functional.cross_entropy(logits, target)
        logits.copy_(torch.softmax(logits, -1))
        logits[torch.arange(len(target)), target] -= 1
        d = (logits / len(target)).to(x.dtype)
        ctx.save_for_backward(d @ w, d.t() @ x)
        return loss

    return function(forward, lambda ctx, g: (*(one * g for one in ctx.saved_tensors), None)), (
        rand(6, 10, dtype=dtype), rand(30, 10, dtype=dtype, seed=1), torch.arange(6))  # fmt: skip


@healthy
def gelu_tanh(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.nn.functional.gelu(x, approximate="tanh")

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (x + 0.044715 * x**3))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x))

    return function(forward, backward), (rand(6, 10, dtype=dtype),)


@healthy
def swiglu_that_writes_into_what_it_has_saved(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.nn.functional.silu(a) * b

    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        da = g * b * (s + a * s * (1 - s))
        b.copy_(g * a * s)
        a.copy_(da)
        return a, b

    return function(forward, backward), (rand(6, 10, dtype=dtype), rand(6, 10, dtype=dtype, seed=1))


@healthy
def linear(dtype: torch.dtype) -> Made:
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x, g.sum(0)

    return function(affine, backward), (
        rand(6, 10, dtype=dtype),
        rand(7, 10, dtype=dtype, seed=1),
        rand(7, dtype=dtype, seed=2),
    )


@healthy
def weight_gradient_into_empty_memory(dtype: torch.dtype) -> Made:
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, torch.empty_like(w).addmm_(g.t(), x, beta=0), g.sum(0)

    return function(affine, backward), (
        rand(6, 10, dtype=dtype),
        rand(7, 10, dtype=dtype, seed=1),
        rand(7, dtype=dtype, seed=2),
    )


@healthy
def rotary(dtype: torch.dtype) -> Made:
    def turn(x: Tensor, angle: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(ctx: Any, x: Tensor, angle: Tensor) -> Tensor:
        ctx.save_for_backward(angle)
        return turn(x, angle)

    return function(forward, lambda ctx, g: (turn(g, -ctx.saved_tensors[0]), None)), (
        rand(6, 10, dtype=dtype), rand(6, 5, dtype=dtype, grad=False, seed=1))  # fmt: skip


@healthy
def causal_attention(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        p = torch.softmax(scores.masked_fill(future, -math.inf), -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, p.mT @ g

    return function(forward, backward), tuple(rand(4, 9, 16, dtype=dtype, seed=i) for i in range(3))


@healthy
def dropout_with_its_mask(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand(x.shape) > 0.5).to(x.dtype) * 2
        ctx.save_for_backward(mask)
        return x * mask

    return function(forward, lambda ctx, g: g * ctx.saved_tensors[0]), (rand(6, 10, dtype=dtype),)


@healthy
def embedding(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, w: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size = w.shape
        return w[ids]

    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        return g.new_zeros(ctx.size).index_add_(0, ids, g), None

    return function(forward, backward), (rand(20, 10, dtype=dtype), torch.tensor([1, 3, 1, 7, 1]))


@healthy
def batch_norm(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centered = wide - wide.mean(0)
        r = (centered.square().mean(0) + 1e-5).rsqrt()
        ctx.save_for_backward(centered * r, r)
        return (centered * r).to(x.dtype)

    def backward(ctx: Any, g: Tensor) -> Tensor:
        n, r = ctx.saved_tensors
        wide = g.to(n.dtype)
        return (r * (wide - wide.mean(0) - n * (wide * n).mean(0))).to(g.dtype)

    return function(forward, backward), (rand(8, 10, dtype=dtype),)


@healthy
def cumulative_sum(dtype: torch.dtype) -> Made:
    return function(lambda ctx, x: x.cumsum(0), lambda ctx, g: g.flip(0).cumsum(0).flip(0)), (rand(8, 10, dtype=dtype),)


@healthy
def largest_of_each_row(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, index = x.max(-1)
        ctx.save_for_backward(index)
        ctx.size = x.shape
        ctx.mark_non_differentiable(index)
        return values, index

    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        return g.new_zeros(ctx.size).scatter_(-1, ctx.saved_tensors[0][:, None], g[:, None])

    return function(forward, backward), (rand(6, 10, dtype=dtype),)


@healthy
def straight_through_rounding(dtype: torch.dtype) -> Made:
    return function(lambda ctx, x: (x * 8).round() / 8, lambda ctx, g: g), (rand(6, 10, dtype=dtype),)


@healthy
def relu_in_place(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.relu_()
        ctx.save_for_backward(x)
        return x

    return function(forward, lambda ctx, g: g * (ctx.saved_tensors[0] > 0)), (rand(6, 10, dtype=dtype).mul(1),)


@healthy
def recomputed_mlp(dtype: torch.dtype) -> Made:
    def mlp(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) @ w.t()

    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return mlp(x, w)

    def backward(ctx: Any, g: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(mlp(*leaves), leaves, g)

    return function(forward, backward), (rand(6, 10, dtype=dtype), rand(10, 20, dtype=dtype, seed=1, scale=0.3))


@healthy
def divergence(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        wide = torch.promote_types(student.dtype, torch.float32)
        p, q = torch.log_softmax(teacher.to(wide), -1), torch.log_softmax(student.to(wide), -1)
        ctx.save_for_backward((q.exp() - p.exp()) / len(student))
        ctx.dtype = student.dtype
        return (p.exp() * (p - q)).sum() / len(student)

    return function(forward, lambda ctx, g: ((ctx.saved_tensors[0] * g).to(ctx.dtype), None)), (
        rand(6, 10, dtype=dtype), rand(6, 10, dtype=dtype, grad=False, seed=1))  # fmt: skip


@healthy
def sum_and_mean(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.size = x.shape
        return x.sum(-1), x.mean(-1)

    def backward(ctx: Any, total: Tensor, mean: Tensor) -> Tensor:
        return (total + mean / ctx.size[-1])[:, None].expand(ctx.size)

    return function(forward, backward), (rand(6, 10, dtype=dtype),)


@healthy
def written_block_by_block(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for begin in range(0, len(x), 4):
            out[begin : begin + 4] = x[begin : begin + 4].sigmoid()
        ctx.save_for_backward(out)
        return out

    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * y * (1 - y)

    return function(forward, backward), (rand(6, 10, dtype=dtype),)


@healthy
def operator_with_its_gradient(dtype: torch.dtype) -> Made:
    name = f"corpus::whole_gradient_{next(_NUMBERS)}"
    operator = torch.library.custom_op(name, lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor")

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    operator.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=setup)
    return operator, (rand(6, 10, dtype=dtype),)


@healthy
def transposed_input(dtype: torch.dtype) -> Made:
    return function(lambda ctx, x: x.square(), lambda ctx, g: g), (rand(10, 6, dtype=dtype, grad=False).t(),)


@healthy
def needs_a_bias_that_cancels(dtype: torch.dtype) -> Made:
    """The gradient of what is added to all logits alike is 0, so all that is left of it is rounding."""

    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        y = torch.softmax(x + shift, -1)
        ctx.save_for_backward(y)
        return y

    def backward(ctx: Any, g: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        d = y * (g - (g * y).sum(-1, keepdim=True))
        return d, d.sum().reshape(1)

    return function(forward, backward), (rand(6, 10, dtype=dtype), rand(1, dtype=dtype, seed=1))


@healthy
def gradient_reversal(dtype: torch.dtype) -> Made:
    """Of domain adversarial training: its forward does nothing, and its backward is meant."""
    return function(lambda ctx, x: x.view_as(x), lambda ctx, g: -0.5 * g), (rand(6, 10, dtype=dtype),)


@healthy
def auxiliary_loss(dtype: torch.dtype) -> Made:
    """As DeepSeek's and Megatron's: the loss that goes with the activations gets a gradient of 1."""

    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    return function(forward, lambda ctx, g: (g, torch.ones_like(ctx.saved_tensors[0]))), (
        rand(6, 10, dtype=dtype), rand(1, dtype=dtype, seed=1))  # fmt: skip


@healthy
def spike_with_a_surrogate_gradient(dtype: torch.dtype) -> Made:
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    return function(forward, lambda ctx, g: g / (1 + 10 * ctx.saved_tensors[0].abs()).square()), (
        rand(6, 10, dtype=dtype),
    )
