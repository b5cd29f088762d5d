"""Imported last by a server that forks workers: what it has made so far is left alone by the
garbage collection of its children, which would copy every page of it.
"""

import gc

gc.collect()
gc.freeze()
