"""The site's configuration: keys, units, what is accepted, its reference.

Runs in the daemon and the command line. Imports ``protocol`` at most.
"""
