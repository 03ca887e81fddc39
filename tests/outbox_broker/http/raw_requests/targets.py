"""Request targets: RFC 9112, section 3.2, and RFC 3986; what a path must not be normalised, decoded or split into."""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    BODY,
    HOST,
    JSON,
    LENGTH,
    RawRequest,
    answered,
    any_of,
    case,
    ended,
    livez,
    maybe_ended,
    refused,
    request,
)

_NOT_ORIGIN_FORM: Final = {
    "asterisk-with-get": "*",
    "authority-form": "localhost:80",
    "no-slash": "livez",
    "dot": "./livez",
    "query-only": "?livez",
    "backslash": "\\livez",
    "nul": "/live\0z",
    "control-byte": "/live\x01z",
    "escape": "/live\x1bz",
    "delete": "/live\x7fz",
    "tab": "/live\tz",
    "absolute-with-userinfo": "http://user@localhost/livez",
    "absolute-with-userinfo-and-password": "http://a:b@localhost/livez",
    "absolute-of-another-host": "http://elsewhere/livez",
    "absolute-of-another-port": "http://localhost:81/livez",
    "absolute-without-authority": "http:///livez",
    "absolute-without-slashes": "http:/livez",
    "absolute-with-space": "http://local host/livez",
    "absolute-ftp": "ftp://localhost/livez",
    "mailto": "mailto:a@localhost",
    "javascript": "javascript:1",
    "space": "/livez x",
}

_UNKNOWN: Final = {
    "dot-segments": "/v1/../livez",
    "dot-segment": "/./livez",
    "dot-segments-above-the-root": "/../../livez",
    "double-slash": "//livez",
    "double-slash-host": "//localhost/livez",
    "trailing-slash": "/livez/",
    "upper-case": "/LIVEZ",
    "semicolon-parameter": "/livez;x=1",
    "encoded-slash": "/%2Flivez",
    "encoded-query-mark": "/livez%3Fx",
    "encoded-dots": "/v1/%2e%2e/livez",
    "colon": "/http://localhost/livez",
    "root": "/",
}

_NAMES: Final = {
    "encoded-dots": "%2e%2e",
    "encoded-slash": "a%2Fb",
    "encoded-backslash": "a%5Cb",
    "encoded-nul": "a%00b",
    "encoded-crlf": "a%0d%0ab",
    "encoded-header": "a%0d%0aX-Injected:%20yes%0d%0a%0d%0a",
    "encoded-space": "a%20b",
    "twice-encoded": "a%252fb",
    "overlong-utf-8": "%c0%ae%c0%ae",
    "broken-utf-8": "%ff%fe",
    "percent-alone": "a%",
    "percent-and-one-digit": "a%2",
    "percent-and-no-digits": "a%zz",
    "percent-u": "a%u002f",
    "raw-utf-8": "\xc3\xa4",
    "raw-latin-1": "\xe4",
    "plus": "a+b",
    "star": "*",
}

_QUERIES: Final = {
    "empty": "?",
    "two-question-marks": "??",
    "name-only": "?x",
    "value-only": "?=",
    "ampersands": "?&&",
    "semicolon": "?a=1;b=2",
    "encoded-nul": "?a=%00",
    "encoded-crlf": "?a=%0d%0aX-Injected:%20yes",
    "broken-percent": "?a=%zz",
    "url": "?u=http://elsewhere/",
    "slashes": "?a=/../../b",
}

_ACK: Final = b'{"receipts":[]}'


def _ack_of(name: str) -> bytes:
    return request(
        f"POST /v1/topics/{name}/groups/g/ack HTTP/1.1", HOST, JSON, f"Content-Length: {len(_ACK)}", body=_ACK
    )


CASES: Final[tuple[RawRequest, ...]] = (
    *(refused(name, request(f"GET {target} HTTP/1.1", HOST)) for name, target in _NOT_ORIGIN_FORM.items()),
    *(case(f"path-{name}", request(f"GET {target} HTTP/1.1", HOST), answered(404))
      for name, target in _UNKNOWN.items()),
    *(case(f"name-{name}", _ack_of(text), *any_of(400, 404, 422)) for name, text in _NAMES.items()),
    *(case(f"query-{name}", request(f"GET /livez{query} HTTP/1.1", HOST), *any_of(200, 400, 422))
      for name, query in _QUERIES.items()),
    case("query-twice", request("GET /v1/topics?limit=1&limit=2 HTTP/1.1", HOST), *any_of(200, 400, 422)),
    case("query-encoded-digit", request("GET /v1/topics?limit=%31 HTTP/1.1", HOST), answered(200)),
    case("query-encoded-name", request("GET /v1/topics?%6cimit=0 HTTP/1.1", HOST), answered(422)),
    case("query-unknown", request("GET /v1/topics?nothing=1 HTTP/1.1", HOST), answered(422)),
    case("query-long", request("GET /v1/topics?after=" + "a" * 5_000 + " HTTP/1.1", HOST), answered(422)),
    case("encoded-letter", request("GET /%6civez HTTP/1.1", HOST), *any_of(200, 404)),
    case("fragment", request("GET /livez#part HTTP/1.1", HOST), *any_of(400, 404)),
    case("fragment-with-a-path", request("GET /livez#/v1/topics HTTP/1.1", HOST), *any_of(400, 404)),
    case("raw-latin-1-path", request("GET /livez\xe4 HTTP/1.1", HOST), *any_of(400, 404)),
    case("brackets", request("GET /[livez] HTTP/1.1", HOST), *any_of(400, 404)),
    case("braces", request("GET /v1/topics/{topic} HTTP/1.1", HOST), *any_of(400, 404, 422)),
    case("backslash-within", request("GET /v1\\..\\livez HTTP/1.1", HOST), *any_of(400, 404)),
    case("asterisk-with-options", request("OPTIONS * HTTP/1.1", HOST), *maybe_ended(405)),
    case("absolute", request("GET http://localhost/livez HTTP/1.1", HOST), answered(200)),
    case("absolute-with-port", request("GET http://localhost:7/livez HTTP/1.1", "Host: localhost:7"), answered(200)),
    case("absolute-with-query", request("GET http://localhost/v1/topics?limit=1 HTTP/1.1", HOST), answered(200)),
    case("absolute-upper-case", request("GET HTTP://LOCALHOST/livez HTTP/1.1", HOST), *any_of(200, 400)),
    case("absolute-default-port", request("GET http://localhost:80/livez HTTP/1.1", HOST), *any_of(200, 400)),
    case("absolute-https", request("GET https://localhost/livez HTTP/1.1", HOST), *any_of(200, 400, 421)),
    case("absolute-without-path", request("GET http://localhost HTTP/1.1", HOST), *any_of(400, 404)),
    case(
        "absolute-publish",
        request("POST http://localhost/v1/publish HTTP/1.1", HOST, JSON, LENGTH, body=BODY),
        answered(200),
    ),
    refused("absolute-without-host", request("GET http://localhost/livez HTTP/1.1")),
    refused("absolute-with-two-hosts", request("GET http://localhost/livez HTTP/1.1", HOST, "Host: elsewhere")),
    case("absolute-1.0-without-host", request("GET http://localhost/livez HTTP/1.0"), ended(200), ended(400)),
    refused("very-long", request("GET /" + "a" * 40_000 + " HTTP/1.1", HOST), 414, 431),
    refused("very-long-query", request("GET /livez?" + "a" * 40_000 + " HTTP/1.1", HOST), 414, 431),
    refused("very-long-without-an-end", b"GET /" + b"a" * 70_000, 414, 431),
    case("long-within-the-bound", livez("X-Filler: " + "a" * 20_000), answered(200)),
)  # fmt: skip
