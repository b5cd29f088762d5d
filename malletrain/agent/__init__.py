"""The agent, MalleTrain's process on a leased node: ``python -m malletrain.agent``.

It runs on the node, one process per lease. It has one connection to the daemon, starts and stops
the launcher of its job, passes rounds to it, forwards the reports and the output of the workers,
and leaves no process behind. The daemon decides about jobs and membership. The agent imports
neither torch nor numpy. While idle it uses no resource of the node except its own memory.
"""
