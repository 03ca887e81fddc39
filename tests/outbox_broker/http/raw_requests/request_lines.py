"""Request lines: RFC 9112, sections 2.2, 2.3 and 3, and what the HTTP/1.1 probes of MDA2AV/Http11Probe send."""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    BODY,
    CHUNKED,
    HOST,
    JSON,
    LENGTH,
    RawRequest,
    answered,
    any_of,
    case,
    ended,
    livez,
    refused,
    request,
)

_VERSIONS: Final = {
    "lower-case": "http/1.1",
    "mixed-case": "Http/1.1",
    "no-minor": "HTTP/1",
    "minor-missing-behind-dot": "HTTP/1.",
    "two-digits-minor": "HTTP/1.10",
    "leading-zero-major": "HTTP/01.1",
    "leading-zero-minor": "HTTP/1.01",
    "three-parts": "HTTP/1.1.1",
    "comma": "HTTP/1,1",
    "space-within": "HTTP/ 1.1",
    "space-before-slash": "HTTP /1.1",
    "minus": "HTTP/-1.1",
    "letters": "HTTP/x.y",
    "other-name": "HTTPS/1.1",
    "shoutcast": "ICY/1.1",
    "1.2": "HTTP/1.2",
    "1.9": "HTTP/1.9",
    "0.9": "HTTP/0.9",
    "2": "HTTP/2",
    "2.0": "HTTP/2.0",
    "3.0": "HTTP/3.0",
    "9.9": "HTTP/9.9",
    "tab-behind": "HTTP/1.1\t",
    "space-behind": "HTTP/1.1 ",
    "word-behind": "HTTP/1.1 x",
    "nul-behind": "HTTP/1.1\0",
    "second-version-behind": "HTTP/1.1 HTTP/1.1",
}

_LINES: Final = {
    "tab-behind-method": "GET\t/livez HTTP/1.1",
    "two-spaces-behind-method": "GET  /livez HTTP/1.1",
    "tab-before-version": "GET /livez\tHTTP/1.1",
    "two-spaces-before-version": "GET /livez  HTTP/1.1",
    "vertical-tab-before-version": "GET /livez\vHTTP/1.1",
    "space-before-method": " GET /livez HTTP/1.1",
    "tab-before-method": "\tGET /livez HTTP/1.1",
    "nul-before-method": "\0GET /livez HTTP/1.1",
    "nul-in-method": "G\0ET /livez HTTP/1.1",
    "colon-behind-method": "GET: /livez HTTP/1.1",
    "byte-order-mark": "\xef\xbb\xbfGET /livez HTTP/1.1",
    "no-method": "/livez HTTP/1.1",
    "no-target": "GET HTTP/1.1",
    "no-target-two-spaces": "GET  HTTP/1.1",
    "quoted-method": '"GET" /livez HTTP/1.1',
    "bare-cr-in-target": "GET /li\rvez HTTP/1.1",
    "bare-cr-before-version": "GET /livez\rHTTP/1.1",
    "header-first": "Host: localhost",
    "status-line": "HTTP/1.1 200 OK",
    "method-only": "GET",
}

CASES: Final[tuple[RawRequest, ...]] = (
    case("plain", livez(), answered(200)),
    case("no-version-is-0.9", b"GET /livez\r\n", ended(400), ended(505), ended()),
    case("no-version-with-headers", request("GET /livez", HOST), ended(400), ended(505), ended()),
    # llhttp issue 877: the end of a versionless line by a bare LF is not checked, and a body is read all the same.
    case(
        "no-version-bare-lf-with-body",
        b"POST /v1/publish\nHost: localhost\r\n%b\r\n%b\r\n\r\n%b"
        % (JSON.encode(), LENGTH.encode(), BODY),
        ended(400), ended(505), ended(),
    ),
    case(
        "no-version-crlf-with-body",
        request("POST /v1/publish", HOST, JSON, LENGTH, body=BODY),
        ended(400), ended(505), ended(),
    ),
    case(
        "0.9-spelled-out-with-chunks",
        request("POST /v1/publish HTTP/0.9", HOST, JSON, CHUNKED, body=b"0\r\n\r\n"),
        ended(400), ended(505), ended(),
    ),
    *(refused(f"version-{name}", request(f"GET /livez {version}", HOST), 400, 505)
      for name, version in _VERSIONS.items()),
    *(refused(f"line-{name}", request(line, HOST)) for name, line in _LINES.items()),
    refused("ends-in-bare-lf", b"GET /livez HTTP/1.1\nHost: localhost\r\n\r\n"),
    refused("all-lines-end-in-bare-lf", b"GET /livez HTTP/1.1\nHost: localhost\n\n"),
    refused("ends-in-bare-cr", b"GET /livez HTTP/1.1\rHost: localhost\r\r"),
    refused("ends-in-lf-cr", b"GET /livez HTTP/1.1\n\rHost: localhost\n\r\n\r"),
    refused("ends-in-cr-cr-lf", b"GET /livez HTTP/1.1\r\r\nHost: localhost\r\n\r\n"),
    refused("crlf-within", b"GET /livez\r\n HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, 505),
    case("crlf-in-front", b"\r\n" + livez(), answered(200), ended(400)),
    case("many-crlf-in-front", b"\r\n" * 5 + livez(), answered(200), ended(400)),
    case("bare-lf-in-front", b"\n" + livez(), *any_of(200, 400)),
    case("bare-cr-in-front", b"\r" + livez(), *any_of(200, 400)),
    refused("very-long-method", request("G" * 5_000 + " /livez HTTP/1.1", HOST), 400, 405, 431, 501),
)  # fmt: skip
