"""The daemon's database: tables, rows, migrations.

Runs in the daemon. Imports ``core`` and ``protocol`` at most.
"""
