from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_openai import FakeServer, Script


@pytest.fixture(scope="session")
def fake() -> Iterator[FakeServer]:
    """One fake server for all tests of this folder; each plays its own script on it."""
    with FakeServer(Script()) as server:
        yield server
