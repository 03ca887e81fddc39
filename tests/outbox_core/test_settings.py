"""Settings of a service: where each comes from, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.settings import ServiceSettings, Table, load_settings


class Shop(Table):
    url: str = "none"
    port: int = Field(default=1, ge=1)
    schemas: list[str] = Field(default=[])


class Settings(ServiceSettings):
    shop: Shop = Shop()
    log_level: str = "info"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a table of ours and one of another service."""
    path = tmp_path / "outbox.toml"
    path.write_text('[shop]\nurl = "file"\nport = 2\nschemas = ["a"]\n[another]\nport = 3\n')
    return path


def test_each_key_is_taken_from_the_first_that_gives_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_SHOP__PORT", "4")
    monkeypatch.setenv("OUTBOX_SHOP__SCHEMAS", '["b", "c"]')
    monkeypatch.setenv("OUTBOX_LOG_LEVEL", "debug")

    settings = load_settings(Settings, {"shop": {"schemas": ["d"], "url": None}, "log_level": None}, file=file)

    assert settings.shop == Shop(url="file", port=4, schemas=["d"])
    assert settings.log_level == "debug"


def test_an_empty_list_of_flags_leaves_the_list_of_the_file(file: Path) -> None:
    assert load_settings(Settings, {"shop": {"schemas": []}}, file=file).shop.schemas == ["a"]


def test_a_variable_with_the_name_of_a_table_is_an_application_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_SHOP", "http://shop:1")
    monkeypatch.setenv("OUTBOX_SHOP__PORT", "4")

    assert load_settings(Settings, {}, file=None).shop == Shop(port=4)


def test_what_is_wrong_is_said_with_where_it_was_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[shop]\nport = 0")

    with pytest.raises(ConfigurationError, match=r"outbox\.toml: the setting 'port' of \[shop\] is wrong"):
        load_settings(Settings, {}, file=file)
    with pytest.raises(ConfigurationError, match=r"^the setting 'port' of \[shop\] is wrong"):
        load_settings(Settings, {"shop": {"port": -1}}, file=file)

    monkeypatch.setenv("OUTBOX_SHOP__PROT", "4")
    with pytest.raises(ConfigurationError, match=r"OUTBOX_SHOP__PROT in the environment: .*'port' is meant"):
        load_settings(Settings, {"shop": {"port": 1}}, file=None)


def test_a_variable_that_is_no_json_is_refused_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_SHOP__SCHEMAS", "hush, hush")

    with pytest.raises(ConfigurationError) as raised:
        load_settings(Settings, {}, file=None)

    assert "OUTBOX_SHOP__SCHEMAS in the environment" in str(raised.value)
    assert "as JSON" in str(raised.value)
    assert "hush" not in str(raised.value)


class Owner(Table):
    name: str


class Owned(ServiceSettings):
    owner: Owner


def test_what_is_missing_is_said_with_each_way_to_give_it() -> None:
    with pytest.raises(ConfigurationError, match=r"^--name is needed, or OUTBOX_OWNER__NAME.*'name' of \[owner\]"):
        load_settings(Owned, {"owner": {}}, file=None)
