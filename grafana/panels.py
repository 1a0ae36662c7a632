"""What a panel says, without what Grafana needs around it.

    Panel("Evictions", "...", "ops", Query('sum by (tier) (rate(kilburn_evictions_total{$G}[$R]))', "{{tier}}"))
      -> the JSON of a time series, its place on the page worked out: rows of 24 columns, from left to right

In an expression $G stands for the labels of the chosen instances and worker groups, $I for those of the chosen
instances, $R for Grafana's own interval of a rate.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

COLUMNS, HEIGHT = 24, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
ABBREVIATIONS = {"$G": 'instance=~"$instance",group=~"$group"', "$I": 'instance=~"$instance"', "$R": "$__rate_interval"}


class Look(Enum):
    LINES = "timeseries"
    STACKED = "timeseries "  # areas one on the other: parts of a whole
    NUMBER = "stat"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = "__auto"

    @property
    def promql(self) -> str:
        text = self.expr
        for short, long in ABBREVIATIONS.items():
            text = text.replace(short, long)
        return text


class Panel:
    """`about`: what is shown, and what to do when it looks bad. `unit` is one of Grafana's."""

    def __init__(
        self, title: str, about: str, unit: str, *queries: Query, look: Look = Look.LINES, columns: int = 12
    ) -> None:
        self.title, self.about, self.unit = title, about, unit
        self.queries, self.look, self.columns = queries, look, columns

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": number,
            "type": self.look.value.strip(),
            "title": self.title,
            "description": self.about,
            "gridPos": {"x": x, "y": y, "w": self.columns, "h": HEIGHT},
            "datasource": DATASOURCE,
            "targets": [self._target(query, at) for at, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._field(), "overrides": []},
            "options": self._options(),
        }

    def _target(self, query: Query, at: int) -> dict[str, Any]:
        target = {"refId": chr(ord("A") + at), "datasource": DATASOURCE, "expr": query.promql}
        match self.look:
            case Look.HEATMAP:
                return {**target, "format": "heatmap", "legendFormat": "{{le}}"}
            case Look.TABLE:
                return {**target, "format": "table", "instant": True}
            case _:
                return {**target, "legendFormat": query.legend}

    def _field(self) -> dict[str, Any]:
        match self.look:
            case Look.LINES:
                return {"unit": self.unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 8}}
            case Look.STACKED:
                stacking = {"mode": "normal", "group": "A"}
                custom = {"lineWidth": 1, "fillOpacity": 40, "stacking": stacking}
                return {"unit": self.unit, "min": 0, "custom": custom}
            case _:
                return {"unit": self.unit}

    def _options(self) -> dict[str, Any]:
        match self.look:
            case Look.LINES | Look.STACKED:
                legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
                return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
            case Look.HEATMAP:
                return {"calculate": False, "yAxis": {"unit": self.unit}, "cellGap": 1}
            case Look.NUMBER:
                return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
            case Look.TABLE:
                return {"showHeader": True}


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    about: str
    sections: tuple[Section, ...]

    @property
    def panels(self) -> list[Panel]:
        return [panel for section in self.sections for panel in section.panels]

    def json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["kilburn"],
            "schemaVersion": 41,
            "editable": True,
            "graphTooltip": 1,  # one crosshair over all panels
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "templating": {"list": VARIABLES},
            "links": [{"title": "Kilburn", "type": "dashboards", "tags": ["kilburn"], "asDropdown": True}],
            "panels": self._placed(),
        }

    def _placed(self) -> list[dict[str, Any]]:
        placed: list[dict[str, Any]] = []
        y = 0
        for section in self.sections:
            bar = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
            placed.append({"id": len(placed) + 1, "type": "row", "title": section.title, "gridPos": bar, "panels": []})
            x, y = 0, y + 1
            for panel in section.panels:
                if x + panel.columns > COLUMNS:
                    x, y = 0, y + HEIGHT
                placed.append(panel.json(len(placed) + 1, x, y))
                x += panel.columns
            y += HEIGHT
        return placed


def _labels_of(label: str, series: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({series}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


VARIABLES: list[dict[str, Any]] = [
    {"name": "datasource", "label": "source", "type": "datasource", "query": "prometheus"},
    _labels_of("instance", "kilburn_up_to_serve"),
    _labels_of("group", "kilburn_blocks"),
]
