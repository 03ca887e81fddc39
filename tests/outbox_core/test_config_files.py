"""The files that a configuration names: read, or refused in one sentence that quotes no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_core.common.errors import ConfigurationError
from outbox_core.runtime.config_files import SECRET_BYTES_MAX, read_secret, read_toml


def test_a_secret_is_the_files_text_without_the_white_space_around_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\n s3cret pass \n")

    assert read_secret(path, what="token") == "s3cret pass"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"s3cret\xff", "is not UTF-8"),
        (b"s3cret" + b"x" * SECRET_BYTES_MAX, "has more than 4,096 bytes"),
        (None, "cannot read the token file"),
    ],
    ids=["binary", "large", "missing"],
)
def test_a_file_that_holds_no_secret_is_refused_and_not_quoted(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigurationError) as raised:
        read_secret(path, what="token")

    assert said in str(raised.value)
    assert str(path) in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("content", [b"[a", b"a = '\xff'"], ids=["torn", "binary"])
def test_a_configuration_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "outbox.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"outbox\.toml is not TOML"):
        read_toml(path)


def test_a_configuration_is_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "outbox.toml"
    path.write_text("[a]\nb = 1\n")

    assert read_toml(path) == {"a": {"b": 1}}
