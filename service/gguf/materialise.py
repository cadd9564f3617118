"""A directory that Hugging Face code can read, made from a GGUF header alone: config, tokenizer, chat template.

The directory lies in a cache under the file's identity, so it is made once and copies of a file share it. It also holds
links to the file's parts, because vLLM looks for config.json beside the weights (for MTP's draft too).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from service.errors import UserError
from service.gguf.header import GgufHeader
from service.gguf.hf_config import Attention, hf_config
from service.gguf.tokenizer import stop_tokens, tokenizer_config, tokenizer_json

# Raised whenever the content made from an unchanged header changes.
REVISION = 1


def materialise(header: GgufHeader, cache: Path, attention: Attention) -> Path:
    """Make (or find) the directory for `header`; returns it. Safe against others that make the same one at once.
    Raises GgufError for a header that cannot be mapped, UserError when `cache` cannot be written."""
    where = "-".join(str(p.resolve()) for p in header.files)
    place = _short_hash(where)
    target = cache / f"{header.architecture}-{attention}-r{REVISION}-{header.identity[:16]}-{place}"
    if (target / "config.json").is_file():
        return target
    files = contents(header, attention)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    except OSError as error:
        raise UserError(f"cache directory {cache}: {error.strerror or error}") from None
    try:
        for name, text in files.items():
            (made / name).write_text(text, encoding="utf-8")
        for file in header.files:
            (made / file.name).symlink_to(file.resolve())
        made.chmod(0o755)
        try:
            made.rename(target)
        except OSError:
            # Somebody else was first: theirs is the same.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def contents(header: GgufHeader, attention: Attention) -> dict[str, str]:
    """File names and texts of the directory."""
    config = hf_config(header, attention)
    context = int(config.get("max_position_embeddings") or header.integer("{arch}.context_length", 4096))
    generation: dict[str, Any] = {"eos_token_id": stop_tokens(header) or None}
    files = {
        "config.json": _json(config),
        "generation_config.json": _json(generation),
        "tokenizer.json": json.dumps(tokenizer_json(header), ensure_ascii=False),
        "tokenizer_config.json": _json(tokenizer_config(header, context)),
    }
    if header.chat_template:
        files["chat_template.jinja"] = header.chat_template
    return files


def linked_file(directory: Path, header: GgufHeader) -> Path:
    """The first part of the weights as it is called inside `directory`."""
    return directory / header.path.name


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + os.linesep


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
