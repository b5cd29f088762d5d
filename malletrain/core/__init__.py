"""Decides which job runs on which nodes and which leases are taken.

Pure: no I/O, no clock, no threads. Imports ``allocator`` and ``jpa``, nothing else of ours.
"""
