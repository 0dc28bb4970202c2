"""What only one of two traces has measured: modules, tensors of modules, whole phases."""

from dtypedoctor.trials.alignment import Alignment, Lone, Stream, lane_of
from dtypedoctor.trials.comparison import Missing

__all__ = ["missing"]

_Module = tuple[int, str]
_Key = tuple[str, _Module, str, str]


def missing(alignment: Alignment) -> tuple[Missing, ...]:
    """Everything of which the other trace has nothing at all, A's first, each in execution order.

    Single calls that one run makes more often are not among them: they are counted in the drift of their module.
    """
    shared, end = alignment.shared, len(alignment.pairs)
    lanes = {(stream.root, stream.fqn, lane_of(stream)) for stream in shared}
    known = {"A": _modules(alignment, "A"), "B": _modules(alignment, "B")}
    groups: dict[_Key, list[Lone]] = {}
    for lone in alignment.lone:
        stream = lone.place.stream
        if stream not in shared:
            whole = (stream.root, stream.fqn) not in known["B" if lone.side == "A" else "A"]
            groups.setdefault(_key(lone.side, stream, whole=whole), []).append(lone)
    return tuple(
        Missing(
            only_in=side,
            root=module[0],
            fqn=module[1],
            lane=lane,
            path=path,
            whole=not lane,
            extra=(*module, lane) in lanes,
            tensors=len(found),
            after_the_end=end > 0 and all(lone.before == end for lone in found),
        )
        for (side, module, lane, path), found in groups.items()
    )


def _modules(alignment: Alignment, side: str) -> set[_Module]:
    """Every module of which one side has measured anything."""
    streams = alignment.shared | {lone.place.stream for lone in alignment.lone if lone.side == side}
    return {(stream.root, stream.fqn) for stream in streams}


def _key(side: str, stream: Stream, *, whole: bool) -> _Key:
    module = (stream.root, stream.fqn)
    return (side, module, "", "") if whole else (side, module, lane_of(stream), stream.path)
