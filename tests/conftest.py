"""What holds for all tests."""

import pytest

SLOW_FOLDERS = ("e2e", "benchmarks")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rewrite-snapshot``, which `tests/e2e/snapshot.py` explains."""
    parser.addoption(
        "--rewrite-snapshot", action="store_true", help="write tests/e2e/snapshot.json instead of checking it"
    )


@pytest.fixture(scope="session")
def rewrite_snapshot(pytestconfig: pytest.Config) -> bool:
    """Whether what is said now becomes the snapshot."""
    return bool(pytestconfig.getoption("rewrite_snapshot"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks as slow whatever starts processes of its own: all of `e2e` and `benchmarks`. Elsewhere a test says it itself."""
    if item.path.parent.name in SLOW_FOLDERS:
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the long runs, whatever else is selected, unless they are asked for by their marker."""
    if "soak" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("soak") is not None]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]
