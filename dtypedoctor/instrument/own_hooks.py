"""The doctor's global module hooks: none is left behind, and ``torch.compile`` does not warn the user of them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.modules import module as modules

_GLOBAL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def hide_from_compiler(handles: Sequence[Any]) -> Callable[[], None]:
    """Lets torch count no hook of ``handles`` when it asks whether there are global module hooks.

    It asks only to warn that they run once more for a compiled module, which ours do not mind.

    Returns:
        What takes this back.
    """
    original = getattr(modules, "_has_any_global_hook", None)
    if original is None:
        return lambda: None
    own = {handle.id for handle in handles}

    def others() -> bool:
        return any(set(getattr(modules, name, ())) - own for name in _GLOBAL)

    modules._has_any_global_hook = others

    def undo() -> None:
        modules._has_any_global_hook = original

    return undo


def remove_hooks(handles: Sequence[Any]) -> None:
    """Removes global module hooks, and what torch 2.13 forgets of them: its table of hooks that take keyword arguments."""
    for handle in handles:
        handle.remove()
        getattr(modules, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
