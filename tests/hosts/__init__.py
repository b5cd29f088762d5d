"""MalleTrain on several hosts of their own, and what a first day on such hosts showed.

Where each finding of that day is tested:

* the head announces an address that its nodes reach: ``test_sites.py`` (the short form),
  ``tests/malletrain/daemon/test_advertise.py`` (also IPv6);
* a lease whose agent never reports is cancelled: ``test_sites.py``,
  ``tests/malletrain/daemon/test_polls.py``;
* gloo's address, unknown names, ways that are blocked: ``test_fabric.py``;
* what of a job listens to strangers: ``test_fabric.py``, ``test_users.py``,
  ``tests/malletrain/launch/test_round_store.py``, ``tests/malletrain/elastic/test_strangers.py``;
* the head's own trouble: ``test_sites.py``, ``test_exact.py``;
* leases leave nodes that drain or are reserved: ``tests/slurm/test_leases.py``;
* a directory that another user has taken: ``test_sites.py``, ``test_users.py``,
  ``tests/malletrain/agent/test_run_dir.py``;
* a main job without a daemon, or while training starts: ``test_main_jobs.py``,
  ``tests/malletrain/agent/test_leaving.py``;
* nodes unfit for one user, users who are refused:
  ``tests/malletrain/daemon/test_other_users_agents.py``; a failed poll is said once:
  ``test_main_jobs.py``; an admin's scancel: ``tests/slurm/test_scancel.py``;
* requests to the controller: ``tests/scavenger/batch/test_calls.py``.
"""
