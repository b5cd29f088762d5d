"""Adds the search of each job for the layout of its nodes, and the layouts that were found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "layout_searches",
        sa.Column(
            "job",
            sa.String(64),
            sa.ForeignKey("jobs.id", name=op.f("fk_layout_searches_job_jobs")),
            nullable=False,
        ),
        sa.Column("node_class", sa.String(255), nullable=False),
        sa.Column("max_processes", sa.Integer(), nullable=False),
        sa.Column("search", sa.Text(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("source", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_layout_searches")),
    )
    op.create_table(
        "layouts",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("node_class", sa.String(255), nullable=False),
        sa.Column("cores", sa.Integer(), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("updated", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_layouts")),
    )
