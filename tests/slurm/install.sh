#!/bin/sh
# Installs the packages of a real Slurm for the tests marked "slurm", where that is possible: on a system with apt, as root. Where Slurm
# is installed, or cannot be, it does nothing; the tests then say why they are skipped. No service is started or enabled.
#
# Never the packages named *-emulator: they replace the daemons by ones that only pretend.
set -u
PATH=$PATH:/usr/sbin:/sbin
have() { command -v "$1" >/dev/null 2>&1; }
if have slurmctld && have slurmdbd && have mariadbd; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! have apt-get; then
    echo "Slurm, or its accounting with a database, is not installed and cannot be installed from here (that needs root and apt); its tests will be skipped." >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# Package scripts ask this one whether they may start services (invoke-rc.d(8)); 101 means no.
policy=/usr/sbin/policy-rc.d
made_policy=
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && made_policy=yes
fi
install() {
    apt-get install -y --no-install-recommends slurm-wlm slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge \
        slurmdbd slurm-wlm-mysql-plugin mariadb-server-core
}
log=$(mktemp)
install >"$log" 2>&1 || { apt-get update >>"$log" 2>&1; install >>"$log" 2>&1; }
status=$?
[ -n "$made_policy" ] && rm -f "$policy"
if [ $status -ne 0 ]; then
    echo "Slurm could not be installed; its tests will be skipped. The last lines of apt-get:" >&2
    tail -5 "$log" >&2
fi
rm -f "$log"
exit 0
