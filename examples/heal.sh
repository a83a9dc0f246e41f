#!/bin/sh
# Train a compressed model to predict what its dense model predicts; no dim changes.
#
#   examples/heal.sh COMPRESSED MODEL TEXT HELD_OUT OUT [more options of heal]
#   vllm serve OUT --load-format gac
#
# Stopped, the same command with --resume goes on. On several GPUs, put `torchrun --nproc-per-node 2
# -m vllm_gac` for `vllm-gac`.
set -eu
compressed=$1 model=$2 text=$3 held_out=$4 out=$5
shift 5
vllm-gac heal "$compressed" --teacher "$model" --text "$text" --out "$out" "$@"
vllm-gac evaluate "$compressed" --against "$model" --text "$held_out"
vllm-gac evaluate "$out" --against "$model" --text "$held_out"
