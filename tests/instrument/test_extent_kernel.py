"""The kernel that measures many tensors in one launch: by Triton's interpreter where there is no GPU."""

import os
import sys

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() and os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    pytest.skip("Triton was imported without its interpreter: run this file alone", allow_module_level=True)
pytest.importorskip("triton")

from dtypedoctor.instrument.batches import Asked, TritonRows, as_dense
from dtypedoctor.instrument.statistics import measure_one

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def results(rows: TritonRows, batch: list[Asked]) -> list[tuple[float, int, int]]:
    number = rows.launch(batch)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    found = rows.arrived(number, len(batch))
    assert found is not None
    return found


def spoilt(tensor: Tensor, seed: int) -> Tensor:
    """The tensor with some NaN and inf put into it at random places."""
    generator = torch.Generator().manual_seed(seed)
    flat = tensor.flatten()
    for value, count in ((float("nan"), seed % 4), (float("inf"), seed % 3), (-float("inf"), seed % 2)):
        for place in torch.randint(flat.numel(), (count,), generator=generator).tolist():
            flat[place] = value
    return tensor


@pytest.mark.parametrize("seed", range(8))
def test_magnitudes_and_counts_are_exact_for_every_dtype_length_and_place(seed: int) -> None:
    """Largest finite magnitude, NaN and inf of sixteen tensors agree with torch's own, whatever their lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = TritonRows(DEVICE)
    tensors = []
    for place in range(16):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[(place + seed) % 3]
        length = (1, 2, 3, 63, 4096, 32769, 65537, 70001)[(place * 3 + seed) % 8]
        values = torch.randn(length, generator=generator) * 10.0 ** ((seed + place) % 6 - 3)
        tensors.append(spoilt(values.to(dtype), seed * place))
    found = results(rows, [(as_dense(t.to(DEVICE)), -1) for t in tensors])
    for tensor, one in zip(tensors, found, strict=True):
        extent = measure_one(tensor)
        assert one == (extent.absmax, extent.num_nan, extent.num_posinf + extent.num_neginf)


def test_a_gated_tensor_is_read_only_where_its_gate_was_not_finite() -> None:
    """What went into a module is measured if NaN came out of it, and left alone otherwise."""
    rows = TritonRows(DEVICE)
    good, bad = torch.ones(100, device=DEVICE), torch.full((100,), float("nan"), device=DEVICE)
    first = rows.launch([(good, -1), (bad, -1)])
    given = torch.full((100,), 5.0, device=DEVICE)
    found = results(rows, [(given, rows.index(first)), (given, rows.index(first) + 1)])
    assert found == [(0.0, 0, 0), (5.0, 0, 0)]


def test_a_slot_that_is_used_again_starts_from_nothing() -> None:
    """After more launches than there are slots, results are still those of their own launch."""
    rows = TritonRows(DEVICE)
    for number in range(1, 1300 if DEVICE.type == "cuda" else 3):
        value = float(1 + number % 7)
        assert results(rows, [(torch.full((16,), value, device=DEVICE), -1)]) == [(value, 0, 0)]


def test_a_row_that_has_not_arrived_is_not_taken_for_one_that_has() -> None:
    """Zeros, stale rows and torn rows fail their check."""
    rows = TritonRows(DEVICE)
    number = rows.launch([(torch.ones(4, device=DEVICE), -1)])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert rows.arrived(number, 1) == [(1.0, 0, 0)]
    assert rows.arrived(number + 1024, 1) is None
    rows._host[number % 1024, 0] ^= 1
    assert rows.arrived(number, 1) is None
