"""docs/reconciliation.md says what the code does: its settings are read, its table is the one that judges."""

from __future__ import annotations

import re
from pathlib import Path

from spark_reconcile.cli import EXIT_FINDINGS, EXIT_NOT_COMPARABLE
from spark_reconcile.config import read_settings
from spark_reconcile.verdict import RULES, Severity, Verdict, severity_of

PAGE = (Path(__file__).parents[2] / "docs" / "reconciliation.md").read_text()


def test_the_page_has_every_line_of_the_table_in_its_order() -> None:
    lines = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", PAGE, flags=re.MULTILINE)

    assert lines == [(rule.verdict, rule.evidence) for rule in RULES]


def test_the_page_names_the_findings() -> None:
    sentence = re.search(r"^Findings are (.+?)\. ", PAGE, flags=re.MULTILINE)

    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence.group(1))) == {
        verdict for verdict in Verdict if severity_of(verdict) is Severity.ERROR
    }


def test_the_example_is_settings_and_shows_every_key(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.+?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "reconcile.toml").write_text(example)

    settings = read_settings(tmp_path / "reconcile.toml")

    assert settings.rules[0].where == {"status": "PAID"}
    assert (settings.database.archive_days, settings.database.inbox_days) == (30, 30)
    shown = (settings.database, settings.broker, settings.grace, settings.output)
    assert all(name in example for struct in shown for name in struct.__struct_fields__)
    assert all(name in example for name in settings.rules[0].__struct_fields__)


def test_the_page_has_the_exit_statuses() -> None:
    rows = dict(re.findall(r"^\| (\d) \| (\w[\w ]*\w)", PAGE, flags=re.MULTILINE))

    assert rows == {
        "0": "balanced", str(EXIT_FINDINGS): "findings", "2": "usage", str(EXIT_NOT_COMPARABLE): "not comparable"
    }  # fmt: skip
