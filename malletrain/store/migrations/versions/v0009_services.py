"""Adds the values of nodes that lapse, and the measured starts of services."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("values_until", sa.Float(53)))
    column = sa.Column("lasting_values", sa.Text(), nullable=False, server_default=sa.text("'{}'"))
    op.add_column("jobs", column)
    op.create_table(
        "service_starts",
        sa.Column(
            "job",
            sa.String(64),
            sa.ForeignKey("jobs.id", name=op.f("fk_service_starts_job_jobs")),
            nullable=False,
        ),
        sa.Column("node_class", sa.String(255), nullable=False),
        sa.Column("durations", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job", "node_class", name=op.f("pk_service_starts")),
    )
