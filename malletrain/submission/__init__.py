"""A job as its owner describes it, checked on the submitting machine.

Runs where a job is submitted. Imports ``identity``, ``protocol`` and the allocator's curves.
"""
