# SPDX-License-Identifier: MIT
# What an administrator does with fmhad, in a system that was booted for it (tests/systemd.sh).
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive HOME=/root

say() { echo "systemd: $*"; }
fail() {
    say "FAILED: $*"
    systemctl --no-pager --full status fmhad.socket fmhad.service || true
    journalctl --no-pager -u fmhad -n 30 -o short-monotonic || true
    exit 1
}
# What the service manager holds of the service.
shown() { systemctl show --value -p "$1" fmhad.service; }
# until SECONDS COMMAND...
until_true() {
    local tries=$(($1 * 10))
    shift
    for _ in $(seq "$tries"); do
        ! "$@" >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    return 1
}
as() { runuser -u "$1" -- "${@:2}"; }
logged() { journalctl --no-pager -u fmhad -o cat --since "$since" | grep -q -- "$1"; }
configure() { echo "$1" >/etc/fmhad/fmhad.json; }
is() { [ "$(shown "$1")" = "$2" ]; }
since=$(date "+%F %T")

say "install"
apt-get install -y -qq --no-install-recommends /packages/*.deb >/tmp/log 2>&1 || { cat /tmp/log; fail "apt-get install"; }
for unit in fmhad.socket fmhad.service; do
    systemctl --quiet is-enabled $unit || fail "$unit is not enabled"
    systemctl --quiet is-active $unit || fail "$unit is not active"
done
useradd --create-home --groups fmha alice
useradd --create-home mallory
as alice fmhactl ping >/dev/null || fail "alice gets no answer"
as alice fmhactl verify --cases 20 >/tmp/log || { cat /tmp/log; fail "results are wrong"; }
! as mallory fmhactl ping 2>/tmp/log || fail "mallory is let in"
grep -q EPERM /tmp/log || fail "mallory is not told why: $(cat /tmp/log)"
shown StatusText | grep -q ready || fail "systemd is told '$(shown StatusText)'"
logged "ready on" || fail "the journal has nothing"
[ -n "$(journalctl --no-pager -o cat FMHA_DEVICE=0)" ] || fail "the journal has no fields"

say "sandbox"
for pid in $(systemctl show --value -p MainPID fmhad) $(pgrep -P "$(shown MainPID)"); do
    grep -q "^NoNewPrivs:.1" "/proc/$pid/status" && grep -q "^Seccomp:.2" "/proc/$pid/status" &&
        grep -q "^CapBnd:.0*$" "/proc/$pid/status" || fail "process $pid is not confined"
    ! nsenter -t "$pid" -m touch /usr/written 2>/dev/null || fail "process $pid may write /usr"
    ! nsenter -t "$pid" -m touch /etc/fmhad/written 2>/dev/null || fail "process $pid may write /etc"
    ! nsenter -t "$pid" -m ls /home/alice 2>/dev/null || fail "process $pid sees homes"
done

say "reload"
pid=$(shown MainPID)
configure '{"limits": {"plans_per_connection": 77}, "admin_uids": ['"$(id -u alice)"']}'
systemctl reload fmhad || fail "reload"
has_limit() { fmhactl status --json | grep -q '"plans_per_connection":{"value":77'; }
until_true 10 has_limit || fail "the limit is not taken over"
is MainPID "$pid" || fail "a reload is no restart"
configure '{"log_levle": 1}'
systemctl reload fmhad || true
until_true 10 logged "log_levle" || fail "a wrong configuration is not named"
as alice fmhactl ping >/dev/null || fail "a wrong configuration ended the service"

say "failures"
configure '{}'
worker=$(pgrep -P "$pid" | head -1)
kill -SEGV "$worker"
until_true 10 logged "signal 11" || fail "a worker's end is not logged"
until_true 10 as alice fmhactl verify --cases 2 || fail "no worker after the first"
is MainPID "$pid" || fail "the front ended with a worker"
kill -KILL "$pid"
as alice fmhactl ping >/dev/null || fail "clients do not wait for the next daemon"
until_true 10 is NRestarts 1 || fail "systemd does not restart it"
mkdir -p /etc/systemd/system/fmhad.service.d
printf '[Service]\nWatchdogSec=2\n' >/etc/systemd/system/fmhad.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart fmhad
sleep 4
is NRestarts 0 || fail "the watchdog ends a daemon that is well"
kill -STOP "$(shown MainPID)"
until_true 20 is NRestarts 1 || fail "the watchdog does not end a daemon that hangs"
until_true 10 as alice fmhactl ping || fail "no answer after the watchdog"
rm -r /etc/systemd/system/fmhad.service.d
systemctl daemon-reload

say "configurations"
configure '{"log_levle": 1}'
! fmhad --check 2>/dev/null || fail "--check takes a wrong configuration"
! systemctl restart fmhad 2>/dev/null || fail "a wrong configuration starts"
sleep 2
is ActiveState failed && is ExecMainStatus 78 && is NRestarts 0 || fail "exit code 78 is retried"
# Clients that come meanwhile must not use up what the administrator needs.
for _ in $(seq 8); do ! as alice timeout 2 fmhactl ping --timeout 1 >/dev/null 2>&1 || fail "who answers?"; done
sleep 10 # that long the service manager refuses; to edit a file takes longer
configure '{"devices": [{"backend": "cpu", "cpu_level": "x86_64_v9"}]}'
systemctl start fmhad 2>/dev/null || fail "a daemon without a device that works does not start"
until_true 10 sh -c 'systemctl show --value -p StatusText fmhad | grep -q degraded' || fail "systemd is not told of a degraded start: $(shown StatusText)"
! as alice fmhactl verify --cases 1 >/tmp/log 2>&1 || fail "there is a device"
grep -q "x86_64_v9" /tmp/log || fail "clients are not told why: $(cat /tmp/log)"
configure '{"metrics_socket": "/run/fmhad/metrics/http"}'
systemctl restart fmhad
until_true 10 test -S /run/fmhad/metrics/http || fail "no socket for metrics: $(journalctl --no-pager -u fmhad -n 5 -o cat)"

say "stop, and start by a client"
systemctl stop fmhad.socket fmhad.service 2>/dev/null
is Result success || fail "stopping: $(shown Result)"
[ ! -e /run/fmhad/fmhad.sock ] || fail "the socket is left"
systemctl start fmhad.socket
is ActiveState inactive || fail "the socket starts the service unasked"
as alice fmhactl ping >/dev/null || fail "the socket does not start the service"

say "purge"
apt-get purge -y -qq "fmhad*" "libfmha*" "python3-fmha*" >/tmp/log 2>&1 || { cat /tmp/log; fail "purge"; }
! pgrep -x fmhad-front >/dev/null || fail "the daemon outlives its package"
for left in /usr/bin/fmhad /etc/fmhad /var/lib/fmhad /var/cache/fmhad /run/fmhad /usr/lib/systemd/system/fmhad.service; do
    [ ! -e $left ] || fail "$left is left"
done
getent passwd fmhad >/dev/null || fail "the system user is gone"
say "all well"
