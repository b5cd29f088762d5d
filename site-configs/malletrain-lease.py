#!/opt/malletrain/bin/python -I
"""What sudo lets the daemon's account run as others: it submits and ends leases, and nothing else.

Copy to /usr/local/sbin/malletrain-lease (root's, mode 0755). The first line names the Python of
MalleTrain, which must be root's too; with -I neither variables nor files of users are read by it.
malletrain-lease.conf and sudoers.conf beside this file belong to it; docs/several-users.md.
"""

import sys

from scavenger.gate.main import main

sys.exit(main(sys.argv[1:]))
