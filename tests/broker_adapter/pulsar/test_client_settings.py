"""URLs of Pulsar: which settings of its client they give, and what is refused with its cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker_adapter.publishing.broker_url import BrokerUrl
from broker_adapter.pulsar import open_broker
from broker_adapter.pulsar.client_settings import URL_OPTIONS, ClientSettings
from outbox_core.common.errors import ConfigurationError


def settings(url: str, *, token: str | None = None) -> ClientSettings:
    return ClientSettings.of(BrokerUrl.parse(url, port=6650, options=URL_OPTIONS), timeout_ms=10_000, token=token)


def test_several_hosts_are_one_service_and_topics_are_persistent_in_the_default_namespace() -> None:
    found = settings("pulsar://h1,h2:6651")

    assert (found.service_url, found.addresses) == ("pulsar://h1:6650,h2:6651", "h1:6650,h2:6651")
    assert found.topic_url("orders") == "persistent://public/default/orders"


def test_the_path_names_tenant_and_namespace() -> None:
    assert settings("pulsar://h/shop/eu").topic_url("orders") == "persistent://shop/eu/orders"


def test_a_user_and_a_password_are_a_basic_login() -> None:
    found = settings("pulsar://app:p%40ss@h")

    assert (found.user, found.password, found.token) == ("app", "p@ss", None)


@pytest.mark.parametrize(
    ("url", "token"), [("pulsar://:t0k@h", None), ("pulsar://h", "t0k"), ("pulsar://:old@h", "t0k")]
)
def test_a_password_without_a_user_is_a_token_and_a_given_token_goes_before_it(url: str, token: str | None) -> None:
    found = settings(url, token=token)

    assert (found.token, found.user, found.password) == ("t0k", None, None)


def test_certificates_are_used_over_tls(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("certificate")

    found = settings(f"pulsar+ssl://h?ca_file={tmp_path}/ca&cert_file={tmp_path}/cert&key_file={tmp_path}/key")

    assert (found.ca_file, found.cert_file, found.key_file) == tuple(f"{tmp_path}/{n}" for n in ("ca", "cert", "key"))


@pytest.mark.parametrize(
    ("url", "token", "cure"),
    [
        ("pulsar://h/tenant", None, "/TENANT/NAMESPACE"),
        ("pulsar://h/a/b/c", None, "/TENANT/NAMESPACE"),
        ("pulsar://app@h", None, "a user needs a password"),
        ("pulsar://h,[::1]:6651", None, "no IPv6 addresses"),
        ("pulsar://app:pw@h", "t", "leave one out"),
        (f"pulsar://h?ca_file={__file__}", None, "write pulsar+ssl://"),
        (f"pulsar+ssl://h?cert_file={__file__}", None, "give both"),
        ("pulsar://h?admin=h:8080", None, "like http://HOST:8080"),
        ("pulsar://h?admin=http://u:p@h:8080", None, "without a login"),
        ("pulsar+ssl://app:pw@h?admin=http://h:8080", None, "give the https:// address"),
        ("pulsar+ssl://h?admin=http://10.0.0.1:8080", "t", "give the https:// address"),
        ("pulsar://h?ca_file=/nowhere", None, "names no file"),
        ("pulsar://h?acks=1", None, "unknown option"),
    ],
)
def test_what_cannot_work_is_refused_with_its_cure(url: str, token: str | None, cure: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(cure)):
        open_broker(url, token=token)


@pytest.mark.parametrize(
    "url",
    [
        "pulsar+ssl://app:pw@h?admin=https://h:8443",
        "pulsar+ssl://app:pw@h?admin=http://localhost:8090",
        "pulsar+ssl://app:pw@h?admin=http://[::1]:8090",
        "pulsar+ssl://h?admin=http://h:8080",
        "pulsar://app:pw@h?admin=http://h:8080",
    ],
)
def test_the_admin_api_is_read_by_tls_on_this_machine_without_a_login_or_with_one_that_is_in_clear(url: str) -> None:
    assert settings(url).admin_url == url.partition("admin=")[2]


def test_neither_a_refusal_nor_the_settings_show_a_secret() -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_broker("pulsar://app:geheim@h/x")

    assert "geheim" not in str(raised.value)
    assert "geheim" not in repr(settings("pulsar://app:geheim@h")) + repr(settings("pulsar://:geheim@h"))
