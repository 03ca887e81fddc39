"""How far a run is: shares of its phases, as the last run measured them, and within one the tasks that Spark has done.

A share is of time, so the time left follows from it. Judges nothing, and reads no source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_core.common.errors import ConfigurationError
from spark_reconcile.load.read_plan import SourcePlan
from spark_reconcile.load.spark_session import Size, is_of_this_process
from spark_reconcile.runs.stored_results import stored_run

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

WHOLE: Final = 1_000
"""All of a run."""
_REPORT: Final = 20
"""What is left for the report once the last phase has ended."""
_LOOK_S: Final = 1.0
_LOOK_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class RunShare:
    """How much of a run is done, of `total`; what it does now; how many tasks Spark has done for it; and how long the
    rest takes, None where no run like it was measured.
    """

    done: int
    total: int
    step: str
    tasks: int
    left_ms: int | None


Shows = Callable[[RunShare], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMeasures:
    """How many seconds each phase takes, and how many tasks of Spark's, in the order of the phases. `tasks` None: they
    depend on the rows and on the cluster, and no run has counted them.
    """

    seconds: Mapping[str, float]
    tasks: Mapping[str, int] | None


FIRST_OF_FEW: Final = PhaseMeasures(
    seconds={"start": 6.0, "read": 10.0, "judge": 5.0, "count": 2.0}, tasks={"read": 21, "judge": 11, "count": 8}
)
"""Of 14,000 rows without a finding, on two processors: each job has one task, or two. By this, or one of the next two,
goes the first run of a folder.
"""
FIRST_SMALL: Final = PhaseMeasures(
    seconds={"start": 8.0, "read": 12.0, "judge": 12.0, "count": 6.0}, tasks={"read": 21, "judge": 106, "count": 108}
)
"""Of the demonstration's 79,000 rows: each job has some four tasks."""
FIRST_OF_MANY: Final = PhaseMeasures(seconds={"start": 24.0, "read": 51.0, "judge": 212.0, "count": 34.0}, tasks=None)
"""Of half a million rows with findings, on two processors."""


class RunProgress:
    """Follows one run: is told its steps and the ends of its phases, and tells how much is done, which never shrinks.

    `say` is called with each step, `shows` with each share, by one thread at a time. A run that starts again shows
    what was shown until it has come that far.
    """

    def __init__(
        self, output: Path, *, by_the_hour: bool, say: Callable[[str], None], shows: Shows | None
    ) -> None:  # fmt: skip
        """`output`: the folder of the runs to go by. `shows` None: nobody looks, and Spark is asked nothing."""
        self._say = say
        self._shows = shows
        self._measures = None if shows is None else _last_measures(output, by_the_hour=by_the_hour)
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._shown = 0
        self.start(FIRST_OF_MANY)

    def start(self, first: PhaseMeasures) -> None:
        """The first phase begins. `first`: what to go by where no run was measured."""
        self._since = time.monotonic()
        self._expected = self._measures or first
        self._step = ""
        self._counter: TaskCounter | None = None
        self._tasks_before = 0
        self.took_seconds: dict[str, float] = {}
        self.spark_tasks: dict[str, int] = {}

    def begin(self, step: str) -> None:
        """A step begins, within the phase that goes on."""
        self._say(step)
        with self._lock:
            self._step = step
            self._show()

    def end_phase(self, name: str) -> None:
        """A phase ends, and the next one begins."""
        with self._lock:
            now = time.monotonic()
            self.took_seconds[name] = round(now - self._since, 2)
            self._since = now
            if self._counter is not None:
                self._counter.look()
                self.spark_tasks[name] = self._counter.done - self._tasks_before
                self._tasks_before = self._counter.done
            self._show()

    def end(self) -> None:
        """The run has ended, with its results published."""
        with self._lock:
            self._shown = WHOLE
            self._show()

    @contextmanager
    def watching(self, session: SparkSession) -> Iterator[None]:
        """Count the tasks of the session's jobs within this context, in a thread of its own.

        Through Spark Connect there is no status tracker: there the phases alone are counted.
        """
        if self._shows is None or not is_of_this_process(session):
            yield
            return
        self._counter = TaskCounter(session.sparkContext.statusTracker())
        ended = threading.Event()
        looking = threading.Thread(target=self._look_until, args=(ended,), name="reconcile-progress", daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join(_LOOK_S_MAX)  # it may wait for a Java process that has gone

    def _look_until(self, ended: threading.Event) -> None:
        from py4j.protocol import Py4JError

        while not ended.wait(_LOOK_S):
            try:
                with self._lock:
                    if self._counter is not None:
                        self._counter.look()
                        self._show()
            except (Py4JError, OSError):  # Java has gone, which the run tells itself
                return

    def _show(self) -> None:
        if self._shows is None:
            return
        tasks = 0 if self._counter is None else self._counter.done
        self._shown = max(self._shown, int((WHOLE - _REPORT) * self._done_share()))
        left_ms = None
        if self._shown and self._expected.tasks is not None:
            left_ms = int((time.monotonic() - self._begun) * 1000) * (WHOLE - self._shown) // self._shown
        self._shows(RunShare(self._shown, WHOLE, self._step, tasks, left_ms))

    def _done_share(self) -> float:
        seconds, tasks = self._expected.seconds, self._expected.tasks
        left = [phase for phase in seconds if phase not in self.took_seconds]
        done_s = sum(seconds.values()) - sum(seconds[phase] for phase in left)
        if left and self._counter is not None:
            known = self._counter.known - self._tasks_before
            # Of a phase that nobody has measured, half may be jobs of which nobody knows yet.
            expected = 2 * known if tasks is None else max(known, tasks.get(left[0], 0))
            done_s += seconds[left[0]] * (self._counter.done - self._tasks_before) / max(expected, 1)
        return done_s / (sum(seconds.values()) or 1)


def first_measures(plan: SourcePlan) -> PhaseMeasures:
    """Returns what a run like this one takes, before one was measured."""
    if plan.is_few:
        return FIRST_OF_FEW
    return FIRST_SMALL if plan.size is Size.SMALL else FIRST_OF_MANY


def _last_measures(output: Path, *, by_the_hour: bool) -> PhaseMeasures | None:
    """Returns what the newest run of an output folder took; None if there is none of this kind that was watched."""
    try:
        newest = stored_run(output)
    except ConfigurationError:
        return None
    is_alike = (newest.windows is not None) is by_the_hour and bool(newest.spark_tasks)
    return PhaseMeasures(seconds=newest.took_seconds, tasks=newest.spark_tasks) if is_alike else None


class TaskCounter:
    """Counts the tasks of the jobs that begin in a Spark context from now on, by its status tracker."""

    def __init__(self, tracker: StatusTracker) -> None:
        self._tracker = tracker
        self._next_job = 1 + max(tracker.getJobIdsForGroup(None), default=-1)
        self._stages: dict[int, list[int]] = {}
        """The stages of jobs that have not ended."""
        self._seen: set[int] = set()
        self._ended = 0
        self.done = 0
        self.known = 0
        """The tasks of all jobs that have begun, less those that the ones that ended could skip."""

    def look(self) -> None:
        """Count again."""
        newest = max(self._tracker.getActiveJobsIds(), default=-1)
        while (job := self._tracker.getJobInfo(self._next_job)) is not None or self._next_job < newest:
            stage_ids = [] if job is None else [stage for stage in job.stageIds if stage not in self._seen]
            self._seen.update(stage_ids)
            self._stages[self._next_job] = stage_ids
            self._next_job += 1
        done, known = 0, 0
        for job_id, stage_ids in list(self._stages.items()):
            job = self._tracker.getJobInfo(job_id)  # before its stages: what has ended has all its tasks then
            stages = [stage for stage_id in stage_ids if (stage := self._tracker.getStageInfo(stage_id)) is not None]
            completed = sum(stage.numCompletedTasks for stage in stages)
            if job is None or job.status != "RUNNING":
                del self._stages[job_id]
                self._ended += completed
            else:
                done += completed
                known += sum(stage.numTasks for stage in stages)
        self.done, self.known = self._ended + done, self._ended + known
