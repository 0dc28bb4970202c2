"""Autocast regions, and custom functions that run under them."""

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["AutocastRegion", "CustomFunction", "OpenRegions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastRegion:
    """An autocast region that was entered; each different one is written once.

    Attributes:
        device: the device type whose operators it casts.
        wanted: the dtype that was asked for.
        enabled: False for a region that switches autocast off, and where torch disabled it (no such device).
        source: ``file.py:line`` of the code that entered it; None for one that was open when the watch began.
    """

    KIND: ClassVar[str] = "autocast-region"

    device: str
    wanted: str
    enabled: bool
    source: str | None

    @property
    def dtype(self) -> str | None:
        """The dtype it casts to, None where it casts nothing."""
        return self.wanted if self.enabled else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRegions:
    """The regions that were open when an op raised.

    Attributes:
        of: number of the op.
        device: type of its operands' device.
        regions: from the outermost in.
    """

    KIND: ClassVar[str] = "autocast-regions"

    of: int
    device: str
    regions: list[AutocastRegion]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomFunction:
    """A custom ``autograd.Function`` whose backward begins; the observation's ``fqn`` is the module that its forward ran in.

    Attributes:
        function: its name.
        decorated: whether its forward is decorated with ``custom_fwd``.
        fwd_used_autocast: what ``custom_fwd`` has noted: whether autocast was on in the forward.
        ctx_dtype: the dtype that ``custom_fwd`` has noted.
        forward_autocast: dtype of the region that the forward ran in; None outside of any.
        forward_source: ``file.py:line`` of the forward.
    """

    KIND: ClassVar[str] = "custom-function"

    function: str | None
    decorated: bool
    fwd_used_autocast: bool | None
    ctx_dtype: str | None
    forward_autocast: str | None
    forward_source: str | None
