"""The alerts: each metric and label that they speak of is one that our code exports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from compensator.service.metrics import CompensatorMetrics
from outbox_broker.engine.engine import Engine
from outbox_broker.http.broker_metrics import BrokerMetrics
from outbox_broker.http.service_ports import ServicePorts
from tests.deploy.manifests import of_kind

OTHERS = {"kube_cronjob_status_last_successful_time": {"cronjob"}}
"""Metrics that another program exports."""
WORDS = {
    "max", "min", "sum", "rate", "increase", "time", "absent", "histogram_quantile", "by", "and", "or", "unless", "on",
}  # fmt: skip
_SUFFIX = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
_IDENTIFIER = r"[a-zA-Z_][a-zA-Z0-9_]*"


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    return [rule for one in of_kind("PrometheusRule") for group in one["spec"]["groups"] for rule in group["rules"]]


class RecordingRegistry(CollectorRegistry):
    """A registry that knows what was registered, also metrics that have no samples yet."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        self.collectors.append(collector)
        super().register(collector)


def exported(registry: RecordingRegistry) -> Iterator[tuple[str, set[str]]]:
    """Each sample's name with its labels."""
    for collector in registry.collectors:
        for family in collector.collect():
            labels = set(getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()))
            labels |= {label for sample in family.samples for label in sample.labels}
            for suffix in _SUFFIX.get(family.type, [""]):
                yield family.name + suffix, labels | ({"le"} if suffix == "_bucket" else set())


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Mapping[str, set[str]]]:
    """Every metric that the compensator and the broker export, with its labels."""
    engine = Engine.open(tmp_path / "data")
    compensators, brokers = RecordingRegistry(), RecordingRegistry()
    CompensatorMetrics(compensators)
    BrokerMetrics(ServicePorts.of(engine), series_max=10, registry=brokers)
    yield dict([*exported(compensators), *exported(brokers)]) | OTHERS
    engine.close()


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression names."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"|\bby\s*\([^)]*\)", " ", expression)
    return set(re.findall(_IDENTIFIER, bare)) - WORDS


def labels_of(expression: str) -> set[str]:
    """The labels that an expression groups by and selects on."""
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", expression)
    selected = re.findall(rf"({_IDENTIFIER})\s*(?:=~|!~|!=|=)\s*\"", expression)
    return {label.strip() for group in grouped for label in group.split(",")} | set(selected)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_speaks_of_what_is_exported(rule: dict[str, Any], known: Mapping[str, set[str]]) -> None:
    named = metrics_of(rule["expr"])
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))

    assert named
    assert named <= known.keys(), sorted(known)
    for metric in named:
        assert labels_of(rule["expr"]) - {"le"} <= known[metric]
    assert shown <= labels_of(rule["expr"])
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert {"summary", "description"} == rule["annotations"].keys()
    assert rule["expr"].count("(") == rule["expr"].count(")")


def test_each_alert_has_a_name_of_its_own() -> None:
    names = [rule["alert"] for rule in rules()]

    assert len(names) == len(set(names)) >= 12


def test_a_metric_that_nobody_exports_would_be_found(known: Mapping[str, set[str]]) -> None:
    assert metrics_of('max by (source) (outbox_old_name{a="b"}) > 60 * rate(x_total[5m])') == {
        "outbox_old_name",
        "x_total",
    }
    assert "outbox_old_name" not in known
