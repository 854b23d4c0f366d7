"""Studies, trials, predictions, measurements and what belongs to them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "autotune_provenance",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256", name="uq_autotune_provenance_sha256"),
    )
    op.create_table(
        "autotune_study",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("base_dir", sa.Text(), nullable=False),
        sa.Column("machine", sa.JSON(), nullable=True),
        sa.Column("workloads", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("stop_requested", sa.Boolean(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "autotune_calibration",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("calibration_id", sa.String(length=64), nullable=False),
        sa.Column("parent_id", sa.String(length=64), nullable=True),
        sa.Column("stored", sa.DateTime(timezone=True), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["autotune_study.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("study_id", "calibration_id", name="uq_autotune_calibration"),
    )
    op.create_table(
        "autotune_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["autotune_study.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_autotune_event_kind", "autotune_event", ["study_id", "kind"], unique=False)
    op.create_table(
        "autotune_noise_floor",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("concurrency", sa.Integer(), nullable=False),
        sa.Column("stored", sa.DateTime(timezone=True), nullable=False),
        sa.Column("rel_floor", sa.Double(), nullable=False),
        sa.Column("num_pairs", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["autotune_study.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("study_id", "concurrency", name="uq_autotune_noise_floor"),
    )
    op.create_table(
        "autotune_worker",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("process_started", sa.Double(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["study_id"], ["autotune_study.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_autotune_worker_study", "autotune_worker", ["study_id"], unique=False)
    op.create_table(
        "autotune_trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("claim", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("origin", sa.String(length=255), nullable=False),
        sa.Column("knobs_id", sa.String(length=16), nullable=False),
        sa.Column("knobs", sa.JSON(), nullable=False),
        sa.Column("group_id", sa.String(length=16), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("worker_id", sa.Integer(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=True),
        sa.Column("provenance_id", sa.Integer(), nullable=True),
        sa.Column("failure_kind", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(["provenance_id"], ["autotune_provenance.id"]),
        sa.ForeignKeyConstraint(["study_id"], ["autotune_study.id"]),
        sa.ForeignKeyConstraint(["worker_id"], ["autotune_worker.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("study_id", "claim", name="uq_autotune_trial_claim"),
    )
    op.create_index(
        "ix_autotune_trial_knobs", "autotune_trial", ["study_id", "knobs_id"], unique=False
    )
    op.create_index(
        "ix_autotune_trial_number", "autotune_trial", ["study_id", "number"], unique=False
    )
    op.create_table(
        "autotune_failure",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["autotune_trial.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_autotune_failure_trial", "autotune_failure", ["trial_id"], unique=False)
    op.create_table(
        "autotune_measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("knobs_id", sa.String(length=16), nullable=False),
        sa.Column("concurrency", sa.Integer(), nullable=False),
        sa.Column("repeat", sa.Integer(), nullable=False),
        sa.Column("order", sa.Integer(), nullable=False),
        sa.Column("started", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("tpot_ms", sa.Double(), nullable=True),
        sa.Column("accept_length", sa.Double(), nullable=True),
        sa.Column("output_check", sa.String(length=16), nullable=False),
        sa.Column("failure_kind", sa.String(length=32), nullable=True),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["autotune_study.id"]),
        sa.ForeignKeyConstraint(["trial_id"], ["autotune_trial.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("trial_id", "concurrency", "repeat", name="uq_autotune_measurement"),
    )
    op.create_index(
        "ix_autotune_measurement_knobs",
        "autotune_measurement",
        ["study_id", "knobs_id", "concurrency"],
        unique=False,
    )
    op.create_index(
        "ix_autotune_measurement_order", "autotune_measurement", ["study_id", "order"], unique=False
    )
    op.create_table(
        "autotune_prediction",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("concurrency", sa.Integer(), nullable=False),
        sa.Column("stored", sa.DateTime(timezone=True), nullable=False),
        sa.Column("calibration_id", sa.String(length=64), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["autotune_trial.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "ix_autotune_prediction_trial",
        "autotune_prediction",
        ["trial_id", "concurrency"],
        unique=False,
    )


def downgrade() -> None:
    """Drop every table."""
    op.drop_index("ix_autotune_prediction_trial", table_name="autotune_prediction")
    op.drop_table("autotune_prediction")
    op.drop_index("ix_autotune_measurement_order", table_name="autotune_measurement")
    op.drop_index("ix_autotune_measurement_knobs", table_name="autotune_measurement")
    op.drop_table("autotune_measurement")
    op.drop_index("ix_autotune_failure_trial", table_name="autotune_failure")
    op.drop_table("autotune_failure")
    op.drop_index("ix_autotune_trial_number", table_name="autotune_trial")
    op.drop_index("ix_autotune_trial_knobs", table_name="autotune_trial")
    op.drop_table("autotune_trial")
    op.drop_index("ix_autotune_worker_study", table_name="autotune_worker")
    op.drop_table("autotune_worker")
    op.drop_table("autotune_noise_floor")
    op.drop_index("ix_autotune_event_kind", table_name="autotune_event")
    op.drop_table("autotune_event")
    op.drop_table("autotune_calibration")
    op.drop_table("autotune_study")
    op.drop_table("autotune_provenance")
