"""The site's configuration: its keys, units, valid values and reference.

Runs in the daemon and the command line. Imports ``protocol`` at most.
"""
