"""The lease gate: what sudo lets the account of a daemon of several users run as others, in
place of the main scheduler's own commands.

Runs on the head node as the owner of a lease, once for each command. Nothing of the daemon is
believed here: a command gets through only if it asks for, or ends, what a lease is.
"""
