"""`glm5 chat`: a terminal chat over the service's own HTTP, nothing but the public interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson

from service.address import base_url
from service.errors import UserError
from service.terminal import lines, one_line

TIMEOUT = httpx.Timeout(10.0, read=600.0)


def run(url: str, model: str | None, key: Path | None, system: str | None, max_tokens: int, temperature: float) -> None:
    """Read lines, stream answers (control characters as escapes). Raises UserError where the service cannot be reached
    or refuses."""
    headers = {"authorization": f"Bearer {_secret(key)}"} if key else {}
    interactive, url = sys.stdin.isatty(), base_url(url)
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT) as client:
        model = model or _served(client)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if interactive:
            print(f"{one_line(model)} at {url}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)  # noqa: T201
        while True:
            try:
                line = input("\n> " if interactive else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                return
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            body = {
                "model": model,
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stream": True,
            }
            answer = ""
            try:
                for piece in stream(client, body):
                    answer += piece
                    sys.stdout.write(lines(piece))
                    sys.stdout.flush()
            except KeyboardInterrupt:
                if not interactive:
                    raise
                sys.stdout.write(" [stopped]")
            sys.stdout.write("\n")
            messages.append({"role": "assistant", "content": answer})


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Text pieces of one answer. Raises UserError for errors before or in the stream, and for a stream cut short."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise UserError(_message(response))
            for line in _lines(response):
                if line == b"data: [DONE]":
                    return
                if not line.startswith(b"data: "):
                    continue
                try:
                    event = orjson.loads(line[6:])
                except orjson.JSONDecodeError:
                    shown = line[:200].decode(errors="replace")
                    raise UserError(f"the answer broke off: the service sent what is no JSON: {shown}") from None
                if event.get("error"):
                    raise UserError(f"the answer broke off: {event['error']['message']}")
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    yield delta.get("reasoning_content") or ""
                    yield delta.get("content") or ""
    except httpx.HTTPError as fault:
        raise UserError(f"the service at {client.base_url} did not answer: {fault}") from None
    raise UserError("the answer broke off: the stream ended without [DONE]")


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines of an event stream. httpx's own also end at U+2028, U+2029 and U+0085, which JSON may hold."""
    rest = b""
    for piece in response.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")


def _served(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise UserError(_message(response))
        models = response.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as fault:
        raise UserError(f"no service answers at {client.base_url} ({fault}); start one with: glm5 serve") from None
    if not models:
        raise UserError("the service has no model yet; it is still loading")
    return str(models[0]["id"])


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"


def _secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as fault:
        raise UserError(f"--key {path}: {fault.strerror}") from None
