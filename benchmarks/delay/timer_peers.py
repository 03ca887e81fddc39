"""RQ's scheduler and arq as contestants of benchmarks.delay.timer_stores, in their own interpreter.

    python -m benchmarks.delay.timer_peers rq redis://127.0.0.1:6379/0 add 20000 7200

Commands: `fill COUNT SECONDS` writes pending jobs as the library stores them, many at a time; `add COUNT SECONDS`
schedules jobs by the library; `fire COUNT` has those that are due moved to the queue and run. Prints JSON. Each is used
in its fastest way: RQ schedules 500 jobs in a pipeline and runs them in the worker's own process; arq schedules 100 at
a time, and its worker runs 100 at a time and polls without a pause.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

BODY: Final = "x" * 512
QUEUE: Final = "bench"
BATCH: Final = 500
AT_ONCE: Final = 100
READ_AT_ONCE: Final = 1_000
ENDED_POLL_SECONDS: Final = 0.005
JOB: Final = "benchmarks.delay.timer_peers.do_nothing"


def do_nothing(_body: str) -> None:
    """The job of RQ."""


async def accept(_context: Mapping[Any, Any], _body: str) -> None:
    """The job of arq."""


class Rq:
    """RQ: a hash a job, a sorted set of scheduled ones, a list of those that are to run."""

    def __init__(self, url: str) -> None:
        from redis import Redis  # type: ignore[import-not-found,unused-ignore]
        from rq import Queue  # type: ignore[import-not-found,unused-ignore]

        self._client = Redis.from_url(url)
        self._queue = Queue(QUEUE, connection=self._client)

    def fill(self, count: int, seconds: int) -> dict[str, float]:
        """Copies of one job, which the library made."""
        [model] = self._schedule(1, seconds)
        fields = self._client.hgetall(f"rq:job:{model}")
        due = time.time() + seconds
        pipeline = self._client.pipeline(transaction=False)
        for number in range(count - 1):
            name = str(uuid4())
            pipeline.hset(f"rq:job:{name}", mapping=fields)
            pipeline.zadd(f"rq:scheduled:{QUEUE}", {name: due})
            if number % BATCH == 0:
                pipeline.execute()
        pipeline.execute()
        return {}

    def add(self, count: int, seconds: int) -> dict[str, float]:
        """By Queue.enqueue_at."""
        began = time.perf_counter()
        for begin in range(0, count, BATCH):
            self._schedule(min(BATCH, count - begin), seconds)
        return {"add": time.perf_counter() - began}

    def fire(self, count: int) -> dict[str, float]:
        """By the scheduler's step, which a process of its own does each second, and by a worker."""
        from rq import SimpleWorker  # type: ignore[import-not-found,unused-ignore]
        from rq.scheduler import RQScheduler  # type: ignore[import-not-found,unused-ignore]

        scheduler = RQScheduler([QUEUE], connection=self._client)
        worker = SimpleWorker([self._queue], connection=self._client)
        began = time.perf_counter()
        scheduler.acquire_locks()
        while self._queue.count < count:
            scheduler.enqueue_scheduled_jobs()
        fired = time.perf_counter()
        worker.work(burst=True, logging_level="WARNING", max_jobs=count)
        ended = time.perf_counter()
        assert self._queue.count == 0
        scheduler.release_locks()
        return {"fire": fired - began, "ack": ended - fired}

    def _schedule(self, count: int, seconds: int) -> list[str]:
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        pipeline = self._client.pipeline()
        jobs = [
            self._queue.enqueue_at(at, JOB, BODY, description="bench", result_ttl=0, pipeline=pipeline)
            for _ in range(count)
        ]
        pipeline.execute()
        return [job.id for job in jobs]


class Arq:
    """arq: a key a job, a sorted set of all that are not done."""

    def __init__(self, url: str) -> None:
        from arq.connections import RedisSettings  # type: ignore[import-not-found,unused-ignore]

        self._settings = RedisSettings.from_dsn(url)

    def fill(self, count: int, seconds: int) -> dict[str, float]:
        """Copies of one job, which the library made."""
        asyncio.run(self._fill(count, seconds))
        return {}

    def add(self, count: int, seconds: int) -> dict[str, float]:
        """By ArqRedis.enqueue_job."""
        return {"add": asyncio.run(self._add(count, seconds))}

    def fire(self, count: int) -> dict[str, float]:
        """By a worker, which takes a job from the sorted set, runs and removes it in one."""
        from arq.worker import Worker  # type: ignore[import-not-found,unused-ignore]

        async def run() -> float:
            worker = Worker(
                functions=[accept], queue_name=QUEUE, redis_settings=self._settings, max_jobs=AT_ONCE,
                queue_read_limit=READ_AT_ONCE, poll_delay=0, keep_result=0, log_results=False, handle_signals=False,
            )  # fmt: skip
            began = time.perf_counter()
            # Its own limit, max_burst_jobs, may end it early: a job that has ended counts twice until it is forgotten.
            working = asyncio.create_task(worker.main())
            while worker.jobs_complete < count and not working.done():
                await asyncio.sleep(ENDED_POLL_SECONDS)
            took = time.perf_counter() - began
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            assert (worker.jobs_complete, worker.jobs_failed) == (count, 0)
            await worker.close()
            return took

        return {"fire_and_ack": asyncio.run(run())}

    async def _fill(self, count: int, seconds: int) -> None:
        pool = await self._pool()
        job = await pool.enqueue_job("accept", BODY, _defer_by=seconds)
        value = await pool.get(f"arq:job:{job.job_id}")
        due_ms, expires_ms = int((time.time() + seconds) * 1000), (seconds + 86_400) * 1000
        pipeline = pool.pipeline(transaction=False)
        for number in range(count - 1):
            name = uuid4().hex
            pipeline.psetex(f"arq:job:{name}", expires_ms, value)
            pipeline.zadd(QUEUE, {name: due_ms})
            if number % BATCH == 0:
                await pipeline.execute()
        await pipeline.execute()
        await pool.aclose()

    async def _add(self, count: int, seconds: int) -> float:
        pool = await self._pool()
        began = time.perf_counter()
        for begin in range(0, count, AT_ONCE):
            jobs = range(begin, min(begin + AT_ONCE, count))
            await asyncio.gather(*(pool.enqueue_job("accept", BODY, _defer_by=seconds) for _ in jobs))
        took = time.perf_counter() - began
        await pool.aclose()
        return took

    async def _pool(self) -> Any:
        from arq.connections import create_pool  # type: ignore[import-not-found,unused-ignore]

        return await create_pool(self._settings, default_queue_name=QUEUE)


PEERS: Final = {"rq": Rq, "arq": Arq}


def main() -> None:
    """Run one command, and print its times in seconds."""
    name, url, command, *numbers = sys.argv[1:]
    peer: Any = PEERS[name](url)
    print(json.dumps(getattr(peer, command)(*map(int, numbers))))


if __name__ == "__main__":
    main()
