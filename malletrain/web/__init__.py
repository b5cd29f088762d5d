"""The page in the browser and its API. Runs where a user starts ``malletrain web``, with that
user's rights: it sends the same requests to the daemon as the command line, and shows the
same data. Decides which requests are admitted and how often the daemon is polled; nothing about
jobs.
"""
