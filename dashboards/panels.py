"""What a dashboard is made of, as plain values, and their one translation into Grafana's JSON.

A `Panel` says what is asked and how it is read; `grafana()` turns a `Board` into JSON with grafana-foundation-sdk,
whose import takes a second and so happens inside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["lines", "stat", "bars", "heatmap"]

DATASOURCE = "${datasource}"


@dataclass(frozen=True)
class Query:
    """One PromQL expression. `legend` may use {{label}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """`help` is the panel's (i): what the figure means and what it is not. `unit` is one of Grafana's unit ids.

    `bars` shows instant values by the label `by`, whose values are numbers: one group of bars for each, one bar in it
    per query; `beside` are the other labels. `red` is the value from which a stat is red (below it, where `red_below`).
    """

    title: str
    help: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "lines"
    width: int = 8
    height: int = 8
    stacked: Literal["", "normal", "percent"] = ""
    by: str = ""
    beside: tuple[str, ...] = ()
    low: float | None = 0.0
    high: float | None = None
    red: float | None = None
    red_below: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A drop-down: values of `label` in the series of `metric`. `many`: several or all may be chosen."""

    name: str
    label: str
    metric: str
    many: bool = False


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    tags: tuple[str, ...] = field(default=("glm5-serve",))

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def grafana(board: Board) -> dict[str, Any]:
    """The dashboard as Grafana's JSON model (schema of Grafana 11)."""
    from grafana_foundation_sdk.builders import dashboard as sdk
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableRefresh

    made = (
        sdk.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags(list(board.tags))
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(sdk.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in board.variables:
        query = (
            sdk.QueryVariable(variable.name)
            .label(variable.name)
            .query(f"label_values({variable.metric}, {variable.label})")
            .datasource(_source())
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(variable.many)
            .include_all(variable.many)
        )
        made = made.with_variable(query.all_value(".*") if variable.many else query)
    number = 0
    for at, row in enumerate(board.rows):
        made = made.with_row(sdk.Row(row.title).id(1001 + at))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel, number))
    tree: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return tree


def _source() -> Any:
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid=DATASOURCE)


def _panel(panel: Panel, number: int) -> Any:
    from grafana_foundation_sdk.builders import prometheus
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

    made = {"lines": _lines, "stat": _stat, "bars": _bars, "heatmap": _heatmap}[panel.kind](panel)
    made = made.id(number).title(panel.title).description(panel.help).datasource(_source())
    made = made.span(panel.width).height(panel.height)
    for at, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(65 + at)).legend_format(query.legend)
        if panel.kind == "bars":
            target = target.instant().format(PromQueryFormat.TABLE)
        elif panel.kind == "heatmap":
            target = target.range().format(PromQueryFormat.HEATMAP)
        else:
            target = target.range()
        made = made.with_target(target)
    return made


def _bounds(made: Any, panel: Panel) -> Any:
    made = made.unit(panel.unit)
    if panel.low is not None:
        made = made.min(panel.low)
    if panel.high is not None:
        made = made.max(panel.high)
    return made


def _lines(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import common, timeseries
    from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, SortOrder, StackingMode
    from grafana_foundation_sdk.models.common import TooltipDisplayMode as Tooltip

    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .calcs([])
    )
    made = (
        _bounds(timeseries.Panel(), panel)
        .line_width(1)
        .fill_opacity(70 if panel.stacked else 8)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(Tooltip.MULTI).sort(SortOrder.DESCENDING))
    )
    if panel.stacked:
        mode = StackingMode.PERCENT if panel.stacked == "percent" else StackingMode.NORMAL
        made = made.stacking(common.StackingConfig().mode(mode).group("A"))
    return made


def _stat(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import common, dashboard, stat
    from grafana_foundation_sdk.models.common import BigValueColorMode, BigValueGraphMode
    from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

    made = (
        _bounds(stat.Panel(), panel)
        .graph_mode(BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )
    if panel.red is not None:
        colours = ("red", "green") if panel.red_below else ("green", "red")
        steps = [Threshold(value=None, color=colours[0]), Threshold(value=panel.red, color=colours[1])]
        thresholds = dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
        made = made.thresholds(thresholds).color_mode(BigValueColorMode.BACKGROUND)
    return made


def _bars(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import barchart, common
    from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, VisibilityMode
    from grafana_foundation_sdk.models.dashboard import DataTransformerConfig

    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .calcs([])
    )
    many = len(panel.queries) > 1
    at = range(1, len(panel.queries) + 1)
    values = [f"Value #{chr(64 + number)}" if many else "Value" for number in at]
    names = dict(zip(values, (query.legend for query in panel.queries), strict=True))
    hidden = [f"{name} {number}" if many else name for name in ("Time", *panel.beside) for number in at]
    made = _bounds(barchart.Panel(), panel).x_field(panel.by).show_value(VisibilityMode.AUTO).legend(legend)
    number, text = (
        {"conversions": [{"targetField": panel.by, "destinationType": kind}]} for kind in ("number", "string")
    )
    for kind, options in (
        ("joinByField", {"byField": panel.by, "mode": "outer"}),
        ("organize", {"excludeByName": dict.fromkeys(hidden, True), "renameByName": names}),
        # Grafana sorts text as text, 17 before 2; and a bar chart names its bars by text.
        ("convertFieldType", number),
        ("sortBy", {"sort": [{"field": panel.by}]}),
        ("convertFieldType", text),
    ):
        made = made.with_transformation(DataTransformerConfig(id_val=kind, options=options))
    return made


def _heatmap(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import heatmap
    from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

    colours = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").steps(64)
    axis = heatmap.YAxisConfig().unit(panel.unit)
    return heatmap.Panel().calculate(False).color(colours).y_axis(axis)
