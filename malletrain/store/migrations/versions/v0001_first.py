"""The first schema: jobs, leases, events, observations, rescales, profiles and curves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

ID = sa.String(64)
NAME = sa.String(255)
SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
REAL = sa.Float(53)


def upgrade() -> None:
    op.create_table(
        "meta",
        sa.Column("key", ID, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_meta"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", ID, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("name", NAME, nullable=False),
        sa.Column("owner", NAME, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", ID, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("submitted", REAL, nullable=False),
        sa.Column("started", REAL),
        sa.Column("ended", REAL),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("planned_nodes", sa.Text, nullable=False),
        sa.Column("members", sa.Text, nullable=False),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("last_broke", REAL),
        sa.Column("samples", REAL, nullable=False),
        sa.Column("samples_before", REAL, nullable=False),
        sa.Column("node_seconds", REAL, nullable=False),
        sa.Column("last_progress", REAL),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("notices", sa.Text, nullable=False),
        sa.Column("snapshot", sa.Text, nullable=False),
        sa.Column("failure", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("number", name="uq_jobs_number"),
    )
    op.create_index("ix_jobs_name", "jobs", ["name"])
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_table(
        "leases",
        sa.Column("id", ID, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("node", NAME, nullable=False),
        sa.Column("scheduler_id", NAME, nullable=False),
        sa.Column("state", ID, nullable=False),
        sa.Column("public_key", ID, nullable=False),
        sa.Column("node_class", NAME, nullable=False),
        sa.Column("owner", NAME, nullable=False),
        sa.Column("requested", REAL, nullable=False),
        sa.Column("started", REAL),
        sa.Column("ended", REAL),
        sa.Column("end_reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sa.UniqueConstraint("number", name="uq_leases_number"),
    )
    op.create_index("ix_leases_state", "leases", ["state"])
    op.create_table(
        "events",
        sa.Column("seq", SERIAL, autoincrement=True, nullable=False),
        sa.Column("time", REAL, nullable=False),
        sa.Column("kind", ID, nullable=False),
        sa.Column("job", ID, nullable=False),
        sa.Column("node", NAME, nullable=False),
        sa.Column("lease", ID, nullable=False),
        sa.Column("generation", sa.BigInteger),
        sa.Column("data", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_seq", "events", ["job", "seq"])
    op.create_index("ix_events_kind_seq", "events", ["kind", "seq"])
    _make_append_only()
    op.create_table(
        "observations",
        sa.Column("job", ID, nullable=False),
        sa.Column("nodes", sa.Integer, autoincrement=False, nullable=False),
        *_observed(),
        sa.PrimaryKeyConstraint("job", "nodes", name="pk_observations"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_observations_job"),
    )
    op.create_table(
        "observation_history",
        sa.Column("seq", SERIAL, autoincrement=True, nullable=False),
        sa.Column("job", ID, nullable=False),
        sa.Column("nodes", sa.Integer, nullable=False),
        *_observed(),
        sa.PrimaryKeyConstraint("seq", name="pk_observation_history"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_observation_history_job"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_observation_history_job_seq", "observation_history", ["job", "seq"])
    op.create_table(
        "rescales",
        sa.Column("job", ID, nullable=False),
        sa.Column("generation", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("kind", ID, nullable=False),
        sa.Column("from_nodes", sa.Integer, nullable=False),
        sa.Column("to_nodes", sa.Integer, nullable=False),
        sa.Column("began", REAL, nullable=False),
        sa.Column("ended", REAL),
        sa.Column("cost_s", REAL),
        sa.Column("phases", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", name="pk_rescales"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_rescales_job"),
    )
    op.create_table(
        "profiles",
        sa.Column("job", ID, nullable=False),
        sa.Column("key", ID, nullable=False),
        sa.Column("node_class", NAME, nullable=False),
        sa.Column("learned", sa.Text, nullable=False),
        sa.Column("waits", sa.Text, nullable=False),
        sa.Column("interruptions", sa.Text, nullable=False),
        sa.Column("parameters", REAL),
        sa.Column("flops", REAL),
        sa.PrimaryKeyConstraint("job", name="pk_profiles"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_profiles_job"),
    )
    op.create_table(
        "curves",
        sa.Column("key", ID, nullable=False),
        sa.Column("node_class", NAME, nullable=False),
        sa.Column("processes", sa.Integer, nullable=False),
        sa.Column("learned", sa.Text, nullable=False),
        sa.Column("parameters", REAL),
        sa.Column("flops", REAL),
        sa.Column("job", ID, nullable=False),
        sa.Column("updated", REAL, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_curves"),
    )
    op.create_index("ix_curves_updated", "curves", ["updated"])


def _observed() -> list[sa.Column[float]]:
    names = ("batch", "rate", "spread", "seconds", "samples", "time")
    return [sa.Column(name, REAL, nullable=False) for name in names]


def _make_append_only() -> None:
    """The database itself refuses to change or remove an event."""
    refusal = "The event table is the audit trail: events are added, never changed or removed."
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER events_no_{verb.lower()} BEFORE {verb} ON events BEGIN SELECT "
                f"RAISE(ABORT, '{refusal}'); END"
            )
    elif dialect == "postgresql":
        op.execute(
            "CREATE FUNCTION events_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"RAISE EXCEPTION '{refusal}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON events "
            "FOR EACH STATEMENT EXECUTE FUNCTION events_append_only()"
        )
