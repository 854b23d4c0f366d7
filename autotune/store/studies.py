"""Studies in the database: their file, their state, and what happened to them."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, update

from autotune.errors import UserError
from autotune.store import codec
from autotune.store.database import shown
from autotune.store.session import Sessions
from autotune.store.tables import CalibrationRow, EventRow, NoiseFloorRow, StudyRow
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
        row = StudyRow(
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
            taken = session.scalar(select(StudyRow.id).where(StudyRow.name == name))
            if taken is None:
                session.add(row)
                session.flush()
                return _study_view(row)
        raise UserError(
            f"study {name!r} exists already in {shown(self.engine.url)}; go on with "
            f"`autotune study resume {name}`, or give the study file another name"
        )

    def find_study(self, name: str) -> StudyView | None:
        """The study called ``name``, if it is there."""
        with self.reading() as session:
            row = session.scalar(select(StudyRow).where(StudyRow.name == name))
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
            return [
                _study_view(row) for row in session.scalars(select(StudyRow).order_by(StudyRow.id))
            ]

    def rename_study(self, study_id: int, name: str) -> None:
        """Give a study another name; what belongs to it goes by its id and stays."""
        with self.write() as session:
            session.execute(update(StudyRow).where(StudyRow.id == study_id).values(name=name))

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
            session.execute(update(StudyRow).where(StudyRow.id == study_id).values(**values))

    def stop_requested(self, study_id: int) -> bool:
        """Whether another process asked this study to stop."""
        with self.reading() as session:
            asked = select(StudyRow.stop_requested).where(StudyRow.id == study_id)
            return bool(session.scalar(asked))

    def add_calibration(
        self, study_id: int, calibration_id: str, parent_id: str | None, record: Mapping[str, Any]
    ) -> None:
        """Keep fitted constants; one that is there already is left alone."""
        with self.write() as session:
            query = select(CalibrationRow.id).where(
                CalibrationRow.study_id == study_id,
                CalibrationRow.calibration_id == calibration_id,
            )
            if session.scalar(query) is None:
                session.add(
                    CalibrationRow(
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
            select(CalibrationRow.record)
            .where(CalibrationRow.study_id == study_id)
            .order_by(CalibrationRow.id)
        )
        with self.reading() as session:
            return list(session.scalars(query))

    def set_noise_floor(self, study_id: int, floor: NoiseFloor) -> None:
        """Keep the A/A difference of a level, replacing an older one."""
        with self.write() as session:
            query = select(NoiseFloorRow).where(
                NoiseFloorRow.study_id == study_id,
                NoiseFloorRow.concurrency == floor.concurrency,
            )
            row = session.scalar(query) or NoiseFloorRow(
                study_id=study_id, concurrency=floor.concurrency
            )
            row.stored = datetime.now(UTC)
            row.rel_floor, row.num_pairs = floor.rel_floor, floor.num_pairs
            session.add(row)

    def noise_floors(self, study_id: int) -> dict[int, NoiseFloor]:
        """A/A difference by concurrency."""
        query = select(NoiseFloorRow).where(NoiseFloorRow.study_id == study_id)
        with self.reading() as session:
            return {
                row.concurrency: NoiseFloor(row.concurrency, row.rel_floor, row.num_pairs)
                for row in session.scalars(query)
            }

    def add_event(self, study_id: int, kind: str, detail: Mapping[str, Any]) -> None:
        """Note what happened besides repeats."""
        with self.write() as session:
            session.add(
                EventRow(study_id=study_id, at=datetime.now(UTC), kind=kind, detail=dict(detail))
            )

    def count_events(self, study_id: int, kind: str) -> int:
        """How often something happened."""
        query = (
            select(func.count())
            .select_from(EventRow)
            .where(EventRow.study_id == study_id, EventRow.kind == kind)
        )
        with self.reading() as session:
            return int(session.scalar(query) or 0)

    def event_details(self, study_id: int, kind: str) -> list[dict[str, Any]]:
        """What was noted of each event of a kind, oldest first."""
        query = (
            select(EventRow.detail)
            .where(EventRow.study_id == study_id, EventRow.kind == kind)
            .order_by(EventRow.id)
        )
        with self.reading() as session:
            return list(session.scalars(query))


def _study_view(row: StudyRow) -> StudyView:
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
