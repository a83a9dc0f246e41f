"""Of every option of vLLM's engine, whether the matrix has it, and why not.

tests/benchmarks/test_option_matrix.py holds it against vLLM's EngineArgs, so that a new option is
thought of.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# What every cell has, beside its options.
EVERY_CELL = ("model", "max_model_len")
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "names, logs, metrics and clients: nothing is computed otherwise": tuple(
        "served_model_name tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
        "allowed_local_media_path allowed_media_domains aggregate_engine_logging "
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
        "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode "
        "jit_monitor_verbose enable_mm_processor_stats profiler_config logging_config log_level "
        "log_config_file use_tqdm_on_load io_processor_plugin renderer_num_workers "
        "fail_on_environ_validation shutdown_timeout stream_interval reasoning_parser "
        "reasoning_parser_plugin reasoning_config tokens_only kv_events_config "
        "ray_workers_use_nsight enable_trace_replay max_logprobs".split()
    ),
    "which requests wait or are refused, not how they are answered": tuple(
        "max_num_queued_reqs max_num_queued_tokens max_num_active_seqs max_num_scheduled_tokens "
        "scheduler_reserve_full_isl prefill_schedule_interval watermark "
        "long_prefill_token_threshold_adaptive".split()
    ),
    "sampling: the matrix is greedy": tuple(
        "seed use_fp64_gumbel return_sampling_mask override_generation_config "
        "enable_batch_sharded_sampling watermark_config logits_processors".split()
    ),
    "where files come from; tests/serving reads Hub ids and directories": tuple(
        "model_weights hf_config_path download_dir revision code_revision hf_token config_format "
        "trust_remote_code safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size ignore_patterns pt_load_map_location "
        "max_parallel_loading_workers".split()
    ),
    "needs several hosts, or a server instead of an offline engine: tests/serving/test_parallel.py "
    "has data parallel engines and Ray": tuple(
        "distributed_executor_backend master_addr master_port nnodes node_rank "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds data_parallel_size "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "_api_process_count _api_process_rank fault_tolerance_config enable_fault_tolerance "
        "disable_nccl_for_dp_synchronization dp_sync_interval".split()
    ),
    "where processes run": tuple(
        "numa_bind numa_bind_nodes numa_bind_cpus device_ids worker_cls worker_extension_cls "
        "enable_shm_tensor_arena disable_custom_all_reduce scheduler_cls".split()
    ),
    "mixtures of experts, which gac models are not": tuple(
        "enable_return_routed_experts aux_output_config enable_expert_parallel "
        "enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep "
        "elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold eplb_config enable_eplb expert_placement_strategy "
        "enable_mixed_moe_lora_format enable_moe_shared_loras enable_hc_sp".split()
    ),
    "images, sound and video, of which Llama and Mistral know nothing": tuple(
        "language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings "
        "media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling "
        "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device "
        "mm_ipc_gpu_memory_gb mm_device_do_normalize default_mm_loras "
        "enable_tower_connector_lora disable_chunked_mm_input ec_transfer_config "
        "ec_manager_config".split()
    ),
    "other architectures: state spaces, sparse indexers, latent attention of DeepSeek, diffusion, "
    "engrams": tuple(
        "sparse_indexer_topk_backend mamba_config mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
        "replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend "
        "kda_prefill_backend kda_decode_backend diffusion_config engram_config "
        "prefix_cache_retention_interval".split()
    ),
    "details of an option that the matrix has": tuple(
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size cudagraph_capture_sizes max_cudagraph_capture_size "
        "cpu_offload_params offload_num_in_group offload_prefetch_step offload_params max_loras "
        "max_cpu_loras lora_target_modules specialize_active_lora max_lora_cls_labels "
        "spec_method spec_model spec_tokens quantization_config allow_deprecated_quantization "
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator "
        "enable_nccl_comm_suspend pooler_config attention_config kernel_config "
        "kv_offloading_backend swa_bounded_replay kv_cache_dtype_skip_layers".split()
    ),
    "vLLM 0.32 has it without an effect": ("disable_cascade_attn",),
    "for plugins of platforms, and new weights from a trainer (tests/serving/test_lifecycle.py "
    "reloads them)": ("additional_config", "weight_transfer_config"),
    "on a GPU only, and not asked for: FlashInfer's tuning, the order in which kernels are "
    "preferred": ("enable_flashinfer_autotune", "ir_op_priority"),
}


def in_cells(cells: Iterable[Mapping[str, Any]]) -> set[str]:
    """The options that any of these cells has."""
    return {name for cell in cells for name in cell["options"]} | set(EVERY_CELL)
