"""The demo: the main job end to end on one machine, with an account of where every idle node-second
went.

Runs on one machine, with a daemon of its own.
"""
