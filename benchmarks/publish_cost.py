"""What publishing costs a business transaction: bare, with a hand-written INSERT of the message, with ours.

    python benchmarks/publish_cost.py --url mysql+pymysql://root@127.0.0.1/bench

One SELECT, one UPDATE, one INSERT; then nothing, a message by hand, one by us, ten by us. Alternating rounds, medians,
at 1 and 8 threads, as JSON. Ours includes sending (to a broker that accepts at once) and removing the rows. The schema
`outbox_bench` and tables `bench_*` are made anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from messaging import CancelStatus, Message, PublishResult, PublishStatus
from messaging.ids import new_message_id
from outbox import Outbox
from outbox.migrating import upgrade

SCHEMA = "outbox_bench"
ACCOUNTS = 1_000
BODY = b"x" * 500


class AcceptingBroker:
    """Accepts everything at once, so that what is measured is ours."""

    def publish(self, batch: Sequence[Message]) -> list[PublishResult]:
        return [PublishResult(message.id, PublishStatus.STORED) for message in batch]

    def cancel(self, message_ids: Sequence[str]) -> list[CancelStatus]:
        return [CancelStatus.UNKNOWN for _ in message_ids]


def main() -> None:
    """Measure, and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--transactions", type=int, default=1_000)
    chosen = arguments.parse_args()
    upgrade(chosen.url, schema=SCHEMA)
    engine = create_engine(chosen.url, pool_size=10)
    _make_tables(engine)
    box = Outbox(engine, broker=AcceptingBroker(), schema=SCHEMA)  # type: ignore[arg-type]
    cases = _cases(engine, box)
    results = [
        {"threads": threads, **_measure(cases, threads=threads, rounds=chosen.rounds, count=chosen.transactions)}
        for threads in (1, 8)
    ]
    print(json.dumps({"server": _server(engine), "rounds": chosen.rounds, "results": results}, indent=2))
    box.close()
    engine.dispose()


def _cases(engine: Engine, box: Outbox) -> dict[str, Callable[[int], None]]:
    sessions = sessionmaker(engine)
    by_hand = text("INSERT INTO bench_message VALUES (:id, 'bench', 'k', '{}', :body, 'pending', :at, :at)")

    def bare(number: int) -> None:
        with sessions() as session, session.begin():
            _business(session, number)

    def hand_written(number: int) -> None:
        with sessions() as session, session.begin():
            _business(session, number)
            session.execute(by_hand, {"id": new_message_id(), "body": BODY, "at": time.time_ns() // 1000})

    @box.transactional
    def ours(session: Session, number: int) -> None:
        _business(session, number)
        box.publish("bench", BODY, key="k")

    @box.transactional
    def ours_ten(session: Session, number: int) -> None:
        _business(session, number)
        for _ in range(10):
            box.publish("bench", BODY, key="k")

    return {"bare": bare, "hand_written": hand_written, "ours": ours, "ours_ten_messages": ours_ten}


def _business(session: Session, number: int) -> None:
    account = {"id": number % ACCOUNTS}
    session.execute(text("SELECT balance FROM bench_account WHERE id = :id"), account).scalar()
    session.execute(text("UPDATE bench_account SET balance = balance + 1 WHERE id = :id"), account)
    session.execute(text("INSERT INTO bench_entry (account) VALUES (:id)"), account)


def _measure(cases: dict[str, Callable[[int], None]], *, threads: int, rounds: int, count: int) -> dict[str, object]:
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            rates[name].append(_rate(case, threads=threads, count=count))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "transactions_per_second": {name: round(median) for name, median in medians.items()},
        "ours_to_hand_written": round(medians["ours"] / medians["hand_written"], 3),
        "ten_messages_to_one": round(medians["ours"] / medians["ours_ten_messages"], 3),
    }


def _rate(case: Callable[[int], None], *, threads: int, count: int) -> float:
    def work(offset: int) -> None:
        for number in range(count // threads):
            case(offset * 131 + number * 7)

    workers = [threading.Thread(target=work, args=(offset,)) for offset in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return count / (time.perf_counter() - started)


def _make_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        for name in ("bench_account", "bench_entry", "bench_message"):
            connection.execute(text(f"DROP TABLE IF EXISTS {name}"))
        connection.execute(text("CREATE TABLE bench_account (id INT PRIMARY KEY, balance INT)"))
        connection.execute(text("CREATE TABLE bench_entry (id BIGINT AUTO_INCREMENT PRIMARY KEY, account INT)"))
        connection.execute(
            text(
                "CREATE TABLE bench_message (id VARCHAR(64) PRIMARY KEY, topic VARCHAR(255), message_key VARCHAR(255), "
                "headers TEXT, body LONGBLOB, state VARCHAR(16), due_at_us BIGINT, created_at_us BIGINT, "
                "KEY (state, due_at_us, id))"
            )
        )
        connection.execute(
            text("INSERT INTO bench_account VALUES (:id, 0)"), [{"id": number} for number in range(ACCOUNTS)]
        )


def _server(engine: Engine) -> str:
    with engine.connect() as connection:
        return str(connection.execute(text("SELECT VERSION()")).scalar())


if __name__ == "__main__":
    main()
