"""WindSR: diffusion super-resolution of wind speed with data assimilation, trained and sampled as
malleable jobs of MalleTrain.

Rooms, from the bottom up: ``fields`` (what a wind field is, units), ``readers`` and ``synthetic``
(where fields come from), ``grids`` (regridding, block means, tiles), ``presets``, ``networks``,
``patches`` (what a training sample is), ``methods`` (WindSR and the baselines behind one
interface), ``train`` and ``queue`` (the two malleable jobs), ``assimilate``, ``evaluate``,
``output``, ``pictures``, ``cli``.
"""

__version__ = "0.1.0"


class WindsrError(Exception):
    """Something the user can mend; the message is a sentence for the command line."""
