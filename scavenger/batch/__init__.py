"""Code that the scavengers of all batch schedulers share: commands, rules, leases as jobs.

Runs in the daemon. Imports :mod:`scavenger.interface` and :mod:`scavenger.horizon`.
"""
