"""Small glm-dsa files, made once a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.gguf.header import GgufHeader, read_header
from tests.tiny_glm import Tiny, make

SMALL = Tiny(layers=2, dense_layers=1, experts=3, experts_used=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def mixed(place: Path) -> GgufHeader:
    return read_header(make(place / "mixed.gguf", "w1_over_w3", SMALL))
