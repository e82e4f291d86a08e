# SPDX-License-Identifier: MIT
# A fresh Debian in a folder, with the packages beside it: for tests that install them. Sourced; $packages is
# the folder of .deb files. Needs root, debootstrap and a Debian mirror.

root=$(mktemp -d "/tmp/fmhad-${0##*/}-XXXXXX")
chmod 755 "$root"
daemon=

say() { echo "${0##*/}: $*" >&2; }
fail() { say "$*"; exit 1; }

clean() {
    if [ -n "$daemon" ]; then
        kill "$daemon" || true
        wait "$daemon" || true
    fi
    # Not before nothing is mounted there.
    if mountpoint -q "$root/proc"; then umount -R "$root/proc"; fi
    rm -rf --one-file-system "$root"
}
trap clean EXIT

in_root() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive HOME=/root "$@"; }

# What the packages need of Debian is installed, they themselves lie in /packages. Arguments: other packages.
fresh_root() {
    local suite
    say "a fresh system in $root"
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    debootstrap --variant=minbase "$suite" "$root" >"$root.log" 2>&1 || { tail -5 "$root.log" >&2; fail "debootstrap failed"; }
    rm -f "$root.log"
    rm -f "$root/etc/apt/sources.list" # this system's say the same
    cp /etc/apt/sources.list "$root/etc/apt/" 2>/dev/null || true
    cp /etc/apt/sources.list.d/* "$root/etc/apt/sources.list.d/" 2>/dev/null || true
    cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null || true
    mount -t proc proc "$root/proc"
    mkdir "$root/packages"
    cp "$packages"/*.deb "$root/packages/"
    in_root apt-get update -qq
    in_root sh -c '
        needs=$(apt-get install -s --no-install-recommends "$@" /packages/*.deb | sed -n "s/^Inst \([^ ]*\) .*/\1/p" | grep -v fmha)
        apt-get install -y -qq --no-install-recommends "$@" $needs' sh "$@" \
        >"$root/tmp/log" 2>&1 || { tail -5 "$root/tmp/log" >&2; fail "what the packages need cannot be installed"; }
}
