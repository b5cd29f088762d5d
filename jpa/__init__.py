"""Job profiling advisor: scaling curves and the inverse-order profiling plan. Pure functions."""
