"""Every setting of a service is named in a page, and every TOML file in the pages is one that its reader takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from compensator.core import config as compensator_config
from outbox_broker.cluster.cluster_settings import ClusterSettings, load_cluster_settings
from outbox_broker.config import broker_config
from outbox_broker.http.access_control import load_tokens
from spark_reconcile.core.settings_file import DECLARATION, read_config, settings_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"]
MODELS: list[type[BaseModel]] = [
    broker_config.BrokerConfig, ClusterSettings, compensator_config.CompensatorConfig,
    compensator_config.CompensatorTable, compensator_config.SourceTable, compensator_config.TimingTable,
]  # fmt: skip
BLOCKS = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
RECONCILIATION = {"rules", "inboxes", "outboxes", "reconcile"}


def take(tables: dict[str, Any], file: Path) -> None:
    """Have the reader of this file read it. Raises ConfigurationError."""
    if "tokens" in tables:
        load_tokens(file)
    elif RECONCILIATION & tables.keys():
        found = read_config(file)
        database = {name: value for name, value in found.get("database", {}).items() if name != "password_file"}
        settings_of({**found, "database": {"url": "sqlite:///shop.db", **database}})
    elif "compensator" in tables:
        compensator_config.load({}, file=file)
    elif "cluster" in tables:
        load_cluster_settings({"store": "bookkeeper://zk1/delay"}, file=file)
    else:
        broker_config.load({"data": Path("data")}, file=file)


def named_in_pages() -> set[str]:
    """The names in code, and the keys and tables in files of settings."""
    text = "\n".join(page.read_text() for page in PAGES)
    named = {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"\w+", code)}
    written = [re.findall(r"^(?:(\w+) = |\[+(?:\w+\.)?(\w+)\])", block, re.MULTILINE) for _, block in BLOCKS]
    return named | {name for names in written for key, table in names for name in (key, table)}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_setting_is_named_in_a_page(model: type[BaseModel]) -> None:
    assert sorted(model.model_fields.keys() - named_in_pages()) == []


def test_every_setting_of_reconciliation_is_named_in_a_page() -> None:
    declared = {setting.location[-1] for setting in DECLARATION.declared()}

    assert sorted(declared - named_in_pages()) == []


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page}-{number}" for number, (page, _) in enumerate(BLOCKS)])
def test_a_file_of_settings_in_the_pages_is_taken(page: str, block: str, tmp_path: Path) -> None:
    file = tmp_path / page
    file.write_text(block)

    take(tomllib.loads(block), file)


def test_there_are_files_of_each_kind() -> None:
    assert len(BLOCKS) >= 5
