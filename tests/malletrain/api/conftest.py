"""The command line and a fake daemon, as in the tests of the command line."""

from tests.malletrain.cli.conftest import daemon as daemon
from tests.malletrain.cli.conftest import run as run
