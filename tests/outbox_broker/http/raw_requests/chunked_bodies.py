"""The chunked transfer coding: RFC 9112, section 7.1, and "Funky chunks" (w4ke, 2025: TERM.EXT, EXT.TERM, TERM.SPILL,
SPILL.TERM, and spills of one or two bytes behind chunk data).
"""

from __future__ import annotations

from typing import Final

from tests.outbox_broker.http.raw_requests.raw_request import (
    BODY,
    CHUNK,
    HOST,
    LAST_CHUNK,
    SIZE,
    SMUGGLED,
    RawRequest,
    answered,
    case,
    chunked,
    ended,
    livez,
    maybe_ended,
    refused,
    unfinished,
)

_HEX: Final = b"%x" % SIZE
_DATA: Final = b"\r\n" + BODY + b"\r\n"

_SIZE_LINES: Final[dict[str, bytes]] = {
    "plus": b"+" + _HEX,
    "minus": b"-" + _HEX,
    "minus-one": b"-1",
    "0x": b"0x" + _HEX,
    "x": b"x" + _HEX,
    "underscore": b"1_b",
    "blank-before": b" " + _HEX,
    "tab-before": b"\t" + _HEX,
    "blank-behind": _HEX + b" ",
    "tab-behind": _HEX + b"\t",
    "blank-within": b"1 b",
    "empty": b"",
    "no-digits": b"zz",
    "digit-and-letter": _HEX + b"g",
    "nul-before": b"\0" + _HEX,
    "nul-behind": _HEX + b"\0",
    "decimal-point": _HEX + b".0",
    "quoted": b'"' + _HEX + b'"',
    "bracketed": b"[" + _HEX + b"]",
    "comma": _HEX + b",",
    "bare-cr-behind": _HEX + b"\r",
    "bare-cr-and-byte": _HEX + b"\rX",
    "17-digits": b"10000000000000000",
    "wraps-64-bits": b"1" + b"0" * 14 + _HEX.rjust(2, b"0"),
    "20-digits": b"f" * 20,
    "full-width-digit": b"\xef\xbc\x91b",
    "byte-ff": b"\xff",
}

_HUGE: Final[dict[str, bytes]] = {
    "32-bits": b"f" * 8,
    "63-bits": b"7" + b"f" * 15,
    "64-bits": b"f" * 16,
}
"""More than any request may have, and never whole: refused at once, or when it does not come in time."""

_EXTENSIONS: Final[dict[str, bytes]] = {
    "bare-lf": b";\n",
    "name-and-bare-lf": b";a\n",
    "bare-lf-within": b";a\nb",
    "bare-lf-in-quotes": b';a="\n"',
    "bare-cr": b";\rx",
    "bare-cr-within": b";a\rb",
    "nul": b";a\0b",
    "control-byte": b";a\x01b",
    "bare-cr-and-cr": b";a\r",
}

_VALID_EXTENSIONS: Final[dict[str, bytes]] = {
    "name": b";a",
    "value": b";a=b",
    "quoted-value": b';a="b"',
    "two": b";a=b;c=d",
}

_MALFORMED: Final[dict[str, bytes]] = {
    "size-ends-in-bare-lf": _HEX + b"\n" + BODY + b"\r\n" + LAST_CHUNK,
    "size-ends-in-bare-cr": _HEX + b"\r" + BODY + b"\r\n" + LAST_CHUNK,
    "size-ends-in-lf-cr": _HEX + b"\n\r" + BODY + b"\r\n" + LAST_CHUNK,
    "data-ends-in-bare-lf": _HEX + b"\r\n" + BODY + b"\n" + LAST_CHUNK,
    "data-ends-in-bare-cr": _HEX + b"\r\n" + BODY + b"\r" + LAST_CHUNK,
    "data-ends-in-lf-lf": _HEX + b"\r\n" + BODY + b"\n\n" + LAST_CHUNK,
    "data-ends-in-two-other-bytes": _HEX + b"\r\n" + BODY + b"XX" + LAST_CHUNK,
    "data-ends-in-cr-and-other": _HEX + b"\r\n" + BODY + b"\rX" + LAST_CHUNK,
    "data-ends-in-other-and-lf": _HEX + b"\r\n" + BODY + b"X\n" + LAST_CHUNK,
    "data-ends-in-nothing": _HEX + b"\r\n" + BODY + LAST_CHUNK,
    "data-is-longer": _HEX + b"\r\n" + BODY + b"}\r\n" + LAST_CHUNK,
    "data-is-shorter": _HEX + b"\r\n" + BODY[:-1] + b"\r\n" + LAST_CHUNK,
    "crlf-twice-behind-data": _HEX + b"\r\n" + BODY + b"\r\n\r\n" + LAST_CHUNK,
    "last-size-ends-in-bare-lf": CHUNK + b"0\n\r\n",
    "last-chunk-by-bare-lf": CHUNK + b"0\n\n",
    "last-line-ends-in-bare-lf": CHUNK + b"0\r\n\n",
    "last-size-ends-in-bare-cr": CHUNK + b"0\r\r\n",
    "last-line-is-cr-cr": CHUNK + b"0\r\n\r\r\n",
    "last-line-is-cr-and-other": CHUNK + b"0\r\n\rX",
    "last-size-is-minus-zero": CHUNK + b"-0\r\n\r\n",
    "last-size-is-0x0": CHUNK + b"0x0\r\n\r\n",
    "last-size-is-underscored": CHUNK + b"0_0\r\n\r\n",
    "last-size-is-blank": CHUNK + b" \r\n\r\n",
    "last-extension-with-bare-lf": CHUNK + b"0;a\n\r\n\r\n",
    "not-chunked-at-all": BODY,
    "trailer-without-colon": CHUNK + b"0\r\nX-A\r\n\r\n",
    "trailer-with-blank-before-colon": CHUNK + b"0\r\nX-A : a\r\n\r\n",
    "trailer-with-empty-name": CHUNK + b"0\r\n: a\r\n\r\n",
    "trailer-with-nul": CHUNK + b"0\r\nX-A: a\0\r\n\r\n",
    "trailer-with-nul-in-name": CHUNK + b"0\r\nX\0A: a\r\n\r\n",
    "trailer-with-bare-lf": CHUNK + b"0\r\nX-A: a\nX-B: b\r\n\r\n",
    "trailer-with-bare-cr": CHUNK + b"0\r\nX-A: a\rb\r\n\r\n",
    "trailer-with-fold": CHUNK + b"0\r\nX-A: a\r\n b\r\n\r\n",
    "trailer-is-a-request-line": CHUNK + b"0\r\n" + SMUGGLED,
    "trailer-ends-in-bare-lf": CHUNK + b"0\r\nX-A: a\r\n\n",
    # A size line that one parser ends at the bare LF, and another at the CRLF behind it.
    "term-ext": b"%x;\n" % SIZE + BODY + b"\r\n" + LAST_CHUNK + SMUGGLED,
    "ext-term": b"2;\nxx\r\n%x\r\n" % len(SMUGGLED) + SMUGGLED + b"\r\n" + LAST_CHUNK,
    "term-spill": b"5\r\nAAAAA\n2c\r\n" + LAST_CHUNK + SMUGGLED,
    "spill-term": b"5\r\nAAAAAXX2\r\n45\r\n" + LAST_CHUNK + SMUGGLED,
    "spill-of-one-byte": b"5\r\nAAAAAX0\r\n\r\n" + SMUGGLED,
    "spill-over-a-lf": b"5\r\nAAAAA\n0\r\n\r\n" + SMUGGLED,
}

_TRAILERS: Final[dict[str, bytes]] = {
    "content-length": b"Content-Length: 0",
    "content-length-of-a-request": b"Content-Length: %d" % len(SMUGGLED),
    "transfer-encoding": b"Transfer-Encoding: chunked",
    "host": b"Host: elsewhere",
    "authorization": b"Authorization: Bearer x",
    "content-type": b"Content-Type: text/html",
    "content-encoding": b"Content-Encoding: gzip",
    "connection": b"Connection: close",
    "expect": b"Expect: 100-continue",
    "upgrade": b"Connection: Upgrade\r\nUpgrade: h2c",
    "unknown": b"X-A: a",
}

_TOO_LONG: Final = (ended(400), ended(413), ended(431))

CASES: Final[tuple[RawRequest, ...]] = (
    case("one-chunk", chunked(CHUNK + LAST_CHUNK), *maybe_ended(200)),
    case("chunks-of-one-byte", chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + LAST_CHUNK),
         *maybe_ended(200)),
    case("upper-case-size", chunked(_HEX.upper() + _DATA + LAST_CHUNK), *maybe_ended(200)),
    case("leading-zeros", chunked(_HEX.rjust(8, b"0") + _DATA + LAST_CHUNK), *maybe_ended(200)),
    case("many-leading-zeros", chunked(_HEX.rjust(40, b"0") + _DATA + LAST_CHUNK), *maybe_ended(200), ended(400)),
    case("last-chunk-of-two-zeros", chunked(CHUNK + b"00\r\n\r\n"), *maybe_ended(200)),
    case("last-chunk-with-an-extension", chunked(CHUNK + b"0;a=b\r\n\r\n"), *maybe_ended(200)),
    *(case(f"extension-{name}", chunked(_HEX + text + _DATA + LAST_CHUNK), *maybe_ended(200))
      for name, text in _VALID_EXTENSIONS.items()),
    case("extension-with-blanks", chunked(_HEX + b' ; a = "b"' + _DATA + LAST_CHUNK), *maybe_ended(200), ended(400)),
    case("extension-empty", chunked(_HEX + b";" + _DATA + LAST_CHUNK), *maybe_ended(200), ended(400)),
    case("extension-latin-1", chunked(_HEX + b";a=\xe4" + _DATA + LAST_CHUNK), *maybe_ended(200), ended(400)),
    *(refused(f"size-{name}", chunked(line + _DATA + LAST_CHUNK))
      for name, line in _SIZE_LINES.items()),
    *(refused(f"extension-with-{name}", chunked(_HEX + text + _DATA + LAST_CHUNK))
      for name, text in _EXTENSIONS.items()),
    *(refused(name, chunked(body)) for name, body in _MALFORMED.items()),
    case("trailer", chunked(CHUNK + b"0\r\nX-A: a\r\n\r\n", "Trailer: X-A"), *maybe_ended(200)),
    *(case(f"trailer-{name}", chunked(CHUNK + b"0\r\n" + line + b"\r\n\r\n"), *maybe_ended(200), ended(400))
      for name, line in _TRAILERS.items()),
    refused("trailers-very-long", chunked(CHUNK + b"0\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n"), 400, 431),
    refused("trailers-very-many", chunked(CHUNK + b"0\r\n" + b"X-A: a\r\n" * 10_000 + b"\r\n"), 400, 431),
    case("trailers-without-an-end", chunked(CHUNK + b"0\r\n" + b"X-A: a\r\n" * 10_000), *_TOO_LONG),
    refused("extension-very-long", chunked(_HEX + b";" + b"a" * 70_000 + _DATA + LAST_CHUNK), 400, 413, 431),
    case("extension-without-an-end", chunked(_HEX + b";" + b"a" * 100_000), *_TOO_LONG),
    case("size-without-an-end", chunked(b"0" * 100_000), *_TOO_LONG),
    *(case(f"size-of-{name}", chunked(line + _DATA + LAST_CHUNK + SMUGGLED), *unfinished(), ended(413))
      for name, line in _HUGE.items()),
    case("empty", chunked(LAST_CHUNK), *maybe_ended(400)),
    case("without-the-last-chunk", chunked(CHUNK), *unfinished()),
    case("without-the-last-crlf", chunked(CHUNK + b"0\r\n"), *unfinished()),
    case("within-a-size", chunked(_HEX), *unfinished()),
    case("within-a-chunk", chunked(CHUNK[:10]), *unfinished()),
    case("within-a-trailer", chunked(CHUNK + b"0\r\nX-A: a\r\n"), *unfinished()),
    case("then-a-request", chunked(CHUNK + LAST_CHUNK) + livez(), answered(200, 200), ended(200)),
    case("then-crlf-and-a-request", chunked(CHUNK + LAST_CHUNK) + b"\r\n" + livez(), answered(200, 200), ended(200),
         ended(200, 400)),
    case("then-garbage", chunked(CHUNK + LAST_CHUNK) + b"garbage\r\nHost: x\r\n\r\n", ended(200, 400), ended(200)),
    case("host-in-the-trailer-alone", chunked(CHUNK + b"0\r\n" + HOST.encode() + b"\r\n\r\n").replace(
        HOST.encode() + b"\r\n", b"", 1), ended(400)),
)  # fmt: skip
