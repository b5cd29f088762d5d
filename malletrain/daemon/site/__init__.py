"""What the daemon finds where it runs: configuration, clock, process, database, main scheduler;
and where it reports: log, audit log, metrics.
"""
