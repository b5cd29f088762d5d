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
# A slot has the GPUs that PBS gives it. Where PBS does not name them (CUDA_VISIBLE_DEVICES, set by its hook pbs_cgroups) and the job sees
# more than its own, it could use those of other jobs, so it does not start.
if [ -n "$MALLETRAIN_SLOT" ] && [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
  visible=0
  for device in /dev/nvidia[0-9]*; do if [ -e "$device" ]; then visible=$((visible + 1)); fi; done
  if [ "$visible" -gt "${MALLETRAIN_GPUS:-0}" ]; then
    echo "PBS gave this lease ${MALLETRAIN_GPUS:-0} GPUs but it sees $visible, and CUDA_VISIBLE_DEVICES is not set: enable the hook pbs_cgroups."
    exit 1
  fi
fi
# The agent takes the place of this shell and of the one above it (shell.sh), so that PBS's SIGTERM reaches it and PBS sees it end.
exec "$@"
