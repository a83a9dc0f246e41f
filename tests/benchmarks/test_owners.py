"""The page of who owns a decode step: parts add up to the step."""

from benchmarks.engines.whole_model.owners import page
from benchmarks.engines.whole_model.trace import PURPOSES_OF_FP8, TRACED_STEPS, by_purpose, per_step

KERNELS = {
    "nvjet_tst_64x8": "GEMM",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
    "void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<...>>": "GEMM",
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>": "norm",
    "_norm_rows": "norm",
    "void vllm::act_and_mul_kernel<c10::BFloat16, silu>": "SwiGLU",
    "_gated_rows": "SwiGLU",
    "void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<...>": "quantizing",
    "_quantized_rows": "quantizing",
    "triton_red_fused_cutlass_scaled_mm_rms_norm_0": "Inductor",
    "latent_split_kv": "attention",
    "_rotate": "rotating, caching",
    "void at::native::index_kernel": "rest",
}


def test_every_kernel_of_a_step_has_a_purpose() -> None:
    for name, purpose in KERNELS.items():
        times = by_purpose({name: [1, 5.0]}, PURPOSES_OF_FP8)
        assert {what for what, time in times.items() if time} == {purpose}, name


def test_parts_of_the_page_add_up_to_the_step() -> None:
    events = [("nvjet", 100.0 * i, 100.0 * i + 70) for i in range(TRACED_STEPS)]
    steps = {
        "1x1218->64": {
            "microseconds": 110.0,
            "kernels": per_step(events),
            "gaps": {"count": 1, "short": 12.0, "long": 18.0},
        }
    }
    about = {"machine": "a GPU", "torch": "2", "triton": "3", "vllm": "0.32.0"}
    result = {"command": "c", "commit": "abc", "date": "2026-11-23", **about}
    text = page(result | {"models": [{"name": "dense", "steps": steps}]})
    cells = next(line for line in text.splitlines() if line.startswith("| dense |")).split("|")
    step, *parts, launches = (float(cell) for cell in cells[2:-1])
    assert step == sum(parts) == 110
    assert launches == 1
