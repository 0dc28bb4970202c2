"""Values that half precision rounds are followed in float64 to where they are used: what is told of, and what is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor._torch_private import without_modes
from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.trace.events import NotWatched

HALF = torch.bfloat16


def told_of(directory: Path, work: Callable[[], object]) -> list[Finding]:
    """What is found of rounded values."""
    torch.manual_seed(0)
    findings = diagnose(watched(directory, lambda _: work()))
    ids = ("rounded-result", "rounded-sum", "rounded-indices", "rounded-rotary-buffer", "update-stall")
    return [one for one in findings if one.id in ids]


def line_of(finding: Finding) -> str:
    number = int((finding.source or ":0").rpartition(":")[2])
    return Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]


def schedule() -> None:
    """A grid of times in which a step looks for itself."""
    sigmas = torch.linspace(1.0, 0.003, 100, dtype=HALF)
    times = 5 * sigmas / (1 + 4 * sigmas)
    for time in times:
        int(torch.argmin((times - time).abs()))


def codes() -> None:
    """Nearest codes by distances that overflow."""
    rows, table = torch.full((4, 8), 300.0).half(), (torch.arange(24).reshape(3, 8).half() * 100).flip(0)
    ((rows[:, None] - table[None]) ** 2).sum(-1).argmin(1)


class Counts(nn.Module):
    """Counts whole numbers in a buffer, which is cast with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        """Adds how often each has come."""
        self.seen += torch.bincount(rows, minlength=4)
        return self.seen.float()


def counts() -> None:
    """One step of 16 calls, of which a routine look sees three."""
    model = Counts().to(HALF)
    for _ in range(16):
        model(torch.randint(0, 4, (301,)))


def statistics() -> None:
    """The running variance of a batch norm is beyond float16."""
    norm = nn.BatchNorm1d(8).half()
    for _ in range(2):
        norm(torch.randn(16, 8).half() * 3000)


def merged() -> None:
    """An adapter that is merged into frozen weights and taken out again."""
    model, adapter = nn.Linear(32, 32).to(HALF), torch.randn(32, 32) * 0.03
    for _ in range(3):
        model.weight.data += adapter
        model.weight.data -= adapter.to(HALF)
        adapter = adapter + torch.randn(32, 32) * 0.01


def averaged() -> None:
    """torch's own average of a bfloat16 model, which updates all weights in one operator."""
    model = nn.Linear(32, 32).to(HALF)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9999)
    )
    for _ in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        average.update_parameters(model)


def lengths() -> None:
    """Lengths as shares of the longest, which are cast with everything else of a batch."""
    frames = torch.tensor([2999.0, 2513, 1777, 1204, 2203, 2750, 1999, 1601])
    torch.round((frames / 2999).half() * 2999).long()


class Rotations(nn.Module):
    """Turns by a complex table in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16.0), 100.0 ** -torch.linspace(0, 1, 8))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))


def rotations() -> None:
    """A model is cast with its table."""
    Rotations().to(HALF)


def confusion() -> None:
    """Pairs of classes are counted by a product in half precision, summed in float32, and read by Python."""
    total = torch.zeros(4, 4)
    for _ in range(3):
        hot = [nn.functional.one_hot(torch.randint(0, 4, (9001,)), 4).to(HALF) for _ in range(2)]
        total += hot[0].t() @ hot[1]
    int(total.sum())


def levels() -> None:
    """Steps between levels of which some coincide."""
    table = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).half()
    sigmas = ((1 - table) / table).sqrt()
    state = torch.ones(8)
    for now in range(40, 0, -1):
        state = state + (sigmas[now - 1] - sigmas[now]) * torch.randn(8)


def exam() -> None:
    """Scores that are rounded before one of each row is chosen."""
    (torch.randn(400, 40) + 60).to(HALF).argmax(1)


def neighbors() -> None:
    """The nearest of points that are far from the origin, by distances that are made of squares in float32."""
    for _ in range(3):
        points = 100 * torch.rand(64, 2) + torch.tensor([5e5, 5e6])
        distances = torch.cdist(points, points)
        distances.fill_diagonal_(float("inf"))
        distances.topk(4, largest=False)


def faded() -> None:
    """An average whose weight is 1 in bfloat16, so that nothing is added."""
    beta, average = torch.tensor(0.999, dtype=HALF), torch.zeros(64)
    for _ in range(10):
        average = beta * average + (1 - beta) * torch.randn(64)


def threshold() -> None:
    """A threshold beyond what half precision can tell from 1, for scores in float32."""
    limit = torch.tensor(0.9985, dtype=HALF)
    (torch.rand(5000) * 0.02 + 0.99).gt(limit).sum()


def best_so_far() -> None:
    """A loss that falls by less than its spacing from one epoch to the next."""
    best = torch.tensor(float("inf"), dtype=HALF)
    for epoch in range(60):
        loss = torch.tensor(2.0) * 0.9995**epoch
        now = (loss + 0.001).to(HALF)
        best = min(best, now)


def seconds_apart() -> None:
    """Times of day and year beside other features in float32."""
    times = torch.arange(1_700_000_000, 1_700_000_000 + 256 * 60, 60)
    rows = torch.stack([times.float(), torch.randn(256)], 1)
    rows[1:, 0].sub(rows[:-1, 0])


def correct_ones() -> None:
    """A count of whole numbers that are summed before."""
    correct = torch.zeros(()).half()
    for _ in range(100):
        correct += (torch.rand(100) < 0.33).half().sum()


def joined() -> None:
    """Ids beyond 24 bits travel beside features in float32."""
    ids = torch.arange(41_307_115, 41_307_715)
    rows = torch.cat([ids[:, None].float(), torch.randn(600, 6)], 1)
    rows[torch.randperm(600)][:, 0].long()


class Average(nn.Module):
    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("mean", torch.ones(256))

    def forward(self, rows: Tensor) -> Tensor:
        """Moves the average on."""
        self.mean.lerp_(rows.mean(0).to(self.mean.dtype), 1 - self.decay)
        return rows - self.mean


def average_inside() -> None:
    """A module moves its average by less than half precision holds."""
    model, weight = Average(0.9999).to(HALF), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        (model(torch.randn(32, 256).to(HALF)).float().mean() * weight).sum().backward()
        optimizer.step()


def diffusion() -> None:
    """The products of a noise schedule, which a program computes from numbers alone."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=HALF), 0)
    [(1 - kept[step]).sqrt() * torch.randn(4).to(HALF) for step in range(999, 0, -100)]


def returns() -> None:
    """Discounted rewards, which are computed from themselves."""
    value = torch.zeros(100).to(HALF)
    for _ in range(200):
        value = 0.999 * value + (0.5 + torch.rand(100)).to(HALF) * 0.01


class SquaresMinusSquare(nn.Module):
    """A variance by the mean of squares less the square of the mean, before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalizes and multiplies."""
        mean = rows.mean(-1, keepdim=True)
        spread = (rows * rows).mean(-1, keepdim=True) - mean * mean
        return self.layer((rows - mean) * torch.rsqrt(spread.clamp(min=0) + 1e-2))


def variance() -> None:
    """Of values far from 0."""
    SquaresMinusSquare().half()((20 + torch.randn(32, 64)).half())


def stamps() -> None:
    """Gaps between seconds since 1970, in float32."""
    layer, seconds = nn.Linear(19, 4), 1_700_000_000 + torch.randint(5, 60, (32, 20)).cumsum(1)
    times = seconds.float()
    layer(torch.log1p(times[:, 1:] - times[:, :-1]))


def frequencies() -> None:
    """The weights of common words are below float16's smallest number."""
    counts = torch.tensor([8e7, 6e7, 5e7, 5e7, 9e6, 6e6, 4e6, 2e6])
    scores, words = torch.randn(64, 8).half().requires_grad_(), torch.multinomial(counts.sqrt(), 64, replacement=True)
    weight = (1 / counts).to(scores.dtype)
    nn.functional.cross_entropy(scores, words, weight=weight / weight.sum()).backward()


def boxes() -> None:
    """The overlap of small boxes far from the corner of a large image."""
    size, corner = 8 + 8 * torch.rand(300, 2), 1500 + 400 * torch.rand(300, 2)
    one = torch.cat([corner, corner + size], 1)
    a, b = one.to(HALF), (one + torch.randn_like(one)).to(HALF)
    inner = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(-1)
    areas = [(x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1]) for x in (a, b)]
    torch.gt(inner / (areas[0] + areas[1] - inner), 0.5)


def beams() -> None:
    """Scores of long texts, whose spacing is larger than what a word adds."""
    scores = torch.zeros(4).to(HALF)
    for _ in range(300):
        scores, _ = (scores[:, None] + torch.randn(4, 50).to(HALF).log_softmax(-1)).flatten().topk(4)


def handed_on() -> None:
    """Timesteps that go through a list of Python's, and come back in float32."""
    times = (torch.linspace(0, 1, 50) * 999).to(HALF).tolist()
    angles = torch.tensor(times)[:, None] * torch.exp(-torch.arange(8) / 2.0)
    angles.sin()


def through_numpy() -> None:
    ids = torch.randint(0, 60000, (64,)).half()
    torch.randn(60000)[torch.from_numpy(ids.numpy().astype("int64"))]


def micro_batches() -> None:
    """Gradients of many backward passes, which autograd adds up."""
    weight = nn.Parameter(torch.ones(8).to(HALF))
    for _ in range(600):
        (weight * 0.003).sum().backward()
    torch.optim.SGD([weight], 0.1).step()


def bins() -> None:
    """Coordinates are rounded before they are looked up among finer bins, each next to its own."""
    edges, places = torch.arange(0, 100, 0.25), 100 * torch.rand(2000)
    nn.functional.embedding(torch.bucketize(places.to(HALF).float(), edges), torch.randn(500, 4))


def discounted() -> None:
    """A number of Python's that half precision rounds to 1, to the power of the distance."""
    weight, rewards = torch.ones(1, requires_grad=True), torch.rand(400)
    decay = torch.tensor(0.999, dtype=HALF)
    returns = (rewards * decay ** torch.arange(400.0)).sum()
    (weight * returns).sum().backward()


def seconds() -> None:
    """Times of a log, which Python hands to float32."""
    log = [(1_700_000_000 + 7.3 * row, row % 5) for row in range(200)]
    times = torch.tensor([row[0] for row in log])
    nn.Linear(1, 4)((times[1:] - times[:-1])[:, None] / 10)


def priorities() -> None:
    """Rows are drawn by chances of which half precision makes 0."""
    chances = (1e-4 * torch.rand(2000)).half() ** 2
    torch.multinomial(chances.float() + 1e-30 * (torch.arange(2000) == 0), 64)


class Whitened(torch.autograd.Function):
    """Passes a gradient on through half precision."""

    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        """Leaves everything as it is."""
        return rows.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        """Adds and takes away what is large beside it."""
        large = gradient.to(HALF) + 100
        return (large - 100).float()


def passed_back() -> None:
    """A function of the program's own computes the gradient of a model's output."""
    Whitened.apply(nn.Linear(8, 1)(torch.randn(64, 8))).square().sum().backward()


def centered() -> None:
    """Gradients are changed between the backward pass and the step."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.randn(64, 8)).square().mean().backward()
    for parameter in model.parameters():
        large = parameter.grad.to(HALF) + 64
        parameter.grad = (large - 64).float()
    optimizer.step()


class Warp(nn.Module):
    """Moves pixels by what a layer says, from where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Coordinates in half precision, stacked and turned before they are used."""
        flow = self.flow(image)[0]
        axes = [torch.linspace(0, size - 1, size, dtype=flow.dtype) for size in (600, 24)]
        mesh = torch.stack(torch.meshgrid(axes, indexing="ij"), -1).permute(1, 0, 2)
        return (mesh[..., 0] + flow[0]).float() / 600


def mesh() -> None:
    """An image of 600 columns, of which bfloat16 tells 428 apart."""
    Warp().to(HALF)(torch.rand(1, 1, 24, 600).to(HALF))


def interpolated() -> None:
    """A table between whose rows half precision tells nothing apart."""
    at = torch.rand(256).to(HALF) * 199
    low = at.floor().long().clamp(max=198)
    (at - low).float().mul(torch.randn(256))


def pairs() -> None:
    """Distances of all pairs of positions, of which neighbors coincide."""
    positions = torch.arange(700, dtype=HALF)
    (positions[None, :] - positions[:, None]).float().mul(0.5).exp()


def looked_up() -> None:
    """A schedule in half precision, of which a few entries are used at a time."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(HALF)
    for _ in range(3):
        kept[torch.randint(0, 1000, (64,))].sqrt() * torch.randn(64).to(HALF)


def expert() -> None:
    """The best expert, by probabilities of which half precision makes two the same; a quarter of the rows goes to the other one."""
    scores = torch.randn(400, 8)
    scores[:, 4:] = scores[:, :4] * 1.001
    scores.softmax(-1).to(HALF).topk(1, -1)


def two_experts() -> None:
    """The two best of many experts of nearly the same probability: for one row of four another one is among them."""
    (0.05 * torch.randn(400, 64)).softmax(-1).to(HALF).topk(2, -1)


def drawn() -> None:
    """Tokens that a filter has taken out: in float16 the noise that they are drawn by is 0 for one of a hundred million."""
    torch.manual_seed(20)
    chances = torch.zeros(20, 60_000, dtype=torch.float16)
    chances[:, :4] = 0.25
    torch.multinomial(chances, 1)


def divergence() -> None:
    """Log-probabilities of two models over half a million logits, whose difference is about as large as their spacing."""
    logits, tokens = torch.randn(16, 64, 512), torch.randint(0, 512, (16, 64, 1))
    others = (logits + 0.03 * torch.randn(512)).to(HALF).log_softmax(-1).gather(-1, tokens)
    ratio = others - logits.to(HALF).log_softmax(-1).gather(-1, tokens)
    print((ratio.exp() - 1 - ratio).float().mean().item())


def rows_kept() -> None:
    """Drops no row, but for those whose random number is 0: in half precision one of 256."""
    rows = torch.randn(8192, 4).to(HALF)
    (rows * (torch.rand_like(rows[:, :1]) > 0.0)).sum()


def stored_moments() -> None:
    """Squares of small gradients that go through float16 on their way to a file."""
    squares = 1e-9 * torch.rand(64, 64)
    buffer = torch.empty(64, 64, dtype=torch.float16)
    buffer.copy_(squares)


def documents() -> None:
    """Which of many packed tokens are of one document: each meets each."""
    rows = torch.arange(400).repeat_interleave(3).to(HALF)
    torch.where((rows[:, None] == rows[None]), 0.0, -1e4).softmax(-1).sum().item()


def lengths_of_rows() -> None:
    """Four lengths of which three are odd, and a fourth that meets a position that is: an error of one is an error."""
    lengths = torch.tensor([[2049.0], [2051.0], [2500.0], [2053.0]]).half()
    (torch.arange(2500, dtype=lengths.dtype) < lengths).sum(1).tolist()


def converged() -> None:
    """A loss that was as it should be while it was large."""
    for step in range(60):
        margins = (torch.rand(32) + min(step, 6)).to(HALF).requires_grad_()
        (1 + torch.exp(-margins)).log().mean().backward()


def estimates() -> None:
    """A mean of positive terms that are differences of near numbers; in some batches it is 0."""
    for _ in range(20):
        gaps = (torch.randn(64) * 0.04).to(HALF)
        (gaps.exp() - gaps - 1).float().mean().item()


def accepted() -> None:
    """Drafts that are very unlikely, of which some are accepted: a random number in bfloat16 is 0 once in 256 times."""
    for _ in range(40):
        ratio = torch.exp(-12 * torch.rand(512)).to(HALF)
        (torch.rand_like(ratio) < ratio).sum()


def clipped_by_nothing() -> None:
    """Squares of gradients that are 0 in float16, so that no norm is above its limit, and what divides by it is inf."""
    gradients = [torch.rand(64).half() * 1e-4 for _ in range(3)]
    for _ in range(8):
        scale = 1e-5 / (sum(g.square().sum() for g in gradients).sqrt() + 1e-6)  # type: ignore[union-attr]
        if scale < 1:
            break


def annealed() -> None:
    """A learning rate over the steps, each of which is a number of Python's until it is bfloat16."""
    for step in range(300):
        done = torch.tensor(step, dtype=HALF) / 600
        (0.5e-3 * (1 + torch.cos(torch.pi * done))).item()


def plateau() -> None:
    """A loss that falls in each epoch, and that a scheduler takes for one that stands still."""
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    rows = torch.randn(256, 16)
    wanted = rows.sum(1, keepdim=True) + 3 + torch.randn(256, 1)
    for _ in range(60):
        with torch.autocast("cpu", dtype=HALF):
            loss = (model(rows) - wanted.to(HALF)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())


def logged() -> None:
    """The same loss, which is printed; a schedule whose steps bfloat16 has; a loss of small batches."""
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    rows = torch.randn(256, 16)
    for step in range(60):
        with torch.autocast("cpu", dtype=HALF):
            loss = (model(rows) - rows[:, :1].to(HALF)).square().mean()
            batch = (model(torch.randn(16, 16)) - torch.randn(16, 1).to(HALF)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item(), (1 - torch.tensor(step, dtype=HALF) / 64).item()
        scheduler.step(batch.detach())


def averaged_unevenly() -> None:
    """An average of which a few elements go far, and most never move."""
    average, weight = torch.full((64,), 0.3, dtype=HALF), torch.full((64,), 0.3)
    for _ in range(200):
        weight += 6e-4 * torch.where(torch.arange(64) < 8, 100.0, 1.0)
        average.mul_(0.999).add_(weight.to(HALF), alpha=0.001)


def falling() -> None:
    """A loss that falls to nothing, without a difference of near values."""
    for step in range(60):
        margins = (torch.rand(32) + min(step, 6)).to(HALF).requires_grad_()
        nn.functional.softplus(-margins).mean().backward()


def short_lengths() -> None:
    """Lengths of which half precision has all."""
    lengths = torch.tensor([[301.0], [407.0], [599.0], [513.0]]).half()
    (torch.arange(1000, dtype=lengths.dtype) < lengths).sum(1).tolist()


def spreads() -> None:
    """A pressure that varies by little, and a temperature: standard deviations by means of squares, in float32."""
    rows = torch.stack([1013 + 0.02 * torch.randn(512), 290 + 5 * torch.randn(512)], 1)
    mean, squares = rows.mean(0), (rows**2).mean(0)
    spread = (squares - mean**2).clamp_min(0).sqrt()
    nn.Linear(2, 4)((rows - mean) / (spread + 1e-7))


def running_moments() -> None:
    """Moments of ticks and of shares over 40 batches in float32: the variance of the ticks is what two numbers near 1e8 differ by."""
    mean, squares = torch.zeros(2), torch.zeros(2)
    for number in range(1, 41):
        rows = torch.tensor([10_000, 0.5]) + torch.tensor([0.8, 0.1]) * torch.randn(200, 2)
        mean += (rows.mean(0) - mean) / number
        squares += ((rows**2).mean(0) - squares) / number
    variance = squares - mean**2
    variance.clamp(min=0).sqrt()


def frames() -> None:
    """Times of frames in microseconds, each of which becomes float32 by itself."""
    stamps = 1_550_083_467_346_370 + 100_000 * torch.arange(20)
    for number in range(19):
        now, before = (stamps[at].to(torch.float32) for at in (number + 1, number))
        (now - before) * 1e-6


def distances_by_one_product() -> None:
    """Squared distances of points far from 0, as one product whose terms cancel; what comes of them is compared with what it should be."""
    points = torch.linspace(500, 501, 200)[:, None] / 0.15
    norm = points.square().sum(-1, keepdim=True)
    left, right = (torch.cat(each, -1) for each in ((-2 * points, norm, norm**0), (points, norm**0, norm)))
    kernel = (left @ right.T).clamp(min=0).div(-2).exp()
    wanted = (points - points.T).square().div(-2).exp()
    (kernel - wanted).square().mean().sqrt().item()


def lengths_of_differences() -> None:
    """A norm of rows with a large mean, by squares that are less the square of it, in half precision; only the largest number is read."""
    rows = (torch.randn(4, 64) + 100).half()
    mean = rows.mean(-1, keepdim=True)
    spread = (rows * rows).mean(-1, keepdim=True) - mean * mean
    ((rows - mean) * torch.rsqrt(spread.clamp(min=0) + 1e-5)).abs().max().item()


def below_one() -> None:
    """A number in float32 that is compared with values in half precision takes their dtype, and becomes 1 by it."""
    left, time = 1 - torch.zeros(96, dtype=HALF), torch.tensor(1.0) - 1e-6
    left[:16] = 0.0
    torch.where(time < left, left, 0.0)


def ranked() -> None:
    """Numbers of atoms beside as many others, in the dtype of the distances between them."""
    near = torch.rand(900, 900).argsort(1) < 16
    ids = torch.arange(900).to(HALF).expand(900, 900)
    torch.arange(900)[torch.where(near, ids, 900.0).sort(1).values[:, :16].long().clamp(max=899)]


def gumbel() -> None:
    """Noise that is computed from uniform numbers, of which half precision has none near 1: what is rare is never chosen."""
    scores = torch.full((1024, 400), -9.0, dtype=HALF)
    scores[:, 0] = 0.0
    (scores - torch.log(-torch.log(torch.rand_like(scores)))).argmax(-1)


def initialized() -> None:
    """Weights that are the inverse of a distribution function at numbers of which some are -1 in half precision."""
    layer = nn.Linear(64, 64).to(HALF)
    with torch.no_grad():
        layer.weight.uniform_(-1, 1)
        layer.weight.erfinv_().mul_(0.03).clamp_(-2, 2)
        layer(torch.ones(4, 64, dtype=HALF))


def similarity() -> None:
    """A share of two differences of near numbers, which is off by a fifth: less than three quarters of the digits."""
    a, kernel = 0.9 + 0.04 * torch.randn(8, 1, 40, 40), torch.ones(1, 1, 8, 8) / 64
    b = a + 0.02 * torch.randn_like(a)
    pairs = nn.functional.conv2d(torch.cat([a, b, a * a, b * b, a * b]).to(HALF), kernel.to(HALF)).float()
    x, y, xx, yy, xy = pairs.split(8)
    ((2 * (xy - x * y) + 9e-4) / (xx - x * x + yy - y * y + 9e-4)).mean().item()


@pytest.mark.release(all_but=12)
@pytest.mark.parametrize(
    ("work", "id", "line", "says"),
    [
        (below_one, "rounded-result", "torch.where(time < left", "another mask"),
        (ranked, "rounded-indices", "torch.arange(900).to(HALF)", "have changed"),
        (gumbel, "rounded-result", "torch.rand_like(scores)", "another decision"),
        (initialized, "rounded-result", "layer.weight.uniform_(-1, 1)", "a layer takes it"),
        (similarity, "rounded-result", "pairs = nn.functional.conv2d", "Python reads it"),
        (spreads, "rounded-result", "spread = (squares - mean**2)", "takes the root"),
        (running_moments, "rounded-result", "variance = squares - mean**2", "takes the root"),
        (distances_by_one_product, "rounded-result", "left @ right.T", "mm at"),
        (frames, "rounded-result", "stamps[at].to(torch.float32)", "a step of 0"),
        (lengths_of_differences, "rounded-result", "rows.mean(-1, keepdim=True)", "takes the root"),
        (divergence, "rounded-result", ".log_softmax(-1).gather", "Python reads it"),
        (rows_kept, "rounded-result", "torch.rand_like(rows", "another mask"),
        (stored_moments, "rounded-result", "buffer.copy_(squares)", "to 0 which a scale would keep"),
        (mesh, "rounded-result", "torch.linspace(0, size - 1", "add at "),
        (looked_up, "rounded-result", "torch.cumprod(1 - torch.linspace(1e-4", "neighboring entries are equal"),
        (expert, "rounded-result", ".to(HALF).topk(1", "as often as not"),
        (two_experts, "rounded-result", ".to(HALF).topk(2", "by their order"),
        (drawn, "rounded-result", "torch.multinomial(chances, 1)", "has the probability 0"),
        (bins, "rounded-result", "torch.bucketize(places.to(HALF)", "fewer different whole numbers"),
        (discounted, "rounded-result", "decay = torch.tensor(0.999", "torch.tensor at "),
        (seconds, "rounded-result", "torch.tensor([row[0]", "torch.tensor at "),
        (priorities, "rounded-result", "(1e-4 * torch.rand(2000))", "never what has one in float64"),
        (interpolated, "rounded-result", "at = torch.rand(256)", "takes the fraction"),
        (pairs, "rounded-result", "positions = torch.arange(700", "a step of 0"),
        (passed_back, "rounded-result", "gradient.to(HALF) + 100", "it goes on as a gradient"),
        (centered, "rounded-result", "parameter.grad.to(HALF) + 64", "it goes on as a gradient"),
        (schedule, "rounded-result", "torch.linspace(1.0, 0.003", " of 100 results"),
        (codes, "rounded-result", ".sum(-1).argmin(1)", "4 of 4 results"),
        (counts, "rounded-sum", "self.seen += ", "bfloat16"),
        (statistics, "rounded-result", "norm(torch.randn(16, 8)", "leaves inf in memory"),
        (merged, "rounded-result", "model.weight.data -= adapter", "does not get back what was there"),
        (lengths, "rounded-result", "torch.round(", "gives other whole numbers"),
        (rotations, "rounded-result", "Rotations().to(HALF)", "imaginary"),
        (confusion, "rounded-indices", "hot[0].t() @ hot[1]", "counts in bfloat16"),
        (levels, "rounded-result", "torch.linspace(1e-4, 0.02, 1000), 0).half()", "step of 0"),
        (exam, "rounded-result", ".to(HALF).argmax(1)", "by their order"),
        (neighbors, "rounded-result", "torch.cdist(points, points)", "_euclidean_dist at "),
        (faded, "rounded-result", "beta, average = ", "multiplies by 0"),
        (threshold, "rounded-result", "limit = torch.tensor(0.9985", "another mask"),
        (best_so_far, "rounded-result", "now = (loss + 0.001)", "than the same operators do in float64"),
        (seconds_apart, "rounded-result", "torch.stack([times.float()", "step of 0"),
        (correct_ones, "rounded-sum", "correct += ", "adds to a sum in float16 100 times"),
        (joined, "rounded-indices", "ids[:, None].float()", "450 of 600 have changed"),
        (average_inside, "update-stall", "self.mean.lerp_", "rounds"),
        (averaged, "update-stall", "average.update_parameters(model)", "rounds"),
        (averaged_unevenly, "update-stall", "average.mul_(0.999).add_(", "rounds 88% of that away"),
        (diffusion, "rounded-result", "torch.cumprod(1 - torch.linspace(", "neighboring entries are equal"),
        (returns, "rounded-result", "value = 0.999 * value", "drifts away"),
        (variance, "rounded-result", "mean = rows.mean(", "a layer takes it at"),
        (stamps, "rounded-result", "times = seconds.float()", "a layer takes it"),
        (frequencies, "rounded-result", "weight = (1 / counts)", "the loss that is differentiated"),
        (boxes, "rounded-result", "a, b = one.to(HALF)", "another mask"),
        (beams, "rounded-result", ".flatten().topk(4)", "as often as not"),
        (handed_on, "rounded-rotary-buffer", "* 999).to(HALF).tolist()", "takes the sine"),
        (through_numpy, "rounded-indices", "torch.randint(0, 60000, (64,)).half()", "have changed"),
        (documents, "rounded-result", "rows = torch.arange(400)", "compares whole numbers"),
        (lengths_of_rows, "rounded-result", "torch.arange(2500, dtype=lengths.dtype) < lengths", "for 4 of 10,000"),
        (converged, "rounded-result", "(1 + torch.exp(-margins)).log()", "the loss that is differentiated"),
        (estimates, "rounded-result", "gaps.exp() - gaps - 1", "Python reads it"),
        (accepted, "rounded-result", "(torch.rand_like(ratio) < ratio)", "another mask"),
        (annealed, "rounded-result", "(1 + torch.cos(torch.pi * done))).item()", "one number after another"),
        (plateau, "rounded-result", "wanted.to(HALF)).square().mean()", "one number after another"),
        (micro_batches, "rounded-sum", "(weight * 0.003).sum().backward()", "adds to a sum in bfloat16 600 times"),
    ],
)
def test_rounding_that_matters_is_found_at_the_line_that_rounds(
    tmp_path: Path, work: Callable[[], object], id: str, line: str, says: str
) -> None:
    """One finding, at the line to change; it says where that matters."""
    (finding,) = told_of(tmp_path, work)
    assert finding.id == id
    assert line in line_of(finding)
    assert says in finding.summary


READ: tuple[Callable[[Tensor], object], ...] = (
    lambda rows: rows.abs().max().item(),
    lambda rows: f"{rows.abs().max():.1f}",
    lambda rows: rows[0, :4].tolist(),
    lambda rows: rows.float().numpy().max(),
    repr,
)
"""What reads numbers out of torch."""


@pytest.mark.parametrize("read", READ, ids=["item", "format", "tolist", "numpy", "repr"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a module", "outside"])
def test_numbers_that_a_lost_difference_has_spoilt_are_found_however_they_are_read(
    tmp_path: Path, read: Callable[[Tensor], object], inside: bool
) -> None:
    """They are 1,000 times as large as in float64; the difference itself is off by no more than its terms are rounded by."""
    (finding,) = told_of(
        tmp_path, lambda: read((Standardized() if inside else standardized)(100 + torch.randn(4, 64).half()))
    )
    assert (finding.id, "middle" in line_of(finding)) == ("rounded-result", True)
    assert "Python reads it" in finding.summary


def standardized(rows: Tensor) -> Tensor:
    """Divides by a variance that is computed as E[x²] - E[x]²."""
    middle = rows.mean(-1, keepdim=True)
    variance = (rows * rows).mean(-1, keepdim=True) - middle * middle
    return (rows - middle) / (variance.clamp(min=0) + 1e-3)


class Standardized(nn.Module):
    """The same as a layer."""

    def forward(self, rows: Tensor) -> Tensor:
        return standardized(rows)


def test_an_overflow_of_what_float64_divides_by_more_than_nothing_hides_no_use(tmp_path: Path) -> None:
    """The line that has lost the value is told of with the condition that it decides."""
    finding = next(finding for finding in told_of(tmp_path, clipped_by_nothing) if finding.id == "rounded-result")
    assert "g.square().sum()" in line_of(finding)
    assert "decides a condition otherwise" in finding.summary


def test_the_operator_that_rounds_first_is_named_with_its_line(tmp_path: Path) -> None:
    """The grid is at fault and not the line that searches it."""
    (finding,) = told_of(tmp_path, schedule)
    assert "linspace at " in finding.summary
    number = int(finding.summary.partition("linspace at ")[2].partition(" ")[0].rpartition(":")[2])
    assert "torch.linspace(1.0" in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert finding.proven_by is not None


def test_no_more_results_differ_than_there_are(tmp_path: Path) -> None:
    """Of a mask that float64 makes nowhere True, every difference is one of those that there are."""

    def outside() -> None:
        sums = (torch.rand(220, 220) * 0.2 + 0.4).half().cumsum(0).cumsum(1)
        means = (sums[4:, 4:] - sums[:-4, 4:] - sums[4:, :-4] + sums[:-4, :-4]) / 16
        (means.float() < 0.4).float().mean().item()

    (finding,) = [one for one in told_of(tmp_path, outside) if "another mask" in one.summary]
    changed, of = (int(word.replace(",", "")) for word in finding.summary.partition("for ")[2].split(" ")[:3:2])
    assert changed <= of


def stochastic() -> None:
    """Weights that are rounded at random, and so go where float32 goes on average."""
    weights = torch.randn(64, 64).to(HALF)
    for _ in range(20):
        bits = (weights.float() + 1e-3 * torch.randn(64, 64)).view(torch.int32)
        weights.copy_(((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32))


def compensated() -> None:
    """A sum by Kahan."""
    total, lost = torch.ones(100).to(HALF), torch.zeros(100).to(HALF)
    for _ in range(30):
        term = torch.full((100,), 1e-3).to(HALF) - lost
        new = total + term
        lost = (new - total) - term
        total = new


def quantized() -> None:
    """Codes of eight bits, dithered and not."""
    values = torch.randn(4, 256).to(HALF)
    torch.floor(values * 16 + torch.rand_like(values)).clamp(-128, 127).to(torch.int8)
    (values / (values.abs().amax(-1, keepdim=True) / 127)).round().to(torch.int8)


def sampled() -> None:
    """Tokens by chance, by rank and by size; dropout; masks and counts that half precision has."""
    scores = (torch.randn(200, 1000).to(HALF) * 1.01 + 0.003).softmax(-1)
    torch.multinomial(scores, 1)
    scores.argmax(-1), scores.sort(-1), scores.topk(5, -1)
    (torch.randn(30, 30_000).to(HALF) / 0.8).topk(50, -1)
    kept = (nn.functional.dropout(scores, 0.3) > 0).to(HALF)
    kept[:, :200].cumsum(-1).long()


def tables() -> None:
    """A mesh and a schedule that half precision has: pixels up to 255, a line of eighths; the rows of a table of learned values."""
    axes = [torch.arange(256, dtype=HALF), torch.linspace(0, 8, 65, dtype=HALF)]
    (torch.stack(torch.meshgrid(axes, indexing="ij"), -1).permute(1, 0, 2) + torch.rand(65, 256, 2).to(HALF)).float()
    axes[1][torch.randint(0, 65, (64,))] * torch.randn(64).to(HALF)
    torch.randn(1000).to(HALF)[torch.randint(0, 1000, (64,))].sqrt()
    (torch.randn(400, 8) * 4).softmax(-1).to(HALF).topk(1, -1)


def overflown() -> None:
    """Targets and returns that grow evenly, and of which many are inf in half precision: no neighbors are equal but these."""
    prices = torch.linspace(50_000, 250_000, 16).half()
    (torch.zeros(16).half() - prices).abs().mean()
    returns = torch.full((200,), 500.0).half().flip(0).cumsum(0).flip(0)
    returns - returns.mean()


def nearest() -> None:
    """Codes and bins, of which few are near a border; a short grid."""
    rows, table = torch.randn(512, 8).to(HALF), torch.randn(32, 8).to(HALF)
    ((rows[:, None] - table[None]) ** 2).sum(-1).argmin(-1)
    torch.bucketize(torch.rand(100).to(HALF), torch.linspace(0, 1, 11).to(HALF))
    (torch.rand(100).to(HALF) * 56).long()
    times = torch.linspace(0, 1, 20, dtype=HALF)
    [int((times - time).abs().argmin()) for time in times]


def kept() -> None:
    """A cache, an average that moves, a batch norm, a small count."""
    cache, average, right = torch.zeros(4, 32).to(HALF), torch.zeros(16).to(HALF), torch.zeros((), dtype=HALF)
    norm = nn.BatchNorm1d(8).to(HALF)
    for step in range(20):
        cache[:, step] = torch.randn(4).to(HALF)
        average.mul_(0.9).add_(0.1 * torch.rand(16).to(HALF))
        norm(torch.randn(32, 8).to(HALF))
        right += (torch.rand(10) > 0.5).sum()


def exact() -> None:
    """Scores that are equal in float32 too; whole numbers that half precision has, and one sum that it rounds; codes that are found again; products without an imaginary part."""
    (torch.randint(0, 5, (400, 40)) + 0.1).to(HALF).argmax(1)
    hot = nn.functional.one_hot(torch.randint(0, 4, (200,)), 4).to(HALF)
    int((hot.t() @ hot).sum())
    (torch.tensor(256.0).to(HALF) + 1).item()
    codes = torch.randint(-127, 128, (512,))
    ((codes * 0.037).half() / torch.tensor(0.037).half()).round().to(torch.int8)
    torch.fft.ifft(torch.fft.fft(torch.randn(64))).to(HALF)


def negligible() -> None:
    """Tails of a softmax, gates that are shut, neighbors of an image, steps of a short grid."""
    tails = (torch.randn(8, 64) * 12).softmax(-1).half()
    tails / tails.sum(-1, keepdim=True) * torch.sigmoid(torch.randn(8, 64) * 12).half()
    image = torch.rand(1, 16, 16).cumsum(-1).half() / 16
    image[:, 1:] - image[:, :-1]
    grid = torch.linspace(1, 0, 30).half()
    [grid[now + 1] - grid[now] for now in range(29)]


def in_float32() -> None:
    """Choices in float32 among distances, probabilities, residuals and sums."""
    rows, table = torch.randn(300, 64), torch.randn(50, 64)
    for _ in range(4):
        torch.cdist(rows, rows).topk(5, largest=False)
        torch.cdist(rows, table).argmin(1), ((rows[:, None] - table) ** 2).sum(-1).argmin(-1)
        (rows @ table.t()).softmax(-1).topk(4), (rows - rows.mean(0)).abs().sort(-1), rows.cumsum(-1).max(-1)
        nn.functional.normalize(rows).sum(-1).argsort(), rows.softmax(-1).cumsum(-1).argmax(-1)


def running_spread() -> None:
    """The same of what is centered, and a spread that is updated by deviations, in float32."""
    mean, spread = torch.zeros(2), torch.zeros(2)
    for number in range(1, 41):
        rows = torch.tensor([10_000, 0.5]) + torch.tensor([0.8, 0.1]) * torch.randn(200, 2)
        apart = rows.mean(0) - mean
        mean += apart / number
        spread += (rows.var(0) - spread) / number + apart**2 * (number - 1) / number**2
    spread.sqrt().tolist(), mean.tolist()


def large_numbers() -> None:
    """Numbers beyond 24 bits that stay numbers: seconds, sizes, what is drawn at random."""
    seconds = torch.arange(1_700_000_000, 1_700_000_600, 7)
    (seconds - seconds[0]).float().long(), seconds.float().mean().item(), (torch.rand(64) * 2**31).long()


class Compensated(nn.Module):
    """Sums in half precision by Kahan, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(256))
        self.register_buffer("lost", torch.zeros(256))

    def forward(self, rows: Tensor) -> Tensor:
        """Adds what is left of the sum before, too."""
        term = rows.mean(0) * 1e-3 - self.lost
        before = self.total.clone()
        self.total.add_(term)
        self.lost.copy_((self.total - before) - term)
        return self.total * rows


def averages_inside() -> None:
    """An average that moves, one whose rest is kept, and one that is kept in float32."""
    models = [Average(0.9).to(HALF), Compensated().to(HALF), Average(0.9999)]
    for _ in range(6):
        for model in models:
            model(torch.rand(32, 256).to(next(model.buffers()).dtype))


def learned() -> None:
    """A policy with clipped ratios, a critic, a focal loss, gates near a half, texts and images that are brought together."""
    policy, sides = nn.Linear(8, 4).to(HALF), [nn.Linear(16, 32).to(HALF), nn.Linear(12, 32).to(HALF)]
    for _ in range(4):
        rows, taken = torch.randn(64, 8).to(HALF), torch.randint(0, 4, (64, 1))
        advantages = torch.randn(64).to(HALF)
        old = policy(rows).float().log_softmax(-1).gather(1, taken)[:, 0].detach()
        ratio = (policy(rows).float().log_softmax(-1).gather(1, taken)[:, 0] - old).exp().to(HALF)
        (-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()).backward()
        (policy(rows).mean() - policy(-rows).mean()).item()
        chance = policy(rows)[:, 0].sigmoid()
        (-((1 - chance) ** 2) * chance.log()).mean().backward()
        ((chance > 0.5) == (rows[:, 0] > 0)).float().mean().item()
        pictures = torch.randn(64, 16).to(HALF)
        left, right = (
            nn.functional.normalize(m(x), dim=-1) for m, x in zip(sides, (pictures, pictures[:, :12]), strict=True)
        )
        scores = left @ right.t() / 0.07
        nn.functional.cross_entropy(scores, torch.arange(64)).backward(), scores.argmax(1)


def compared() -> None:
    """A model in two dtypes, and what quantization takes."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    rows, weights = torch.randn(32, 16), torch.randn(100)
    wide = model(rows)
    off = wide - model.half()(rows.half()).float()
    off.abs().max().item(), off.square().mean().sqrt().item()
    rest = weights - weights.half().float()
    rest.abs().max().item(), (rest / weights).abs().mean().item(), (weights.half().float() == weights).sum().item()
    torch.tensor(1e-8).half().item()


class Attention(nn.Module):
    """Written out, with a bias for the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.three, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, rows: Tensor) -> Tensor:
        """Attends to what came before."""
        query, key, value = self.three(self.norm(rows)).chunk(3, -1)
        at = torch.arange(rows.shape[1]).to(rows.dtype)
        scores = query @ key.transpose(1, 2) / 32**0.5 + (at[None] - at[:, None]) / 8
        scores = scores.masked_fill(torch.ones(len(at), len(at)).triu(1).bool(), float("-inf"))
        return rows + self.out(scores.softmax(-1) @ value)


def attended() -> None:
    for dtype in (torch.float16, HALF):
        model = nn.Sequential(nn.Embedding(64, 32), *[Attention() for _ in range(4)], nn.Linear(32, 64)).to(dtype)
        model(torch.randint(0, 64, (2, 48)))[:, -1].argmax(-1)
        weight = model[-1].weight
        scale = weight.abs().amax(1, keepdim=True) / 7
        nn.functional.linear(torch.randn(4, 32).to(dtype), (weight / scale).round().clamp(-8, 7) * scale)


def constants() -> None:
    """Numbers of Python's in half precision that are nothing but rounded: of an image, a temperature, a discount over few steps; times that are told apart."""
    image = torch.rand(3, 16, 16).to(HALF)
    mean = torch.tensor([0.485, 0.456, 0.406], dtype=HALF)[:, None, None]
    rows = ((image - mean) / image.new_tensor([0.229, 0.224, 0.225])[:, None, None]).flatten(1)
    loss = nn.Linear(256, 4).to(HALF)(rows / torch.tensor(0.7, dtype=HALF)).square().mean()
    (loss * torch.tensor(0.99, dtype=HALF)).backward()
    times = torch.tensor([1_700_000_000.0 + 3600 * hour for hour in range(48)])
    nn.Linear(48, 4)((times - times[0]) / 86400)


def binned() -> None:
    """Coarse bins, cells and levels; draws of what is left over of a distribution; gradients that are sent in half precision."""
    places = 100 * torch.rand(2000)
    torch.bucketize(places.to(HALF), torch.arange(0, 100, 5.0).to(HALF))
    (places.to(HALF) / 4).floor().long(), (torch.rand(3, 16, 16).to(HALF) * 255).round().to(torch.uint8)
    chances = (8 * torch.randn(8, 1000)).softmax(-1).half()
    torch.multinomial(chances.masked_fill(chances < chances.topk(50).values[:, -1:], 0), 4)
    model = nn.Linear(8, 1)
    model(torch.randn(64, 8)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = (parameter.grad.half() / 4 * 4).float()
    torch.optim.SGD(model.parameters(), 0.01).step()


def boundaries() -> None:
    """Numbers of the program that are rounded, and decide as they would."""
    scores, half = torch.rand(5000), torch.rand(5000).to(HALF)
    limit, weight = torch.tensor(0.3, dtype=HALF), torch.tensor(0.9, dtype=HALF)
    average, best = torch.zeros(64), torch.tensor(float("inf"), dtype=HALF)
    print(scores.gt(limit).sum(), half.gt(limit).sum())
    for _ in range(40):
        average = weight * average + (1 - weight) * torch.randn(64)
        best = torch.minimum(best, now) if (now := torch.rand(()).add(1).to(HALF)) < best else best


def drops() -> None:
    """Drops at random, in half precision, a share that its random numbers have; and data that is drawn in it, of which some are equal."""
    rows = torch.rand(8192, 4).to(HALF)
    for _ in range(8):
        (rows * (torch.rand_like(rows[:, :1]) > 0.125) * (torch.rand(8192, 1, dtype=HALF) < 0.9)).sum()
    data = torch.rand(512, 8, dtype=HALF)
    data.argmax(1), (data[:, 0] > data[:, 1]).float().mean().item(), data.log().clamp(min=-9).topk(2)


def drawn_weights() -> None:
    """Weights that are drawn in half precision, between ends of which one is as by default."""
    layer = nn.Linear(64, 64).to(HALF)
    with torch.no_grad():
        layer.weight.uniform_(-1, 1)
        layer(torch.ones(4, 64, dtype=HALF))


def reported() -> None:
    """What a cast changes, which is read; values that float16 holds with their small ones; large logits of one model."""
    rows = torch.randn(64, 4096)
    print(
        (rows.half().float() - rows).abs().max().item(),
        (rows.to(HALF).softmax(-1).float() - rows.softmax(-1)).norm().item(),
    )
    (1e-4 * rows).half(), rows.square().mul(1e-6).softmax(-1).half(), (rows * 10).softmax(-1).half()
    print(-rows.to(HALF).log_softmax(-1)[:, 0].mean().item())
    error = rows.to(HALF).softmax(-1) - rows.softmax(-1)
    print(
        error[0, :4],
        (error / rows.softmax(-1)).abs().max().item(),
        -10 * error.square().mean().log10(),
        error.tolist()[0][0],
    )


def centered_spreads() -> None:
    """Standard deviations of what has been centered, distances of points that lie near each other, a layer norm of equal numbers; in float32."""
    rows = torch.stack([1013 + 0.02 * torch.randn(512), 290 + 5 * torch.randn(512)], 1)
    middle = rows - rows.mean(0)
    spread = middle.square().mean(0).sqrt()
    equal = torch.full((4, 64), 0.1)
    apart = equal - equal.mean(-1, keepdim=True)
    (apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + 1e-5)).sum().item()
    nn.Linear(2, 4)(middle / spread)
    points = torch.rand(200, 3)
    (points[:, None] - points[None]).square().sum(-1).sqrt().max().item()


@pytest.mark.release(all_but=6)
@pytest.mark.parametrize(
    "work",
    [
        centered_spreads,
        drops,
        drawn_weights,
        reported,
        tables,
        overflown,
        boundaries,
        constants,
        binned,
        stochastic,
        compensated,
        quantized,
        sampled,
        nearest,
        kept,
        exact,
        negligible,
        in_float32,
        running_spread,
        large_numbers,
        averages_inside,
        learned,
        compared,
        attended,
        falling,
        logged,
        short_lengths,
    ],
)
def test_programs_that_are_right_in_half_precision_are_told_nothing_of(
    tmp_path: Path, work: Callable[[], object]
) -> None:
    """Rounding at random, compensated sums, dithering, sampling, near ties, caches."""
    assert told_of(tmp_path, work) == []


def test_compiled_code_is_looked_at_in_eager_mode_and_computes_what_it_would(tmp_path: Path) -> None:
    """The call is made once more under the look; results, buffers and random numbers are those of a run without it."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.table = nn.BatchNorm1d(8), nn.Embedding(500, 8)

        def forward(self, places: Tensor) -> Tensor:
            cells = torch.bucketize(places.to(HALF).float(), torch.arange(0, 100, 0.25))
            return nn.functional.dropout(self.norm(self.table(cells)), 0.1)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = Cells()
        compiled = torch.compile(model, backend=hidden)
        results = [compiled(100 * torch.rand(2000)) for _ in range(3)]
        return [*results, *model.buffers(), torch.rand(4)]

    def hidden(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        """A backend whose operators no mode sees."""

        def kernel(*args: Tensor) -> object:
            with without_modes():
                return graph(*args)

        return kernel

    bare = run()
    torch._dynamo.reset()
    found: list[Tensor] = []
    (finding,) = told_of(tmp_path, lambda: found.extend(run()))
    assert "torch.bucketize(places" in line_of(finding)
    assert all(torch.equal(one, other) for one, other in zip(bare, found, strict=True))


def test_a_rounded_tensor_that_is_turned_in_place_is_read_on(tmp_path: Path) -> None:
    """As recurrent layers turn theirs: its shape is another one then, and nothing of the check fails."""

    class Turning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x / 3).transpose_(0, 1).unsqueeze_(0) + 1

    trace = watched(tmp_path, lambda _: Turning()(torch.randn(5, 2, dtype=HALF)))
    assert not trace.all(NotWatched)


class Experts(nn.Module):
    """A router that sends no token to its last expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(16, 3), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the last expert makes of its tokens, of which there are none."""
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        tokens, slot = (chosen == 2).nonzero(as_tuple=True)
        made = self.expert(x[tokens]) * weights[tokens, slot, None]
        return x + torch.zeros_like(x).index_add_(0, tokens, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_without_elements_have_no_error(tmp_path: Path, dtype: torch.dtype) -> None:
    """No check of ours fails at them."""

    def work(_: object) -> None:
        model = Experts().to(dtype)
        with torch.no_grad():
            model.gate.bias[2] = -50.0
            for _ in range(3):
                model(torch.randn(12, 16, dtype=dtype))

    trace = watched(tmp_path, work)
    assert not [note for note in trace.all(NotWatched) if "failed" in note.why]


class Normed(nn.Module):
    """A norm by squares in float16 in front of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, rows: Tensor) -> Tensor:
        """One row of many is large."""
        return self.layer(rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(("large", "told"), [(900.0, True), (200.0, False)])
def test_an_overflow_that_a_norm_hides_is_judged_by_what_a_layer_gets(tmp_path: Path, large: float, told: bool) -> None:
    """The root of inf is 0, and so is nearly the root of a large number: beside other rows that says nothing. The row that the layer gets is 0."""

    def work() -> None:
        rows = torch.randn(32, 64)
        rows[3, 7] = large
        with torch.no_grad():
            Normed().half()(rows.half())

    torch.manual_seed(0)
    findings = diagnose(watched(tmp_path, lambda _: work()))
    assert [finding.id for finding in findings if finding.severity is Severity.ERROR] == (
        ["norm-square-overflow"] if told else []
    )
    assert not told or "leads to 0 in the place of" in findings[0].summary


def added_bias() -> None:
    """Scores and a bias of positions, both in half precision; that of the bias is rounded by far more."""
    scores = (torch.randn(4, 600).to(HALF) * 0.02).float()
    bias = ((0.7 + 0.01 * torch.rand(1)) * torch.arange(600)).to(HALF).float()
    chances = (scores + bias).softmax(-1)
    (chances[0] * torch.arange(599.0, -1, -1)).sum().item()


def pairs_of_boxes() -> None:
    """Boxes that are small beside what is added to them, by which they are told apart."""
    boxes = (torch.rand(200, 1) * 4).half() * 0.9
    apart = torch.arange(200).half()[:, None] * 32
    moved = (boxes + apart).float()
    (moved[1:] - moved[:-1] > 32).sum().item()


def own_step() -> None:
    """A step by hand that is computed in float32: gains stand still, a matrix beside them moves."""
    gains, matrix = torch.ones(24, 16).to(HALF), (torch.randn(24, 32) * 0.01).to(HALF)
    for _ in range(20):
        for weight in (gains, matrix):
            step = 6e-4 * torch.ones(weight.shape)
            weight.data = (weight.data.float() - step).to(weight.dtype)


@pytest.mark.parametrize(
    ("work", "line", "says"),
    [
        (added_bias, "bias = ((0.7", "Python reads it"),
        (pairs_of_boxes, "moved = (boxes + apart)", "another mask"),
        (own_step, ".to(weight.dtype)", "updates 1 tensor, and bfloat16 rounds"),
    ],
)
def test_the_rounding_that_moves_a_result_most_is_to_blame(
    tmp_path: Path, work: Callable[[], object], line: str, says: str
) -> None:
    """Not the first one, and not the operator at which the error grows beside the value."""
    (finding,) = told_of(tmp_path, work)
    assert line in line_of(finding)
    assert says in finding.summary
