"""The daemon's memory: tables, rows, migrations.

Runs in the daemon. Imports ``core`` and ``protocol`` at most.
"""
