"""Output for users: text, tables, live screen. Decides form only; the facts come as
:mod:`malletrain.protocol.views`. Runs in the command line and the demo.
"""
