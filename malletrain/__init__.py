"""MalleTrain: train neural networks on the supercomputer nodes that nobody else can fill.

``import malletrain`` is what a training script does, so this package imports nothing but the standard library until asked.
"""

__version__ = "0.1.0"
