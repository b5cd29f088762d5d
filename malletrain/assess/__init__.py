"""What a machine would yield, from its own accounting: its gaps, what MalleTrain would harvest in
them, and a report to read.

Runs where a person asks for it, without a daemon.
"""
