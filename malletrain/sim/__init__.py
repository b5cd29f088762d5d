"""The simulator: the controller's second shell, with a virtual clock, a trace of idle nodes and
model jobs.

It runs on any machine and imports nothing of the daemon.
"""
