#!/usr/bin/env bash
# Trains the CPU example: GRPO with an EAGLE-3 draft co-trained and served by vLLM. Extra arguments are overrides.
set -euo pipefail
cd "$(dirname "$0")/.."
bash ci/setup.sh
exec .venv/bin/nemo-ext train examples/grpo_cpu_eagle3.yaml "$@"
