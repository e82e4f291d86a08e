#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The Debian packages in a fresh system: installs them into a new root, runs the daemon there by hand and a
# client as another user, upgrades, removes, purges, and looks for what is left. Needs root, debootstrap and
# a Debian mirror; part of nightly.
#
#   tests/packages.sh [FOLDER]     of .deb files; default build/package, which `./dev package` fills
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
packages=${1:-build/package}
. tests/lib/root.sh

install_packages() { in_root sh -c 'apt-get install -y -qq --no-install-recommends --reinstall /packages/*.deb' >"$root/log" 2>&1 || { cat "$root/log" >&2; fail "apt-get install failed"; }; }
# Every file of the system but what its own tools keep changing.
listing() { in_root find / -xdev \( -path /proc -o -path /packages -o -path /var/cache/apt -o -path /var/lib/apt \
    -o -path /var/lib/dpkg -o -path /var/log -o -path /var/cache/ldconfig -o -path /tmp -o -path /log \
    -o -path /var/cache/debconf -o -path /var/lib/systemd -o -path /root \) -prune -o -print | sort; }

start_daemon() {
    in_root sh -c 'printf "{\"socket_group\": \"fmha\", \"devices\": [{\"backend\": \"cpu\", \"threads\": 2}]}" >/tmp/by-hand.json'
    # Not by in_root, whose process would be a shell that waits for the daemon.
    chroot "$root" /usr/bin/fmhad --config /tmp/by-hand.json 2>"$root/tmp/daemon.log" &
    daemon=$!
    for _ in $(seq 100); do
        [ ! -S "$root/run/fmhad/fmhad.sock" ] || return 0
        sleep 0.1
    done
    cat "$root/tmp/daemon.log" >&2
    fail "the daemon made no socket"
}

stop_daemon() {
    kill "$daemon"
    wait "$daemon" || fail "the daemon ended with $?"
    daemon=
}

fresh_root systemd-standalone-sysusers systemd-standalone-tmpfiles
listing >"$root/tmp/before"

say "install"
install_packages
in_root getent passwd fmhad >/dev/null || fail "there is no user fmhad"
in_root getent group fmha >/dev/null || fail "there is no group fmha"
in_root dpkg-query -W -f='${Conffiles}\n' fmhad | grep -q /etc/fmhad/fmhad.json || fail "fmhad.json is no conffile"
in_root fmhad --check || fail "the shipped configuration is wrong"
in_root useradd --create-home --groups fmha alice
in_root useradd --create-home mallory
start_daemon
in_root runuser -u alice -- fmhactl ping >/dev/null || fail "alice gets no answer"
in_root runuser -u alice -- fmhactl verify --cases 20 >"$root/tmp/verified" || fail "results are wrong: $(cat "$root/tmp/verified")"
in_root runuser -u alice -- python3 -c '
import fmha, numpy
q = k = v = numpy.random.default_rng(0).standard_normal((1, 64, 2, 32), dtype=numpy.float32)
scores = numpy.einsum("bqhd,bkhd->bhqk", q, k) / numpy.sqrt(32)
weights = numpy.exp(scores - scores.max(-1, keepdims=True))
expected = numpy.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
assert abs(fmha.attention(q, k, v) - expected).max() < 1e-5' || fail "Python gets no attention"
in_root runuser -u alice -- python3 -c '
import fmha, numpy, time
q = numpy.ones((1, 64, 2, 32), dtype=numpy.float32)
end = time.monotonic() + 10
while time.monotonic() < end:
    fmha.attention(q, q, q)' &
in_root fmhactl top --interval 2 --count 3 >"$root/tmp/top" && wait $! || fail "nobody can be watched"
grep -q "[0-9] .*f\.b\.f32\.h32x32\.b1h2x2\." "$root/tmp/top" || fail "top does not show the work: $(cat "$root/tmp/top")"
! in_root runuser -u mallory -- fmhactl ping 2>"$root/tmp/refused" || fail "mallory is let in"
grep -q "EPERM" "$root/tmp/refused" || fail "mallory is not told why: $(cat "$root/tmp/refused")"
in_root fmhactl build --arch sm_80 --list --filter "hdim_q == 64" >"$root/tmp/list"
[ -s "$root/tmp/list" ] || fail "no kernel sources"
stop_daemon

say "upgrade"
in_root sh -c 'echo "{\"log_level\": \"notice\"}" >/etc/fmhad/fmhad.json; mkdir -p /var/cache/fmhad; echo kept >/var/cache/fmhad/kept; mkdir -p /var/lib/fmhad/tuned; echo kept >/var/lib/fmhad/tuned/kept'
install_packages
in_root grep -q notice /etc/fmhad/fmhad.json || fail "the upgrade took the administrator's configuration"
in_root test -e /var/cache/fmhad/kept -a -e /var/lib/fmhad/tuned/kept || fail "the upgrade took the state"
start_daemon
in_root runuser -u alice -- fmhactl ping >/dev/null || fail "no answer after the upgrade"
stop_daemon

say "remove"
ours=$(cd "$packages" && for file in *.deb; do dpkg-deb -f "$file" Package; done)
in_root apt-get remove -y -qq $ours >/dev/null
in_root test -e /etc/fmhad/fmhad.json -a -e /var/cache/fmhad/kept || fail "remove took what only purge takes"
! in_root test -e /usr/bin/fmhad || fail "remove left the program"

say "purge"
in_root apt-get purge -y -qq fmhad >/dev/null
in_root dpkg-query -W -f='${Package} ${Status}\n' | grep -E "^(lib)?fmha" | grep -v "not-installed" && fail "packages are left"
in_root userdel --remove alice 2>/dev/null
in_root userdel --remove mallory 2>/dev/null
listing >"$root/tmp/after"
# useradd leaves its backups, and the system user stays: its number may own files elsewhere.
left=$(comm -13 "$root/tmp/before" "$root/tmp/after" | grep -v '^/etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\)-$' || true)
[ -z "$left" ] || fail "left behind:
$left"
in_root getent passwd fmhad >/dev/null || fail "the system user is gone"
say "all well: nothing left but the system user"
