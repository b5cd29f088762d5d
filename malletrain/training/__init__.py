"""The library of a training script: progress, samples, snapshots.

Runs in the user's process. Imports ``protocol`` only; never the daemon's parts, sqlalchemy or
pydantic.
"""
