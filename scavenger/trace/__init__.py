"""Traces: which node was idle when; real ones read, synthetic ones made, both replayed.

Runs anywhere. Imports nothing else of ours.
"""
