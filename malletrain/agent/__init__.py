"""MalleTrain's process on a leased node: ``python -m malletrain.agent``.

The agent holds one connection to the daemon, starts and stops the launcher of the job it is given,
passes rounds to it, forwards what the workers report and print, and leaves no process behind. It
decides nothing about jobs or membership: the daemon does. It imports neither torch nor numpy; an
idle agent holds nothing of the node but its own memory.
"""
