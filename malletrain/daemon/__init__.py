"""The daemon: the controller's shell on the real clock, with sockets, a store and a main
scheduler.

Runs on the head node.
"""
