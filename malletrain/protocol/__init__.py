"""The protocol between the parts of MalleTrain: messages, channels, views, environment variables.

Runs everywhere. Imports no other package of MalleTrain.
"""
