"""The agent, MalleTrain's process on a node: ``python -m malletrain.agent``.

Runs on a leased node. The agent holds one connection to the daemon, starts and stops the launcher
of the job it is given, passes rounds to it, forwards what the workers report and print, and leaves
no process behind. It decides nothing about jobs or membership: the daemon does. It imports neither
torch nor numpy; an idle agent holds nothing of the node but its own memory.
"""
