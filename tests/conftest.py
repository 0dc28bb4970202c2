"""What holds for all tests."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the long runs, whatever else is selected, unless they are asked for by their marker."""
    if "soak" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("soak") is not None]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
