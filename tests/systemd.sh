#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The packages under a real systemd: a fresh system is booted in a container, and what an administrator does
# with the service is done there (tests/lib/administrator.sh). Needs root, debootstrap, systemd-nspawn and a
# Debian mirror; part of nightly.
#
#   tests/systemd.sh [FOLDER]     of .deb files; default build/package, which `./dev package` fills
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
packages=${1:-build/package}
. tests/lib/root.sh

fresh_root systemd systemd-sysv dbus procps util-linux
cp tests/lib/administrator.sh "$root/"
cat >"$root/etc/systemd/system/administrator.service" <<'UNIT'
[Service]
Type=oneshot
ExecStart=/bin/bash /administrator.sh
StandardOutput=file:/log
StandardError=file:/log
ExecStopPost=/bin/sh -c 'exec /bin/systemctl exit "$EXIT_STATUS"'
TimeoutStartSec=300
[Install]
WantedBy=multi-user.target
UNIT
in_root systemctl --quiet enable administrator.service
umount -R "$root/proc"

say "boot"
# It ends with what the administrator ends with.
status=0
timeout 400 systemd-nspawn --quiet -D "$root" --boot --register=no --keep-unit --console=pipe \
    </dev/null >"$root.boot" 2>&1 || status=$?
cat "$root/log" >&2 || cat "$root.boot" >&2
rm -f "$root.boot"
[ "$status" -eq 0 ] || fail "failed under systemd"
