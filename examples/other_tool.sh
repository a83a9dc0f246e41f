#!/bin/sh
# What SVD-LLM, LLM-Pruner, ASVD, Puzzletron or another tool wrote, with dims that GPUs like.
#
#   examples/other_tool.sh SOURCE HELD_OUT OUT
#   vllm serve OUT --load-format gac
#
# SOURCE is a directory or a state dict. Padding changes no answer.
set -eu
source=$1 held_out=$2 out=$3
vllm-gac import "$source" "$out.imported"
vllm-gac repair "$out.imported" --out "$out" --gpu "${GPU:-h200}"
vllm-gac inspect --verify "$out"
vllm-gac evaluate "$out" --against "$out.imported" --text "$held_out"
