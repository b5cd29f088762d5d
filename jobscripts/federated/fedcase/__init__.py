"""Federated rounds of simulated clients on idle nodes, with Flower.

Decides which clients train in a round and on which node, which of a client's samples are kept in
memory, and when a round counts. A round counts once its state is saved; an unfinished round is made
again. The decisions are pure; :mod:`fedcase.strategy` carries them out in Flower.
"""

__version__ = "0.1.0"
