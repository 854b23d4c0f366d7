"""Studies in the database: their file, their state, and what happened to them."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Row, func, insert, select, update

from autotune.errors import UserError
from autotune.store import codec
from autotune.store.database import shown
from autotune.store.session import Sessions
from autotune.store.tables import CALIBRATION, EVENT, NOISE_FLOOR, STUDY
from autotune.store.views import NoiseFloor, StudyView
from model.spec import Workload


class StudyQueries(Sessions):
    """Studies, calibrations, noise floors and events."""

    def add_study(
        self,
        *,
        name: str,
        text: str,
        label: str,
        base_dir: Path,
        machine: Mapping[str, Any] | None,
        workloads: Mapping[int, Workload],
    ) -> StudyView:
        """Store a new study. Raises ``UserError`` when the name is taken."""
        row = insert(STUDY).values(
            name=name,
            created=datetime.now(UTC),
            text=text,
            label=label,
            base_dir=str(base_dir),
            machine=None if machine is None else dict(machine),
            workloads={str(level): asdict(workload) for level, workload in workloads.items()},
            state="running",
            result=None,
        )
        with self.write() as session:
            taken = session.scalar(select(STUDY.c.id).where(STUDY.c.name == name))
            if taken is None:
                session.execute(row)
                stored = session.execute(select(STUDY).where(STUDY.c.name == name))
                return _study_view(stored.one())
        raise UserError(
            f"study {name!r} exists already in {shown(self.engine.url)}; go on with "
            f"`autotune study resume {name}`, or give the study file another name"
        )

    def find_study(self, name: str) -> StudyView | None:
        """The study called ``name``, if it is there."""
        with self.reading() as session:
            row = session.execute(select(STUDY).where(STUDY.c.name == name)).first()
            return None if row is None else _study_view(row)

    def study(self, name: str) -> StudyView:
        """The study called ``name``. Raises ``UserError`` listing those that are there."""
        found = self.find_study(name)
        if found is None:
            names = ", ".join(view.name for view in self.studies()) or "none"
            raise UserError(
                f"no study {name!r} in {shown(self.engine.url)}; studies there: {names}"
            )
        return found

    def studies(self) -> list[StudyView]:
        """All studies, oldest first."""
        with self.reading() as session:
            return [_study_view(row) for row in session.execute(select(STUDY).order_by(STUDY.c.id))]

    def rename_study(self, study_id: int, name: str) -> None:
        """Give a study another name; what belongs to it goes by its id and stays."""
        with self.write() as session:
            session.execute(update(STUDY).where(STUDY.c.id == study_id).values(name=name))

    def set_state(
        self,
        study_id: int,
        state: str | None = None,
        *,
        stop_requested: bool | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """Change what is given, leave the rest."""
        values: dict[str, Any] = {}
        if state is not None:
            values["state"] = state
        if stop_requested is not None:
            values["stop_requested"] = stop_requested
        if result is not None:
            values["result"] = dict(result)
        with self.write() as session:
            session.execute(update(STUDY).where(STUDY.c.id == study_id).values(**values))

    def stop_requested(self, study_id: int) -> bool:
        """Whether another process asked this study to stop."""
        with self.reading() as session:
            asked = select(STUDY.c.stop_requested).where(STUDY.c.id == study_id)
            return bool(session.scalar(asked))

    def add_calibration(
        self, study_id: int, calibration_id: str, parent_id: str | None, record: Mapping[str, Any]
    ) -> None:
        """Keep fitted constants; one that is there already is left alone."""
        with self.write() as session:
            query = select(CALIBRATION.c.id).where(
                CALIBRATION.c.study_id == study_id,
                CALIBRATION.c.calibration_id == calibration_id,
            )
            if session.scalar(query) is None:
                session.execute(
                    insert(CALIBRATION).values(
                        study_id=study_id,
                        calibration_id=calibration_id,
                        parent_id=parent_id,
                        stored=datetime.now(UTC),
                        record=dict(record),
                    )
                )

    def calibrations(self, study_id: int) -> list[dict[str, Any]]:
        """Records of all calibrations, oldest first."""
        query = (
            select(CALIBRATION.c.record)
            .where(CALIBRATION.c.study_id == study_id)
            .order_by(CALIBRATION.c.id)
        )
        with self.reading() as session:
            return list(session.scalars(query))

    def newest_calibration_id(self, study_id: int) -> str | None:
        """Id of the calibration stored last; None before the first."""
        query = (
            select(CALIBRATION.c.calibration_id)
            .where(CALIBRATION.c.study_id == study_id)
            .order_by(CALIBRATION.c.id.desc())
            .limit(1)
        )
        with self.reading() as session:
            return session.scalar(query)

    def set_noise_floor(self, study_id: int, floor: NoiseFloor) -> None:
        """Keep the A/A difference of a level, replacing an older one."""
        with self.write() as session:
            level = {"study_id": study_id, "concurrency": floor.concurrency}
            values = {
                "stored": datetime.now(UTC),
                "rel_floor": floor.rel_floor,
                "num_pairs": floor.num_pairs,
            }
            changed = session.execute(update(NOISE_FLOOR).filter_by(**level).values(**values))
            if not changed.rowcount:
                session.execute(insert(NOISE_FLOOR).values(**level, **values))

    def noise_floors(self, study_id: int) -> dict[int, NoiseFloor]:
        """A/A difference by concurrency."""
        query = select(NOISE_FLOOR).where(NOISE_FLOOR.c.study_id == study_id)
        with self.reading() as session:
            return {
                row.concurrency: NoiseFloor(row.concurrency, row.rel_floor, row.num_pairs)
                for row in session.execute(query)
            }

    def add_event(self, study_id: int, kind: str, detail: Mapping[str, Any]) -> None:
        """Note what happened besides repeats."""
        with self.write() as session:
            session.execute(
                insert(EVENT).values(
                    study_id=study_id, at=datetime.now(UTC), kind=kind, detail=dict(detail)
                )
            )

    def count_events(self, study_id: int, kind: str) -> int:
        """How often something happened."""
        query = (
            select(func.count())
            .select_from(EVENT)
            .where(EVENT.c.study_id == study_id, EVENT.c.kind == kind)
        )
        with self.reading() as session:
            return int(session.scalar(query) or 0)

    def event_details(self, study_id: int, kind: str) -> list[dict[str, Any]]:
        """What was noted of each event of a kind, oldest first."""
        query = (
            select(EVENT.c.detail)
            .where(EVENT.c.study_id == study_id, EVENT.c.kind == kind)
            .order_by(EVENT.c.id)
        )
        with self.reading() as session:
            return list(session.scalars(query))


def _study_view(row: Row[Any]) -> StudyView:
    return StudyView(
        id=row.id,
        name=row.name,
        created=row.created,
        text=row.text,
        label=row.label,
        base_dir=Path(row.base_dir),
        machine=row.machine,
        workloads={
            int(level): codec.workload_from_json(values) for level, values in row.workloads.items()
        },
        state=row.state,
        stop_requested=row.stop_requested,
        result=row.result,
    )
