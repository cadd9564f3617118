"""`glm5 top`: the live figures of a service, in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.address import base_url
from service.errors import UserError

if TYPE_CHECKING:
    from service.metrics.top import Figures, Scrape

TIMEOUT_S = 5.0
BAR = 24

app = typer.Typer(help="Live figures of a running service in the terminal.", add_completion=False)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object per interval, for machines.")] = False,
    key: Annotated[
        str | None, typer.Option(envvar="GLM5_API_KEY", help="An operator's API key, where the service asks for one.")
    ] = None,
) -> None:
    """Show pools, slots, tok/s at the present concurrency against the recorded curve, TTFT and queue.

    Reads /metrics of the service; needs neither Prometheus nor Grafana. "Recorded" is the mean since the service began;
    "now" is what happened between two readings. Ends with Ctrl-C.
    """
    address = base_url(url)
    readings = _readings(address if address.endswith("/metrics") else f"{address}/metrics", interval, key)
    if json_:
        for found in readings:
            sys.stdout.write(json.dumps(_plain(found)) + "\n")
            sys.stdout.flush()
            if once:
                return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        console.print(render(next(readings)))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for found in readings:
            live.update(render(found), refresh=True)


def _readings(url: str, interval: float, key: str | None) -> Iterator[Figures]:
    """Figures of each interval, for ever. Raises UserError where the service does not answer."""
    import httpx

    from service.metrics.top import figures

    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(timeout=TIMEOUT_S, headers=headers) as client:
        before = _scrape(client, url)
        while True:
            time.sleep(interval)
            now = _scrape(client, url)
            yield figures(before, now)
            before = now


def _scrape(client: Any, url: str) -> Scrape:
    import httpx

    from service.metrics.top import Scrape

    try:
        answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as fault:
        raise UserError(f"{url} cannot be read ({type(fault).__name__}); give --url of a running service") from None
    if answer.status_code in (401, 403):
        raise UserError(f"{url} asks for an operator's key (glm5 keys add NAME --operator); give it as GLM5_API_KEY")
    if answer.status_code != 200:
        raise UserError(f"{url} answered {answer.status_code}; give --url of a running service")
    try:
        scrape = Scrape.parse(answer.text, time.monotonic())
    except ValueError:
        raise UserError(f"{url} is not Prometheus text; give --url of a running service") from None
    if "glm_rejections_total" not in scrape.samples:
        raise UserError(f"{url} has no metrics of this service; give --url of a running service")
    return scrape


def render(found: Figures) -> Any:
    """The screen: one table of pools, one curve a pool."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    pools = Table(title=None, box=None, pad_edge=False, header_style="bold")
    for name in ("pool", "ready", "slots", "decoding", "waiting", "queued", "tok/s", "TTFT p95", "queue p95", "KV"):
        pools.add_column(name, justify="left" if name == "pool" else "right")
    for pool in found.pools:
        pools.add_row(
            pool.pool,
            str(pool.ready),
            f"{pool.running}/{pool.slots}",
            str(pool.decoding),
            str(pool.waiting),
            str(pool.queued),
            f"{pool.tokens_per_s:.1f}",
            _seconds(pool.ttft_p95_s),
            _seconds(pool.queue_p95_s),
            "" if pool.kv_used is None else f"{pool.kv_used:.0%}",
        )
    head = (
        f"in flight {found.in_flight}   requests {found.requests_per_s:.2f}/s   "
        f"failed {found.failed_per_s:.2f}/s   refused {found.refused_per_s:.2f}/s"
    )
    if not found.pools:
        return Text(f"{head}\nno replica has started yet; GET /ready says what it waits for")
    parts: list[Any] = [Text(head, style="dim"), Text(""), pools]
    for pool in found.pools:
        if not pool.curve:
            continue
        curve = Table(box=None, pad_edge=False, header_style="bold")
        for name in (f"{pool.pool}: at once", "tok/s recorded", "now", "of recorded", "time there", ""):
            curve.add_column(name, justify="left" if name == "" else "right")
        most = max(point.recorded for point in pool.curve)
        for point in pool.curve:
            share = None if point.now is None or not point.recorded else point.now / point.recorded
            style = "" if share is None else ("red" if share < 0.9 else "green")
            curve.add_row(
                point.concurrency,
                f"{point.recorded:.1f}",
                "" if point.now is None else f"{point.now:.1f}",
                Text("" if share is None else f"{share:.0%}", style=style),
                f"{point.share:.0%}" if point.share else "",
                "█" * round(BAR * point.recorded / most) if most else "",
                style="bold" if point is pool.current else "",
            )
        parts += [Text(""), curve]
    return Group(*parts)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _plain(found: Figures) -> dict[str, Any]:
    return {**asdict(found), "pools": {pool.pool: asdict(pool) for pool in found.pools}}
