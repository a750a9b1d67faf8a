"""Options and fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.nodes import NodeBuilder

GOLDEN = Path(__file__).parent / "golden"

# How long an example takes depends on who else uses the machine: speed is measured in bench/.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/ anew from what comes out"
    )


@pytest.fixture
def node() -> NodeBuilder:
    """A node with three GPUs on which nothing runs."""
    builder = NodeBuilder()
    builder.init()
    for index in range(3):
        builder.gpu(index)
    return builder


class Golden:
    """Compares text with a file under tests/golden/, or writes it there with --update-golden."""

    def __init__(self, update: bool) -> None:
        self.update = update

    def check(self, name: str, text: str) -> None:
        path = GOLDEN / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{name} is missing: run pytest --update-golden and read it"
        assert text == path.read_text()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    if request.config.getoption("--update-golden") and os.environ.get("CI"):
        pytest.fail("golden files are written by a person, not in CI")
    return Golden(bool(request.config.getoption("--update-golden")))
