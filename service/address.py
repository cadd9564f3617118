"""Where a service is, as people type it."""

from __future__ import annotations

from urllib.parse import urlsplit

from service.errors import UserError


def base_url(text: str) -> str:
    """`text` as the start of a URL, without a slash at its end; `HOST:PORT` means http. Raises UserError."""
    given = text.strip()
    url = (given if "://" in given else f"http://{given}").rstrip("/")
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket that nothing closes
        right = False
    if not right or any(letter.isspace() for letter in url):
        raise UserError(f"--url {text!r}: write it as http://HOST:PORT, such as http://127.0.0.1:8000")
    return url
