"""The connection to a daemon: its address, one socket, the operations.

Runs in the clients of a daemon: the command line and :mod:`malletrain.api`.
Decides nothing about jobs.
"""

from malletrain.client.connection import Connection as Connection
from malletrain.client.errors import ClientError as ClientError
from malletrain.client.errors import Unreachable as Unreachable
