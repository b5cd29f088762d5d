"""A small main scheduler for one machine, and its scavenger.

The cluster is a process of its own; the scavenger runs in the daemon. Imports ``trace``.
"""
