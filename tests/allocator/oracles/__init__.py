"""What the solver is checked against: slow ways to the same optimum, for tests and benchmarks."""
