"""What a dashboard's panels show, asked of a Prometheus and kept as JSON for render.mjs.

python -m dashboards.picture.series --prometheus URL --job JOB --seconds N SERIES.json
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from dashboards import build
from dashboards.panels import Panel, Query

POINTS = 240
TIMEOUT_S = 30.0


def keep(board: str, prometheus: str, variables: Mapping[str, str], start: float, end: float) -> dict[str, Any]:
    """Series of every panel of `board` (a file name of dashboards/out) that has some; times in Unix seconds.

    `variables`: Grafana's, with the dollar sign. Panels without data are left out, and so are heat maps.
    """
    shown = build.boards()[board]
    step = max(1.0, (end - start) / POINTS)
    panels = []
    with httpx.Client(base_url=prometheus, timeout=TIMEOUT_S) as client:
        for panel in shown.panels:
            if panel.kind == "heatmap":
                continue
            ask = _bars if panel.kind == "bars" else _lines
            series = [one for query in panel.queries for one in ask(client, panel, query, variables, start, end, step)]
            if series:
                panels.append(
                    {
                        **{name: getattr(panel, name) for name in ("title", "unit", "kind", "stacked", "low", "high")},
                        "width": panel.width,
                        "height": panel.height,
                        "series": series,
                    }
                )
    return {"title": shown.title, "from": start, "to": end, "panels": panels}


def _lines(
    client: httpx.Client,
    panel: Panel,
    query: Query,
    variables: Mapping[str, str],
    start: float,
    end: float,
    step: float,
) -> list[dict[str, Any]]:
    asked: dict[str, str | float] = {"query": _fill(query.expr, variables), "start": start, "end": end, "step": step}
    found = client.get("/api/v1/query_range", params=asked).json()["data"]["result"]
    made = []
    for one in found:
        # A grid without holes: what is missing or not a number is a gap, not a line across it.
        values = {round((float(when) - start) / step): float(value) for when, value in one["values"]}
        grid = range(int((end - start) / step) + 1)
        points = [[start + at * step, value if (value := values.get(at)) == value else None] for at in grid]
        if any(point[1] for point in points) or not panel.stacked:
            made.append({"name": _legend(query.legend, one["metric"]), "points": points})
    return made


def _bars(
    client: httpx.Client,
    panel: Panel,
    query: Query,
    variables: Mapping[str, str],
    start: float,
    end: float,
    step: float,
) -> list[dict[str, Any]]:
    asked: dict[str, str | float] = {"query": _fill(query.expr, variables), "time": end}
    found = client.get("/api/v1/query", params=asked).json()["data"]["result"]
    points = [[one["metric"][panel.by], float(one["value"][1])] for one in found]
    return [{"name": query.legend, "points": sorted(points, key=lambda point: float(point[0]))}] if points else []


def _fill(expression: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        expression = expression.replace(name, value)
    return expression


def _legend(pattern: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)


def main(
    out: Path,
    prometheus: Annotated[str, typer.Option(help="URL of the Prometheus.")],
    job: Annotated[str, typer.Option(help="Scrape job of the service.")] = "glm5",
    seconds: Annotated[float, typer.Option(help="How much time before now.")] = 3600.0,
    window: Annotated[str, typer.Option(help="Window of rates.")] = "1m",
    board: Annotated[str, typer.Option(help="File name of the dashboard.")] = "serving.json",
) -> None:
    """Keep what a dashboard shows now, for render.mjs."""
    end = time.time()
    variables = {"$job": job, "$pool": ".*", "$box": ".*", "$__rate_interval": window}
    out.write_text(json.dumps(keep(board, prometheus, variables, end - seconds, end)))


if __name__ == "__main__":
    typer.run(main)
