#!/usr/bin/env bash
# Holds the NeMo-RL front door against real checkouts of NeMo-RL, on a CPU.
#
#   bash ci/regression.sh [--upstream PATH|URL] [--version v0.7.0|main]
#
# Without --upstream: the clone that an earlier run has kept, else https://github.com/NVIDIA-NeMo/RL. PATH is any clone that has
# the pinned commits; it is read and never changed. Without --version: all versions. Each version runs with the vLLM that it
# pins. What ran is told in plain lines at the end. Where upstream or the environment is out of reach: a line `SKIPPED: ...`,
# and exit code 1, or 0 where ALLOW_SKIP is 1. Checkouts and results are kept in .cache/regression; the clone and the
# environment (ci/regression/environment.sh) in NEMO_EXT_CACHE, ~/.cache/nemo_ext by default.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '4s/^# *//p' "$0" >&2; }
skip() {
  echo "SKIPPED: $*"
  [[ ${ALLOW_SKIP:-0} == 1 ]] || { echo "error: a skipped check is a failed one; set ALLOW_SKIP=1 to allow it" >&2; exit 1; }
  exit 0
}

upstream="" wanted=""
while (($#)); do
  case $1 in
    --upstream) upstream=${2:?$(usage)}; shift 2 ;;
    --version) wanted=${2:?$(usage)}; shift 2 ;;
    *) echo "error: $1 is not an argument of ci/regression.sh" >&2; usage; exit 2 ;;
  esac
done

if [[ $upstream == [/.~]* && ! -e $upstream ]]; then
  echo "error: --upstream is $upstream: no such folder; give a clone of NeMo-RL, or a URL" >&2
  exit 2
fi

bash ci/setup.sh
root=$PWD/.cache/regression
mkdir -p "$root"

# "VERSION COMMIT" of each manifest; --version is the name that upstream gives it.
pins=$(.venv/bin/python ci/regression/pins.py "$wanted") || exit 2

clone=${NEMO_EXT_CACHE:-$HOME/.cache/nemo_ext}/upstream.git
[[ -d $clone ]] || git init -q --bare "$clone"
while read -r version commit; do
  git -C "$clone" cat-file -e "$commit^{commit}" 2>/dev/null && continue
  git -C "$clone" fetch -q --depth 1 "${upstream:-https://github.com/NVIDIA-NeMo/RL}" "$commit" 2>"$root/fetch.log" && continue
  tail -n 1 "$root/fetch.log" >&2
  [[ -n $upstream && -e $upstream ]] && { echo "error: --upstream is $upstream, which has no commit $commit ($version)" >&2; exit 2; }
  skip "upstream not reachable"
done <<<"$pins"

environment=$(bash ci/regression/environment.sh 2>"$root/environment.log") || skip "$(tail -n 1 "$root/environment.log")"

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false NVTE_FRAMEWORK=pytorch TORCHDYNAMO_DISABLE=1
export PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES=-1 RAY_USAGE_STATS_ENABLED=0
stubs=$PWD/ci/regression/stubs
python=$environment/env/bin/python
megatron=$environment/megatron
racy=$PWD/ci/regression/upstream_tests/racy.txt
failed=0
trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT
# Ended from outside: what had failed by then has failed.
trap "exit 1" TERM

# tests RESULT PYTEST...: JUnit results in $results/RESULT.xml.
tests() {
  local name=$1; shift
  "$@" --junitxml="$results/$name.xml" >"$results/$name.log" 2>&1 </dev/null || true
}

# upstream_tests NAME CHECKOUT LIST: upstream's own tests, in its own folder.
upstream_tests() {
  (
    cd "$2"
    export PYTHONPATH=$stubs:$2:$megatron
    tests "$1" "$python" -m pytest -p upstream_run -p no:cacheprovider -o addopts= --noconftest -q --timeout 60 \
      $(sed 's/ .*//; s/^/--deselect=/' "$racy") $(cut -d' ' -f2 "$3")
  )
}

# our_tests NAME FILE...: this package's tests against the patched checkout.
our_tests() {
  (
    local name=$1; shift
    export PYTHONPATH=$stubs:$patched:$megatron:$PWD NEMO_RL_UPSTREAM=$patched NEMO_RL_PRISTINE=$pristine
    export NEMO_EXT_ENGINE_SOURCE=$engine
    tests "$name" "$python" -m pytest -q -p no:cacheprovider --timeout 400 "$@"
  )
}

# engine_tests RUNNER: the same with the version's engine on a CPU, and vLLM's runner V1 (RUNNER is 1) or V2 (2). Triton's
# kernels run in its interpreter; the V2 runner wants to see that no device is visible, the V1 runner to do without Triton.
engine_tests() {
  (
    export PYTHONPATH=$stubs:$patched:$engine:$megatron:$PWD NEMO_RL_UPSTREAM=$patched NEMO_RL_PRISTINE=$pristine
    export TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=$(($1 - 1))
    (($1 == 1)) || export CUDA_VISIBLE_DEVICES=
    tests "engine_v$1" "$python" -m pytest -q -p no:cacheprovider --timeout 400 tests/upstream/test_backend.py \
      tests/upstream/test_train_is_serve.py
  )
}

declare -A seconds
while read -r version commit; do
  started=$SECONDS
  results=$root/results/$version pristine=$root/checkouts/$version/pristine patched=$root/checkouts/$version/patched
  rm -rf "$results" "$pristine" "$patched"
  mkdir -p "$results" "$pristine" "$patched"
  for checkout in "$pristine" "$patched"; do
    git -C "$clone" archive "$commit" | tar -x -C "$checkout"
  done
  engine=$environment/vllm-$(.venv/bin/python -c "from nemo_ext.nemo_rl.families import ENGINES as e; print(e['$version'].split()[1])")
  echo "== $version: patches, hooks, subclasses, and its engine ${engine##*/vllm-}"
  .venv/bin/nemo-ext patch apply --upstream "$patched"
  PYTHONPATH=$engine VLLM_LOGGING_LEVEL=ERROR "$python" -c 'import vllm; print(vllm.__version__)' >"$results/engine.txt" 2>/dev/null
  # vLLM 0.20.0 serves with its V1 runner unless it is told otherwise, newer ones with V2 where they can.
  {
    engine_tests 1
    [[ $engine == *-0.20.0 ]] || engine_tests 2
  } &
  our_tests subclasses tests/upstream/test_patches.py tests/upstream/test_drift.py tests/upstream/test_hooks.py \
    tests/upstream/test_recipes.py tests/upstream/test_engine_families.py tests/upstream/test_engine_facts.py \
    tests/upstream/test_policy_worker.py
  wait $!
  seconds[$version]=$((SECONDS - started))
  .venv/bin/python ci/regression/told.py subclasses "$results" "$version" || failed=1
done <<<"$pins"

# Upstream's own tests take longest, so a run that is cut short has had the rest of both versions.
while read -r version commit; do
  started=$SECONDS
  results=$root/results/$version pristine=$root/checkouts/$version/pristine patched=$root/checkouts/$version/patched
  list=$PWD/ci/regression/upstream_tests/$version.txt
  echo "== $version: upstream's own tests, before and after the patches"
  upstream_tests before "$pristine" "$list" &
  upstream_tests after "$patched" "$list"
  wait $!
  .venv/bin/nemo-ext patch revert --upstream "$patched"
  seconds[$version]=$((seconds[$version] + SECONDS - started))
  .venv/bin/python ci/regression/told.py upstream "$results" "$version" "$list" || failed=1
  diff -r "$pristine" "$patched"
done <<<"$pins"

while read -r version commit; do
  echo
  cat "$root/results/$version/told.txt"
  echo "$version: ${seconds[$version]} s"
done <<<"$pins"
((failed == 0)) && echo "regression passed" || { echo "regression FAILED; logs are in $root/results"; exit 1; }
