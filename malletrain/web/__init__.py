"""The page in the browser and its API. Runs where somebody types ``malletrain web``, with that
user's rights: it asks the daemon what the command line asks, and shows what the command line shows.
Decides who is let in and how often the daemon is asked; nothing about jobs.
"""
