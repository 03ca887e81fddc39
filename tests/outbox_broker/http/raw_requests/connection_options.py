"""Connection, Upgrade and Expect: RFC 9112, section 9, RFC 9110, sections 7.6.1, 7.8 and 10.1.1.

Upgrades as in "h2c Smuggling" (Bishop Fox, 2020) and the websocket smuggling of 0ang3el (2019); MagicStack/httptools
issue 124, where the body of a request with an Upgrade is read as the next request.
"""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    BODY,
    CHUNK,
    CHUNKED,
    HOST,
    JSON,
    LAST_CHUNK,
    LENGTH,
    PUBLISH,
    SIZE,
    SMUGGLED,
    SMUGGLED_LENGTH,
    RawRequest,
    answered,
    any_of,
    case,
    ended,
    livez,
    maybe_ended,
    publish,
    refused,
    request,
)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_WEBSOCKET: Final = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
                     "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip
_H2C: Final = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")

_UPGRADES: Final[dict[str, tuple[str, ...]]] = {
    "websocket": _WEBSOCKET,
    "websocket-of-a-wrong-version": (*_WEBSOCKET[:2], "Sec-WebSocket-Version: 1337"),
    "websocket-in-other-case": ("connection: uPGRADE", "upgrade: WebSocket"),
    "h2c": _H2C,
    "h2c-without-settings": ("Connection: Upgrade", "Upgrade: h2c"),
    "keep-alive-too": ("Connection: keep-alive, Upgrade", "Upgrade: h2c"),
    "two-connection-fields": ("Connection: keep-alive", "Connection: Upgrade", "Upgrade: h2c"),
    "tls": ("Connection: Upgrade", "Upgrade: TLS/1.0"),
    "several-protocols": ("Connection: Upgrade", "Upgrade: h2c, websocket"),
    "unknown-protocol": ("Connection: Upgrade", "Upgrade: nothing/7"),
    "empty-protocol": ("Connection: Upgrade", "Upgrade:"),
    "upgrade-first": ("Upgrade: websocket", "Connection: Upgrade"),
}

_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "close": ("Connection: close",),
    "close-upper-case": ("Connection: CLOSE",),
    "close-and-keep-alive": ("Connection: close, keep-alive",),
    "keep-alive-and-close": ("Connection: keep-alive, close",),
    "close-among-others": ("Connection: x , close,y",),
    "close-in-the-second-field": ("Connection: keep-alive", "Connection: close"),
    "close-in-the-first-field": ("Connection: close", "Connection: keep-alive"),
    "close-and-upgrade": ("Connection: close, Upgrade", "Upgrade: h2c"),
}

_EXPECTATIONS: Final[dict[str, tuple[str, ...]]] = {
    "unknown": ("Expect: something",),
    "200": ("Expect: 200-ok",),
    "list": ("Expect: 100-continue, something",),
    "prefixed": ("Expect: y 100-continue",),
    "with-a-parameter": ("Expect: 100-continue;q=1",),
    "two-fields": ("Expect: 100-continue", "Expect: something"),
}

CASES: Final[tuple[RawRequest, ...]] = (
    *(case(f"option-{name}", livez(*lines) + SMUGGLED, ended(200)) for name, lines in _OPTIONS.items()),
    *(case(f"option-{name}-on-publish", publish(LENGTH, *_OPTIONS[name]) + SMUGGLED, ended(200))
      for name in ("close", "close-among-others")),
    case("option-keep-alive", livez("Connection: keep-alive"), answered(200)),
    case("option-unknown", livez("Connection: x"), answered(200)),
    case("option-empty", livez("Connection:"), answered(200)),
    case("option-commas", livez("Connection: ,,"), answered(200)),
    case("option-closed", livez("Connection: closed"), answered(200)),
    case("proxy-connection-close", livez("Proxy-Connection: close"), *maybe_ended(200)),
    case("1.0-keep-alive", request("GET /livez HTTP/1.0", HOST, "Connection: keep-alive"), *maybe_ended(200)),
    case("1.0-close", request("GET /livez HTTP/1.0", HOST, "Connection: close"), ended(200)),
    case("1.0-upgrade", request("GET /livez HTTP/1.0", HOST, *_H2C) + SMUGGLED, ended(200)),
    *(case(f"upgrade-{name}-then-a-request", livez(*lines) + SMUGGLED, ended(200))
      for name, lines in _UPGRADES.items()),
    *(case(f"upgrade-{name}-with-a-body", livez(*lines, SMUGGLED_LENGTH, body=SMUGGLED), ended(200))
      for name, lines in _UPGRADES.items()),
    *(case(f"upgrade-{name}-on-publish", publish(LENGTH, *lines) + SMUGGLED, ended(200))
      for name, lines in _UPGRADES.items()),
    case("upgrade-of-a-chunked-publish", publish(CHUNKED, *_H2C, body=CHUNK + LAST_CHUNK) + SMUGGLED, ended(200)),
    case("upgrade-of-a-chunked-request", livez(
        CHUNKED, *_H2C, body=b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED) + LAST_CHUNK), ended(200)),
    case("upgrade-with-the-preface-behind", livez(*_H2C) + _PREFACE, ended(200)),
    case("upgrade-with-a-frame-behind", livez(*_WEBSOCKET) + b"\x81\x85\0\0\0\0hello", ended(200)),
    case("upgrade-on-unknown-route", request("GET /nowhere HTTP/1.1", HOST, *_WEBSOCKET) + SMUGGLED, ended(404)),
    case("upgrade-on-wrong-method", request("POST /livez HTTP/1.1", HOST, *_WEBSOCKET, SMUGGLED_LENGTH,
                                            body=SMUGGLED), ended(405)),
    refused("upgrade-with-both-framings", livez(*_H2C, LENGTH, CHUNKED)),
    refused("upgrade-without-host", request("GET /livez HTTP/1.1", *_H2C)),
    # Without the other half an upgrade is not asked for, and a body is a body.
    case("upgrade-without-connection", livez("Upgrade: h2c", SMUGGLED_LENGTH, body=SMUGGLED), *maybe_ended(200)),
    case("connection-without-upgrade", livez("Connection: Upgrade", SMUGGLED_LENGTH, body=SMUGGLED),
         *maybe_ended(200)),
    case("publish-with-upgrade-without-connection", publish("Upgrade: h2c", LENGTH), *maybe_ended(200)),
    case("publish-with-connection-without-upgrade", publish("Connection: Upgrade", LENGTH), *maybe_ended(200)),
    case("expect-continue", publish(LENGTH, "Expect: 100-continue"), answered(200)),
    case("expect-continue-upper-case", publish(LENGTH, "Expect: 100-CONTINUE"), answered(200)),
    case("expect-continue-chunked", publish(CHUNKED, "Expect: 100-continue", body=CHUNK + LAST_CHUNK),
         *maybe_ended(200)),
    case("expect-continue-on-get", livez("Expect: 100-continue"), answered(200)),
    case("expect-continue-twice", publish(LENGTH, "Expect: 100-continue", "Expect: 100-continue"),
         answered(200), *any_of(417, 400)),
    case("expect-continue-on-unknown-route", request("POST /nowhere HTTP/1.1", HOST, LENGTH, "Expect: 100-continue",
                                                     body=b"x" * SIZE), *maybe_ended(404)),
    case("expect-continue-1.0", request(PUBLISH.replace("1.1", "1.0"), HOST, JSON, LENGTH, "Expect: 100-continue",
                                        body=BODY), ended(200)),
    case("expect-continue-over-the-bound", publish("Content-Length: 68719476736", "Expect: 100-continue", body=b""),
         ended(413)),
    case("expect-empty", publish(LENGTH, "Expect:"), answered(200), *any_of(417)),
    *(case(f"expect-{name}", publish(LENGTH, *lines), *any_of(400, 417)) for name, lines in _EXPECTATIONS.items()),
    *(case(f"expect-{name}-with-a-request-as-body", publish(SMUGGLED_LENGTH, *lines, body=SMUGGLED), *any_of(400, 417))
      for name, lines in _EXPECTATIONS.items()),
    refused("expect-blank-before-colon", publish(LENGTH, "Expect : 100-continue")),
)  # fmt: skip
