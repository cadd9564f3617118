"""The browser page: files read once, served as they are. It asks no other host for anything, and its policy says so."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from service.errors import NotFound

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes markup in one place only, the sanitiser.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain", "svg": "image/svg+xml"}
FIRST = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    type: str
    plain: bytes
    packed: bytes
    etag: str


class Page:
    """The files of one folder: `index.html` at `/`, the others at `/page/NAME`."""

    def __init__(self, folder: Traversable) -> None:
        """Raises OSError where the folder cannot be read."""
        self._files = dict(_read(folder, ""))
        assert FIRST in self._files, f"{folder} holds no {FIRST}"

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/", self.first, methods=["GET"], include_in_schema=False)
        app.add_api_route("/page/{name:path}", self.file, methods=["GET"], include_in_schema=False)

    async def first(self, request: Request) -> Response:
        return _answer(request, self._files[FIRST])

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = self._files.get(name)
        if found is None or name == FIRST:
            raise NotFound(f"the page has no file {name[:128]!r}")
        return _answer(request, found)


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, PageFile]]:
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            yield from _read(entry, f"{name}/")
        elif (type_ := TYPES.get(entry.name.rpartition(".")[2])) is not None:
            plain = entry.read_bytes()
            packed = gzip.compress(plain, 9, mtime=0)
            yield name, PageFile(type_, plain, packed, f'"{hashlib.sha256(plain).hexdigest()[:16]}"')


def _answer(request: Request, file: PageFile) -> Response:
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "vary": "accept-encoding",
        "etag": file.etag,
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers=headers | {"content-encoding": "gzip"}, media_type=file.type)
    return Response(file.plain, headers=headers, media_type=file.type)
