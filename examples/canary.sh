#!/bin/sh
# One in ten requests for a model goes to the compressed one, the others to the dense one.
#
#   vllm serve MODEL --served-model-name chat --port 8001
#   vllm serve MODEL-gac --served-model-name chat --port 8002 --load-format gac
#   examples/canary.sh 127.0.0.1:8002 127.0.0.1:8001 8080
#
# The log says in `group` which side a request was drawn for. With limits, metrics and alerts, see
# ../serving_configs/README.md.
set -eu
compressed=$1 dense=$2 port=$3
configs=$(dirname "$0")/../serving_configs/nginx
work=$(mktemp -d)
chmod 711 "$work" # nginx that root starts works as nobody
sed "s/listen 8080 /listen $port /; s#/tmp/#$work/#" "$configs/nginx.conf" > "$work/nginx.conf"
sed "s/vllm:8000/$compressed/; s/dense:8000/$dense/" "$configs/canary.conf" > "$work/servers.conf"
cp "$configs/pool.conf" "$work"
nginx -c "$work/nginx.conf" -p "$work" -g 'daemon off;' &
trap 'kill $!; wait $!; rm -r "$work"' EXIT
trap exit INT TERM
wait $!
