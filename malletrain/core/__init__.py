"""Decides which job runs on which nodes and which leases are taken.

Pure: no I/O, no clock, no threads. Imports ``protocol``, ``jpa``, ``allocator``, and of
``scavenger`` lists of hosts, back-offs and forecasts of gaps.
"""
