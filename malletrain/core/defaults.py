"""The defaults of settings that the command line of the simulator shows: commands import only what
is light (:mod:`malletrain.cli`). The other defaults are in :mod:`malletrain.core.settings`. Times
in seconds. Imports nothing.
"""

T_FWD_S = 120.0
RESCALE_UP_S = 18.0
RESCALE_DOWN_S = 12.0
START_S = 18.0
"""Costs of a rescale before one is measured, from measurements on Summit."""
MAX_RUNNING = 20
STARVATION_S = 600.0
