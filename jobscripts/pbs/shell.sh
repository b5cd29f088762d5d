#!/bin/sh -l
# The shell of a lease's PBS job (qsub -S): becomes the job script, so that the agent leads the job's session. Under a plain shell the
# shell is the leader: it ends at PBS's SIGTERM at once, and MoM sees that the agent has left as well only when it looks again, which
# takes it 10 s (OpenPBS 23.06).
#
# MoM writes the script's name to the shell's standard input, behind "cd DIRECTORY;" where the job has a sandbox of its own.
read -r line || exit
case $line in
    *\;*) eval "${line%;*}" || exit ;;
esac
exec "${line##*;}"
