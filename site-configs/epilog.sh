#!/bin/sh
# For the main scheduler's epilog on every node, as root (Slurm: Epilog=; PBS: a hook for execjob_end): removes what agents that were
# killed together with everything around them have left in the node's memory. Those of living agents stay, whosever they are.
#
# A folder's name ends with the number of its agent's process, when that began (ticks since boot), and a few letters.
for folder in "${1:-/dev/shm}"/malletrain-mem-*; do
    if [ ! -d "$folder" ] || [ -L "$folder" ]; then continue; fi
    rest=${folder##*/}
    rest=${rest%-*}
    born=${rest##*-}
    rest=${rest%-*}
    pid=${rest##*-}
    case "$pid:$born" in *[!0-9:]* | :* | *:) continue ;; esac
    # The name of a program may hold blanks and brackets; the 22nd field is the 20th after the last bracket.
    began=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | cut -d ' ' -f 20)
    if [ "$began" != "$born" ]; then rm -rf -- "$folder"; fi
done
exit 0
