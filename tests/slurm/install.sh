#!/bin/sh
# Installs the packages of a real Slurm for the tests marked "slurm", sudo and nft for tests/hosts, Charliecloud for tests/containers,
# Chromium with its driver for the test of the page in a browser, Ruby for that of the app of Open OnDemand, Prometheus for that of dashboards and alerts, PostgreSQL for that of the
# store, and Redis for that of gradients through a store, where that is possible: on a system with apt, as root. Where they are installed, or cannot be, it does nothing; their tests
# then say why they are skipped, and those of containers why they fail. No service is started or enabled.
#
# Never the packages named *-emulator: they replace the daemons by ones that only pretend.
set -u
PATH=$PATH:/usr/sbin:/sbin
have() { command -v "$1" >/dev/null 2>&1; }
slurm= hosts= charliecloud= chromium= ruby= prometheus= postgresql= redis=
have slurmctld && have slurmdbd && have mariadbd || slurm="slurm-wlm slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge \
    slurmdbd slurm-wlm-mysql-plugin mariadb-server-core"
have sudo && have nft || hosts="sudo nftables"
have ch-run || charliecloud=charliecloud-runtime
have chromium && have chromedriver || chromium="chromium chromium-driver"
have ruby || ruby=ruby
have prometheus && have promtool || prometheus=prometheus
ls /usr/lib/postgresql/*/bin/pg_ctl >/dev/null 2>&1 || postgresql=postgresql
have redis-server || redis=redis-server
[ -n "$slurm$hosts$charliecloud$chromium$ruby$prometheus$postgresql$redis" ] || exit 0
if [ "$(id -u)" != 0 ] || ! have apt-get; then
    echo "Not installed, and not to be installed from here (that needs root and apt): $slurm $hosts $charliecloud $chromium $ruby $prometheus $postgresql $redis." >&2
    echo "Without Slurm, sudo, nft, Chromium, Ruby, Prometheus, PostgreSQL or Redis their tests are skipped; without Charliecloud those of containers fail." >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# Package scripts ask this one whether they may start services (invoke-rc.d(8)); 101 means no.
policy=/usr/sbin/policy-rc.d
made_policy=
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && made_policy=yes
fi
log=$(mktemp)
install() {
    apt-get install -y --no-install-recommends "$@" >>"$log" 2>&1
}
for packages in "$slurm" "$hosts" "$charliecloud" "$chromium" "$ruby" "$prometheus" "$postgresql" "$redis"; do
    [ -n "$packages" ] || continue
    # shellcheck disable=SC2086 # one word for each package
    if ! install $packages && { apt-get update >>"$log" 2>&1; ! install $packages; }; then
        echo "These could not be installed: $packages. The last lines of apt-get:" >&2
        tail -5 "$log" >&2
    fi
done
[ -n "$made_policy" ] && rm -f "$policy"
rm -f "$log"
exit 0
