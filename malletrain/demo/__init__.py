"""The demo: the whole system on one machine, with an account of all idle node-seconds. Runs in
the user's terminal and starts its own daemon.
"""
