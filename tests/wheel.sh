#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# The Python wheel in a fresh system that has nothing but Python: builds it, installs it with what PyPI has into a virtual
# environment of a new root, runs README's snippets there and compiles a kernel by pip's NVRTC. Needs root, debootstrap, a
# Debian mirror and PyPI; part of nightly.
#
#   tests/wheel.sh [--with-torch]     the snippets of torch and transformers too: some GB of downloads
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
root=$(mktemp -d /tmp/fmhad-wheel-XXXXXX)
chmod 755 "$root"
more=()
[ "${1:-}" != --with-torch ] || more=(torch transformers)

say() { echo "wheel: $*" >&2; }
fail() { say "$*"; exit 1; }

clean() {
    # Not before nothing is mounted there.
    if mountpoint -q "$root/proc"; then umount -R "$root/proc"; fi
    rm -rf --one-file-system "$root"
}
trap clean EXIT

in_root() { chroot "$root" env -i PATH=/venv/bin:/usr/bin:/bin HOME=/tmp "$@"; }

mkdir "$root/wheel"
/usr/bin/python3 -m pip wheel -q --no-deps -w "$root/wheel" ./client/python
wheel=$(basename "$root"/wheel/fmha-*.whl)

debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm "$root" >"$root/wheel/log" ||
    { tail -5 "$root/wheel/log" >&2; fail "debootstrap failed"; }
mount -t proc proc "$root/proc"
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
rm -f "$root"/usr/lib/*/libnettle.so* # apt's: nothing here installs by it
! ls "$root"/usr/lib/*/ | grep -E '^lib(uv|msgpack|cjson|nettle|fmha)' || fail "the root has what the wheel has to bring"

in_root python3 -m venv /venv
in_root pip install -q --disable-pip-version-check "/wheel/$wheel[cuda]" ${more[@]+"${more[@]}"}
in_root python -m fmha --start
native=$(in_root python -c 'import fmha, pathlib; print(pathlib.Path(fmha.__file__).parent / "_native")')
for library in "$root$native"/lib/lib{uv,msgpack,cjson,nettle}*.so*; do
    [ -s "$root$native/licenses/$(basename "$library")" ] || fail "$(basename "$library") comes without its licence"
done

/usr/bin/python3 - client/python/README.md "$root/wheel" <<'SNIPPETS'
import pathlib, re, sys
for n, text in enumerate(re.findall(r"```python\n(.*?)```", pathlib.Path(sys.argv[1]).read_text(), re.S)):
    pathlib.Path(sys.argv[2], f"snippet{n}.py").write_text(text)
SNIPPETS
for snippet in "$root"/wheel/snippet*.py; do
    if grep -q '^import torch' "$snippet" && [ ${#more[@]} -eq 0 ]; then continue; fi
    say "$(basename "$snippet")"
    in_root python "/wheel/$(basename "$snippet")"
done

# The compiler that a private daemon would be told of.
nvrtc=$(in_root python -c 'import fmha._start; print(fmha._start._with_nvrtc({})["compile"]["library_path"])')
bin=$(in_root python -c 'import fmha._start; print(fmha._start.program("fmhactl"))')
in_root "$bin" build --arch sm_90a --profile pytorch --list >"$root/wheel/kernels"
kernel=$(grep -m 1 wgmma "$root/wheel/kernels")
in_root "$bin" build --arch sm_90a --library-path "$nvrtc" --kernel "$kernel" --cache /tmp/cache
say "$wheel works where nothing else is installed"
