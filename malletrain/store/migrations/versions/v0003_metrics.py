"""Adds the values of metrics over time. The last value of each stays in the table of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "metric_points",
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("time", sa.Float(53), nullable=False),
        sa.Column("value", sa.Float(53), nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("samples", sa.Float(53), nullable=False),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("job", "name", "number", name="pk_metric_points"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name="fk_metric_points_job"),
    )
