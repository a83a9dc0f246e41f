#!/bin/sh
# Dims that an H200 (or another GPU that `vllm-gac profile` has measured) takes fastest in FP8.
#
#   examples/faster_in_fp8.sh MODEL TEXT HELD_OUT OUT [more options of plan]
#   vllm serve OUT --load-format gac --quantization fp8_per_tensor --kv-cache-dtype fp8
#
# A plan for 16 bits served in FP8 gains less: say how you serve, and what a usual step holds.
# PARAM_RATIO=0.8 KV_RATIO=0.5 is faster in prefill, and lost a 1.5B 22 points of HumanEval.
set -eu
model=$1 text=$2 held_out=$3 out=$4
shift 4
vllm-gac calibrate "$model" --text "$text" --method heads,prune --out "$out.stats.safetensors"
vllm-gac plan "$model" --out "$out.plan.json" --stats "$out.stats.safetensors" \
  --param-ratio "${PARAM_RATIO:-0.9}" --kv-ratio "${KV_RATIO:-0.75}" --gpu "${GPU:-h200}" \
  --quantization fp8_per_tensor --kv-cache-dtype fp8 --decode-batch 64 --decode-context 1250 "$@"
vllm-gac compress "$model" --out "$out" --plan "$out.plan.json" --stats "$out.stats.safetensors"
vllm-gac inspect "$out"
vllm-gac evaluate "$out" --against "$model" --text "$held_out"
