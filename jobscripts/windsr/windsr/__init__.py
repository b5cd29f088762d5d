"""WindSR: diffusion super-resolution of wind speed with data assimilation, trained and sampled as
malleable jobs of MalleTrain.

Rooms, from the bottom up: ``fields`` (what a wind field is, units), ``grids`` (regridding, block
means, tiles), ``datasets``, ``hdf5``, ``readers`` and ``synthetic`` (where fields come from),
``presets``, ``networks``, ``patches`` (what a training sample is), ``method`` (what all ways to a
fine field share), ``regression`` and ``diffusion`` (the ways), ``methods`` (their names), ``whole``
(whole fields, a day left out), ``assimilate``, ``train`` and ``queue`` (the two malleable jobs),
``evaluate`` and ``verification``, ``output``, ``pictures``, ``cli``.
"""

__version__ = "0.1.0"


class WindsrError(Exception):
    """An error that the user can correct; the message is a sentence for the command line."""
