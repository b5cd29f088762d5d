"""Training data in the memory of a job's nodes. Runs in the user's process, in its loader workers,
and in the launcher of each node, which serves the other nodes.

Decides which node owns a sample, which samples are kept, how they are stored in shared memory, and
which are fetched before they are needed. Results never depend on it: any part of it may vanish at
any time, and a sample that is not found is read from the data set.
"""
