"""Adds the tasks of farms."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "tasks",
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("state", sa.String(64), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(255), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("started", sa.Float(53), nullable=True),
        sa.Column("ended", sa.Float(53), nullable=True),
        sa.Column("tail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_tasks_job"),
        sa.PrimaryKeyConstraint("job", "number", name="pk_tasks"),
    )
    op.create_index("ix_tasks_job_state_number", "tasks", ["job", "state", "number"])
