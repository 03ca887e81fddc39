"""The README's first screen, as a program: pay for an order, and find its message at the broker.

python examples/quickstart.py
"""

from sqlalchemy import create_engine, text

from outbox import Outbox
from outbox.migrate import upgrade

engine = create_engine("sqlite:///shop.db")  # or mysql+pymysql://app@db/shop
upgrade(engine)  # the outbox's own tables
with engine.begin() as connection:
    connection.execute(text("CREATE TABLE IF NOT EXISTS payment (order_id INTEGER)"))
box = Outbox(engine, broker="embedded:./broker-data")  # or http://broker:7788


@box.transactional
def pay(session, order_id):  # type: ignore[no-untyped-def]
    session.execute(text("INSERT INTO payment VALUES (:id)"), {"id": order_id})
    box.publish("payment.completed", {"order_id": order_id}, key=str(order_id))


pay(1)  # committed: sent. Raised: neither row nor message, savepoints included.
for delivery in box.broker.pull("payment.completed", "printer", wait_ms=5000):
    print(delivery.topic, delivery.json())
    box.broker.ack([delivery.receipt])  # without this it is delivered again, 30 seconds later

box.close()
box.broker.close()
