"""The scripts of the zoo. Each runs in worker processes that a driver starts."""
