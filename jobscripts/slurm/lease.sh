#!/bin/sh
# The batch script of a lease: one node of Slurm, on which MalleTrain's agent runs until Slurm wants the node back.
#
# The line that stands alone below is replaced by the lease's environment and its command ("set -- COMMAND ..."). A site may use a copy
# of this file with what its nodes need first, such as modules ([scheduler.slurm] script): keep that line, and end with exec, so that
# Slurm's signal reaches the agent and no shell is left between them.
#MALLETRAIN-LEASE
export MALLETRAIN_NODE="${SLURMD_NODENAME:?this script runs in a Slurm job}${MALLETRAIN_SLOT:+/$MALLETRAIN_SLOT}"
# As many processes a node as Slurm gave the lease GPUs, unless a job says otherwise.
if [ -n "$SLURM_GPUS_ON_NODE" ]; then export MALLETRAIN_GPUS="$SLURM_GPUS_ON_NODE"; fi
# What describes this job's own steps would mislead srun and sbatch in the jobs that run here.
unset SLURM_JOB_NAME SBATCH_EXPORT SLURM_EXPORT_ENV
if [ -n "$MALLETRAIN_AS_STEP" ]; then
    # Without SlurmctldParameters=preempt_send_user_signal a preempted batch script hears nothing until its grace time is over; the tasks
    # of a step are told at once.
    exec srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none --mem=0 --input=none --unbuffered \
        --quiet --export=ALL "$@"
fi
exec "$@"
