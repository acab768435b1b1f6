#!/usr/bin/env bash
# Makes .cache/regression/env, in which upstream's code and tests run on a CPU, and .cache/regression/megatron, the two
# wheels of Megatron that are taken for a newer Python than they need. Idempotent. Needs Python 3.11 with venv, and pip's
# configured index; PYTHON and TORCH_CPU_INDEX as in ci/setup.sh. On failure says why and exits with 1.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3.11}
root=.cache/regression
want=$(cat ci/regression/requirements.txt ci/regression/constraints.txt ci/regression/environment.sh | sha256sum)
[[ -f $root/installed && $(cat "$root/installed") == "$want" ]] && exit 0

log=$root/install.log
mkdir -p "$root"
rm -rf "$root/env" "$root/megatron" "$root/wheels"
"$python" -m venv "$root/env"
pip=("$root/env/bin/python" -m pip --disable-pip-version-check --quiet)
failed() {
  echo "the environment cannot be installed: $(grep -i error "$log" | tail -n 1); all of it in $log" >&2
  exit 1
}
"${pip[@]}" install "torch==2.13.0+cpu" >"$log" 2>&1 ||
  PIP_EXTRA_INDEX_URL=${TORCH_CPU_INDEX:-} "${pip[@]}" install "torch==2.13.0+cpu" >>"$log" 2>&1 || failed
"${pip[@]}" install -c ci/regression/constraints.txt -r ci/regression/requirements.txt >>"$log" 2>&1 || failed
"${pip[@]}" download --no-deps --only-binary=:all: --python-version 3.12 -d "$root/wheels" \
  megatron-core==0.19.2 megatron-bridge==0.6.2 >>"$log" 2>&1 || failed
for wheel in "$root"/wheels/*.whl; do
  "$root/env/bin/python" -m zipfile -e "$wheel" "$root/megatron"
done
# One that does not match a CPU torch, and transformers imports it when it is there.
"${pip[@]}" uninstall -y torchvision >>"$log" 2>&1 || true
echo "$want" >"$root/installed"
