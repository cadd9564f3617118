from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service import Service, running


@pytest.fixture(scope="session")
def fragile_pair() -> Iterator[Service]:
    """Two replicas of the simulated engine behind two ingresses; every test leaves it whole."""
    with running("deployments/profiles/sim-chaos.yaml") as service:
        yield service
