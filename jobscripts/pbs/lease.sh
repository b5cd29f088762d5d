#!/bin/sh
# The batch script of a lease: one host of PBS, on which MalleTrain's agent runs until PBS wants the host back.
#
# The line that stands alone below is replaced by the lease's environment and its command ("set -- COMMAND ..."). A site may use a copy
# of this file with what its nodes need first, such as modules or #PBS lines ([scheduler.pbs] script): keep that line, and end with exec,
# so that no shell is left between PBS's signals and the agent.
#MALLETRAIN-LEASE
# PBS would copy its own output file somewhere when the job ends; what is worth keeping is written here and now.
exec >>"${MALLETRAIN_OUTPUT:-/dev/null}" 2>&1 </dev/null
: "${PBS_JOBID:?this script runs in a PBS job}"
cd / || exit
# The agent takes the place of this shell and of the one above it (shell.sh), so that PBS's SIGTERM reaches it and PBS sees it end.
exec "$@"
