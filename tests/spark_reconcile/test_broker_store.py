"""A broker on BookKeeper as a source: how it is named, and what is said where it cannot be read. The lane of BookKeeper
reads one: tests/engines/bookkeeper/test_broker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox_core.common.errors import ConfigurationError
from spark_reconcile import Settings
from spark_reconcile.core.settings import LedgerSource
from spark_reconcile.core.settings_file import settings_of
from spark_reconcile.load.ledger_exports import refresh_broker_export


@pytest.mark.parametrize(
    ("broker", "refusal"),
    [
        ({"groups": ["mail"]}, "needs data, a broker's folder, or store"),
        ({"data": "b", "store": "bookkeeper://zk/outbox/broker"}, "not both"),
        (
            {"store": "zk1:2181"},
            r"\[broker\] store is no address on BookKeeper: 'zk1:2181'; .*bookkeeper://zk1,zk2,zk3/outbox/broker",
        ),
        ({"data": "b", "config": "cluster.toml"}, "config goes with store"),
    ],
)
def test_a_broker_is_in_a_folder_or_on_bookkeeper(broker: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigurationError, match=refusal):
        settings_of({"database": {"url": "sqlite:///a.db"}, "broker": broker})


def test_a_broker_on_bookkeeper_is_exported_into_the_output_folder(tmp_path: Path) -> None:
    settings = settings_of(
        {
            "database": {"url": "sqlite:///a.db"},
            "broker": {"store": "bookkeeper://zk/outbox/broker", "config": "cluster.toml"},
            "output": {"folder": "results"},
        },
        folder=tmp_path,
    )

    assert settings.broker_data == tmp_path / "results" / "broker"
    assert settings.broker_store == LedgerSource(
        store="bookkeeper://zk/outbox/broker", config=tmp_path / "cluster.toml"
    )  # fmt: skip


@pytest.mark.processes
def test_a_broker_whose_bookies_cannot_be_reached_is_told_with_its_reason(tmp_path: Path) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text("[cluster]\nunheard_of = 1\n")
    source = LedgerSource(store="bookkeeper://127.0.0.1:1/outbox/broker", config=config)

    settings = Settings(
        database_url="sqlite:///a.db", broker_data=tmp_path / "broker", output=tmp_path, broker_store=source
    )

    with pytest.raises(ConfigurationError, match=r"the broker bookkeeper://.*/broker cannot be read: .*unheard_of"):
        refresh_broker_export(settings)
