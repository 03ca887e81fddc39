"""The parts of a broker's URL, and what of it may be shown."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from outbox_core.messages.url_parts import shown_url, split_url


@pytest.mark.parametrize(
    "url",
    ["http://h:1/p?q=1#f", "http://u:p@[::1]:9", "embedded:./folder", "memory:", "plain words, no URL", "x://h,i"],
)
def test_a_url_with_one_host_or_none_is_split_as_everywhere(url: str) -> None:
    assert split_url(url) == urlsplit(url)


def test_hosts_may_be_ipv6_addresses_at_any_place() -> None:
    parts = split_url("kafka://app:secret@h1,[::1]:9,h3:7/path,more?a=b,c#d,e")

    assert tuple(parts) == ("kafka", "app:secret@h1,[::1]:9,h3:7", "/path,more", "a=b,c", "d,e")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("kafka://app:secret@h1,[::1]:9/p?password=x", "kafka://h1,[::1]:9/p"),
        ("embedded:./folder?x=y", "embedded:./folder"),
    ],
)
def test_a_shown_url_has_no_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_a_bracket_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="IPv6"):
        split_url("http://[::1")
