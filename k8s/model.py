"""A model on a volume: fetched, checked by size and SHA-256, judged by the gate, and only then marked as ready.

The mark names the manifest that was fulfilled; a pod that waits for another manifest does not take it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import httpx
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.errors import UserError
from service.strict_yaml import parse_yaml

MARK = ".glm5-ready.json"
TIMEOUT = httpx.Timeout(60.0, connect=20.0)
TRIES = 8
SAY_S = 15.0

Say = Callable[[str], None]
Gate = Callable[[Path], bool]
"""Judges the entry file; says on its own output what it found. False: this model must not be served."""


class ModelFile(BaseModel):
    """One file: plain name, size in bytes, hex SHA-256, where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    url: str = Field(pattern="^https?://")


class Manifest(BaseModel):
    """`entry`: the file that model.path names, one of `files`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    entry: Annotated[str, Field(min_length=1)]
    files: tuple[ModelFile, ...] = ()

    @property
    def digest(self) -> str:
        """Changes with any name or content; not with where the files come from."""
        return hashlib.sha256(
            json.dumps([self.entry, sorted((f.name, f.bytes, f.sha256) for f in self.files)]).encode()
        ).hexdigest()


def manifest_of(text: str, where: str, may_be_empty: bool = False) -> Manifest:
    """Raises UserError."""
    try:
        manifest = Manifest.model_validate(parse_yaml(text, "its text"))
    except (UserError, ValidationError) as fault:
        raise UserError(f"{where} is no manifest of a model: {fault}") from None
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise UserError(f"{where} lists a file twice")
    if not names and may_be_empty:
        return manifest
    if not names:
        raise UserError(f"{where} lists no files: make it with `glm5 k8s model manifest DIRECTORY --url https://...`")
    if manifest.entry not in names:
        raise UserError(f"{where}: entry {manifest.entry} is none of its files")
    return manifest


def manifest_from(folder: Path, entry: str, url: str, say: Say) -> Manifest:
    """The manifest of all GGUF files in a folder, to be fetched from `url`/NAME. Reads every byte. Raises UserError."""
    files = sorted(folder.glob("*.gguf"))
    if entry not in [path.name for path in files]:
        raise UserError(f"{entry} is no GGUF file in {folder}")
    found = []
    for path in files:
        say(f"reading {path.name}")
        digest = _sha256(path)
        found.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest, "url": f"{url}/{path.name}"})
    return manifest_of(yaml.safe_dump({"entry": entry, "files": found}), str(folder))


@dataclass(frozen=True)
class Mark:
    manifest: str
    entry: str


def ready(manifest: Manifest, at: Path) -> str | None:
    """None where the volume holds exactly this manifest's model, judged and marked; else what is missing."""
    try:
        mark = Mark(**json.loads((at / MARK).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return "no mark yet: the Job has not finished"
    except (OSError, ValueError, TypeError) as fault:
        return f"the mark cannot be read: {fault}"
    if mark.manifest != manifest.digest:
        return "the mark belongs to another manifest: the Job must run again"
    for file in manifest.files:
        path = at / file.name
        if not path.is_file() or path.stat().st_size != file.bytes:
            return f"{file.name} has changed since the mark was made"
    return None


def wait(manifest: Manifest, at: Path, timeout_s: float, say: Say, poll_s: float = 5.0) -> bool:
    """Until the volume is ready, or False after `timeout_s`. Says what it waits for whenever that changes."""
    deadline = time.monotonic() + timeout_s
    last: str | None = ""
    while True:
        missing = ready(manifest, at)
        if missing is None:
            return True
        if missing != last:
            say(missing)
            last = missing
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))


def fill(manifest: Manifest, to: Path, gate: Gate, say: Say, parallel: int = 4) -> bool:
    """Bring the volume to this manifest. True: ready and marked. False: the gate refused. Raises UserError.

    Safe to repeat and to interrupt: whole files with the right sum stay, begun ones are continued.
    """
    if ready(manifest, to) is None:
        say("already ready")
        return True
    (to / MARK).unlink(missing_ok=True)
    missing = [file for file in manifest.files if not _whole(file, to, say)]
    need = sum(file.bytes - _size(_part(file, to)) for file in missing)
    free = shutil.disk_usage(to).free
    if need > free:
        raise UserError(f"{to} has {free / 1e9:.1f} GB free; {need / 1e9:.1f} GB are needed")
    with httpx.Client(timeout=TIMEOUT, follow_redirects=True) as client, ThreadPoolExecutor(parallel) as pool:
        for done in [pool.submit(_fetch, client, file, to, say) for file in missing]:
            done.result()
    say(f"judging {manifest.entry}")
    if not gate(to / manifest.entry):
        return False
    temporary = to / f"{MARK}.new"
    temporary.write_text(json.dumps(asdict(Mark(manifest.digest, manifest.entry))) + "\n", encoding="utf-8")
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    temporary.rename(to / MARK)
    say("ready")
    return True


def _part(file: ModelFile, to: Path) -> Path:
    return to / f".{file.name}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _whole(file: ModelFile, to: Path, say: Say) -> bool:
    path = to / file.name
    if _size(path) == file.bytes and _sha256(path) == file.sha256:
        say(f"{file.name} is there and right")
        return True
    if path.exists():
        say(f"{file.name} is there and wrong: fetching it anew")
        path.unlink()
    return False


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fetch(client: httpx.Client, file: ModelFile, to: Path, say: Say) -> None:
    part = _part(file, to)
    for attempt in range(1, TRIES + 1):
        try:
            _continue(client, file, part, say)
            break
        except (httpx.HTTPError, OSError) as fault:
            if attempt == TRIES or (isinstance(fault, httpx.HTTPStatusError) and fault.response.status_code < 500):
                raise UserError(f"{file.url}: {fault}") from None
            pause = min(60.0, 0.5 * 2**attempt)
            say(f"{file.name}: {type(fault).__name__}; again in {pause:.0f} s from byte {_size(part)}")
            time.sleep(pause)
    digest = _sha256(part) if _size(part) == file.bytes else ""
    if digest != file.sha256:
        size = _size(part)
        part.unlink(missing_ok=True)
        wrong = f"{size} bytes instead of {file.bytes}" if size != file.bytes else f"SHA-256 {digest}"
        raise UserError(f"{file.name} from {file.url} is not the file of the manifest: {wrong}")
    part.rename(to / file.name)
    say(f"{file.name} is there and right")


def _continue(client: httpx.Client, file: ModelFile, part: Path, say: Say) -> None:
    """Append to the part what is missing of it. Raises httpx.HTTPError where the connection or the server fails."""
    have = _size(part)
    if have > file.bytes:
        part.unlink()
        have = 0
    if have == file.bytes:
        return
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})
    with client.stream("GET", file.url, headers=headers) as response:
        response.raise_for_status()
        # A server that knows no ranges sends everything again.
        with part.open("ab" if response.status_code == 206 else "wb") as sink:
            said = time.monotonic()
            for chunk in response.iter_raw():
                sink.write(chunk)
                if sink.tell() > file.bytes:
                    return
                if time.monotonic() - said > SAY_S:
                    said = time.monotonic()
                    say(f"{file.name}: {sink.tell() / 1e9:.1f} of {file.bytes / 1e9:.1f} GB")
    if _size(part) < file.bytes:
        raise httpx.ReadError("the connection ended early")
