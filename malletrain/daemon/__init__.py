"""The daemon: runs the controller on the real clock, with sockets, a store and a main scheduler.

It runs on the head node. Its rooms import downwards only: ``main`` and ``compose``, ``server``,
``api``, ``nodes``, ``leases``, ``engine``, ``jobs``, ``site``.
"""
