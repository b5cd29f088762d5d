"""The agent, MalleTrain's process on a node: ``python -m malletrain.agent``.

Runs on a leased node. The agent holds one connection to the daemon, starts and stops the launcher
of its job, passes rounds to it, forwards what the workers report and print, and leaves no process
behind. The daemon decides about jobs and membership. The agent imports neither torch nor numpy;
while idle it uses nothing of the node but its own memory.
"""
