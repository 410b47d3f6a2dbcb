#!/usr/bin/env bash
# How long the README takes on a machine that has nothing: as root on Debian, with debootstrap; needs 3 GB in /tmp.
#     bash .ci/first_run.sh [FOLDER TO SHOW INSIDE, SUCH AS ONE WITH WHEELS]...
# In a new root folder with python3, git and make alone, times a clone with `make demo`, and a clone with `pip install`
# and the README's program. The pip settings of this machine hold there too.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$(mktemp -d /tmp/first-run-XXXXXX)

leave() {
    for folder in "$@" /proc /dev; do umount "$root$folder" 2>/dev/null || true; done
    if grep -q " $root/" /proc/mounts; then  # never remove what is mounted there
        echo "still mounted below $root: unmount it and remove the folder" >&2
    else
        rm -rf --one-file-system "$root" "$root.log"
    fi
}
trap 'leave "$@"' EXIT

debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates bookworm "$root" >"$root.log"
for folder in "$@" /dev; do mkdir -p "$root$folder" && mount --bind "$folder" "$root$folder"; done
mount -t proc proc "$root/proc"
cp /etc/resolv.conf "$root/etc/" && cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
for file in /etc/pip.conf "$HOME/.config/pip/pip.conf"; do
    if [ -f "$file" ]; then mkdir -p "$root$(dirname "$file")" && cp "$file" "$root$file"; fi
done
git clone --quiet --mirror . "$root/lockstep.git"

cat >"$root/steps.sh" <<'STEPS'
set -euo pipefail
cd "$HOME"
SECONDS=0
git clone --quiet /lockstep.git demo
make --silent -C demo demo >demo.log 2>&1 || { tail -n 20 demo.log; exit 1; }
grep 'val/acc' demo.log | tail -n 1
echo "clone and make demo: $SECONDS s"

SECONDS=0
git clone --quiet /lockstep.git library
python3 -m venv env
(cd library && ../env/bin/python -m pip install --quiet --no-warn-script-location --constraint constraints.txt '.[examples]')
sed -n '/^## A complete program/,/^```$/p' library/README.md | sed '1,/^```python$/d; /^```$/d' >program.py
env/bin/python program.py >program.log 2>&1 || { tail -n 20 program.log; exit 1; }
echo "clone, pip install and the README's program: $SECONDS s"
STEPS
variables=$(env | grep '^PIP_' || true)
chroot "$root" env -i HOME=/root PATH=/usr/local/bin:/usr/bin:/bin $variables bash /steps.sh
