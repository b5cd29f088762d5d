"""State in the memory of the nodes: runs on leased nodes, in agents, launchers and workers.

Decides where it lies (a folder of the agent's in shared memory), how much of it there may be, and
how it gets to another node of the same job. What is in it, and which of it is restored, is
:mod:`malletrain.training`'s.
"""
