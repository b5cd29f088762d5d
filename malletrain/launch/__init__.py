"""Starts, watches and stops the workers of one job on one node.

Runs on the node, one process per job. Imports ``training`` and ``protocol``.
"""
