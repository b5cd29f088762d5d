"""Gaps and leases of OpenPBS and PBS Professional.

Runs in the daemon. Imports ``batch``.
"""
