"""Connects MalleTrain to the training loops of other libraries: progress reports, and a checkpoint
before a rescale or the loss of a node.

One module per library, imported only by its users: :mod:`malletrain.integrations.transformers`,
:mod:`malletrain.integrations.accelerate`, :mod:`malletrain.integrations.lightning`. Such a job runs
in restart mode; see docs/library-trainers.md for what works with which.
"""
