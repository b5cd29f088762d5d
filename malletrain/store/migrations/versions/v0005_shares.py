"""Adds the service to each party, and the accounts of leases and jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "service",
        sa.Column("party", sa.String(255), nullable=False),
        sa.Column("served", sa.Float(53), nullable=False),
        sa.Column("due", sa.Float(53), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("updated", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("party", name="pk_service"),
    )
    for table in ("jobs", "leases"):
        account = sa.Column("account", sa.String(255), nullable=False, server_default=sa.text("''"))
        op.add_column(table, account)
