"""What is stored and measured of each job.

Runs in the daemon.
"""
