#!/usr/bin/env bash
# Holds the NeMo-RL front door against real checkouts of NeMo-RL, on a CPU.
#
#   bash ci/regression.sh [--upstream PATH|URL] [--version v0.7.0|main]
#
# Without --upstream: the clone that an earlier run has kept, else https://github.com/NVIDIA-NeMo/RL. PATH is any clone that has
# the pinned commits; it is read and never changed. Without --version: all versions. What ran is told in plain lines at the
# end. Where upstream or the environment is out of reach: a line `SKIPPED: ...`, and exit code 0. Everything is kept in
# .cache/regression.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '4s/^# *//p' "$0" >&2; }
skip() { echo "SKIPPED: $*"; exit 0; }

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

clone=$root/upstream.git
[[ -d $clone ]] || git init -q --bare "$clone"
while read -r version commit; do
  git -C "$clone" cat-file -e "$commit^{commit}" 2>/dev/null && continue
  git -C "$clone" fetch -q --depth 1 "${upstream:-https://github.com/NVIDIA-NeMo/RL}" "$commit" 2>"$root/fetch.log" && continue
  tail -n 1 "$root/fetch.log" >&2
  [[ -n $upstream && -e $upstream ]] && { echo "error: --upstream is $upstream, which has no commit $commit ($version)" >&2; exit 2; }
  skip "upstream not reachable"
done <<<"$pins"

reason=$(bash ci/regression/environment.sh 2>&1 >/dev/null) || skip "$reason"

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false NVTE_FRAMEWORK=pytorch TORCHDYNAMO_DISABLE=1
export PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES="" RAY_USAGE_STATS_ENABLED=0
stubs=$PWD/ci/regression/stubs
python=$root/env/bin/python
racy=$PWD/ci/regression/upstream_tests/racy.txt
failed=0
trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT
# Ended from outside: what had failed by then has failed.
trap 'exit $((failed ? 1 : 124))' TERM

# tests RESULT PYTEST...: JUnit results in $results/RESULT.xml.
tests() {
  local name=$1; shift
  "$@" --junitxml="$results/$name.xml" >"$results/$name.log" 2>&1 </dev/null || true
}

# upstream_tests NAME CHECKOUT LIST: upstream's own tests, in its own folder.
upstream_tests() {
  (
    cd "$2"
    export PYTHONPATH=$stubs:$2:$root/megatron
    tests "$1" "$python" -m pytest -p upstream_run -p no:cacheprovider -o addopts= --noconftest -q --timeout 60 \
      $(sed 's/ .*//; s/^/--deselect=/' "$racy") $(cut -d' ' -f2 "$3")
  )
}

# our_tests NAME PYTHON FILE...: this package's tests against the patched checkout.
our_tests() {
  local name=$1 interpreter=$2; shift 2
  export PYTHONPATH=$stubs:$patched:$megatron:$PWD NEMO_RL_UPSTREAM=$patched NEMO_RL_PRISTINE=$pristine
  tests "$name" "$interpreter" -m pytest -q -p no:cacheprovider --timeout 400 "$@"
  unset PYTHONPATH NEMO_RL_UPSTREAM NEMO_RL_PRISTINE
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
  echo "== $version: patches, hooks, subclasses"
  .venv/bin/nemo-ext patch apply --upstream "$patched"
  megatron=$root/megatron our_tests subclasses "$python" tests/upstream/test_patches.py tests/upstream/test_drift.py \
    tests/upstream/test_hooks.py tests/upstream/test_recipes.py tests/upstream/test_policy_worker.py
  megatron= our_tests backend .venv/bin/python tests/upstream/test_backend.py
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
