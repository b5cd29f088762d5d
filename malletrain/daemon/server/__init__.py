"""The socket: who is admitted, who waits, and which handler gets a message.

Runs in the daemon.
"""
