from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service import Service, running


@pytest.fixture(scope="session")
def fragile_pair() -> Iterator[Service]:
    """Two replicas of the simulated engine behind two ingresses; every test leaves it whole."""
    with pytest.MonkeyPatch.context() as patch:
        # Serve looks after its proxy every 10 s and gives up after three looks; no test can wait for that.
        patch.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")
        with running("deployments/profiles/sim-chaos.yaml") as service:
            yield service
