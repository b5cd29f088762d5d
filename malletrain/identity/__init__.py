"""Identities: keys, users, the state directory.

Runs in the daemon and in its clients. Imports ``protocol`` at most.
"""
