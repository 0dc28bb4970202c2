"""A model as a worker has noted it, for models that are not files."""

from dtypedoctor.diagnosis.static.subject import Intent, QuantState, StaticTensor, Subject
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.reader import Trace


def noted(name: str, trace: Trace, intent: Intent) -> Subject:
    """The parameters and buffers of the first model in ``trace``, in the dtypes that they have in memory."""
    notes = {note.name: note for note in trace.all(ParameterNote) if note.root == 0}
    return Subject(
        name=name,
        tensors=tuple(
            StaticTensor(name=note.name, dtype=note.dtype, shape=tuple(note.shape), trainable=_trainable(note))
            for note in notes.values()
        ),
        quant_states=tuple(
            QuantState(
                weight=note.name,
                kind=str(note.quant["kind"]),
                dtype=str(note.quant["dtype"]),
                compute_dtype=note.quant.get("compute_dtype"),
                nested=bool(note.quant.get("nested")),
            )
            for note in notes.values()
            if note.quant is not None
        ),
        loaded=True,
        intent=intent,
    )


def _trainable(note: ParameterNote) -> bool:
    return note.requires_grad and not note.buffer
