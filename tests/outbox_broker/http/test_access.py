"""Who may do what: roles, topic patterns, and web pages that would have a browser do it for them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import requests

from outbox_broker.http.access_control import Access, Role, load_tokens
from outbox_broker.http.server import HttpServer
from outbox_core.common.errors import ConfigurationError
from outbox_core.messages.url_parts import is_loopback
from outbox_core.runtime.command import main
from tests.outbox_broker.http.publish_bodies import of_topic

Client = Callable[..., requests.Response]


def token_file(folder: Path, *entries: tuple[str, list[str], list[str]]) -> Path:
    """A file whose tokens are `secret-of-<name>`."""
    text = ""
    for name, roles, topics in entries:
        digest = hashlib.sha256(f"secret-of-{name}".encode()).hexdigest()
        text += f'[[tokens]]\nname = "{name}"\nsha256 = "{digest}"\nroles = {roles!r}\ntopics = {topics!r}\n'
    path = folder / "tokens.toml"
    path.write_text(text.replace("'", '"'))
    return path


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret-of-{name}"}


def test_the_entry_that_the_command_makes_is_read_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = 'Zo\N{LATIN SMALL LETTER E WITH DIAERESIS} "\\" \N{PARTY POPPER} \x7f'
    with pytest.raises(SystemExit) as ended:
        main(["broker", "token", name, "--role", "read", "--topic", "payment.*"])
    said = capsys.readouterr()
    file = tmp_path / "tokens.toml"
    file.write_text(said.out, encoding="utf-8")

    [(digest, principal)] = load_tokens(file).items()

    assert not ended.value.code
    assert (principal.name, principal.topics) == (name, ("payment.*",))
    assert digest == hashlib.sha256(said.err.strip().rpartition(" ")[2].encode()).digest()


@pytest.fixture
def guarded(serve: Callable[..., HttpServer], tmp_path: Path) -> str:
    """A server with a producer and a consumer of payments, a reader of all, and an administrator of payments."""
    path = token_file(
        tmp_path,
        ("producer", ["publish"], ["payment.*"]),
        ("consumer", ["consume"], ["payment.*", "refund.done"]),
        ("reader", ["read"], ["*"]),
        ("admin", ["admin"], ["payment.*"]),
    )
    return serve(access=Access(tokens=load_tokens(path))).url


def attempt(client: Client, url: str, who: str, what: str, topic: str = "payment.done") -> int:
    group = f"{url}/v1/topics/{topic}/groups/g"
    headers = bearer(who)
    match what:
        case "publish":
            return client("POST", f"{url}/v1/publish", json=of_topic(topic, {"body": "b"}), headers=headers).status_code
        case "pull":
            return client("POST", f"{group}/pull", json={}, headers=headers).status_code
        case "ack" | "nack":
            return client("POST", f"{group}/{what}", json={"receipts": []}, headers=headers).status_code
        case "declare":
            return client("PUT", group, json={}, headers=headers).status_code
        case "pause":
            return client("POST", f"{group}/pause", headers=headers).status_code
        case "count" | "discard":
            body = {"all": True} | ({"why": "wrong"} if what == "discard" else {})
            return client("POST", f"{group}/dead/{what}", json=body, headers=headers).status_code
        case "edit":
            edit = {"operation": "op", "why": "typo", "all": True, "edit": {"headers": {"a": "b"}}}
            return client("POST", f"{group}/dead/edit", json=edit, headers=headers).status_code
        case "figures":
            return client("GET", group, headers=headers).status_code
        case _:
            raise AssertionError(what)


@pytest.mark.parametrize(
    ("who", "allowed"),
    [
        ("producer", {"publish"}),
        ("consumer", {"pull", "ack", "nack"}),
        ("reader", {"figures"}),
        ("admin", {"declare", "pause", "count", "discard", "edit", "figures"}),
    ],
)
def test_each_role_may_do_its_own_and_nothing_else(client: Client, guarded: str, who: str, allowed: set[str]) -> None:
    attempt(client, guarded, "admin", "declare")

    seen = {
        what: attempt(client, guarded, who, what)
        for what in ("publish", "pull", "ack", "nack", "declare", "pause", "count", "discard", "edit", "figures")
    }

    assert {what for what, status in seen.items() if status == 200} == allowed
    assert {status for what, status in seen.items() if what not in allowed} == {403}


def test_a_role_counts_for_the_topics_of_its_patterns_only(client: Client, guarded: str) -> None:
    assert attempt(client, guarded, "producer", "publish", "payment.refund") == 200
    assert attempt(client, guarded, "producer", "publish", "payment") == 403
    assert attempt(client, guarded, "producer", "publish", "PAYMENT.done") == 403
    assert attempt(client, guarded, "consumer", "pull", "refund.done") == 200
    assert attempt(client, guarded, "consumer", "pull", "refund.done.too") == 403


def test_a_publish_to_many_topics_needs_the_role_for_each_of_them_and_stores_nothing_where_one_is_not_allowed(
    client: Client, guarded: str
) -> None:
    def publish(who: str, *topics: str) -> requests.Response:
        body = {"messages": [{"body": "b", "topic": topic} for topic in topics]}
        return client("POST", f"{guarded}/v1/publish", json=body, headers=bearer(who))

    refused = publish("producer", "payment.many", "payment.many", "other", "payment.more")

    assert (refused.status_code, publish("consumer", "refund.done").status_code) == (403, 403)
    assert refused.json()["detail"].endswith("for the topic other")
    assert publish("producer", "payment.more").status_code == 200
    names = client("GET", f"{guarded}/v1/topics", headers=bearer("reader")).json()["topics"]
    assert "payment.more" in names
    assert not {"payment.many", "other"} & set(names)


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic secret-of-reader",
        "secret-of-reader",
        "Bearer " + "a" * 2_000,
    ],
)
def test_without_a_known_token_nothing_under_v1_is_served(
    client: Client, guarded: str, authorization: str | None
) -> None:
    for method, path in (("GET", "/v1/topics"), ("POST", "/v1/publish"), ("GET", "/metrics")):
        response = client(method, guarded + path, headers={"authorization": authorization})

        assert response.status_code == 401
        assert response.json()["type"] == "urn:outbox-mq:problem:unauthenticated"
        assert response.headers["www-authenticate"] == "Bearer"


def test_probes_and_the_document_need_no_token_and_tell_strangers_little(client: Client, guarded: str) -> None:
    assert client("GET", f"{guarded}/livez").status_code == 200
    assert client("GET", f"{guarded}/openapi.json").status_code == 200
    stranger = client("GET", f"{guarded}/readyz").json()
    assert stranger["status"] == "ok"
    assert all(check["hint"] is check["observed"] is None for check in stranger["checks"])
    friend = client("GET", f"{guarded}/readyz", headers=bearer("reader")).json()
    assert [(check["name"], check["status"], check["hint"]) for check in friend["checks"]] == [
        ("serving", "ok", None), ("storage", "ok", None),
    ]  # fmt: skip
    assert friend["checks"][1]["observed"] == "0 bytes of messages, 0 scheduled"
    assert (stranger["roles"], stranger["version"]) == ([], None)
    assert (friend["roles"], friend["version"]) == (["read"], version("outbox-mq"))
    assert stranger["now_ms"] <= friend["now_ms"]
    assert client("GET", f"{guarded}/livez").json()["now_ms"] is None


def test_metrics_name_every_topic_so_they_need_a_reader_of_all(client: Client, guarded: str) -> None:
    assert client("GET", f"{guarded}/metrics", headers=bearer("reader")).status_code == 200
    assert client("GET", f"{guarded}/metrics", headers=bearer("admin")).status_code == 403
    assert client("GET", f"{guarded}/metrics", headers=bearer("producer")).status_code == 403


def test_topics_that_a_token_does_not_cover_are_not_listed(client: Client, guarded: str) -> None:
    attempt(client, guarded, "producer", "publish", "payment.a")
    attempt(client, guarded, "consumer", "pull", "refund.done")

    everything = client("GET", f"{guarded}/v1/topics", headers=bearer("reader")).json()["topics"]
    payments = client("GET", f"{guarded}/v1/topics", headers=bearer("admin")).json()["topics"]

    assert everything == ["payment.a", "refund.done"]
    assert payments == ["payment.a"]


def test_a_token_cannot_settle_receipts_of_a_topic_that_it_does_not_cover(client: Client, guarded: str) -> None:
    attempt(client, guarded, "producer", "publish")
    pulled = client(
        "POST", f"{guarded}/v1/topics/payment.done/groups/g/pull", json={}, headers=bearer("consumer")
    ).json()
    receipt = pulled["deliveries"][0]["receipt"]

    answer = client(
        "POST",
        f"{guarded}/v1/topics/refund.done/groups/g/ack",
        json={"receipts": [receipt]},
        headers=bearer("consumer"),
    ).json()

    assert answer["results"][0]["status"] == "unknown"


def test_a_token_cannot_cancel_or_see_scheduled_messages_of_other_topics(
    client: Client, serve: Callable[..., HttpServer], tmp_path: Path
) -> None:
    path = token_file(
        tmp_path,
        ("payments", ["publish", "read"], ["payment.*"]),
        ("trips", ["publish", "read"], ["trip.*"]),
        ("all", ["read"], ["*"]),
    )
    url = serve(access=Access(tokens=load_tokens(path))).url
    later = of_topic("payment.done", {"id": "later", "body": "", "delay_ms": 3_600_000})
    client("POST", f"{url}/v1/publish", json=later, headers=bearer("payments"))

    def cancel(who: str) -> str:
        answer = client("POST", f"{url}/v1/scheduled/cancel", json={"ids": ["later"]}, headers=bearer(who))
        return str(answer.json()["results"][0]["status"])

    assert client("GET", f"{url}/v1/scheduled/later", headers=bearer("trips")).status_code == 404
    assert client("GET", f"{url}/v1/scheduled/later", headers=bearer("payments")).status_code == 200
    assert client("GET", f"{url}/v1/scheduled", headers=bearer("trips")).status_code == 403
    assert client("GET", f"{url}/v1/scheduled?topic=payment.done", headers=bearer("trips")).status_code == 403
    assert client("GET", f"{url}/v1/scheduled", headers=bearer("all")).status_code == 200
    assert [cancel("trips"), cancel("payments")] == ["unknown", "canceled"]


def test_what_dead_letters_carry_is_hidden_from_a_mere_reader(client: Client, guarded: str) -> None:
    group = f"{guarded}/v1/topics/payment.done/groups/g"
    client("PUT", group, json={"max_attempts": 1}, headers=bearer("admin"))
    attempt(client, guarded, "producer", "publish")
    pulled = client("POST", f"{group}/pull", json={}, headers=bearer("consumer")).json()
    receipts = [pulled["deliveries"][0]["receipt"]]
    client("POST", f"{group}/nack", json={"receipts": receipts, "reason": "no"}, headers=bearer("consumer"))

    [seen] = client("GET", f"{group}/dead", headers=bearer("reader")).json()["dead"]
    [known] = client("GET", f"{group}/dead", headers=bearer("admin")).json()["dead"]

    assert (seen["reason"], seen["body"], seen["headers"]) == ("no", None, None)
    assert known["body"] == "b"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:80"}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:1"}, 200),
    ],
)
def test_an_open_server_does_not_do_what_a_foreign_web_page_asks(
    serve: Callable[..., HttpServer], client: Client, topic: str, headers: dict[str, str], status: int
) -> None:
    url = serve(access=Access(loopback_hosts_only=True)).url

    response = client("POST", f"{url}/v1/publish", json=of_topic(topic, {"body": "b"}), headers=headers)

    assert response.status_code == status
    if status == 403:
        assert response.json()["type"] == "urn:outbox-mq:problem:foreign-origin"
        assert client("GET", f"{url}/v1/topics/{topic}").status_code == 404


@pytest.mark.parametrize("origin", ["http://[", "http://[evil]", "//]"])
@pytest.mark.parametrize("query", ["", "?the=long-way"])
def test_an_origin_that_cannot_be_read_is_a_foreign_one(
    client: Client, shared_url: str, topic: str, origin: str, query: str
) -> None:
    url = f"{shared_url}/v1/publish{query}"

    response = client("POST", url, json=of_topic(topic, {"body": "b"}), headers={"origin": origin})

    assert (response.status_code, response.json()["type"]) == (403, "urn:outbox-mq:problem:foreign-origin")


def test_an_open_server_shows_nothing_under_a_foreign_name(serve: Callable[..., HttpServer], client: Client) -> None:
    url = serve(access=Access(loopback_hosts_only=True)).url

    for path in ("/v1/topics", "/metrics"):
        assert client("GET", url + path, headers={"host": "rebound.example"}).status_code == 403


def test_tokens_are_never_logged(client: Client, guarded: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        attempt(client, guarded, "producer", "publish")
        attempt(client, guarded, "producer", "pull")
        client("GET", f"{guarded}/v1/topics", headers={"authorization": "Bearer secret-that-is-wrong"})

    of_server = [record for record in caplog.records if not record.name.startswith("urllib3")]
    assert "secret" not in "".join(f"{record.getMessage()} {vars(record)}" for record in of_server)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tokens = 1",
        "[[tokens]]",
        '[[tokens]]\nname = "a"\nsha256 = "SECRET"\nroles = ["publish"]\ntopics = ["*"]',
        f'[[tokens]]\nname = "a"\nsha256 = "{"0" * 64}"\nroles = ["owner"]\ntopics = ["*"]',
        f'[[tokens]]\nname = "a"\nsha256 = "{"0" * 64}"\nroles = []\ntopics = ["*"]',
        f'[[tokens]]\nname = "a"\nsha256 = "{"0" * 64}"\nroles = ["read"]\ntopics = ["*"]\nsecret = "SECRET"',
        "[[tokens",
        "\x00",
    ],
)
def test_a_token_file_that_is_wrong_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)

    with pytest.raises(ConfigurationError) as caught:
        load_tokens(path)

    assert str(path) in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_token_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_tokens(tmp_path / "none.toml")


def test_a_token_file_holds_roles_and_patterns(tmp_path: Path) -> None:
    [principal] = load_tokens(token_file(tmp_path, ("a", ["publish", "read"], ["x.*"]))).values()

    assert principal.roles == {Role.PUBLISH, Role.READ}
    assert principal.covers("x.y")
    assert not principal.covers("y")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("localhost.evil.example", False), ("", False)],
)  # fmt: skip
def test_loopback_is_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
