"""One file a schema version: ``v<revision>_<word>.py``."""
