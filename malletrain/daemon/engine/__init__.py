"""The engine: the daemon's state, its transactions one at a time, what the controller decides in
them, and the rounds of all jobs.

Runs in the daemon.
"""
