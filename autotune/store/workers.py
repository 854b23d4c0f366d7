"""Processes that work on a study: who is alive, and how long the study has been worked on."""

import os
import socket
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from sqlalchemy import insert, select, update

from autotune.store.session import Sessions, new_id
from autotune.store.tables import WORKER
from autotune.store.views import WorkerView

#: a worker of another host that was not seen for this long is dead
STALE_AFTER_S = 180.0
#: how often a worker says that it is alive
HEARTBEAT_S = 10.0
#: two clocks' worth of error in a process's start time
_START_SLACK_S = 2.0


class WorkerQueries(Sessions):
    """Workers of studies."""

    def add_worker(self, study_id: int) -> int:
        """Register this process; its worker id."""
        # commands that only read ask no process
        import psutil

        now = datetime.now(UTC)
        row = insert(WORKER).values(
            study_id=study_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=psutil.Process().create_time(),
            started=now,
            last_seen=now,
        )
        with self.write() as session:
            return new_id(session.execute(row))

    def heartbeat(self, worker_id: int, *, ended: bool = False) -> None:
        """Say that a worker is alive, or that it has ended."""
        now = datetime.now(UTC)
        values = {"last_seen": now, "ended": now} if ended else {"last_seen": now}
        with self.write() as session:
            session.execute(update(WORKER).where(WORKER.c.id == worker_id).values(**values))

    def workers(self, study_id: int) -> list[WorkerView]:
        """All workers a study ever had."""
        query = select(WORKER).where(WORKER.c.study_id == study_id).order_by(WORKER.c.id)
        with self.reading() as session:
            return [
                WorkerView(
                    id=row.id,
                    host=row.host,
                    pid=row.pid,
                    process_started=row.process_started,
                    started=row.started,
                    last_seen=row.last_seen,
                    ended=row.ended,
                )
                for row in session.execute(query)
            ]


def is_alive(worker: WorkerView, now: datetime) -> bool:
    """Whether a worker still runs: by its process on this host, by its heartbeat on others."""
    if worker.ended is not None:
        return False
    if worker.host == socket.gethostname():
        import psutil

        try:
            started = psutil.Process(worker.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        return abs(started - worker.process_started) < _START_SLACK_S
    return now - worker.last_seen < timedelta(seconds=STALE_AFTER_S)


def worked_s(workers: Iterable[WorkerView]) -> float:
    """Seconds during which at least one worker was at work."""
    total, end = 0.0, None
    for worker in sorted(workers, key=lambda item: item.started):
        stop = worker.ended or worker.last_seen
        start = worker.started if end is None else max(worker.started, end)
        if stop > start:
            total += (stop - start).total_seconds()
        end = stop if end is None else max(end, stop)
    return total
