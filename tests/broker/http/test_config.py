"""Where a setting comes from: flags, then the environment, then the file, then defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.config import load
from messaging.errors import ConfigurationError


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
        ("broker = 1", "[broker]"),
        ("[broker", "not TOML"),
        ("[broker]", "--data"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text(text)

    with pytest.raises(ConfigurationError) as caught:
        load({}, file=path)

    assert said in str(caught.value)


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
