"""How the product looks to a person: text, tables, live screen. Decides form only; facts come as
:mod:`malletrain.protocol.views`.

Runs where a person looks: in the command line and the demo.
"""
