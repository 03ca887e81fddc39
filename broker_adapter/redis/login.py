"""The login of connections to Redis. A password file is read for each new one, so a new password needs no restart."""

from __future__ import annotations

import contextlib
from typing import Any

from redis.credentials import CredentialProvider

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError


class PasswordFile(CredentialProvider):
    """A user, and the password in the file that an option of a URL names. Thread-safe."""

    def __init__(self, url: BrokerUrl, *, user: str | None, option: str, password: str) -> None:
        """`password`: what the file said at first."""
        self._url = url
        self._user = user
        self._option = option
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User and password as the file says it now; where it cannot be read, as it said it last."""
        with contextlib.suppress(ConfigurationError):
            self._password = self._url.secret(self._option) or self._password
        return (self._password,) if self._user is None else (self._user, self._password)


def login_settings(url: BrokerUrl, *, user: str | None, password: str | None, option: str) -> dict[str, Any]:
    """The client's settings for a user and a password: that in the file which `option` names, if the URL has it.

    Raises ConfigurationError where the file cannot be read.
    """
    in_file = url.secret(option)
    if not in_file:
        return {"username": user, "password": password, "credential_provider": None}
    provider = PasswordFile(url, user=user, option=option, password=in_file)
    return {"username": None, "password": None, "credential_provider": provider}
