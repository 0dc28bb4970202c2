"""Of an exception's message its template is quoted: what a training put into it is not."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtypedoctor.redaction.messages import elided, message_of

PATIENT = "Patient Jane Doe, born 1970, has pneumonia"
BATCH = {"text": [PATIENT, "and another one"], "input_ids": [[101, 2023, 2003, 102]], "scores": [0.25, 0.5, 0.75]}
TESTS = Path(__file__).parents[1]
OF_TORCH = (
    "expected mat1 and mat2 to have the same dtype, but got: c10::Half != c10::BFloat16",
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x32)",
    ("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (when checking argument for argument "
    "mat1 in method wrapper_CUDA_addmm)"),
    "\"addmm_impl_cpu_\" not implemented for 'Half'",
    "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
    "shape '[2, 3]' is invalid for input of size 5",
    "Given groups=1, weight of size [8, 3, 3, 3], expected input[1, 4, 8, 8] to have 3 channels, but got 4 channels instead",
    "Could not run 'aten::empty.memory_format' with arguments from the 'QuantizedCPU' backend.",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha, a, CUDA_R_16BF, lda, b)`",
    ("Recomputed values for the following tensors have different metadata than during the forward pass.\ntensor at position 3:\n"
    "saved metadata: {'shape': torch.Size([2, 3]), 'dtype': torch.float16, 'device': device(type='cpu')}"),
    ('Missing key(s) in state_dict: "model.layers.0.self_attn.q_proj.weight", "b". size mismatch for lm_head.weight: copying a param with '
    "shape torch.Size([3, 4]) from checkpoint, the shape in current model is torch.Size([5, 4])."),
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 12.44 MiB is free.",
    "zeros() received an invalid combination of arguments - got (str, int), but expected one of:\n * (tuple of ints size, *, Tensor out = None)",
    "FSDP expects uniform original parameter dtype but got {torch.float16, torch.float32}",
    "'NoneType' object has no attribute 'dtype'",
)  # fmt: skip


def quoted_in_tests() -> list[str]:
    """Messages about dtypes that the tests hold, most of them torch's."""
    found = set()
    for path in sorted((*TESTS.glob("unit/*.py"), *TESTS.glob("e2e/*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and "\n" not in node.value
                and len(node.value) < 400
            ) and re.search(r"c10::|scalar type|same dtype|not implemented for '", node.value):
                found.add(node.value)
    return sorted(found)


@pytest.mark.parametrize("message", sorted({*OF_TORCH, *quoted_in_tests()}))
def test_messages_of_torch_stay_as_they_are(message: str) -> None:
    """Dtypes, shapes, devices, names of operators and parameters, and numbers."""
    assert elided(message) == message


def formatted(data: Any) -> None:
    """By an f-string."""
    raise ValueError(f"Unable to create tensor from {data!r} in layers.3, dtype {'float16'}, step {7}")


def by_percent(data: Any) -> None:
    """By ``%``, before it is raised."""
    message = "cannot tokenize %s at step %d" % (data, 7)  # noqa: UP031
    raise RuntimeError(message)


def added(data: Any) -> None:
    raise ValueError("bad sample: " + str(data))


def by_format(data: Any) -> None:
    raise ValueError("could not read {} in {}".format(data, "layers.3"))


def asserted(data: Any) -> None:
    """By an assertion."""
    assert not data, f"loss is nan for {data}"


def handed_on(data: Any) -> None:
    """Through a function that knows the message only as a value."""
    _fail(f"{data}")


def _fail(message: str) -> None:
    raise ValueError(message)


def as_value(data: Any) -> None:
    """As the only argument."""
    raise ValueError({"data": data, "n": 3})


def by_key(data: Any) -> None:
    _ = {}[str(data)]


def by_number(data: Any) -> None:
    """By the interpreter itself."""
    int(str(data))


def by_json(data: Any) -> None:
    """By a library."""
    json.loads(str(data) + "}")


def as_class(data: Any) -> None:
    """By a class that words its message itself."""

    class OwnError(Exception):
        def __str__(self) -> str:
            return f"the sample {data} is wrong"

    raise OwnError


RAISING = (formatted, by_percent, added, by_format, asserted, handed_on, as_value, by_key, by_number, by_json, as_class)


@pytest.mark.parametrize(
    "data",
    [PATIENT, BATCH, [PATIENT], (PATIENT, 3), {"label": PATIENT.encode()}],
    ids=["text", "batch", "list", "tuple", "bytes"],
)
@pytest.mark.parametrize("raising", RAISING)
def test_the_data_of_a_training_are_in_no_message(raising: Callable[[Any], None], data: Any) -> None:
    """However the program puts them in: what remains is what its source says."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        raising(data)
    said = message_of(raised.value)
    for needle in ("Jane", "pneumonia", "1970", "another", "2023", "0.25"):
        assert needle not in said


@pytest.mark.parametrize(
    ("raising", "template"),
    [(formatted, "Unable to create tensor from '…' in layers.3, dtype float16, step 7"), (by_percent, "cannot tokenize … at step 7"),
     (added, "bad sample: …"), (by_format, "could not read … in layers.3"), (as_class, "the sample … is wrong")],
)  # fmt: skip
def test_the_template_of_a_message_stays(raising: Callable[[Any], None], template: str) -> None:
    """What the source says, and numbers and names that fill it."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        raising(PATIENT)
    assert message_of(raised.value) == template


def test_a_message_that_cannot_be_said_is_empty() -> None:
    """An exception whose text raises costs nothing but the text."""

    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert message_of(BrokenError()) == ""
