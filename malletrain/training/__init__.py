"""Library for training scripts: progress reports, samplers, snapshots.

Runs in the user's process. Imports ``protocol`` only; never the daemon's modules, sqlalchemy or
pydantic.
"""
