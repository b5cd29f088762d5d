"""The script to submit: ``malletrain submit --service --value value.csv serve.py --memory 8G``."""

import sys

from infinicache.service import main

sys.exit(main())
