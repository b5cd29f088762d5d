"""The script to submit: ``malletrain submit --service --value value.csv serve.py --model M``."""

import sys

from llmserve.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
