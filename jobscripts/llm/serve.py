"""Runs a replica of a language model on each node of a service. It is the script to submit:
``malletrain submit --service --value value.csv serve.py --model M``.
"""

import sys

from llmserve.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
