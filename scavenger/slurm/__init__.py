"""Gaps and leases of Slurm.

Runs in the daemon. Imports ``batch``.
"""
