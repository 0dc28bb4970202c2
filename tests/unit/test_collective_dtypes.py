"""Which collective several ranks have called with different dtypes, from what each has recorded of its own."""

from dataclasses import replace

import pytest
from collective_examples import calling, gathering, rank

from dtypedoctor.diagnosis.distributed import Rank, across_ranks
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.rules.collectives import compare_ranks, detect_rejected


def found(*ranks: Rank) -> list[Finding]:
    return list(compare_ranks(ranks))


def test_a_collective_of_two_dtypes_is_told_with_both_lines_and_both_dtypes() -> None:
    """The rank whose dtype is the rarest has the finding."""
    first = (0, "all_reduce@train.py:3", "float16")
    odd = (0, "all_reduce@metrics.py:7", "float32")
    (one,) = found(rank(0, calling(first)), rank(1, calling(odd)), rank(2, calling(first)))
    assert one.summary == "all_reduce gets float16 on ranks 0, 2 (train.py:3), float32 on rank 1 (metrics.py:7)."
    assert (one.rank, one.source, one.dtype, one.op) == (1, "metrics.py:7", "float32", "all_reduce")
    assert one.evidence[1] == "Rank 1, collective 1 of process group 0: all_reduce of float32, [4] at metrics.py:7."


def test_a_rank_without_a_record_of_the_call_is_known_by_what_it_did_before() -> None:
    """Rank 0 repeats itself, so that it has written nothing; how often it did, its cursor's page has counted."""
    steady = calling((0, "all_reduce", "float16"), (1, "all_gather", "float16"), (2, "all_reduce", "float16"))
    turning = calling(
        (0, "all_reduce", "float16"),
        (1, "all_gather", "float16"),
        (2, "all_reduce", "float16"),
        (7, "all_gather", "float32"),
    )
    here = rank(0, steady)
    here = replace(here, trace=replace(here.trace, called=(8,)))
    (one,) = found(here, rank(1, turning))
    assert "float16 on rank 0" in one.summary
    assert one.evidence[0] == "Rank 0, collective 8 of process group 0: all_gather of float16 at train.py:3."
    assert not found(replace(here, trace=replace(here.trace, called=(7,))), rank(1, turning))  # it never came there


@pytest.mark.parametrize(
    ("other", "numel"),
    [((0, "all_reduce", "float16"), 4), ((0, "broadcast", "float32"), 4), ((0, "all_reduce@b.py:1", "float32"), 9)],
    ids=["the same", "another collective", "another line and size"],
)
def test_what_is_not_one_collective_in_two_dtypes_is_no_finding(other: tuple[int, str, str], numel: int) -> None:
    """Of ranks that do different things nobody knows which calls belong together."""
    assert not found(rank(0, calling((0, "all_reduce", "float16"))), rank(1, calling(other, numel=numel)))


def test_a_damaged_trace_is_not_compared() -> None:
    """A record that is lost would be taken for one that was never written."""
    damaged = rank(1, calling((0, "all_reduce", "float32")))
    damaged = replace(damaged, trace=replace(damaged.trace, damage=("1 line could not be read",)))
    assert not found(rank(0, calling((0, "all_reduce", "float16"))), damaged)


def test_a_message_is_compared_at_both_ends() -> None:
    """What one rank calls send the other calls recv."""
    (one,) = found(
        rank(0, calling((0, "send", "float16"), channel="0:0>1")),
        rank(1, calling((0, "recv", "float32"), channel="0:0>1")),
    )
    assert one.evidence[0].startswith("Rank 0, message 1 from rank 0 to rank 1 of process group 0: send of float16")


def test_a_collective_of_two_dtypes_comes_before_what_follows_from_it_and_after_what_was_there_before() -> None:
    """Wrong values of a collective may be what another finding is about."""
    ranks = (rank(0, calling((0, "all_reduce", "float16"))), rank(1, calling((0, "all_reduce", "float32"))))

    def order(step: int) -> list[str]:
        own = Finding(
            id="float16-overflow",
            severity=Severity.ERROR,
            confidence=Confidence.LIKELY,
            summary="s",
            cause="c",
            step=step,
        )
        return [finding.id for finding in across_ranks([own], ranks, 0)]

    assert order(2) == ["collective-dtype-mismatch", "float16-overflow"]
    assert order(0) == ["float16-overflow", "collective-dtype-mismatch"]
    assert [finding.id for finding in across_ranks([], ranks, 0)] == ["collective-dtype-mismatch"]


@pytest.mark.parametrize(
    ("message", "dtypes"),
    [
        ("Invalid usage of tensors with different dtypesFound torch.float32 and  torch.float16", "float32 and float16"),
        (
            (
                "ProcessGroupGloo::allgather: invalid tensor type at index 0 (expected TensorOptions(dtype=c10::Half, device=cpu, "
                "layout=Strided), got TensorOptions(dtype=float, device=cpu)"
            ),
            "float16 and float32",
        ),
        (
            "[rank0]: ProcessGroupGloo.cpp:1536] Check failed: outputTensors[i].dtype() == inputTensors[i].dtype() (float vs. c10::Half). ",
            "float32 and float16",
        ),
        ("output tensor must have the same type as input tensor", "two dtypes"),
    ],
)
def test_what_torch_rejects_on_one_rank_names_the_line_and_the_dtypes(message: str, dtypes: str) -> None:
    """Each backend has words of its own; the line is the program's."""
    (one,) = detect_rejected(gathering(message).build())
    assert one.summary == f"all_gather at train.py:12 gets input and output tensors of {dtypes}."
    assert one.source == "train.py:12"
