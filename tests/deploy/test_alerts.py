"""The alerts: each metric and label that they speak of is one that our code exports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import of_kind
from tests.fixtures.exported_metrics import exported_metrics

OTHERS = {"kube_cronjob_status_last_successful_time": {"cronjob"}, "kube_cronjob_created": {"cronjob"}}
"""Metrics that another program exports."""
WORDS = {
    *("max", "min", "sum", "rate", "increase", "time", "absent", "histogram_quantile", "max_over_time"),
    *("by", "and", "or", "unless", "on"),
}
_IDENTIFIER = r"[a-zA-Z_][a-zA-Z0-9_]*"


def rules() -> list[dict[str, Any]]:
    """All alerts."""
    return [rule for one in of_kind("PrometheusRule") for group in one["spec"]["groups"] for rule in group["rules"]]


@pytest.fixture
def known(tmp_path: Path) -> Mapping[str, set[str]]:
    """Every metric that an alert may speak of, with its labels."""
    return {**exported_metrics(tmp_path / "data"), **OTHERS}


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression names."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"|\bby\s*\([^)]*\)|\boffset\s+\w+", " ", expression)
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


def test_a_reconciliation_that_never_succeeded_is_reported_as_well() -> None:
    [rule] = [rule for rule in rules() if rule["alert"] == "OutboxNotReconciled"]

    # kube-state-metrics exports the first of them once a job has succeeded, the second from the beginning.
    assert metrics_of(rule["expr"]) == {"kube_cronjob_status_last_successful_time", "kube_cronjob_created"}


def test_each_alert_has_a_name_of_its_own() -> None:
    names = [rule["alert"] for rule in rules()]

    assert len(names) == len(set(names)) >= 12


def test_a_metric_that_nobody_exports_would_be_found(known: Mapping[str, set[str]]) -> None:
    assert metrics_of('max by (source) (outbox_old_name{a="b"}) > 60 * rate(x_total[5m])') == {
        "outbox_old_name",
        "x_total",
    }
    assert "outbox_old_name" not in known
