"""Finds the blocks between which a model's residual stream runs."""

from collections import Counter

from torch import nn


def residual_blocks(root: nn.Module) -> set[int]:
    """Identities of the modules whose outputs are the residual stream of ``root``.

    These are the members of the outermost ``ModuleList`` objects that hold several modules, most of one class, as the layers
    of a transformer do; of a model without any, its own direct children.
    """
    found: set[int] = set()
    waiting = list(root.children())
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.ModuleList) and _is_stack(module):
            found.update(id(member) for member in module)
        else:
            waiting += module.children()
    return found or {id(child) for child in root.children()} or {id(root)}


def _is_stack(members: nn.ModuleList) -> bool:
    classes = Counter(type(member) for member in members)
    return len(members) > 1 and classes.most_common(1)[0][1] * 2 > len(members)
