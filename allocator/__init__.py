"""How many nodes each malleable job gets, and which: bids and nodes in, plan out. Pure functions over HiGHS."""
