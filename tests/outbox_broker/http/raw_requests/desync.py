"""Requests that two servers in a row would cut in different places: CL.TE, TE.CL, TE.0, CL.0 and 0.CL.

Sources: "HTTP Desync Attacks" (PortSwigger, 2019), "Browser-Powered Desync Attacks" (2022: CL.0, pauses, client-side
desync), "TE.0" (Bugcrowd, 2024), "HTTP/1.1 Must Die" (2025: 0.CL, early answers, Expect); CVE-2020-8287.
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

_WHOLE: Final = CHUNK + LAST_CHUNK
_SMUGGLED_CHUNK: Final = b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED)
_CL_TE: Final = LAST_CHUNK + SMUGGLED
_PREFIX: Final = b"POST /v1/publish HTTP/1.1\r\nX-A: "

_TAKES_NO_BODY: Final[dict[str, tuple[str, int]]] = {
    "get": ("GET /livez HTTP/1.1", 200),
    "head": ("HEAD /livez HTTP/1.1", 200),
    "get-metrics": ("GET /metrics HTTP/1.1", 200),
    "get-topics": ("GET /v1/topics HTTP/1.1", 200),
    "wrong-method": ("POST /livez HTTP/1.1", 405),
    "options": ("OPTIONS /livez HTTP/1.1", 405),
    "trace": ("TRACE /livez HTTP/1.1", 405),
    "unknown-route": ("POST /nowhere HTTP/1.1", 404),
    "unknown-route-get": ("GET /nowhere HTTP/1.1", 404),
    "unknown-topic": ("GET /v1/topics/nowhere HTTP/1.1", 404),
    "delete": ("DELETE /v1/topics/nowhere HTTP/1.1", 404),
    "invalid-name": ("POST /v1/topics/a%20b/read HTTP/1.1", 422),
    "optional-body": ("POST /v1/topics/nowhere/groups/g/pause HTTP/1.1", 415),
}

_REFUSED_BY_HEAD: Final[dict[str, tuple[str, int]]] = {
    "media-type": ("Content-Type: text/plain", 415),
    "accept": ("Accept: text/html", 406),
    "content-encoding": ("Content-Encoding: gzip", 415),
    "foreign-page": ("Sec-Fetch-Site: cross-site", 403),
    "expectation": ("Expect: the-unexpected", 417),
}


def _refused_by_head(line: str, *framing: str, body: bytes) -> bytes:
    lines = [line] if line.startswith("Content-Type") else [JSON, line]
    return request(PUBLISH, HOST, *lines, *framing, body=body)


CASES: Final[tuple[RawRequest, ...]] = (
    refused("cl-te", publish(f"Content-Length: {len(_CL_TE)}", CHUNKED, body=_CL_TE)),
    refused("cl-te-te-first", publish(CHUNKED, f"Content-Length: {len(_CL_TE)}", body=_CL_TE)),
    refused("cl-te-of-a-whole-body", publish(f"Content-Length: {len(_WHOLE)}", CHUNKED, body=_WHOLE)),
    refused("cl-te-zero-length", publish("Content-Length: 0", CHUNKED, body=_WHOLE)),
    refused("cl-te-short-length", publish("Content-Length: 4", CHUNKED, body=b"1\r\nZ\r\nQ\r\n\r\n")),
    refused("cl-te-long-length", publish("Content-Length: 6", CHUNKED, body=b"0\r\n\r\nX")),
    refused("cl-te-prefix", publish(f"Content-Length: {len(LAST_CHUNK + _PREFIX)}", CHUNKED,
                                    body=LAST_CHUNK + _PREFIX)),
    refused("cl-te-on-get", livez(f"Content-Length: {len(_CL_TE)}", CHUNKED, body=_CL_TE)),
    refused("cl-te-on-unknown-route", request("POST /nowhere HTTP/1.1", HOST, f"Content-Length: {len(_CL_TE)}",
                                              CHUNKED, body=_CL_TE)),
    refused("cl-te-upgrade", publish(f"Content-Length: {len(_CL_TE)}", CHUNKED, "Connection: Upgrade", "Upgrade: h2c",
                                     body=_CL_TE)),
    refused("te-cl", publish("Content-Length: 4", CHUNKED, body=_SMUGGLED_CHUNK + LAST_CHUNK)),
    refused("te-cl-te-first", publish(CHUNKED, "Content-Length: 4", body=_SMUGGLED_CHUNK + LAST_CHUNK)),
    refused("te-cl-invalid-length", publish(CHUNKED, "Content-Length: x", body=_WHOLE)),
    refused("te-cl-twice", publish(CHUNKED, "Content-Length: 4", "Content-Length: 4", body=_SMUGGLED_CHUNK)),
    refused("te-te-cl", publish(CHUNKED, "Transfer-Encoding: identity", LENGTH), 400, 501),
    refused("te-te-cl-hidden", publish(LENGTH, "Transfer-Encoding: xchunked", CHUNKED), 400, 501),
    # CVE-2020-8287: only one of two Transfer-Encoding fields was looked at.
    refused("te-te-upgrade", publish(CHUNKED, "Transfer-Encoding: chunked-false", "Connection: upgrade", body=_WHOLE),
            400, 501),
    # Nothing of the next request may be taken for the rest of a chunked one.
    case("chunked-body-ends-in-the-next-request",
         publish(CHUNKED, body=b"%x\r\n%b\r\n" % (SIZE - 1, BODY[:-1]) + LAST_CHUNK)
         + request(PUBLISH, HOST, JSON, "Content-Length: 1", body=BODY[-1:]),
         answered(400, 400), ended(400)),
    case("chunked-body-ends-in-the-next-chunked-request",
         publish(CHUNKED, body=b"%x\r\n%b\r\n" % (SIZE - 1, BODY[:-1]) + LAST_CHUNK)
         + request(PUBLISH, HOST, JSON, CHUNKED,
                   body=b"1\r\n}\r\n" + LAST_CHUNK),
         answered(400, 400), ended(400, 400), ended(400)),
    case("underscore-te-beside-length", publish(LENGTH, "Transfer_Encoding: chunked"), answered(200)),
    case("spelled-te-beside-length", publish(LENGTH, "Transfer-Encodings: chunked"), answered(200)),
    case("x-te-beside-length", publish(LENGTH, "X-Transfer-Encoding: chunked"), answered(200)),
    case("content-transfer-encoding", publish(LENGTH, "Content-Transfer-Encoding: chunked"), answered(200)),
    *(
        case(f"cl-0-{name}", request(line, HOST, SMUGGLED_LENGTH, body=SMUGGLED), *any_of(status, 413),
             heads=(0,) if name == "head" else ())
        for name, (line, status) in _TAKES_NO_BODY.items()
    ),
    *(
        case(f"te-0-{name}", request(line, HOST, CHUNKED, body=_SMUGGLED_CHUNK + LAST_CHUNK), *any_of(status, 400, 413),
             heads=(0,) if name == "head" else ())
        for name, (line, status) in _TAKES_NO_BODY.items()
    ),
    *(
        case(f"early-answer-{name}", _refused_by_head(line, SMUGGLED_LENGTH, body=SMUGGLED), *maybe_ended(status))
        for name, (line, status) in _REFUSED_BY_HEAD.items()
    ),
    *(
        case(f"early-answer-chunked-{name}",
             _refused_by_head(line, CHUNKED, body=_SMUGGLED_CHUNK + LAST_CHUNK), *maybe_ended(status))
        for name, (line, status) in _REFUSED_BY_HEAD.items()
    ),
    case("body-is-a-request", publish(SMUGGLED_LENGTH, body=SMUGGLED), *maybe_ended(400)),
    case("body-is-two-requests", publish(f"Content-Length: {2 * len(SMUGGLED)}", body=SMUGGLED * 2), *maybe_ended(400)),
    case("chunk-is-a-request", publish(CHUNKED, body=_SMUGGLED_CHUNK + LAST_CHUNK), *maybe_ended(400)),
    case("close-then-a-request", livez("Connection: close") + SMUGGLED, ended(200)),
    case("close-then-a-request-on-publish", publish(LENGTH, "Connection: close") + SMUGGLED, ended(200)),
    case("1.0-then-a-request", request("GET /livez HTTP/1.0", HOST) + SMUGGLED, ended(200)),
    case("1.0-publish-then-a-request", request(PUBLISH.replace("1.1", "1.0"), HOST, JSON, LENGTH, body=BODY) + SMUGGLED,
         ended(200)),
    refused("0-cl-blank-before-colon", publish(f"Content-Length : {SIZE}")),
    refused("0-cl-bare-lf", publish(f"Content-Length\n: {SIZE}")),
    refused("0-cl-fold", publish(f"Content-Length:\r\n {len(SMUGGLED)}", body=SMUGGLED)),
    refused("0-cl-hidden-in-a-fold", publish(f"X-A: a\r\n Content-Length: {len(SMUGGLED)}", body=SMUGGLED)),
    refused("0-cl-on-get", livez(f"Content-Length : {len(SMUGGLED)}", body=SMUGGLED)),
    refused("host-blank-before-colon", request("GET /livez HTTP/1.1", "Host : localhost")),
    case("masked-host", request("GET /livez HTTP/1.1", HOST, "X-Host: elsewhere"), answered(200)),
    case("upgrade-insecure-requests", livez("Upgrade-Insecure-Requests: 1"), answered(200)),
    case("hop-by-hop-content-length", publish(LENGTH, "Connection: Content-Length"), *maybe_ended(200)),
    case("hop-by-hop-transfer-encoding", publish(CHUNKED, "Connection: Transfer-Encoding", body=_WHOLE),
         *maybe_ended(200)),
    case("hop-by-hop-host", livez("Connection: Host"), *maybe_ended(200)),
    case("http2-settings-alone", livez("HTTP2-Settings: AAMAAABkAAQAAP__"), answered(200)),
    case("pseudo-header", livez(":path: /v1/topics"), ended(400)),
    case("pseudo-header-authority", livez(":authority: elsewhere"), ended(400)),
)  # fmt: skip
