"""Every engine has all that the rest of the service calls; the registry hands them out untyped."""

from __future__ import annotations

import inspect

import pytest

from service.engines.llamacpp import LlamaCppEngine
from service.engines.protocol import Engine
from service.engines.simulated import SimulatedEngine
from service.engines.vllm.engine import VllmEngine


@pytest.mark.parametrize("engine", [LlamaCppEngine, SimulatedEngine, VllmEngine])
def test_an_engine_has_every_method_of_the_protocol(engine: type) -> None:
    for name, wanted in inspect.getmembers(Engine, inspect.isfunction):
        if name.startswith("_"):
            continue
        found = getattr(engine, name, None)
        assert callable(found), f"{engine.__name__} lacks {name}"
        assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters), name
