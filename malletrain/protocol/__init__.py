"""What the parts of MalleTrain say to each other: messages, channels, views, names of variables.

Runs everywhere. Imports nothing of ours.
"""
