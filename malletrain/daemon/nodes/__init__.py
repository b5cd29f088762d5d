"""The leased nodes and their agents: messages, work, links, and what is wrong with them.

Runs in the daemon.
"""
