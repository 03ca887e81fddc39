"""The TLS of a broker's URL, for clients that take an SSLContext."""

from __future__ import annotations

import ssl

from broker_adapter.publishing.broker_url import BrokerUrl
from outbox_core.common.errors import ConfigurationError


def tls_context(url: BrokerUrl, *, tls_schemes: frozenset[str], ca_file: str | None) -> ssl.SSLContext | None:
    """The context that the URL asks for; None where its scheme is none of `tls_schemes`.

    The server's certificate is checked, by `ca_file` or the URL's, else by what this machine trusts. Raises
    ConfigurationError for certificates without TLS, and for those that cannot be read.
    """
    authorities, certificate, key = ca_file or url.file("ca_file"), url.file("cert_file"), url.file("key_file")
    if url.scheme not in tls_schemes:
        if authorities or certificate or key:
            raise ConfigurationError(
                f"ca_file, cert_file and key_file need TLS: write {min(tls_schemes)}:// in the broker's URL"
            )
        return None
    if key is not None and certificate is None:
        raise ConfigurationError("key_file needs cert_file in the broker's URL")
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"the certificates of the broker's URL cannot be read: {error}") from error
    return context
