"""Adds to each observation where the time of the steps went."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    column = sa.Column("step_times", sa.Text(), nullable=False, server_default=sa.text("'{}'"))
    op.add_column("observations", column)
