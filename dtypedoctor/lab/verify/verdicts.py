"""What a comparison of a saved model with the trained one has shown. Nothing here imports torch, and it is read on both sides."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SAME, DIFFERS, UNKNOWN = "same", "differs", "unknown"
"""The verdicts on a saved model."""
IDENTICAL, ROUNDED, MERGED, REQUANTIZED = "identical", "rounded", "merged", "requantized"
"""How a tensor is the same."""
NOT_LOADED = "not loaded"
NOT_SAVED = "not saved"
SHAPE = "another shape"
CAST = "lost by a cast"
DECLARED = "rounded by the declared dtype"
READ = "loaded values are not the file's"
UNQUANTIZED = "unquantized, but trained on quantized weights"
VALUES = "other values"
UPDATE = "update lost by the merge"
MERGE = "merge is not W + s·BA"
UNMERGE = "unmerge does not give W back"
TIES = "tied and untied"
FUNCTION = "same weights, another function"
WHAT_TO_DO = {
    NOT_LOADED: "Give the file's keys the names that the model's class expects, and save all shards anew.",
    NOT_SAVED: "Save the whole model: unwrap it, gather its shards, name trained modules beside an adapter in `modules_to_save`.",
    SHAPE: "Save the config of the model that was trained (`vocab_size` after `resize_token_embeddings`).",
    CAST: "Save in a dtype that holds these values: bfloat16 has the range of float32.",
    DECLARED: "Write the dtype of the weights to config.json, or load with `dtype=`.",
    READ: "Compare the loader's conversion of these keys with how they were saved.",
    UNQUANTIZED: "Merge into the dequantized weights (`model.dequantize()`), which the adapter was trained on.",
    VALUES: "Save the model that was trained, after its last step, and check what renames or converts tensors on the way.",
    UPDATE: "Merge into float32 weights (of a quantized base: its dequantized ones), or ship base and adapter.",
    MERGE: "Merge once, from the base of the training, with the adapter's own `lora_alpha` and `r`.",
    UNMERGE: "Keep a copy of the base weights, or merge in float32.",
    TIES: "Let `tie_word_embeddings` in config.json say what was trained, and call `tie_weights()` after loading.",
    FUNCTION: "Compare both configs: rotary scaling, norm epsilon, activation, softcap, attention, adapter scaling.",
}
"""What is wrong with a tensor, and what to do about each; what explains others comes first."""


@dataclass(slots=True, kw_only=True)
class Difference:
    """A tensor beside the trained one.

    Attributes:
        tensor: its name in the model; several, or none where it is about the model as a whole.
        kind: one of :data:`WHAT_TO_DO`, or how it is the same.
        said: the measurement, with its numbers.
        size: norm of the difference over norm of the reference, for the order.
    """

    tensor: str
    kind: str
    said: str = ""
    size: float = 0.0


@dataclass(slots=True, kw_only=True)
class Verification:
    """What was compared, and what came of it.

    Attributes:
        saved: the folder or file.
        reference: what it was compared with.
        differences: most important first; empty where there is none.
        counts: how many tensors are the same, by how they are.
        notes: measurements that are no fault.
        unknown: what was to be compared and could not be, each with the reason.
    """

    saved: str
    reference: str
    differences: list[Difference] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """:data:`SAME`, :data:`DIFFERS` or :data:`UNKNOWN`."""
        if self.differences:
            return DIFFERS
        return SAME if self.counts and not self.unknown else UNKNOWN

    def add(self, compared: Difference) -> None:
        """Counts a tensor that is the same, and notes the first of each kind; keeps one that differs."""
        if compared.kind in WHAT_TO_DO:
            order = list(WHAT_TO_DO)
            self.differences.append(compared)
            self.differences.sort(key=lambda difference: (order.index(difference.kind), -difference.size))
            return
        self.counts[compared.kind] = self.counts.get(compared.kind, 0) + 1
        if compared.said and self.counts[compared.kind] == 1:
            self.notes.append(f"{compared.kind}: {compared.tensor}: {compared.said}")

    def data(self) -> dict[str, Any]:
        """As JSON; :meth:`of` is the reverse."""
        return {"verdict": self.verdict, **asdict(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Verification":
        """From what :meth:`data` returns."""
        fields = {name: value for name, value in data.items() if name != "verdict"}
        return cls(**fields | {"differences": [Difference(**difference) for difference in data["differences"]]})
