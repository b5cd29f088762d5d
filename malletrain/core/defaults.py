"""The product's defaults, for the core's settings, the site's configuration and the simulator.
Times in seconds. Imports nothing.
"""

T_FWD_S = 120.0
RESCALE_UP_S = 18.0
RESCALE_DOWN_S = 12.0
START_S = 18.0
"""Costs of a rescale before one is measured, from measurements on Summit."""
MAX_RUNNING = 20
TIME_LIMIT_S = 2.0
PRIOR_EXPONENT = 0.9

DEBOUNCE_S = 1.0
ARRIVAL_S = 2.0
"""Leases taken together start within one or two seconds of each other."""
NOTICE_DEBOUNCE_S = 0.3
IDLE_DEBOUNCE_S = 0.1
"""Notices of one preemption come within some tenths of a second (measured on 64 nodes)."""
MIN_INTERVAL_S = 30.0
STARVATION_S = 600.0
TURNS_APART = 12.0
"""A turn lasts as long as the first wait, so a job gets at most one thirteenth of the time from
turns. Their costs and benefits are in docs/allocation.md.
"""
MAX_TRIES = 3
RETRY_WINDOW_S = 3600.0
RELEASE_AFTER_S = 30.0
MIN_HORIZON_S = 0.0
LEASE_WAIT_S = 120.0
REJECTED_S = 300.0
RECLAIM_S = 25.0
RECLAIM_EVERY_S = 60.0
RECLAIM_WAY_S = 5.0
"""Assumed without the main scheduler's cycle, until the first reclaimed node shows the real time.
"""
MIN_CHARGE_S = 0.0
MIN_LEASE_S = 0.0
CHARGE_FACTOR = 1.0
DEADLINE_WEIGHT = 4.0
DEADLINE_AHEAD = 0.9
MAX_LEASES_PER_OWNER = 0

LAYOUT_S = 60.0
PRECISION = 0.05
MIN_MEASURE_S = 5.0
MAX_MEASURE_S = 60.0
MAX_PROFILE_S = 600.0
RESCALE_TIMEOUT_S = 120.0
DONOR_QUIET_S = 60.0
PATIENCE_S = 60.0
MAX_SIZES = 8
KAPPA = 0.5
EVERY_SIZE_UP_TO = 8
OBSERVE_EVERY_S = 30.0
LEASE_PATIENCE_S = 5.0
SILENCE_S = 60.0

SHARES_HALF_LIFE_S = 7 * 86400.0
"""Default half-life of Slurm's fair share."""
SHARES_DOUBLE_AFTER_S = 4 * 3600.0
