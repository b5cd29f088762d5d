"""Measurements of the product, separate from its tests: every script prints JSON and a table."""
