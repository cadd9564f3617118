"""Engines for these tests: VllmEngine on a thread with a loop of its own, as it lives inside a Serve replica."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from service.types import Delta, Endpoint, EngineRequest
from tests.deltas import joined
from tests.tiny_glm import Tiny, make, make_split
from tests.vllm.faults import VARIABLE, plugin_path

T = TypeVar("T")
MISSING = [
    name for name in ("vllm", "vllm_gguf_plugin", "transformers", "xllamacpp") if not importlib.util.find_spec(name)
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if MISSING:
                item.add_marker(pytest.mark.skip(f"not installed: {', '.join(MISSING)}"))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session", autouse=True)
def plugin(workplace: Path) -> Iterator[None]:
    """Package metadata with the plugin's entry points, for this process and those that vLLM starts."""
    path = plugin_path(workplace / "plugin", faults=True)
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).parent.parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, path] + ([before] if before else []))
    os.environ["VLLM_CACHE_ROOT"] = str(workplace / "vllm-cache")
    sys.path.insert(0, path)
    if not MISSING:
        # Before any test takes stdout away: vLLM's log keeps the stream that it finds.
        import vllm  # noqa: F401
    assert any(p.value.startswith("service.engines.vllm") for p in entry_points(group="vllm.general_plugins"))
    yield
    sys.path.remove(path)
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="session")
def files(workplace: Path) -> dict[str, Path]:
    ud = make(workplace / "tiny-ud.gguf", "ud")
    return {
        "ud": ud,
        "split": make_split(ud, 3),
        "misaligned": make(workplace / "tiny-misaligned.gguf", "ud", Tiny(expert_ffn=256)),
    }


class Engines:
    """Starts engines and runs coroutines on their loop."""

    def __init__(self, workplace: Path) -> None:
        self._workplace = workplace
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._open: list[Any] = []

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 200) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def start(self, path: Path, *, faults: str = "", context: int = 512, **options: Any) -> Any:
        """A loaded engine. Raises what its `load` raises."""
        from service.engines.vllm import engine
        from service.engines.vllm.options import VllmOptions

        made = engine.VllmEngine(
            model=str(path),
            served_name="model",
            slots=8,
            context_tokens=context,
            options=VllmOptions(cache_dir=str(self._workplace / "cache"), load_timeout_s=180, **options),
        )
        os.environ[VARIABLE] = faults
        checks = engine.refusals
        try:
            if "no_checks" in faults:
                engine.refusals = lambda header, setup: []
            made.progress = []
            self.run(made.load(made.progress.append))
        finally:
            engine.refusals = checks
            os.environ[VARIABLE] = ""
        self._open.append(made)
        return made

    def stop(self, engine: Any) -> None:
        self._open.remove(engine)
        self.run(engine.close(), 60)

    def answer(self, engine: Any, endpoint: Endpoint, body: dict[str, Any]) -> Delta:
        """The whole of it in one piece."""

        async def collect() -> list[Delta]:
            request = EngineRequest(os.urandom(4).hex(), endpoint, orjson.dumps(body))
            return [delta async for delta in engine.generate(request)]

        return joined(self.run(collect()))

    def close(self) -> None:
        for engine in list(self._open):
            self.stop(engine)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="module")
def engines(workplace: Path, plugin: None) -> Iterator[Engines]:
    made = Engines(workplace)
    yield made
    made.close()


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Any]:
    """transformers' model of a tiny file, loaded once."""
    from tests.tiny_glm.oracle import load

    known: dict[Path, Any] = {}

    def get(path: Path) -> Any:
        if path not in known:
            known[path] = load(path)
        return known[path]

    return get
