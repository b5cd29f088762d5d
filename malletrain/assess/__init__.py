"""Estimates the yield of a machine from its own accounting: its gaps, what MalleTrain would harvest
in them, and a report. Runs in the command line, without a daemon.
"""
