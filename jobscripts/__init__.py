"""Batch scripts of the leases, and the example malleable jobs."""
