"""Gaps and leases: finds the nodes that the main scheduler cannot fill, takes leases on them and
gives them back.

Runs in the daemon, and by itself as ``python -m``.
"""
