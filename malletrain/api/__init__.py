"""MalleTrain from Python: ``from malletrain import Client``.

Runs in a user's Python: a script, a notebook, another program. Connects to the daemon like the
command line, with the same key and the same rights; decides nothing about jobs.
"""
