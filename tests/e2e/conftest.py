from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.service import Service, running


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The demo model with llama.cpp, 8 slots, shared by all tests that do not break it."""
    # One thread: llama.cpp's threads spin for each other, and a test machine's cores are seldom free.
    with running("--set", "pools.shared.engine.threads=1") as service:
        yield service


@pytest.fixture(scope="session")
def model(service: Service) -> str:
    return service.model


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", timeout=120.0, max_retries=0) as client:
        yield client
