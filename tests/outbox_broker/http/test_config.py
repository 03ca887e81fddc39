"""Where a setting comes from: flags, then the environment, then the file, then defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_adapter.http.admin_client import AdminClient
from outbox_broker.common.engine_options import SEGMENT_BYTES_MIN, EngineOptions
from outbox_broker.config.broker_config import load
from outbox_broker.http.http_settings import HttpSettings
from outbox_broker.http.server import bind
from outbox_core.common.errors import ConfigurationError
from outbox_core.journal.block import FRAMES_MAX


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that sets the port and the durability, and something for clients."""
    path = tmp_path / "outbox.toml"
    path.write_text('[broker]\ndata = "from-file"\nport = 1\ndurability = "os"\nurl = "http://127.0.0.1:1"\n')
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_BROKER__PORT", "2")
    monkeypatch.setenv("OUTBOX_BROKER__HOST", "::1")
    monkeypatch.setenv("OUTBOX_BROKER__URL", "http://127.0.0.1:1")

    config = load({"host": "127.0.0.2", "port": None}, file=file)

    assert (config.host, config.port, config.durability, config.data) == ("127.0.0.2", 2, "os", Path("from-file"))
    assert config.shutdown_timeout_ms == 25_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[broker]\ndata = "d"\nprot = 1', "'port' is meant"),
        ('[broker]\ndata = "d"\nport = "x"', "'port'"),
        ('[broker]\ndata = "d"\npublishes_max = 0', "'publishes_max'"),
        ('[broker]\ndata = "d"\nretention_ms = "7 days"', 'as "250ms", "5s"'),
        ('[broker]\ndata = "d"\nretention_bytes = "64MB"', 'as "512B", "64KiB"'),
        ("broker = 1", "[broker]"),
        ("[broker", "not TOML"),
        ("[broker]", "--data"),
        ('[brokr]\ndata = "d"', "'broker' is meant"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text(text)

    with pytest.raises(ConfigurationError) as caught:
        load({}, file=path)

    assert said in str(caught.value)


ENGINE_BOUNDS = {
    "dedup_messages_max": 7, "cancel_tombstones_max": 8, "topics_max": 9, "groups_per_topic_max": 10,
    "segment_bytes": 8192, "pull_bytes_max": 11, "in_hand_max": 12, "group_in_hand_max": 13,
    "dead_letters_bytes_max": 14, "redrive_per_second": 15, "retention_ms": 16, "retention_bytes": 17,
    "reasons_bytes_max": 18,
}  # fmt: skip


def test_what_bounds_the_engine_is_set_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text("[broker]\ndata = 'd'\n" + "\n".join(f"{name} = {value}" for name, value in ENGINE_BOUNDS.items()))
    monkeypatch.setenv("OUTBOX_BROKER__TOPICS_MAX", "99")

    monkeypatch.setenv("OUTBOX_BROKER__JUDGED_FILE", "out/judged.json")
    config = load({}, file=path)

    assert config.engine_options.judged_file == Path("out/judged.json")
    assert {name: getattr(config.engine_options, name) for name in ENGINE_BOUNDS} == {**ENGINE_BOUNDS, "topics_max": 99}
    assert config.http_settings.pull_bytes_max == 11


def test_durations_and_sizes_may_be_written_with_their_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text("[broker]\ndata = 'd'\nretention_ms = '7d'\nsegment_bytes = '64MiB'\nrequest_bytes_max = '1.5MiB'")
    monkeypatch.setenv("OUTBOX_BROKER__SHUTDOWN_TIMEOUT_MS", "5s")
    monkeypatch.setenv("OUTBOX_BROKER__RETENTION_BYTES", "4096")

    config = load({}, file=path)

    assert (config.retention_ms, config.segment_bytes, config.request_bytes_max) == (
        7 * 86_400_000, 64 << 20, 3 << 19,
    )  # fmt: skip
    assert (config.shutdown_timeout_ms, config.retention_bytes) == (5_000, 4_096)


def test_what_is_not_set_is_as_the_engine_and_the_server_have_it() -> None:
    config = load({"data": Path("d")}, file=None)

    assert (config.engine_options, config.http_settings) == (EngineOptions(), HttpSettings())


@pytest.mark.parametrize("name", ENGINE_BOUNDS)
def test_a_bound_of_the_engine_that_bounds_nothing_is_refused_by_name(name: str) -> None:
    too_little = SEGMENT_BYTES_MIN - 1 if name == "segment_bytes" else 0

    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        load({"data": Path("d"), name: too_little}, file=None)


@pytest.mark.parametrize("name", ["fire_batch_max", "dead_search_messages_max"])
def test_what_makes_the_frames_of_a_block_is_at_most_what_a_block_has(name: str) -> None:
    assert getattr(EngineOptions(**{name: FRAMES_MAX}), name) == FRAMES_MAX  # type: ignore[arg-type]

    with pytest.raises(ConfigurationError, match=f"{name} must be at most {FRAMES_MAX}"):
        EngineOptions(**{name: FRAMES_MAX + 1})  # type: ignore[arg-type]


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_BROKER__PROT", "1")

    with pytest.raises(ConfigurationError, match=r"OUTBOX_BROKER__PROT .*'port' is meant"):
        load({"data": Path("d")}, file=None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "http://[::1", "ftp://127.0.0.1", "127.0.0.1:1"])
def test_a_broker_is_not_asked_at_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigurationError, match="looks like http"):
        AdminClient(url, timeout_ms=1_000).request("GET", "/readyz")


def test_an_address_that_is_not_this_machines_is_told_from_a_port_in_use() -> None:
    with pytest.raises(ConfigurationError, match="as --host"):
        bind("203.0.113.1", 0)
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(ConfigurationError, match="another --port"):
            bind("127.0.0.1", bound.getsockname()[1])


def test_values_are_not_repeated_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_BROKER__PORT", "a-secret-by-mistake")

    with pytest.raises(ConfigurationError) as caught:
        load({"data": Path("d")}, file=None)

    assert "a-secret" not in str(caught.value)


def test_an_address_that_others_reach_needs_tokens_or_a_word() -> None:
    with pytest.raises(ConfigurationError, match="--insecure-no-auth"):
        load({"data": Path("d"), "host": "0.0.0.0"}, file=None).access()

    assert load({"data": Path("d"), "host": "0.0.0.0", "insecure_no_auth": True}, file=None).access().tokens is None
    assert load({"data": Path("d")}, file=None).access().loopback_hosts_only
