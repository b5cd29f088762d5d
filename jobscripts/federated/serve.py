"""The process of one node: submit this with ``malletrain submit --service``."""

import sys

from fedcase.node import main

sys.exit(main())
