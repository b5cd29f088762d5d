"""Imported last by a server that forks workers: freezes the objects made so far, so that the
garbage collection of its children does not visit, and thereby copy, every page of them.
"""

import gc

gc.enable()
gc.collect()
gc.freeze()
