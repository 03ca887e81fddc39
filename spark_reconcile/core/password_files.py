"""Puts a password from a file into the database URLs of Settings that name a user and no password."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote, urlsplit

from spark_reconcile.core.settings import Settings


def with_password(settings: Settings, password: str) -> Settings:
    """Returns the settings with the password in each URL of MySQL or MariaDB that has none."""
    return replace(
        settings,
        database_url=url_with_password(settings.database_url, password),
        outboxes=tuple(replace(outbox, url=url_with_password(outbox.url, password)) for outbox in settings.outboxes),
        rules=tuple(
            replace(rule, urls=tuple(url_with_password(url, password) for url in rule.urls)) for rule in settings.rules
        ),
        inboxes=tuple(
            replace(inbox, url=None if inbox.url is None else url_with_password(inbox.url, password))
            for inbox in settings.inboxes
        ),
    )


def url_with_password(url: str, password: str) -> str:
    """Returns the URL unchanged if it has a password, or no user; what is no URL is refused where it is opened."""
    try:
        parts = urlsplit(url)
        if not parts.username or parts.password is not None:
            return url
    except ValueError:
        return url
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()
