"""The vLLM side of the project: plugin, config, loading, model, attention and metrics.

vLLM enters through `plugin.register`. Imports within this package point down: model -> attention ->
config -> loading -> gac_config, registration, vllm_internals. Beside it only
`profiling.stock_kernels` and `steps.in_process_engine` import vllm.
"""
