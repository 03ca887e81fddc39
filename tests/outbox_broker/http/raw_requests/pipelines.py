"""Several requests behind each other: RFC 9112, sections 2.2 and 9.3.2. Good ones are answered in order; behind a bad
one nothing is read.
"""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    CHUNK,
    CHUNKED,
    GOOD,
    HOST,
    JSON,
    LAST_CHUNK,
    LENGTH,
    SMUGGLED,
    RawRequest,
    answered,
    case,
    chunked,
    ended,
    livez,
    maybe_ended,
    publish,
    refused,
    request,
    unfinished,
)

_NOT_FOUND: Final = request("GET /nowhere HTTP/1.1", HOST)
_HEAD: Final = request("HEAD /livez HTTP/1.1", HOST)
_PULL: Final = request("POST /v1/topics/nowhere.pulled/groups/g/pull HTTP/1.1", HOST, JSON, "Content-Length: 2",
                       body=b"{}")  # fmt: skip

_BAD: Final[dict[str, bytes]] = {
    "garbage": b"garbage\r\n\r\n",
    "no-host": request("GET /livez HTTP/1.1"),
    "two-hosts": livez(HOST),
    "both-framings": publish(LENGTH, CHUNKED),
    "bad-length": publish("Content-Length: x"),
    "bad-coding": publish("Transfer-Encoding: xchunked"),
    "bad-chunk": chunked(b"zz\r\n"),
    "fold": livez("X-A: a\r\n b"),
    "nul": b"\0" * 10,
    "bare-lf": b"GET /livez HTTP/1.1\nHost: localhost\n\n",
    "0.9": b"GET /livez\r\n\r\n",
    "preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}

CASES: Final[tuple[RawRequest, ...]] = (
    case("two", livez() * 2, answered(200, 200)),
    case("ten", livez() * 10, answered(*[200] * 10)),
    case("two-publishes", GOOD * 2, answered(200, 200)),
    case("five-publishes", GOOD * 5, answered(*[200] * 5)),
    case("chunked-publishes", chunked(CHUNK + LAST_CHUNK) * 2, answered(200, 200), ended(200)),
    case("publish-then-get", GOOD + livez(), answered(200, 200)),
    case("get-then-publish", livez() + GOOD, answered(200, 200)),
    case("publish-pull-get", GOOD + _PULL + livez(), answered(200, 200, 200)),
    case("chunked-then-length", chunked(CHUNK + LAST_CHUNK) + GOOD, answered(200, 200), ended(200)),
    case("length-then-chunked", GOOD + chunked(CHUNK + LAST_CHUNK), *maybe_ended(200, 200)),
    case("not-found-then-get", _NOT_FOUND + livez(), answered(404, 200)),
    case("wrong-body-then-get", publish("Content-Length: 1", body=b"{") + livez(), answered(400, 200), ended(400)),
    case("head-then-get", _HEAD + livez(), answered(200, 200), heads=(0,)),
    case("head-then-publish", _HEAD + GOOD, answered(200, 200), heads=(0,)),
    case("get-head-get", livez() + _HEAD + livez(), answered(200, 200, 200), heads=(1,)),
    case("expect-then-get", publish(LENGTH, "Expect: 100-continue") + livez(), answered(200, 200)),
    case("crlf-between", livez() + b"\r\n" + livez(), answered(200, 200), ended(200, 400)),
    case("crlf-behind-a-body", GOOD + b"\r\n" + livez(), answered(200, 200), ended(200, 400)),
    case("close-in-the-middle", livez() + livez("Connection: close") + SMUGGLED, ended(200, 200)),
    case("1.0-in-the-middle", livez() + request("GET /livez HTTP/1.0", HOST) + SMUGGLED, ended(200, 200)),
    case("upgrade-in-the-middle", livez() + livez("Connection: Upgrade", "Upgrade: h2c") + SMUGGLED, ended(200, 200)),
    case("connect-in-the-middle", livez() + request("CONNECT a:1 HTTP/1.1", "Host: a:1") + SMUGGLED, ended(200, 405)),
    case("get-then-half-a-head", livez() + livez()[:20], *unfinished(200)),
    case("get-then-half-a-body", livez() + GOOD[:-3], *unfinished(200)),
    case("publish-then-half-a-chunk", GOOD + chunked(CHUNK[:9]), *unfinished(200)),
    *(refused(f"good-then-{name}", livez() + raw, 400, 501, 505, before=(200,)) for name, raw in _BAD.items()),
    *(refused(f"publish-then-{name}", GOOD + raw, 400, 501, 505, before=(200,)) for name, raw in _BAD.items()),
    *(refused(f"{name}-first", raw + livez(), 400, 501, 505) for name, raw in _BAD.items()),
)  # fmt: skip
