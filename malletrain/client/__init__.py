"""The way to a daemon: its address, one socket, the operations it knows.

Runs wherever somebody asks a daemon something: in the command line, in :mod:`malletrain.api`.
Decides nothing about jobs.
"""

from malletrain.client.connection import Connection as Connection
from malletrain.client.errors import ClientError as ClientError
from malletrain.client.errors import Unreachable as Unreachable
