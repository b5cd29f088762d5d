"""Small scripts as people write them, each tried with a change of nodes at every boundary. Runs in
the tests and as ``python -m tests.zoo``.
"""
