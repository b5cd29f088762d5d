"""The leases: requests to the main scheduler, its answers, and nodes that leave.

Runs in the daemon.
"""
