#!/bin/sh
# Runs on a worker as a job of its own: a Python, and the packages, as of one day. What is there already is kept.
#
#   setup.sh BUNDLE REQUIREMENT PYTHON UV DAY
#
# uv brings the Python: the image's own is too old, apt's may be locked by upgrades for minutes after a VM starts, and
# needs root and a foreign archive for this version; uv needs neither, and gives every worker the same build.
set -eu
bundle=$1 requirement=$2 python=$3 uv=$4 day=$5
root=$HOME/grpojax
export UV_EXCLUDE_NEWER="${day}T00:00:00Z" UV_PYTHON_INSTALL_DIR="$root/python" UV_CACHE_DIR="$root/cache"

case $("$root/bin/uv" --version 2>/dev/null || true) in
"uv $uv" | "uv $uv "*) ;;
*)
    curl -LsSf --retry 5 --connect-timeout 20 "https://astral.sh/uv/$uv/install.sh" -o "$root/uv.sh"
    UV_INSTALL_DIR="$root/bin" UV_NO_MODIFY_PATH=1 sh "$root/uv.sh"
    ;;
esac

uv() { "$root/bin/uv" "$@"; }

version=$("$root/venv/bin/python" -c 'import platform; print(platform.python_version())' 2>/dev/null || true)
case $version in
"$python" | "$python".*) ;;
*) uv venv --clear --python "$python" "$root/venv" ;;
esac
cd "$root/bundles/$bundle"
uv pip install --python "$root/venv/bin/python" --reinstall-package grpojax "$requirement"
"$root/venv/bin/python" -c 'import grpojax, jax; print("grpojax", grpojax.__file__, "jax", jax.__version__)'

# One word that is the same on every worker that has the same packages.
uv pip freeze --python "$root/venv/bin/python" | sed 's/^grpojax.*/grpojax/' >packages.txt
cksum <packages.txt | tr ' ' - >packages
ln -sfn "bundles/$bundle" "$root/current"
for other in "$root/bundles"/*; do
    [ "$other" = "$root/bundles/$bundle" ] || rm -rf "$other"
done
