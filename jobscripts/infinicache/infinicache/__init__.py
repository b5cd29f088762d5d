"""A cache for large objects in the memory of idle nodes, after InfiniCache (Wang et al., FAST
2020).
"""

from infinicache.client import AsyncCache
from infinicache.codec import Code
from infinicache.node import CacheNode
from infinicache.objects import CacheError, Receipt, Stat, TooLarge, Unavailable
from infinicache.sync import Cache

__version__ = "0.1.0"
__all__ = [
    "AsyncCache",
    "Cache",
    "CacheError",
    "CacheNode",
    "Code",
    "Receipt",
    "Stat",
    "TooLarge",
    "Unavailable",
    "__version__",
]
