"""URLs of other brokers: what is read, what is refused with its cure, and that secrets stay unseen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError


def parse(url: str) -> BrokerUrl:
    return BrokerUrl.parse(url, port=5672, options={"exchange"})


def test_the_parts_of_a_url_are_read_and_decoded() -> None:
    url = parse("rabbitmq://app:p%40ss@h1,h2:5673,[::1]:9/shop%2Feu?exchange=paid&strict=true&timeout_ms=2500")

    assert url.hosts == (("h1", 5672), ("h2", 5673), ("::1", 9))
    assert (url.user, url.password, url.path) == ("app", "p@ss", "shop/eu")
    assert (url.is_strict, url.timeout_ms, url.options["exchange"]) == (True, 2_500, "paid")
    assert url.addresses == "h1:5672,h2:5673,[::1]:9"


def test_a_password_is_read_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("geheim\n")

    assert parse(f"rabbitmq://app@h/?password_file={tmp_path / 'password'}").password == "geheim"


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("rabbitmq://", "host:port"),
        ("rabbitmq://h:0", "host:port"),
        ("rabbitmq://h:99999", "host:port"),
        ("rabbitmq://h:12a", "host:port"),
        ("rabbitmq://h/?exchang=x", "did you mean exchange?"),
        ("rabbitmq://h/?zzz=x", "known: "),
        ("rabbitmq://h/?strict=perhaps", "true or false"),
        ("rabbitmq://h/?timeout_ms=-1", "at least 100"),
        ("rabbitmq://h/?timeout_ms=1e3", "at least 100"),
        ("rabbitmq://h/?password_file=/nowhere/at/all", "cannot be read"),
        ("rabbitmq://h/?ca_file=/nowhere/at/all", "names no file"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, cure: str) -> None:
    def read() -> object:
        parsed = parse(url)
        return parsed.is_strict, parsed.timeout_ms, parsed.file("ca_file")

    with pytest.raises(ConfigurationError, match=re.escape(cure)):
        read()


def test_no_error_shows_the_password() -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse("rabbitmq://app:geheim@h:99999/?strict=maybe")

    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("password", ["ge/heim", "ge?heim", "ge#heim", "12/heim", "12?heim", "12#heim"])
@pytest.mark.parametrize("hosts", ["h", "h1:1,h2:2"])
def test_no_error_shows_a_password_that_was_not_encoded(password: str, hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="percent-encode") as raised:
        parse(f"rabbitmq://app:{password}@{hosts}/shop?strict=true")

    assert not any(part in str(raised.value) for part in ("ge", "heim", "12"))
