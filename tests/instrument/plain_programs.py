"""Programs that call no module: some compute inf or NaN in one line, which a comment names with its operator; some only use them.

Each is a function without arguments. The comment ``# makes: OP`` marks the line in which the first value goes wrong; more than one operator
may be named where it is a matter of taste which of them did it.
"""

import io
import math
from collections.abc import Callable
from unittest import TestCase

import torch
from torch import Tensor

INF = float("inf")


def entropy_of_a_sure_event() -> None:
    p = torch.tensor([1.0, 0.0, 0.0])
    entropy = -(p * torch.log(p)).sum()  # makes: log
    print(entropy.item())


def distance_of_equal_points() -> None:
    a = torch.ones(4, 2, requires_grad=True)
    squared = (a[:, None] - a[None]).pow(2).sum(-1)
    distance = torch.sqrt(squared)  # makes: sqrt
    for _ in range(2):
        (gradient,) = torch.autograd.grad(distance.mean(), a, retain_graph=True)
        print(gradient.shape)


def where_in_backward() -> None:
    x = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)
    y = torch.where(x > 0, torch.sqrt(x), torch.zeros(()))  # makes: sqrt
    y.sum().backward()


def half_that_is_tested_as_a_number() -> None:
    total = torch.full((4,), 300.0, dtype=torch.float16)
    squares = (total * total).sum().item()  # makes: mul
    if math.isinf(squares):
        print("no sum")


def newton_at_an_inflection() -> None:
    x = torch.tensor(0.0, requires_grad=True)
    for _ in range(3):
        y = x**3 + 1
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        with torch.no_grad():
            x -= (first + 1) / second  # makes: div


def transformed_gradient() -> None:
    def objective(w: Tensor) -> Tensor:
        return (torch.log(w) * w).sum()  # makes: log

    gradient = torch.func.grad(objective)(torch.tensor([0.0, 1.0]))
    print(gradient.tolist())


def mapped_over_samples() -> None:
    batch = torch.stack([torch.arange(3.0), torch.ones(3)])
    scaled = torch.vmap(lambda row: (row - row.mean()) / row.std())(batch)  # makes: div
    print(scaled.sum().item())


def masked_causally() -> None:
    mask = torch.triu(torch.full((5, 5), -INF), diagonal=1)
    scores = torch.randn(5, 5, requires_grad=True)
    attention = torch.softmax(scores + mask, dim=-1)
    attention.pow(2).sum().backward()
    print(mask.tolist())


def best_so_far() -> None:
    best = torch.tensor(INF)
    w = torch.ones(3, requires_grad=True)
    for _ in range(3):
        loss = w.pow(2).mean()
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad = None
        best = torch.minimum(best, loss.detach())
    print(best.item())


def degrees_of_a_graph() -> None:
    degree = torch.tensor([0.0, 1.0, 3.0])
    inverse = degree.pow(-0.5)
    inverse[inverse == INF] = 0
    print((inverse[:, None] * inverse).sum().item())


def logarithm_that_is_safe() -> None:
    p = torch.tensor([0.0, 0.5, 0.5], requires_grad=True)
    there = p > 0
    entropy = -torch.where(there, p * torch.log(torch.where(there, p, torch.ones(()))), torch.zeros(())).sum()
    entropy.backward()
    print(torch.xlogy(p, p).sum().item())


def lattice_of_logarithms() -> None:
    alpha = torch.full((4,), -INF)
    alpha[0] = 0.0
    emission = torch.randn(6, 4).log_softmax(-1)
    for t in range(6):
        moved = torch.cat([torch.full((1,), -INF), alpha[:-1]])
        alpha = torch.logaddexp(alpha, moved) + emission[t]
    print(torch.logsumexp(alpha, 0).item())


def data_with_gaps() -> None:
    x = torch.tensor([1.0, float("nan"), 3.0])
    missing = torch.isnan(x)
    if missing.any():
        x = torch.where(missing, torch.nanmean(x), x)
    print(x.sum().item())


def beams() -> None:
    scores = torch.full((3,), -INF)
    scores[0] = 0.0
    for _ in range(4):
        candidates = (scores[:, None] + torch.randn(3, 7).log_softmax(-1)).flatten()
        scores, places = candidates.topk(3)
        print(places.tolist())
    print(scores.max().item())


def guarded_and_fine() -> None:
    w = torch.randn(4, requires_grad=True)
    loss = torch.nn.functional.softplus(w).sum()
    assert torch.isfinite(loss).all()
    loss.backward()
    if not torch.isnan(w.grad).any():
        print(w.grad.norm().item())


def saved_and_never_used() -> None:
    roots = torch.sqrt(torch.tensor([4.0, -1.0]))  # makes: sqrt
    torch.save({"roots": roots}, io.BytesIO())
    print(roots.shape)


def handed_to_numpy() -> None:
    ratio = torch.tensor([1.0, 0.0]) / torch.tensor([2.0, 0.0])  # makes: div
    print(ratio.numpy().shape, torch.mean(ratio).shape)


def recall_of_absent_classes() -> None:
    chosen = (torch.randn(20, 4).bfloat16() @ torch.randn(4, 3).bfloat16()).argmax(1)
    hits, all_of = (torch.tensor([[(chosen == c).sum(), 0] for c in range(2)]).float() for _ in range(2))
    recall = hits.flatten() / all_of.flatten()
    print(recall.tolist(), recall.nanmean().item())


def jacobians_and_hessians() -> None:
    def bent(x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.ones(3)

    x = torch.tensor([0.1, 0.2, 0.3])
    for derivative in (torch.func.jacrev(bent), torch.func.jacfwd(bent), torch.func.hessian(bent)):
        print(derivative(x).sum().item())
    print(torch.func.vjp(bent, x)[1](torch.ones(3))[0].sum().item())
    print(torch.func.jvp(bent, (x,), (torch.ones(3),))[1].sum().item())


def batch_that_is_left_out() -> None:
    weight = torch.ones(2, requires_grad=True)
    for kept in (0, 2):
        loss = (weight * torch.ones(2))[:kept].mean()
        if not torch.isfinite(loss):
            continue
        loss.backward()


def mask_in_a_file() -> None:
    mask = torch.full((3, 3), -INF).triu(1)
    torch.save(mask, io.BytesIO())
    print(mask.numpy().shape, (torch.ones(3, 3) + mask).softmax(-1).sum().item())


def half_that_is_tested() -> None:
    total = torch.full((4,), 300.0, dtype=torch.float16)
    squares = (total * total).sum()  # makes: mul
    if torch.isinf(squares):
        print("no sum")


def half_that_is_tested_and_reported() -> None:
    rows = torch.full((64,), 60.0, dtype=torch.float16)
    total = (rows * rows).sum()  # makes: sum
    if torch.isinf(total):
        print("no sum of", rows.float().abs().max().item())
    print((rows.float() * rows.float()).sum().item())


def largest_power_that_a_dtype_holds() -> None:
    limit = 1.0
    while torch.isfinite(torch.tensor(limit, dtype=torch.float16) * 2):
        limit *= 2
    print(limit)


def numbers_that_a_dtype_holds() -> None:
    print([number for number in (1e3, 1e5) if torch.tensor(number, dtype=torch.float16).isfinite()])


def limits_of_several_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        number = torch.ones((), dtype=dtype)
        while torch.isfinite(number * 2):
            number = number * 2
        print(number.item())


def half_that_is_computed_again_in_float32() -> None:
    def dot(rows: Tensor) -> Tensor:
        total = (rows * rows).sum()
        if not torch.isfinite(total):
            total = (rows.float() * rows.float()).sum()
        return total

    def in_float32(rows: Tensor) -> Tensor:
        return (rows.float() * rows.float()).sum()

    rows = torch.full((64,), 60.0, dtype=torch.float16)
    for _ in range(5):
        print(dot(rows).item())
        total = (rows * rows).sum()
        print((in_float32(rows) if total.isinf() else total).item())


def steps_up_to_the_end_of_a_dtype() -> None:
    number = torch.ones((), dtype=torch.float16)
    while not math.isinf((number * 4).item()):
        number = number * 4
    print(number.item())


def a_probe_after_one_that_raised() -> None:
    try:
        torch.linalg.inv(torch.eye(2, dtype=torch.float16))
    except RuntimeError:
        largest_power_that_a_dtype_holds()


def a_number_of_the_code_that_half_does_not_hold() -> None:
    penalty = torch.tensor(1e5, dtype=torch.float16)  # makes: _to_copy cast
    print((penalty * torch.zeros(3, dtype=torch.float16)).sum().item())


def numbers_of_the_code_some_of_which_half_does_not_hold() -> None:
    biggest = 1e6
    weights = torch.tensor([1.0, 2.0, biggest], dtype=torch.float16)  # makes: _to_copy cast
    print((weights / weights.sum()).sum().item())


def means_of_groups_that_may_be_empty() -> Tensor:
    """One of 3 groups is empty, beside computations in half precision."""
    values = (torch.rand(4, 4, dtype=torch.bfloat16) @ torch.rand(4, 1, dtype=torch.bfloat16)).float().flatten()
    group = torch.tensor([0, 0, 2, 2])
    return torch.stack([values[group == k].mean() for k in range(3)])


def empty_groups_that_python_leaves_out() -> None:
    print(sum(mean for mean in means_of_groups_that_may_be_empty() if not torch.isnan(mean)).item())
    for mean in means_of_groups_that_may_be_empty():
        number = mean.item()
        print(None if math.isnan(number) else number)
    print([round(number, 3) for number in means_of_groups_that_may_be_empty().tolist() if not math.isnan(number)])


def empty_groups_that_numpy_leaves_out() -> None:
    means = means_of_groups_that_may_be_empty().half().numpy()
    print(means[~(means != means)].mean())  # noqa: PLR0124  # how NumPy code asks for NaN


def empty_groups_that_are_masked_before_they_are_listed() -> None:
    means = means_of_groups_that_may_be_empty()
    print(means[~means.isnan()].mean().item(), means.tolist())


def ratios_with_gaps() -> tuple[Tensor, Tensor]:
    """Parts and wholes, of which one is nothing, beside computations in half precision."""
    parts = torch.tensor([[1.0, 0.0, 2.0]]) * torch.ones(1, dtype=torch.bfloat16).float()
    return parts, torch.tensor([2.0, 0.0, 3.0])


def ratios_with_gaps_that_are_marked() -> None:
    parts, wholes = ratios_with_gaps()
    there = wholes > 0
    print(torch.where(there, parts / wholes, float("nan")).tolist())
    print(torch.where(there, parts / wholes, torch.full_like(parts, float("nan")))[0, 1].item())
    print((parts / wholes).masked_fill(~there, float("nan")).numpy())
    marked = parts / wholes
    marked[:, ~there] = float("nan")
    torch.save(marked, io.BytesIO())
    scores = torch.where(there, parts / wholes, -INF)
    print(scores.tolist(), scores.softmax(-1).sum().item())


def ratios_with_gaps_that_are_marked_elsewhere() -> None:
    parts, wholes = ratios_with_gaps()
    ratios = parts / wholes  # makes: div
    print(torch.where(parts < 2, ratios, float("nan")).tolist())


def a_mean_over_classes_with_an_empty_one() -> None:
    hits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    accuracy = hits.sum(0) / torch.tensor([1.0, 0.0, 1.0])  # makes: div
    print(accuracy.mean().item())


def nothing_divided_by_nothing() -> None:
    a, b = torch.zeros(5), torch.ones(5)
    similarity = (a * b).sum() / (a.norm() * b.norm())
    if torch.isnan(similarity):
        print("no similarity")
    assert torch.isnan(a / a).all()
    assert torch.isinf(b / 0).all()
    assert torch.log(a).isneginf().all()
    assert torch.allclose(a / a, torch.full((5,), float("nan")), equal_nan=True)


def infinities_that_are_asserted() -> None:
    one, big = torch.ones(()), torch.full((2,), 300.0, dtype=torch.float16)
    assert (one / 0).item() == INF
    assert math.isinf((big * big).max().item())
    assert (big * big).tolist() == [INF, INF]
    listed = big * big
    assert listed.tolist() == [INF, INF]
    listed.clone()  # as the list of a device's tensor is made of a copy
    assert torch.isinf(big * big).all()
    assert not torch.isfinite(big[0] * big[0])
    smallest = float(torch.log(one - 1))
    assert smallest == -INF
    TestCase().assertTrue(math.isnan(as_a_number(one * 0 / 0)))  # noqa: PT009


def alignments_that_cannot_be() -> None:
    scores = (torch.randn(10, 3, 4, dtype=torch.bfloat16) * 2).float().log_softmax(-1)
    lengths = torch.full((3,), 10), torch.full((3,), 3)
    loss = torch.nn.functional.ctc_loss(scores, torch.ones(3, 3, dtype=torch.long), *lengths, zero_infinity=True)
    print(loss.item())


def as_a_number(value: Tensor) -> float:
    return value.item()


HEALTHY: tuple[Callable[[], None], ...] = (
    nothing_divided_by_nothing,
    recall_of_absent_classes,
    empty_groups_that_python_leaves_out,
    empty_groups_that_numpy_leaves_out,
    empty_groups_that_are_masked_before_they_are_listed,
    ratios_with_gaps_that_are_marked,
    infinities_that_are_asserted,
    alignments_that_cannot_be,
    masked_causally,
    best_so_far,
    degrees_of_a_graph,
    logarithm_that_is_safe,
    lattice_of_logarithms,
    data_with_gaps,
    beams,
    guarded_and_fine,
    jacobians_and_hessians,
    batch_that_is_left_out,
    mask_in_a_file,
    largest_power_that_a_dtype_holds,
    numbers_that_a_dtype_holds,
    steps_up_to_the_end_of_a_dtype,
    half_that_is_computed_again_in_float32,
    limits_of_several_dtypes,
    a_probe_after_one_that_raised,
)
FAULTY: tuple[Callable[[], None], ...] = (
    entropy_of_a_sure_event,
    distance_of_equal_points,
    where_in_backward,
    half_that_is_tested,
    half_that_is_tested_and_reported,
    half_that_is_tested_as_a_number,
    newton_at_an_inflection,
    transformed_gradient,
    mapped_over_samples,
    saved_and_never_used,
    handed_to_numpy,
    a_mean_over_classes_with_an_empty_one,
    ratios_with_gaps_that_are_marked_elsewhere,
    a_number_of_the_code_that_half_does_not_hold,
    numbers_of_the_code_some_of_which_half_does_not_hold,
)
