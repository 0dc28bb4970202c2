"""Builds op traces that end in a refused operation, as the instruments leave them."""

from collections.abc import Sequence
from typing import Any

from traces import TraceBuilder

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Observation, Op, ParameterNote, Raised, Replay, Site, TensorNote
from dtypedoctor.trace.model import Trace

HALF = "bfloat16"


class Story(TraceBuilder):
    """One call of a model, op by op; tensors and memory number themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors = 0

    def tensor(self, dtype: str, *, like: TensorNote | None = None, **more: Any) -> TensorNote:
        """A tensor; ``like`` gives the one whose memory it shares."""
        self._tensors += 1
        storage = like.storage if like is not None else self._tensors
        return TensorNote(
            id=self._tensors, dtype=dtype, shape=more.pop("shape", [4, 4]), absmax=1.0, storage=storage, **more
        )

    def parameter(self, name: str, dtype: str, *, buffer: bool = False, note: bool = True, **more: Any) -> TensorNote:
        shape = more.pop("shape", [4, 4])
        quant = more.pop("quant", None)
        if note:
            self.add(
                ParameterNote(
                    n=self.n(), root=0, name=name, dtype=dtype, shape=shape, buffer=buffer, quant=quant, **more
                )
            )
        return self.tensor(dtype, name=name, origin="buffer" if buffer else "parameter", shape=shape)

    def body(self, dtype: str = HALF, size: int = 1000) -> "Story":
        """Most of the model's weights."""
        self.add(ParameterNote(n=self.n(), root=0, name="body.weight", dtype=dtype, shape=[size, size]))
        self.add(ParameterNote(n=self.n(), root=0, name="tail.weight", dtype=dtype, shape=[4, 4]))
        return self

    def called(self, fqn: str, cls: str) -> "Story":
        """The class of a module that was called."""
        number = 1000 + self.n()
        self.add(
            Site(id=number, root=0, fqn=fqn, cls=cls, phase="forward", kind="entered", index="", dtype="", shape=[])
        )
        return self

    def given(self, dtype: str, name: str = "args.0") -> TensorNote:
        """A tensor that the model was called with."""
        return self.tensor(dtype, name=name, origin="input")

    def run(
        self,
        op: str,
        fqn: str,
        inputs: Sequence[TensorNote],
        dtype: str,
        *,
        like: TensorNote | None = None,
        **more: Any,
    ) -> TensorNote:
        result = self.tensor(dtype, like=like)
        record = self.op(op, fqn, list(inputs), [result], **more)
        wide = [t for t in inputs if t.dtype == dtype]
        narrow = [
            t.dtype
            for t in inputs
            if t.dtype in DTYPES and DTYPES[t.dtype].bits < DTYPES.get(dtype, DTYPES["float64"]).bits
        ]
        if wide and narrow:
            self.add(Replay(n=self.n(), of=record.n, how="narrowest-dtype", finite=True, absmax=1.0, dtype=narrow[0]))
        return result

    def refuse(self, op: str, fqn: str, inputs: Sequence[TensorNote], message: str, **more: Any) -> Op:
        """An op that refuses its operands and ends the run, with the replays that the instruments make of it."""
        modules = more.pop("modules", ["", fqn])
        record = self.op(op, fqn, list(inputs), [], error=message, **more)
        dtypes = list(dict.fromkeys(t.dtype for t in inputs if t.dtype in DTYPES))
        ways = ["equal-dtypes", *(f"all-as-{dtype}" for dtype in dtypes)]
        for how in ways if len(dtypes) > 1 else ():
            self.add(Replay(n=self.n(), of=record.n, how=how, finite=True, absmax=1.0, dtype="float32"))
        self.raised(message, phase=record.phase, modules=modules)
        return record

    def raised(
        self, message: str, *, kind: str = "RuntimeError", phase: str = "forward", modules: Sequence[str] = ()
    ) -> "Story":
        """An exception that ended the run."""
        frames = ["/home/me/train.py:12 main", "/site-packages/torch/nn/linear.py:3 forward"]
        self.add(
            Raised(
                n=self.n(),
                step=1,
                call=1,
                phase=phase,
                type=kind,
                message=message,
                frames=frames,
                modules=list(modules),
            )
        )
        return self

    def saw(self, kind: str, fqn: str | None = None, **values: Any) -> "Story":
        self.add(Observation(n=self.n(), step=1, call=1, phase="forward", kind=kind, fqn=fqn, values=values))
        return self

    def ended(self) -> Trace:
        return self.build(outcome="raised")


PRODUCT = "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"
BIASED = "mat1 and mat2 must have the same dtype, but got Float and BFloat16"
IN_PLACE = "self and mat2 must have the same dtype, but got Half and BFloat16"
