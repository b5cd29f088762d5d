"""Authenticated connections between processes of one user: requests with large bodies over TCP.
Runs on leased nodes, in launchers and workers, and in clients of InfiniCache.

Decides the form of messages, how both ends prove that they have the key, and what a lost connection
means for its requests. What is requested is up to the user: the data cache
(:mod:`malletrain.datacache`) and InfiniCache (``jobscripts/infinicache``).
"""
