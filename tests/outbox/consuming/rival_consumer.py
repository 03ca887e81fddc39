"""A consumer process that handles the same deliveries as its rivals. Run as a module; not imported.

Arguments: `URL SCHEMA ISOLATION COUNT SEED`. It says "ready", waits for a line, then hands each delivery
to its handler in an order of its own, again and again until none is left; what fails is redelivered, as a broker would.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import OutboxError, consumer
from outbox_core import Delivery
from tests.outbox.shop import Payment
from tests.outbox.watched_broker import delivery

TRIES_MAX = 200


def main() -> None:
    """Handle all, and tell what the tries came to."""
    url, schema, isolation, count, seed = sys.argv[1:6]
    options = {} if isolation == "default" else {"isolation_level": isolation}
    engine = create_engine(url, **options)  # type: ignore[arg-type]

    @consumer("orders", group="payments", inbox=engine, schema=schema or None)
    def pay(session: Session, one: Delivery) -> None:
        session.add(Payment(id=int(one.body), note=seed))
        session.flush()

    numbers = list(range(int(count)))
    random.Random(seed).shuffle(numbers)
    print("ready", flush=True)
    sys.stdin.readline()
    outcomes: Counter[str] = Counter()
    for _ in range(TRIES_MAX):
        left = []
        for number in numbers:
            try:
                outcomes[pay.handle(delivery(number))] += 1
            except (OutboxError, DBAPIError) as error:
                outcomes[type(error).__name__] += 1
                left.append(number)
        if not (numbers := left):
            break
    engine.dispose()
    print(dict(outcomes), len(numbers), flush=True)


main()
