"""What is not HTTP/1.x at all on the port: other protocols' first bytes, noise, and nothing."""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    SMUGGLED,
    Outcome,
    RawRequest,
    case,
    ended,
    livez,
    refused,
    unfinished,
)

_CLIENT_HELLO: Final = bytes.fromhex(
    "1603010095010000910303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f000004c02f"
    "00ff010000640000000e000c0000096c6f63616c686f7374000b000403000102000a000c000a001d0017001e00190018"
    "002300000016000000170000000d002a0028040305030603080708080809080a080b0804080508060401050106010303"
    "03010302040205020602"
)

_FIRST_BYTES: Final[dict[str, bytes]] = {
    "tls-client-hello": _CLIENT_HELLO,
    "tls-alert": b"\x15\x03\x01\0\x02\x02\x28",
    "ssl-2-client-hello": b"\x80\x2e\x01\x03\x01\0\x15\0\0\0\x10",
    "http-2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http-2-preface-and-settings": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5),
    "http-2-settings-alone": bytes(3) + b"\x04" + bytes(5),
    "proxy-1": b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 80\r\n" + livez(),
    "proxy-2": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "smtp": b"EHLO localhost\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "memcached": b"get x\r\n",
    "socks-5": b"\x05\x01\0",
    "socks-4": b"\x04\x01\0\x50\x7f\0\0\x01\0",
    "amqp": b"AMQP\0\0\x09\x01",
    "mqtt": b"\x10\x0c\0\x04MQTT\x04\0\0\x3c\0\0",
    "postgresql": b"\0\0\0\x08\x04\xd2\x16\x2f",
    "kafka": b"\0\0\0\x14\0\x12\0\0\0\0\0\x01\0\x0aconsole-id",
    "rtsp": b"DESCRIBE rtsp://localhost/a RTSP/1.0\r\nCSeq: 1\r\n\r\n",
    "sip": b"OPTIONS sip:a@localhost SIP/2.0\r\nVia: SIP/2.0/TCP localhost\r\n\r\n",
    "fastcgi": b"\x01\x01\0\x01\0\x08\0\0\0\x01\0\0\0\0\0\0",
    "java-rmi": b"JRMI\0\x02\x4b",
    "websocket-frame": b"\x81\x85\0\0\0\0hello",
    "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
    "json": b'{"messages":[]}\n',
    "html": b"<html></html>\r\n\r\n",
    "nul-bytes": b"\0" * 64,
    "ff-bytes": b"\xff" * 64,
    "every-byte": bytes(range(256)),
    "byte-order-mark-16": b"\xff\xfe" + "GET /livez HTTP/1.1\r\n\r\n".encode("utf-16-le"),
    "blanks": b"    \r\n\r\n",
    "response": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
}


def _refused_or_closed(name: str, raw: bytes) -> RawRequest:
    outcomes: tuple[Outcome, ...] = (ended(400), ended(405), ended(501), ended(505), ended())
    return RawRequest(name=name, raw=raw, outcomes=outcomes, behind=b"\r\n\r\n" + SMUGGLED)


CASES: Final[tuple[RawRequest, ...]] = (
    *(_refused_or_closed(name, raw) for name, raw in _FIRST_BYTES.items()),
    refused("noise-behind-a-request", livez() + b"\x16\x03\x01\x02\0\x01\0", before=(200,)),
    case("nothing", b"", *unfinished()),
    case("one-byte", b"G", *unfinished()),
    case("crlf-alone", b"\r\n", *unfinished()),
    case("crlf-many", b"\r\n" * 10, *unfinished()),
    case("method-alone", b"POST", *unfinished()),
    case("head-without-its-last-crlf", livez()[:-2], *unfinished()),
    case("head-without-its-last-lf", livez()[:-1], *unfinished()),
)  # fmt: skip
