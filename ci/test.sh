#!/usr/bin/env bash
# Sets up and passes all tests: unit, distributed (gloo ranks), e2e (real vLLM). Extra arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/ruff check nemo_ext tests ci
exec .venv/bin/python -m pytest "$@"
