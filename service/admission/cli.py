"""`glm5 keys`: make, list and check API keys. The file holds hashes; a key is shown once, when it is made."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from service.admission.keys import MAX_CONCURRENCY, MAX_TOKENS_PER_MINUTE, KeyEntry, digest, read_entries
from service.errors import UserError
from service.terminal import one_line

PREFIX = "glm-"
RANDOM_BYTES = 32
MAX_DAYS = 36_500

app = typer.Typer(
    help="Make, list and check API keys.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

FileOption = Annotated[Path, typer.Option("--file", "-f", help="Keys file (YAML), the profile's admission.keys_file.")]


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in listings, never a secret.")],
    file: FileOption,
    tier: Annotated[str, typer.Option(help="Best service_tier that it may ask for: priority, default or flex.")] = (
        "priority"
    ),
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=MAX_CONCURRENCY, help="Requests at once. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TOKENS_PER_MINUTE, help="Tokens of prompts and answers a minute. Default: no limit."
        ),
    ] = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="It may also ask for /metrics, live figures and /profile."),
    ] = False,
    days: Annotated[float | None, typer.Option(help="Days until it expires, 36500 at most. Default: never.")] = None,
) -> None:
    """Make a key, print it once, and write its hash to the file (made if missing).

    The service reads the file when it starts: restart it to let a new key in, or an old one out.
    """
    import secrets

    # Not the option's own bounds: they let NaN pass.
    if days is not None and not 0 <= days <= MAX_DAYS:
        raise UserError(f"--days {days:g}: it is 0 to {MAX_DAYS}; leave it out for a key that never expires")
    if one_line(name) != name:
        raise UserError("NAME must not hold control characters")
    try:
        entries = read_entries(file) if file.exists() else []
    except OSError as fault:
        raise UserError(f"keys file {file}: {fault.strerror}") from None
    if any(entry.name == name for entry in entries):
        raise UserError(f"{file} already has a key named {name!r}; choose another name, or delete that entry")
    if tier not in ("priority", "default", "flex"):
        raise UserError(f"--tier is priority, default or flex, not {tier!r}")
    if not 1 <= len(name) <= 64:
        raise UserError("NAME must have 1 to 64 characters")
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    entry = KeyEntry(
        name=name,
        sha256=digest(key).hex(),
        tier=tier,
        concurrency=concurrency,
        tokens_per_minute=tokens_per_minute,
        operator=operator,
        expires=None if days is None else time.time() + days * 86_400,
    )
    _write(file, [*entries, entry])
    typer.echo(key)
    typer.echo(f"wrote the hash of {name}'s key to {file}; the key itself is shown only now", err=True)


@app.command("list")
def list_(file: FileOption, json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the keys' names and limits. Exit 2 if the file is wrong."""
    entries = read_entries(file)
    if json_:
        typer.echo(
            json.dumps([{**entry.model_dump(exclude={"sha256"}), "expired": _expired(entry)} for entry in entries])
        )
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "best tier", "at once", "tokens a minute", "operator", "expires", box=None)
    for entry in entries:
        until = "never" if entry.expires is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.expires))
        table.add_row(
            escape(one_line(entry.name)),
            entry.tier,
            str(entry.concurrency or "any"),
            str(entry.tokens_per_minute or "any"),
            "yes" if entry.operator else "no",
            f"{until} (expired)" if _expired(entry) else until,
        )
    Console().print(table)


@app.command()
def check(file: FileOption) -> None:
    """Read a key from standard input (never from the command line, where others see it) and say whose it is.

    Exit 0 if the key is good, 1 if it is unknown or expired, 2 if the file is wrong.
    """
    import sys

    entries = read_entries(file)
    key = sys.stdin.readline().strip()
    if not key:
        raise UserError("give the key on standard input: glm5 keys check --file keys.yaml < key.txt")
    found = next((entry for entry in entries if entry.sha256 == digest(key).hex()), None)
    if found is None:
        typer.echo("unknown key")
        raise typer.Exit(1)
    if _expired(found):
        typer.echo(f"{one_line(found.name)}: expired")
        raise typer.Exit(1)
    typer.echo(f"{one_line(found.name)}: good, tier {found.tier} at most")


def _expired(entry: KeyEntry) -> bool:
    return entry.expires is not None and time.time() >= entry.expires


def _write(file: Path, entries: list[KeyEntry]) -> None:
    """All or nothing, readable by its owner only."""
    import yaml

    tree = [entry.model_dump(exclude_none=True) for entry in entries]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as sink:
            yaml.safe_dump(tree, sink, sort_keys=False)
        Path(made).replace(file)
    except OSError as fault:
        raise UserError(f"cannot write {file}: {fault.strerror}") from None
