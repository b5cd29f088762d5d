"""A small main scheduler for one machine, and its scavenger.

The cluster is a separate process. The scavenger runs in the daemon. Imports ``trace``.
"""
