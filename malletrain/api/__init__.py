"""MalleTrain from Python: ``from malletrain import Client``.

Runs where a person runs Python: a script, a notebook, another program. Speaks to the daemon as the
command line does, with the same key and the same rights; decides nothing about jobs.
"""
