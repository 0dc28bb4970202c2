"""Fixtures of the tests of instruments."""

from collections.abc import Iterator

import pytest
from torch import distributed as dist


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone: what communicates does all that it does in a larger one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
