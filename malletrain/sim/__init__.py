"""The simulator: the controller's second shell, with a virtual clock, a trace of idle nodes and
model jobs.

Runs wherever a person asks for it; imports nothing of the daemon.
"""
