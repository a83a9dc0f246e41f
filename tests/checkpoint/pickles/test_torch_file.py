"""Files of torch.save: the reader returns the saved values, and never reads beyond them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.pickles import foreign
from tests.checkpoint.pickles.archives import ints, storage, tensor, zip_file
from vllm_gac.checkpoint.pickles.module_tree import named_tensors
from vllm_gac.checkpoint.pickles.torch_file import TorchFile, open_torch_file
from vllm_gac.errors import CheckpointError

# Every format that torch.save writes.
FORMATS: dict[str, dict[str, Any]] = {
    "zip": {},
    "zip, protocol 4": {"pickle_protocol": 4},
    "zip, protocol 5": {"pickle_protocol": 5},
    "legacy": {"_use_new_zipfile_serialization": False},
    "legacy, protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}
TENSORS = {
    "half": torch.arange(6, dtype=torch.float16).view(2, 3),
    "bfloat": torch.arange(6, dtype=torch.bfloat16),
    "float": torch.randn(3, 5),
    "double": torch.randn(2, dtype=torch.float64),
    "long": torch.tensor([1 << 40]),
    "int": torch.tensor([1 << 20], dtype=torch.int32),
    "short": torch.tensor([300], dtype=torch.int16),
    "char": torch.tensor([-3], dtype=torch.int8),
    "byte": torch.tensor([200], dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "columns": torch.randn(8, 8)[:, 2:5],
    "transposed": torch.randn(3, 4).t(),
    "every second": torch.arange(10.0)[1::2],
    "one of many": torch.arange(12.0).view(3, 4)[1],
}


def opened(path: Path, value: Any, **options: Any) -> TorchFile:
    foreign.save(path, value, **options)
    return open_torch_file(path)


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        open_torch_file(path)
    return str(refused.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_tensors_are_read_as_they_were_saved(options: dict[str, Any], tmp_path: Path) -> None:
    file = opened(tmp_path / "t.pt", TENSORS, **options)
    assert file.root.keys() == TENSORS.keys()
    with file.reader() as read:
        for key, expected in TENSORS.items():
            found = read(file.root[key])
            assert found.is_contiguous()
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), key
            assert file.info(file.root[key]).shape == tuple(expected.shape)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_module_of_unknown_origin_is_its_tensors_and_its_state(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = foreign.llama_config()
    model = foreign.model(
        foreign.LLM_PRUNER,
        config,
        [foreign.dims(), foreign.dims(heads=2, kv_heads=2)],
        attention=foreign.at(foreign.LLM_PRUNER, foreign.Attention, "LlamaAttention"),
        mlp=foreign.at(foreign.LLM_PRUNER, foreign.Mlp, "LlamaMLP"),
        rotary=foreign.at(foreign.LLM_PRUNER, foreign.LlamaRotaryEmbedding),
    )
    model.lm_head.weight = model.model.embed_tokens.weight  # two names, one tensor
    tokenizer = foreign.tokenizer("\x00\xff pieces")
    file = opened(tmp_path / "m.bin", {"model": model, "tokenizer": tokenizer}, **options)
    root = file.root["model"]
    assert (root.of.module, root.of.name) == (foreign.LLM_PRUNER, "LlamaForCausalLM")
    assert root.state["config"].state["rope_theta"] == 10000.0
    assert root.state["config"].state["torch_dtype"].name == "float16"
    assert file.root["tokenizer"].state["sp_model_proto"] == b"\x00\xff pieces"
    assert file.root["tokenizer"].state["unique_no_split_tokens"] == {"<s>", "</s>"}
    found, expected = named_tensors(root, "m.bin"), model.state_dict()
    assert found.keys() == expected.keys()
    with file.reader() as read:
        assert all(torch.equal(read(found[key]), expected[key]) for key in expected)


def test_attributes_that_a_tool_hangs_on_parameters_are_passed_over(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module.weight.acc_grad = torch.ones(2, 2)  # LLM-Pruner's llama3.py does this
    file = opened(tmp_path / "m.bin", module)
    assert named_tensors(file.root, "m.bin").keys() == {"weight", "bias"}


def test_scanning_imports_no_torch(tmp_path: Path) -> None:
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "m.pt")
    code = (
        "import sys; from pathlib import Path\n"
        "from vllm_gac.checkpoint.pickles.torch_file import *\n"
        "open_torch_file(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m.pt"], check=True)


# ---- forged files ----------------------------------------------------------------------------


FORGED: dict[str, tuple[bytes, str]] = {
    "a shape beyond the storage": (
        tensor(storage(), 0, ints(5), ints(1)),
        "has a tensor of shape [5] that ends at number 5 of a storage of 4",
    ),
    "an offset beyond the storage": (
        tensor(storage(), 4, ints(1), ints(1)),
        "has a tensor of shape [1] that ends at number 5 of a storage of 4",
    ),
    "a stride beyond the storage": (
        tensor(storage(), 0, ints(2, 2), ints(3, 1)),
        "has a tensor of shape [2, 2] that ends at number 5 of a storage of 4",
    ),
    "a negative offset": (
        tensor(storage(), -1, ints(1), ints(1)),
        "has a tensor with invalid sizes",
    ),
    "a negative stride": (
        tensor(storage(), 3, ints(2), ints(-1)),
        "has a tensor with invalid sizes",
    ),
    "a bool for a size": (
        tensor(storage(), 0, b"\x88\x85", ints(1)),
        "has a tensor with invalid sizes",
    ),
    "a shape that is no tuple": (
        tensor(storage(), 0, b"K\x04", ints(1)),
        "calls torch._utils._rebuild_tensor_v2 with arguments that it does not take",
    ),
    "more strides than sizes": (
        tensor(storage(), 0, ints(2), ints(1, 1)),
        "has a tensor of shape (2,) and strides (1, 1)",
    ),
    "nine dimensions": (
        tensor(storage(), 0, ints(*[1] * 9), ints(*[1] * 9)),
        "has a tensor of shape (1, 1, 1, 1, 1, 1, 1, 1, 1) and strides",
    ),
    "a storage that is not there": (
        tensor(storage("7"), 0, ints(1), ints(1)),
        "refers to the storage '7', which is not in the file",
    ),
    "a storage elsewhere": (
        tensor(storage("../../data.pkl"), 0, ints(1), ints(1)),
        "refers to the storage '../../data.pkl', which is not in the file",
    ),
    "a storage larger than its bytes": (
        tensor(storage(count=5), 0, ints(1), ints(1)),
        "is cut off or damaged: storage '0' of 5 numbers (F32) has only 16 bytes",
    ),
    "a storage of a wider type": (
        tensor(storage(kind="DoubleStorage"), 0, ints(1), ints(1)),
        "is cut off or damaged: storage '0' of 4 numbers (F64) has only 16 bytes",
    ),
    "a storage of negative size": (
        tensor(storage(count=-1), 0, ints(0), ints(1)),
        "has a storage '0' with an invalid size",
    ),
    "a storage of a type that no model has": (
        tensor(storage(kind="ComplexFloatStorage"), 0, ints(1), ints(1)),
        "refers to torch.ComplexFloatStorage, which is not part of a model; not opened",
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_tensors_stay_within_their_storages(forged: str, tmp_path: Path) -> None:
    body, said = FORGED[forged]
    data = zip_file(body, {"0": bytes(16)})
    assert refusal(tmp_path / "t.pt", data).startswith(said)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4,), (0,)), ((2, 2), (1, 1)), ((1000, 1000), (0, 0)), ((2, 3), (1, 1)), ((2, 1), (900, 1))],
)
def test_tensors_that_overlap_or_are_mostly_holes_are_not_read(
    shape: tuple[int, ...], stride: tuple[int, ...], tmp_path: Path
) -> None:
    body = tensor(storage(count=1000), 0, ints(*shape), ints(*stride))
    (tmp_path / "t.pt").write_bytes(zip_file(body, {"0": bytes(4000)}))
    file = open_torch_file(tmp_path / "t.pt")
    with file.reader() as read, pytest.raises(CheckpointError, match=r"overlap or leave too much"):
        read(file.root)


@given(
    st.lists(st.integers(1, 4), max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)),
            st.integers(0, 5),
        )
    )
)
def test_strides_mean_what_they_mean_to_torch(
    tmp_path_factory: pytest.TempPathFactory, view: tuple[list[int], list[int], int]
) -> None:
    shape, stride, offset = view
    values = torch.arange(100.0)
    body = tensor(storage(count=100), offset, ints(*shape), ints(*stride))
    path = tmp_path_factory.getbasetemp() / "strided.pt"
    path.write_bytes(zip_file(body, {"0": values.numpy().tobytes()}))
    file = open_torch_file(path)
    expected = values.as_strided(shape, stride, offset)
    with file.reader() as read:
        if len(set(expected.flatten().tolist())) < expected.numel():
            with pytest.raises(CheckpointError, match="overlap"):
                read(file.root)
            return
        try:
            assert torch.equal(read(file.root), expected)
        except CheckpointError:  # some views without overlap are refused, too, but no slices
            order = sorted(range(len(shape)), key=lambda axis: stride[axis])
            reach = [(shape[axis] - 1) * stride[axis] for axis in order]
            assert any(
                shape[axis] > 1 and stride[axis] <= sum(reach[:at]) for at, axis in enumerate(order)
            )
