"""References for the solver: slow algorithms with the same optimum, for tests and benchmarks."""
