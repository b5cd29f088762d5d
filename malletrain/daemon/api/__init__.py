"""The requests of clients: what they may see and change.

Runs in the daemon.
"""
