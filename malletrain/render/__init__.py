"""How the product looks to a person: text, tables, live screen. Decides form only; facts come as
:mod:`malletrain.protocol.views`.
"""
