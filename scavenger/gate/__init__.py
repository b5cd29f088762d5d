"""The lease gate: the command that sudo lets the account of a multi-user daemon run as other users,
instead of the main scheduler's own commands.

Runs on the head node as the owner of a lease, once per command. It does not trust the daemon: a
command is accepted only if it requests or ends a lease.
"""
