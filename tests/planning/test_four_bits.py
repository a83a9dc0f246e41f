"""Plans for W4A16: dims that vLLM's kernels take, the room of packed weights, and refusals."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.model_executor.layers.quantization.utils.marlin_utils import (
    check_marlin_supports_layer,
    marlin_padded_nk,
)

from tests.planning.test_plan_file import Models, model
from tests.serving.models import ALIGNED, layer, write_model
from tests.serving.quantized import write_quantized
from tests.support.measured_layers import made_up_losses
from tests.support.stored_models import stored_tensors
from vllm_gac.alignment.rules import GROUPS
from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.layer import ONE_INPUT, BatchMix
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.planning.plan_file import planned_layout
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.request import PlanRequest


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("param_ratio", "kv_ratio"), [(0.7, 0.6), (0.9, 0.8)])
@pytest.mark.parametrize("quantization", GROUPS)
def test_vllm_takes_the_planned_dims_without_padding(
    models: Models, quantization: str, param_ratio: float, kv_ratio: float, tp: int
) -> None:
    big, group = models["big"], GROUPS[quantization]
    request = PlanRequest(
        param_ratio=param_ratio,
        kv_ratio=kv_ratio,
        methods=("heads", "prune", "lowrank"),
        tensor_parallel_size=tp,
        quantization=quantization,
    )
    planned = planned_layout(big, best_plan(big, made_up_losses(big.layout), request))
    for one in planned.layers:
        for n, k, whole in matrices(planned, one, tp):
            assert marlin_padded_nk(n, k, group) == (n, k)
            served = type("Linear", (), {"input_size_per_partition": k, "input_size": whole})()
            served.output_size = n
            assert check_marlin_supports_layer(served, group, allow_tile_padding=True)


def matrices(layout: ModelLayout, of: LayerLayout, tp: int) -> Iterator[tuple[int, int, int]]:
    """What multiplies on each of `tp` GPUs: its rows and columns, and the columns of all GPUs."""
    for names in ONE_INPUT:
        is_row_parallel = len(names) == 1
        fused = 0
        for name in names:
            n, k = layout.linear_shape(of, name)
            local = (n, k // tp) if is_row_parallel else (n // tp, k)
            if (rank := of.ranks.get(name)) is None:
                fused += local[0]
            else:
                yield rank, local[1], k
                yield local[0], rank, rank
        if fused:
            yield fused, local[1], k


@pytest.mark.parametrize("quantization", GROUPS)
def test_the_room_is_that_of_the_packed_model(quantization: str, tmp_path: Path) -> None:
    group = GROUPS[quantization]
    layers = ALIGNED
    if group > 32:
        ranks = {"self_attn.k_proj": 128, "mlp.down_proj": 128}
        layers = [
            layer(("rotary", 4, 64), (4, 64), 512, ranks),
            layer(("latent", 4, 32), (2, 48), 256),
        ]
    layout = write_model(tmp_path / "model", layers)
    out, rounded = tmp_path / "packed", tmp_path / "rounded"
    write_quantized(tmp_path / "model", out, rounded, "W4A16", group_size=group)
    stored = sum(
        tensor.nbytes
        for name, tensor in stored_tensors(out).items()
        if not name.endswith((".weight_shape", ".rope_inv_freq"))
    )
    mix = BatchMix(decode_batch=1, decode_context=1)
    request = PlanRequest(quantization=quantization)
    assert request.held_bytes(mix, layout, layout.layers) == stored + 2 * layout.kv_elements


def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path, models: Models) -> None:
    narrow = model(
        tmp_path / "narrow", hidden_size=576, num_attention_heads=9, num_key_value_heads=3
    )
    losses = made_up_losses(narrow.layout)
    request = PlanRequest(param_ratio=0.9, quantization="w4a16")
    with pytest.raises(PlanError, match=r"--quantization w4a16: .*q_proj.* w4a16_group64"):
        best_plan(narrow, losses, request)
    big = models["big"]  # 14,336 channels
    request = replace(request, tensor_parallel_size=64)
    with pytest.raises(PlanError, match="o_proj"):
        request.check_groups(big.layout)


def test_times_of_smaller_groups_are_said_to_be_those_of_the_measured_one() -> None:
    said = {name: PlanRequest(quantization=name).about_times(read_profile()) for name in GROUPS}
    assert {name: len(notes) for name, notes in said.items()} == {
        name: int(group != 128) for name, group in GROUPS.items()
    }
