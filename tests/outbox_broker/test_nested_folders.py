"""A data folder inside another one is refused, from either side, whatever serves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.config.broker_config import BrokerConfig
from outbox_broker.delay_service import process
from outbox_broker.engine.engine import Engine
from outbox_core.common.errors import ConfigurationError
from tests.outbox_broker.delay.conftest import Opened
from tests.outbox_broker.message_log import message_segments

type_of_open = Callable[[Path], None]


def open_broker(folder: Path) -> None:
    Engine.open(folder).close()


def open_delay(folder: Path) -> None:
    """As its process does, up to where it would deliver."""
    config = BrokerConfig(data=folder, insecure_no_auth=True, port=0)
    process.run(config, target_url="embedded:nowhere", target_token=None)


def open_schedule(folder: Path) -> None:
    """What a delay service leaves."""
    opened = Opened(folder)
    opened.open()
    opened.drop()


@pytest.mark.parametrize("outer", [open_broker, open_schedule])
@pytest.mark.parametrize("inner", [open_broker, open_delay])
@pytest.mark.parametrize("place", ["below", "far/below", "messages", "messages/below", "schedule"])
def test_a_data_folder_inside_another_one_is_refused_and_nothing_is_made(
    tmp_path: Path, outer: type_of_open, inner: type_of_open, place: str
) -> None:
    outer(tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(
        ConfigurationError, match=rf"{place} is inside another one, .*data(/messages)?; use a folder beside it"
    ):
        inner(tmp_path / "data" / place)

    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []


@pytest.mark.parametrize("inner", [open_broker, open_schedule])
@pytest.mark.parametrize("outer", [open_broker, open_delay])
def test_a_folder_with_a_data_folder_in_it_is_refused(tmp_path: Path, outer: type_of_open, inner: type_of_open) -> None:
    inner(tmp_path / "data" / "below")

    with pytest.raises(ConfigurationError, match=r"holds another one, .*below"):
        outer(tmp_path / "data")

    assert not message_segments(tmp_path / "data")


def test_a_link_to_a_folder_inside_is_seen_through(tmp_path: Path) -> None:
    open_broker(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "below")

    with pytest.raises(ConfigurationError, match="inside another one"):
        open_broker(tmp_path / "link")


def test_folders_beside_each_other_are_taken(tmp_path: Path) -> None:
    for name in ("data", "data2", "other/data"):
        open_broker(tmp_path / name)
        open_broker(tmp_path / name)
