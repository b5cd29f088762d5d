"""The demo: the whole system on one machine, with an account of all idle node-seconds. Starts its
own daemon.
"""
