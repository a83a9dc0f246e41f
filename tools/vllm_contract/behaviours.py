"""What vllm-gac relies on in vLLM that no import, call or override of ours shows.

Mostly it is how vLLM uses what we hand it: which method it calls with what, and when. Each entry
quotes the sources; where releases say it differently, it quotes each of them. A quote that is gone
may be a harmless change: read what took its place, and correct the quote or our code.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Behaviour:
    """A function, class or value of vLLM whose source says one of some quotes.

    Args:
        module: Where it is.
        name: Its name there, `Class.method` for a method.
        quotes: Code, as `ast.unparse` writes it but for spaces; one of them must be there.
        why: What vllm-gac does by it.
    """

    module: str
    name: str
    quotes: tuple[str, ...]
    why: str

    @property
    def of_cuda_builds(self) -> bool:
        """Whether only builds for CUDA have the module."""
        return self.module.startswith(f"{_FA}.cute.")


def _one(module: str, name: str, quote: str, why: str) -> Behaviour:
    return Behaviour(module, name, (quote,), why)


_PARSER = "vllm.transformers_utils.config"
_ATTENTION = "vllm.model_executor.layers.attention.attention"
_LLAMA = "vllm.model_executor.models.llama"
_LOADERS = "vllm.model_executor.model_loader"
_COMPRESSED = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
_FA = "vllm.vllm_flash_attn"

BEHAVIOURS = (
    # Registration
    _one("vllm.plugins", "DEFAULT_PLUGINS_GROUP", "'vllm.general_plugins'", "the plugin is loaded"),
    _one(
        "vllm.plugins",
        "STAT_LOGGER_PLUGINS_GROUP",
        "'vllm.stat_logger_plugins'",
        "the gac_* gauges are published",
    ),
    _one(
        _PARSER,
        "get_config_parser",
        "_CONFIG_FORMAT_TO_CONFIG_PARSER[config_format]()",
        "our config parser is made by calling the entry",
    ),
    _one(_PARSER, "_CONFIG_FORMAT_TO_CONFIG_PARSER", "'hf'", "our parser replaces the one for hf"),
    _one(
        _LOADERS,
        "get_model_loader",
        "_LOAD_FORMAT_TO_MODEL_LOADER[load_format](load_config)",
        "our loader is made by calling the entry with the load config",
    ),
    _one(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        "class_path",
        "backends are registered by a path",
    ),
    _one(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.__init__",
        "load_stat_logger_plugin_factories()",
        "the stat logger is started with a server",
    ),
    # The config hook
    _one(
        "vllm.config.model",
        "ModelConfig",
        "verify_and_update_model_config(self)",
        "the hook checks a model before an engine starts",
    ),
    _one(
        "vllm.config.vllm",
        "VllmConfig.try_verify_and_update_config",
        "verify_and_update_config(self)",
        "the hook pads dims and chooses the loader before workers start",
    ),
    _one(
        "vllm.config.vllm",
        "VllmConfig.__post_init__",
        "self.try_verify_and_update_config()",
        "the hook runs when a config is made",
    ),
    # Loading
    _one(
        "vllm.model_executor.model_loader.base_loader",
        "BaseModelLoader.load_model",
        "self.create_model(",
        "headers are checked before memory is allocated",
    ),
    _one(
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.load_weights",
        "self.get_all_weights(model_config, model)",
        "tensors are checked, padded and repeated while they are read",
    ),
    _one(
        "vllm.model_executor.model_loader.reload.inplace",
        "reload_weights",
        "model_loader.get_all_weights(model_config, model)",
        "tensors are padded when weights are reloaded",
    ),
    # The model
    _one(
        _LLAMA,
        "LlamaForCausalLM.__init__",
        "self._init_model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, 'model'), "
        "layer_type=layer_type)",
        "our model is built in place of vLLM's",
    ),
    _one(
        _LLAMA,
        "LlamaModel.__init__",
        "layer_type(vllm_config=vllm_config, prefix=prefix)",
        "our layers get their index from the prefix",
    ),
    _one(
        _LLAMA,
        "LlamaModel.forward",
        "layer(positions, hidden_states, residual",
        "our layers are called as vLLM's are",
    ),
    # Attention
    _one(
        _ATTENTION,
        "Attention.__init__",
        "**extra_impl_args)",
        "our implementation gets the geometry of its layer",
    ),
    _one(
        _ATTENTION,
        "Attention.__init__",
        "self.layer_name = prefix",
        "operators find a layer by its prefix",
    ),
    _one(
        _ATTENTION,
        "Attention.get_kv_cache_spec",
        "head_size_v=self.head_size_v",
        "a cache row is as wide as keys and values together",
    ),
    _one(
        _ATTENTION,
        "unified_attention_with_output",
        "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output=output, "
        "output_scale=output_scale, output_block_scale=output_block_scale)",
        "our forward is called with these arguments",
    ),
    _one(
        _ATTENTION,
        "unified_kv_cache_update",
        "attn_layer.impl.do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)",
        "our cache is written with these arguments",
    ),
    _one(
        _ATTENTION,
        "unified_attention_with_output",
        "kv_cache_dummy_dep",
        "attention runs after the cache is written",
    ),
    _one(_ATTENTION, "set_default_quant_scales", "'_k_scale'", "fp8 caches have a scale of keys"),
    _one(_ATTENTION, "set_default_quant_scales", "'_v_scale'", "fp8 caches have a scale of values"),
    _one(
        _COMPRESSED,
        "CompressedTensorsKVCacheMethod.process_weights_after_loading",
        "layer.register_buffer('_k_scale', layer.k_scale.detach())",
        "the scales of each head are those that were loaded",
    ),
    _one(
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl.forward",
        "k_descale = layer._k_scale.expand(descale_shape)",
        "vLLM's own attention takes a scale of each head, too",
    ),
    _one(
        "vllm.v1.attention.backends.utils",
        "split_decodes_and_prefills",
        "return (num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)",
        "the batch is split into these four numbers",
    ),
    _one(
        "vllm.compilation.breakable_cudagraph",
        "eager_break_during_capture",
        "return wrapper",
        "an operator that breaks graphs is known by the module of its wrapper",
    ),
    _one(
        f"{_FA}.cute.interface",
        "_validate_head_dims",
        "is_sm90_range = 8 <= head_dim <= 512 and 8 <= head_dim_v <= 512",
        "FlashAttention 4 takes the heads that gpu/attention_choice.py gives it on Hopper",
    ),
    _one(
        f"{_FA}.cute.interface",
        "_tile_size_fwd_sm90",
        "elif head_dim <= 128: return FwdConfig(128, 128, True, True)",
        "FlashAttention 4 has the tiles that gpu/attention_choice.py says it writes within",
    ),
    # LoRA
    Behaviour(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager._load_adapter",
        (
            "self._adapter_manager._validate_classification_head_lora(lora)",
            "self._adapter_manager._validate_modules_to_save(lora)",
        ),
        "adapters are padded or refused before they are copied",
    ),
    _one(
        "vllm.lora.model_manager",
        "LoRAModelManager.__init__",
        "self.model.lora_manager = self",
        "we get hold of the manager of adapters",
    ),
    # KV cache
    _one(
        "vllm.v1.kv_cache_layout",
        "KVCacheLayout",
        "LBHNC =",
        "a layer's cache lies head by head in memory",
    ),
)

# Attributes that vLLM reads and ours set, or methods of ours that vLLM must call: if the base
# loses one, ours would be ignored without an error.
OVERRIDDEN = {
    ("vllm.v1.attention.backend", "AttentionBackend"): (
        "get_name get_impl_cls get_builder_cls get_supported_kernel_block_sizes "
        "supports_sliding_window supports_per_head_quant_scales supported_kv_cache_layouts "
        "supported_dtypes supported_kv_cache_dtypes forward_includes_kv_cache_update"
    ),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder"): (
        "build build_for_drafting _cudagraph_support reorder_batch_threshold "
        "_init_reorder_batch_threshold"
    ),
    ("vllm.v1.attention.backend", "AttentionImpl"): "forward",
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader"): "create_model",
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader"): (
        "load_weights get_all_weights _prepare_weights"
    ),
    ("vllm.model_executor.models.llama", "LlamaForCausalLM"): "_init_model",
    ("vllm.model_executor.models.llama", "LlamaModel"): "load_weights",
    ("vllm.model_executor.models.config", "VerifyAndUpdateConfig"): (
        "verify_and_update_config verify_and_update_model_config"
    ),
    ("vllm.transformers_utils.config_parser_base", "ConfigParserBase"): "parse",
    ("vllm.v1.metrics.loggers", "StatLoggerBase"): "log_engine_initialized record",
    ("vllm.engine.arg_utils", "EngineArgs"): (
        "load_format model_loader_extra_config hf_overrides max_model_len max_num_seqs "
        "max_num_batched_tokens gpu_memory_utilization kv_cache_memory_bytes "
        "enable_prefix_caching skip_tokenizer_init enforce_eager use_tqdm_on_load"
    ),
}
