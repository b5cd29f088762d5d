"""Sharded models in live mode: which state moves when the group changes, how it moves, and which
state remains after a loss. Runs in the user's process. See docs/how-state-moves.md.

Decides nothing about rounds (:mod:`malletrain.elastic.membership`) and nothing about the contents
of the state (:mod:`malletrain.training.sharded_state`).
"""
