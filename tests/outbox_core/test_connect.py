"""connect(): which URLs have an adapter, and what is said of those that have none."""

from __future__ import annotations

import pytest

from outbox_core import connect
from outbox_core.common.errors import ConfigurationError


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:port", "http://127.0.0.1:99999", "http://[::1", "embedded://h:x/data"]
)
def test_an_address_or_port_that_cannot_be_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not a broker's URL"):
        connect(url)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http//127.0.0.1:1", "", "pigeon://user:hunter2@home"])
def test_a_url_without_an_adapter_is_refused_with_the_schemes_that_there_are(url: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"known schemes: .*http.*looks like http://127\.0\.0\.1:7788"
    ) as refused:
        connect(url)

    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("option", ["delay_token", "delay_ca_file"])
def test_an_option_of_a_delay_service_that_the_url_does_not_name_is_refused_with_the_cure(option: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{option} is of a delay service.*add \?delay="):
        connect("http://127.0.0.1:1", **{option: "hunter2"})
