#!/bin/sh
# Three quarters of the KV cache of a token, so that a third more fit; only heads get smaller.
#
#   examples/more_room.sh MODEL TEXT HELD_OUT OUT [more options of compress]
#   vllm serve OUT --load-format gac
set -eu
model=$1 text=$2 held_out=$3 out=$4
shift 4
vllm-gac compress "$model" --out "$out" --method heads --kv-ratio "${KV_RATIO:-0.75}" --calibration "$text" "$@"
vllm-gac inspect "$out"
vllm-gac evaluate "$out" --against "$model" --text "$held_out"
