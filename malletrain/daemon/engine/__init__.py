"""The core: one transaction at a time, the state that it works on, and the rounds of all jobs.

Runs in the daemon.
"""
