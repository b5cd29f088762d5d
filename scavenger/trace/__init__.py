"""Traces of idle nodes over time: reads real ones, generates synthetic ones, replays both.

Runs anywhere. Imports no other package of this repository.
"""
