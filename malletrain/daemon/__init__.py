"""The daemon: runs the controller on the real clock, with sockets, a store and a main scheduler.

It runs on the head node.
"""
