"""One client's patterns cover so many topics at most, whatever room the server has; others are not touched by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_broker.engine.engine import Engine
from outbox_broker.http.access_control import Principal, Role, load_tokens
from outbox_broker.state.client_topic_quota import ClientTopicQuota, Coverage
from outbox_core.common.errors import ConfigurationError, InvalidMessage
from outbox_core.messages.message import GroupConfig, Message, PublishResult

LIMITED = ClientTopicQuota(("lim.*",), 2)

type_of_open = Callable[..., Engine]


def publish(engine: Engine, *topics: str, quota: ClientTopicQuota | None = LIMITED) -> list[PublishResult]:
    """A message to each of these topics, in one batch."""
    published = len(engine.admin.topics()) + sum(engine.counters().values())
    batch = [Message(id=f"{topic}-{number}-{published}", topic=topic, body=b"") for number, topic in enumerate(topics)]
    return engine.publisher.publish(batch, quota=quota)


def statuses(results: list[PublishResult]) -> list[str]:
    return [str(one.status) for one in results]


def test_a_new_topic_beyond_the_quota_is_refused_by_name_and_all_else_is_stored(engine: Engine) -> None:
    publish(engine, "vic.1", "vic.2", "vic.3", quota=None)

    results = publish(engine, "lim.1", "lim.2", "lim.1", "lim.3")

    assert statuses(results) == ["stored", "stored", "stored", "rejected"]
    assert results[3].error is not None
    assert "topics_max of the token" in results[3].error
    assert "vic" not in results[3].error
    assert engine.admin.topics() == ["lim.1", "lim.2", "vic.1", "vic.2", "vic.3"]
    assert statuses(publish(engine, "lim.1", "lim.2")) == ["stored"] * 2
    assert statuses(publish(engine, "vic.4", quota=None)) == ["stored"]
    assert engine.counters()["published_rejected_topics_max", "~others", ""] == 1


def test_a_quota_holds_for_groups_pulls_and_scheduled_messages_too(engine: Engine) -> None:
    publish(engine, "lim.1", "lim.2")

    with pytest.raises(InvalidMessage, match="topics_max of the token"):
        engine.admin.declare_group("lim.3", "g", GroupConfig(), quota=LIMITED)
    with pytest.raises(InvalidMessage, match="topics_max of the token"):
        engine.puller.take("lim.3", "g", max_messages=1, invisible_ms=1_000, quota=LIMITED)
    later = Message(id="later", topic="lim.3", body=b"", deliver_at_ms=1_900_000_000_000)
    assert statuses(engine.publisher.publish([later], quota=LIMITED)) == ["rejected"]

    engine.admin.declare_group("lim.1", "g", GroupConfig(), quota=LIMITED)
    assert engine.puller.take("lim.2", "g", max_messages=1, invisible_ms=1_000, quota=LIMITED)
    assert engine.admin.topics() == ["lim.1", "lim.2"]


def test_topics_count_that_are_there_already_whoever_made_them_and_when(open_engine: type_of_open) -> None:
    engine = open_engine()
    publish(engine, "lim.1", "lim.2", quota=None)

    engine = open_engine()

    assert statuses(publish(engine, "lim.3")) == ["rejected"]
    engine.deletion.delete_topic("lim.1")
    assert statuses(publish(engine, "lim.3", "lim.4")) == ["stored", "rejected"]


def test_without_a_number_a_tenth_of_the_servers_topics_is_allowed(open_engine: type_of_open) -> None:
    engine = open_engine(topics_max=30)

    results = publish(engine, *(f"lim.{number}" for number in range(5)), quota=ClientTopicQuota(("lim.*",)))

    assert statuses(results) == ["stored"] * 3 + ["rejected"] * 2
    assert results[4].error is not None
    assert "3 topics" in results[4].error
    assert ClientTopicQuota(("lim.*",)).limit(5) == 1


def test_a_full_server_refuses_as_before(open_engine: type_of_open) -> None:
    engine = open_engine(topics_max=1)
    publish(engine, "lim.1")

    [result] = publish(engine, "lim.2")

    assert result.error == "there are 1 topics already, and no more are allowed (topics_max)"


def test_topics_are_counted_once_for_the_same_patterns() -> None:
    topics = {"a.1": None, "a.2": None, "b.1": None}
    coverage = Coverage(topics)
    assert coverage.count(("a.*", "a.1")) == 2

    topics.clear()  # nobody looks at them again
    coverage.made("a.3")
    coverage.made("c.1")
    coverage.deleted("a.1")
    coverage.deleted("b.1")

    assert coverage.count(("a.*", "a.1")) == 2
    assert coverage.count(("b.*",)) == 0


def test_a_publish_to_topics_that_are_there_counts_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine, "lim.1", "lim.2")

    def count(_: Coverage, _patterns: tuple[str, ...]) -> int:
        raise AssertionError("topics were counted")

    monkeypatch.setattr(Coverage, "count", count)

    assert statuses(publish(engine, "lim.1", "lim.2")) == ["stored"] * 2


def test_a_token_has_a_quota_where_it_is_limited_or_says_so() -> None:
    def quota(*topics: str, topics_max: int | None = None) -> ClientTopicQuota | None:
        return Principal(name="p", roles=frozenset(Role), topics=topics, topics_max=topics_max).quota

    assert quota("*") is None
    assert quota("*", topics_max=5) == ClientTopicQuota(("*",), 5)
    assert quota("a.*", "b.*") == ClientTopicQuota(("a.*", "b.*"))
    assert quota("a.*", topics_max=7) == ClientTopicQuota(("a.*",), 7)


def test_a_token_file_may_say_how_many_topics_a_token_may_have(tmp_path: Path) -> None:
    entry = f'[[tokens]]\nname = "p"\nsha256 = "{"0" * 64}"\nroles = ["publish"]\ntopics = ["lim.*"]\n'
    path = tmp_path / "tokens.toml"

    path.write_text(entry + "topics_max = 12\n")
    [principal] = load_tokens(path).values()
    assert principal.quota == ClientTopicQuota(("lim.*",), 12)

    path.write_text(entry + "topics_max = 0\n")
    with pytest.raises(ConfigurationError, match="topics_max"):
        load_tokens(path)
    with pytest.raises(ConfigurationError, match="topics_max"):
        ClientTopicQuota(("lim.*",), 0)
