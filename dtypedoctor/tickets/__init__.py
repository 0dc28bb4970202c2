"""The five public tickets that dtypedoctor starts from, as guests: what only they need registers as any other package does.

Each package holds the faulty original, the model that carries it and the corrections that fit it, for the scenarios in
``scenarios/`` whose names begin alike; ``docs/tickets.md`` tells the stories. No other package imports one of them.
"""

from collections.abc import Mapping

_HERE = "dtypedoctor.tickets"

ENTRY_POINTS: Mapping[str, tuple[str, ...]] = {
    "dtypedoctor.models": tuple(
        f"{_HERE}.{ticket}:MODELS" for ticket in ("gemma4", "fused_llama", "custom_moe", "nf4_compiled")
    ),
    "dtypedoctor.corrections": tuple(
        f"{_HERE}.{ticket}:CORRECTIONS" for ticket in ("gemma4", "fused_llama", "custom_moe", "nf4_compiled")
    ),
    "dtypedoctor.remedies": (f"{_HERE}.remedies:REMEDIES",),
}
"""What would stand in the metadata of a package of its own: by group of entry points, where the dataclasses are."""
