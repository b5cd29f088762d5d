"""Snapshots in the memory of the nodes. Runs on leased nodes, in agents, launchers and workers.

Decides where snapshots are stored (a folder of the agent in shared memory), how many bytes they may
take, and how they get to another node of the same job. :mod:`malletrain.training` decides their
content, and which one is restored.
"""
