"""Adds the goals of jobs (deadline, budget, work, charges) and the past numbers of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

ID = sa.String(64)
REAL = sa.Float(53)


def upgrade() -> None:
    op.create_table(
        "goals",
        sa.Column("job", ID, nullable=False),
        sa.Column("deadline", REAL),
        sa.Column("budget_s", REAL),
        sa.Column("work", REAL),
        sa.Column("stated", sa.Integer, nullable=False),
        sa.Column("charged_s", REAL, nullable=False),
        sa.Column("charged_at", REAL),
        sa.Column("standing", ID, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_goals_job_jobs"),
        sa.PrimaryKeyConstraint("job", name="pk_goals"),
    )
    op.create_table(
        "node_history",
        sa.Column("began", REAL, nullable=False),
        sa.Column("node_class", sa.String(255), nullable=False),
        sa.Column("nodes", REAL, nullable=False),
        sa.PrimaryKeyConstraint("began", "node_class", name="pk_node_history"),
    )
