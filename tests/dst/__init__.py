"""Deterministic simulation testing: a whole site in one process, from one seed.

The daemon with its store and every agent run as they are, as tasks of one event loop whose clock is
virtual (:mod:`tests.dst.loop`). What is around them is a model: the network, the main scheduler, the
nodes with launchers and workers, the users. Everything that is left to chance is drawn from the
seed; nothing waits, nothing is a thread or a socket. The same seed is the same day, to the last
message. What is modelled and what is not: docs/simulation-testing.md.
"""
