"""Methods: RFC 9110, section 9; CONNECT, OPTIONS, TRACE, HEAD and unknown ones, with and without bodies."""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    CHUNKED,
    HOST,
    LENGTH,
    SIZE,
    SMUGGLED,
    SMUGGLED_LENGTH,
    RawRequest,
    answered,
    any_of,
    case,
    ended,
    maybe_ended,
    refused,
    request,
)

_KNOWN: Final = ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "POST")
_SELDOM: Final = ("PROPFIND", "MKCOL", "LOCK", "SEARCH", "PURGE", "LINK", "REPORT", "M-SEARCH", "SOURCE", "QUERY",
                  "BREW", "GETS", "GE", "get", "Get", "post", "X", "!#$")  # fmt: skip

_TUNNELS: Final[dict[str, bytes]] = {
    "authority": request("CONNECT localhost:443 HTTP/1.1", "Host: localhost:443"),
    "other-authority": request("CONNECT elsewhere:22 HTTP/1.1", "Host: elsewhere:22"),
    "path": request("CONNECT /livez HTTP/1.1", HOST),
    "publish-path": request("CONNECT /v1/publish HTTP/1.1", HOST, LENGTH),
    "with-a-body": request("CONNECT localhost:443 HTTP/1.1", "Host: localhost:443", SMUGGLED_LENGTH, body=SMUGGLED),
    "chunked": request("CONNECT localhost:443 HTTP/1.1", "Host: localhost:443", CHUNKED, body=b"0\r\n\r\n"),
    "keep-alive": request("CONNECT localhost:443 HTTP/1.1", "Host: localhost:443", "Connection: keep-alive"),
    "upgrade": request("CONNECT localhost:443 HTTP/1.1", "Host: localhost:443", "Connection: Upgrade", "Upgrade: h2c"),
    "absolute": request("CONNECT http://localhost/ HTTP/1.1", HOST),
    "1.0": request("CONNECT localhost:443 HTTP/1.0"),
}

CASES: Final[tuple[RawRequest, ...]] = (
    *(case(f"livez-{method.lower()}", request(f"{method} /livez HTTP/1.1", HOST), answered(405)) for method in _KNOWN),
    *(case(f"seldom-{method}", request(f"{method} /livez HTTP/1.1", HOST), *any_of(400, 405, 501))
      for method in _SELDOM),
    *(case(f"seldom-{method}-with-a-body", request(f"{method} /livez HTTP/1.1", HOST, SMUGGLED_LENGTH, body=SMUGGLED),
           *any_of(400, 405, 501)) for method in ("PROPFIND", "PURGE", "SOURCE", "BREW")),
    *(refused(f"connect-{name}", raw, 400, 405) for name, raw in _TUNNELS.items()),
    case("connect", _TUNNELS["authority"], ended(405)),
    case("connect-with-bytes-behind", _TUNNELS["authority"] + b"\x16\x03\x01\x02\0\x01", ended(405)),
    case("head", request("HEAD /livez HTTP/1.1", HOST), answered(200), heads=(0,)),
    case("head-metrics", request("HEAD /metrics HTTP/1.1", HOST), answered(200), heads=(0,)),
    case("head-topics", request("HEAD /v1/topics HTTP/1.1", HOST), answered(200), heads=(0,)),
    case("head-unknown-topic", request("HEAD /v1/topics/nowhere HTTP/1.1", HOST), answered(404), heads=(0,)),
    case("head-unknown-route", request("HEAD /nowhere HTTP/1.1", HOST), answered(404), heads=(0,)),
    case("head-of-a-post-route", request("HEAD /v1/publish HTTP/1.1", HOST), answered(405), heads=(0,)),
    case("head-close", request("HEAD /livez HTTP/1.1", HOST, "Connection: close") + SMUGGLED, ended(200), heads=(0,)),
    case("options-asterisk", request("OPTIONS * HTTP/1.1", HOST), *maybe_ended(405)),
    case("options-asterisk-with-a-body", request("OPTIONS * HTTP/1.1", HOST, SMUGGLED_LENGTH, body=SMUGGLED),
         *maybe_ended(405)),
    case("options-asterisk-chunked", request(
        "OPTIONS * HTTP/1.1", HOST, CHUNKED, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)),
        *maybe_ended(405)),
    case("options-unknown-route", request("OPTIONS /nowhere HTTP/1.1", HOST), answered(404), answered(405)),
    case("trace-asks-for-an-echo", request("TRACE / HTTP/1.1", HOST, "Cookie: secret", "Max-Forwards: 0"),
         answered(404), *maybe_ended(405)),
    case("delete-with-a-body", request("DELETE /v1/topics/nowhere HTTP/1.1", HOST, LENGTH, body=b"x" * SIZE),
         *any_of(404, 413)),
    case("get-with-a-body", request("GET /livez HTTP/1.1", HOST, LENGTH, body=b"x" * SIZE), *any_of(200, 413)),
)  # fmt: skip
