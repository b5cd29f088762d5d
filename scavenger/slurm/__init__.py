"""Gaps and leases of a Slurm.

Runs in the daemon. Imports ``batch``.
"""
