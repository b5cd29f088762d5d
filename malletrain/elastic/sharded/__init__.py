"""Sharded models in live mode: what moves when the group changes, how, and what is left after a
loss. Runs in the user's process. See docs/how-state-moves.md.

Decides nothing about rounds (:mod:`malletrain.elastic.membership`) and nothing about what a state
is (:mod:`malletrain.training.sharded_state`).
"""
