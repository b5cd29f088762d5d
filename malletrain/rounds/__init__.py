"""Decides how one job gets from one set of nodes to another.

Pure: no I/O, no clock, no threads. Imports ``protocol``, nothing else of ours.
"""
