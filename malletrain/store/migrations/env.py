"""Run by Alembic: applies migrations on the connection that
:func:`malletrain.store.migrations.upgrade` passes.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
