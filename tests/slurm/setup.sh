#!/usr/bin/env bash
# Installs what tests/slurm needs (SLURM's daemons and munge) where it is missing: Debian or Ubuntu, as root.
# The tests start the daemons themselves, on ports and in folders of their own, and stop them again.
set -euo pipefail
needed=(munged slurmctld slurmd sbatch srun scontrol)
export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for name in "${needed[@]}"; do
    command -v "$name" >/dev/null || missing+=("$name")
done
((${#missing[@]})) || exit 0
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]}: install slurm-wlm and munge" >&2
    exit 1
fi
# Packages would start their daemons with settings that are not there: a policy says no, unless the machine has one.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
