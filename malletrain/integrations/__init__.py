"""MalleTrain in the training loops of other libraries: progress, and a checkpoint before the job is
moved or its node is taken.

One module a library, imported only by who uses it: :mod:`malletrain.integrations.transformers`,
:mod:`malletrain.integrations.accelerate`, :mod:`malletrain.integrations.lightning`. Such a job runs
in restart mode; see docs/live-mode.md for what works with which.
"""
