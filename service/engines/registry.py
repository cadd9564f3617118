"""Engine names to engines. Each engine is imported only when it is asked for (vLLM alone takes seconds to import)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from service.errors import UserError

if TYPE_CHECKING:
    from service.engines.protocol import Engine

_ENGINES = {
    "llamacpp": ("service.engines.llamacpp", "LlamaCppEngine", "pip install 'glm5-serve[local]'"),
    "vllm": ("service.engines.vllm.engine", "VllmEngine", "pip install 'glm5-serve[gpu]'"),
    "simulated": ("service.engines.simulated", "SimulatedEngine", ""),
}


def names() -> tuple[str, ...]:
    return tuple(_ENGINES)


def engine_class(name: str) -> Any:
    """The class registered under `name`. Raises UserError naming the known engines, or the package that is missing."""
    if name not in _ENGINES:
        raise UserError(f"engine {name!r} is not known; known engines: {', '.join(_ENGINES)}")
    module, cls, install = _ENGINES[name]
    try:
        return getattr(import_module(module), cls)
    except ModuleNotFoundError as missing:
        raise UserError(
            f"engine {name!r} needs the package {missing.name!r}, which is not installed: {install}"
        ) from None


def honours(name: str) -> frozenset[str]:
    """Request fields that engine `name` obeys, without importing the engine itself."""
    from service.engines.fields import HONOURED

    return HONOURED[name]


def create(name: str, **settings: Any) -> Engine:
    engine: Engine = engine_class(name)(**settings)
    return engine
