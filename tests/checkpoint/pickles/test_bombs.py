"""Hostile pickles: none of their code runs, and the message says what is refused."""

import copyreg
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.pickles.archives import (
    CONTAINERS,
    called,
    name,
    program,
    stack_name,
    text,
    write,
)
from tests.checkpoint.pickles.bombs import EXTENSION, LIVE, ORDERED_DICT, REBUILD
from vllm_gac.checkpoint.pickles.torch_file import open_torch_file
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.pickled_model import open_pickled_model

LINEAR = name("torch.nn.modules.linear", "Linear")

# torch's own functions that unpickle, run code, or open a file by name.
TORCH = (
    "torch.load",
    "torch.serialization.load",
    "torch.storage._load_from_bytes",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.jit.load",
    "torch.jit._script.script",
    "torch.package.PackageImporter",
    "torch.utils.cpp_extension.load_inline",
    "torch.utils.model_zoo.load_url",
    "torch.utils._config_module.ConfigModule.load_config",
    "torch.distributed.run.main",
    "torch.fx.graph_module._exec_with_source",
    "torch._dynamo.guards.GuardBuilder",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch.from_file",
    "torch.nn.functional.handle_torch_function",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._tensor._rebuild_from_type_v2",
    "torch.nn.Linear",
    "numpy.load",
    "numpy.core.multiarray._reconstruct",
    "transformers.AutoModel.from_pretrained",
    "transformers.utils.hub.cached_file",
    "transformers.dynamic_module_utils.get_class_in_module",
    "LLMPruner.utils.logger.LoggerWithDepth",
    "component.svd_llama_kvcache.x",
)


def refusal(path: Path) -> str:
    """The message that refuses a file. The refusal may take at most 100 MB of memory."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as refused:
        open_pickled_model(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024
    said = str(refused.value)
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    return said.removeprefix(f"{path}: ")


@pytest.fixture
def _extension() -> Iterator[None]:
    copyreg.add_extension("os", "system", EXTENSION)
    try:
        yield
    finally:
        copyreg.remove_extension("os", "system", EXTENSION)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("bomb", LIVE)
def test_nothing_that_pickle_would_run_is_run(bomb: str, tmp_path: Path) -> None:
    make, said = LIVE[bomb]
    canary = tmp_path / "canary"
    for container in CONTAINERS:
        path = write(tmp_path / f"{container}.pt", container, make(canary))
        assert refusal(path).startswith(said), container
        assert not canary.exists()


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("bomb", LIVE)
def test_the_bombs_are_live(bomb: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    try:
        made = pickle.loads(LIVE[bomb][0](canary))
    except Exception:  # many bombs run their code and then fail
        made = None
    if hasattr(made, "wait"):
        made.wait()
    assert canary.exists()


@pytest.mark.parametrize("function", TORCH)
def test_functions_are_refused_by_name(function: str, tmp_path: Path) -> None:
    module, _, attribute = function.rpartition(".")
    for make in (name, stack_name):
        body = program(called(make(module, attribute), text("x")), 4)
        said = refusal(write(tmp_path / "model.pt", "zip", body))
        assert said == f"refers to {function}, which is not part of a model; not opened"


def parameters(value: bytes) -> bytes:
    """A module whose `_parameters` and `_buffers` are empty and whose `_modules` are `value`."""
    empty = text("_parameters") + b"}" + text("_buffers") + b"}"
    return LINEAR + b")\x81}(" + empty + text("_modules") + value + b"ub"


NESTED = 200_000
SILENT: dict[str, tuple[bytes, str]] = {
    "calls an allowed class": (
        program(called(LINEAR, b"K\x01")),
        "calls a class torch.nn.modules.linear.Linear, which no model does; not opened",
    ),
    "calls what it has made": (program(called(text("x"))), "calls a str, which no model does"),
    "an object of a foreign class": (
        program(name("subprocess", "Popen") + text("ls") + b"\x85\x81"),
        "refers to subprocess.Popen, which is not part of a model; not opened",
    ),
    "an object of a foreign class, with keywords": (
        program(name("subprocess", "Popen") + text("ls") + b"\x85}\x92", 4),
        "refers to subprocess.Popen, which is not part of a model; not opened",
    ),
    "makes an object of an allowed function": (
        program(ORDERED_DICT + b")\x81"),
        "makes an object of a collections.OrderedDict, which no model does",
    ),
    "makes an object of an object": (
        program(LINEAR + b")\x81)\x81"),
        "makes an object of a instance, which no model does",
    ),
    "OBJ of an allowed class": (program(b"(" + LINEAR + b"o"), "has pickle opcode OBJ"),
    "sets slots of a class": (
        program(LINEAR + b"N}" + text("__setstate__") + name("torch", "device") + b"s\x86b"),
        "sets the state of a class torch.nn.modules.linear.Linear, which no model does",
    ),
    "updates the dict of a class": (
        program(LINEAR + b"}" + text("__reduce__") + b"Nsb"),
        "sets the state of a class torch.nn.modules.linear.Linear",
    ),
    "sets the defaults of a function": (
        program(REBUILD + b"N}" + text("__defaults__") + b")s\x86b"),
        "sets the state of a torch._utils._rebuild_tensor_v2",
    ),
    "gives an object a __setstate__ and then a state": (
        program(LINEAR + b")\x81}" + text("__setstate__") + name("torch", "Size") + b"sb" + b"}b"),
        "sets the state of a instance",
    ),
    "sets the state of a list": (program(b"]}b"), "sets the state of a list"),
    "an integer of two gigabytes": (
        program(b"\x8b\xff\xff\xff\x7f"),
        "has an integer of 2147483647 bytes",
    ),
    "an integer of a negative length": (
        program(b"\x8b\xff\xff\xff\xff"),
        "has an integer of 4294967295 bytes",
    ),
    "an integer of 255 bytes": (program(b"\x8a\xff" + b"\x01" * 255), "has an integer of 255"),
    "text beyond the end": (program(b"X\xff\xff\xff\xff"), "is not a pickle: it ends early"),
    "bytes of an exabyte": (program(b"\x8e" + b"\xff" * 7 + b"\x0f", 4), "is not a pickle: it end"),
    "text in wide characters": (
        program(text("\U0001f600" + "x" * (2 << 20))),
        "has a text of 2097156 bytes",
    ),
    "text that is not UTF-8": (program(b"X\x02\x00\x00\x00\xff\xff"), "is not a pickle: byte 9 is"),
    "the end of the memo": (
        program(b"Nr\xff\xff\xff\x7f"),
        "is not a pickle: byte 8 takes what is not there",
    ),
    "a memo that is not there": (program(b"h\x05"), "is not a pickle: byte 4 takes what is not"),
    "an empty stack": (b"\x80\x02R.", "is not a pickle: byte 3 takes what is not there"),
    "no end": (b"\x80\x02N", "is not a pickle: it ends early, after"),
    "values left over": (b"\x80\x02NN.", "is not a pickle: it ends with values left over"),
    "protocol 1": (b"\x80\x01N.", "has pickle protocol 1; torch.save writes 2 to 5"),
    "a million values": (program(b"N" * 600_001), "has more than 600000 pickle opcodes"),
    "a million sets": (program(b"\x8f0" * 500_000, 4), "has more than 600000 pickle opcodes"),
    "a list copied into many sets": (
        program(
            b"]q\x00("
            + b"K\x01" * 1000
            + b"e0"
            + name("builtins", "set")
            + b"q\x010"
            + b"h\x01h\x00\x85R0" * 10_000
        ),
        "has more than 600000 pickle opcodes",
    ),
    "a text encoded many times": (
        program(
            text("x" * 100_000)
            + b"q\x000"
            + name("_codecs", "encode")
            + b"q\x010"
            + text("latin1")
            + b"q\x020"
            + b"h\x01h\x00h\x02\x86R0" * 1000
        ),
        "calls _codecs.encode with the same text again and again",
    ),
    "another encoding": (
        program(called(name("_codecs", "encode"), text("x"), text("idna"))),
        "calls _codecs.encode for something else than bytes",
    ),
    "marks in marks": (program(b"(" * 2000), "nests deeper than 1000 marks"),
    "deeply nested tuples": (program(b")" + b"\x85" * NESTED), "holds no model"),
    "deeply nested tuples as a key": (
        program(b"})" + b"\x85" * NESTED + b"Ns"),
        "has a tuple as a key",
    ),
    "deeply nested lists": (program(b"]" * NESTED + b"a" * (NESTED - 1)), "holds no model"),
    "deeply nested objects": (
        program((LINEAR + b")\x81") * 20_000 + b"b" * 19_999),
        "the model: Linear has no _modules: not a torch module",
    ),
    "a list in itself": (program(b"]q\x00h\x00a"), "holds no model"),
    "a list as a key": (program(b"}]Ns"), "has a list as a key"),
    "integers that collide": (program(b"}\x8a\x10" + b"\x01" * 16 + b"Ns"), "has a int as a key"),
    "a set of objects": (program(called(name("builtins", "set"), b"](}e")), "has a dict as a key"),
    "a set of a text": (
        program(called(name("builtins", "set"), text("ab"))),
        "makes a set of something else than a list",
    ),
    "a key without a value": (program(b"}(Nu"), "is not a pickle: at byte 6 a key has no value"),
    "items for an object": (program(LINEAR + b")\x81NNs"), "sets an item of a instance"),
    "too many arguments": (
        program(called(REBUILD)),
        "calls torch._utils._rebuild_tensor_v2 with arguments that it does not take",
    ),
    "a persistent id that is no storage": (program(text("x") + b"Q"), "has a persistent id that"),
    "a tensor without a storage": (
        program(called(REBUILD, b"N", b"K\x00", b")", b")", b"\x89", b"}")),
        "has a tensor without a storage",
    ),
    "buffers from elsewhere": (program(b"\x97", 5), "has pickle opcode NEXT_BUFFER"),
    "a name without end": (program(b"c" + b"x" * 1000), "is not a pickle: at byte"),
    "a module in itself": (
        program(b"}" + text("model") + LINEAR + b")\x81q\x00}("
                + text("_parameters") + b"}" + text("_buffers") + b"}"
                + text("_modules") + b"}" + text("x") + b"h\x00s" + b"ubs"),
        "x.x.x.x.x.x.x.x.x.x.x.x.x.: not a tree of modules",
    ),
    "a model that is not one": (program(b"}" + text("model") + b"}s"), "holds no model"),
    "weights only": (
        program(b"}" + text("model.norm.weight") + b"Ns"),
        "holds no whole model but 1 entries ('model.norm.weight', ...)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bomb", SILENT)
def test_what_no_model_holds_is_refused(bomb: str, tmp_path: Path) -> None:
    body, said = SILENT[bomb]
    assert refusal(write(tmp_path / "model.pt", "zip", body)).startswith(said)


def test_the_same_in_the_legacy_format(tmp_path: Path) -> None:
    for bomb, (body, _) in SILENT.items():
        if len(body) < 1000:
            refusal(write(tmp_path / f"{bomb}.pt", "legacy", body))


def test_a_tree_of_modules_that_share_their_branches(tmp_path: Path) -> None:
    tree = parameters(b"}") + b"q\x000"
    for _ in range(11):
        ten = b"".join(text(str(i)) + b"h\x00" for i in range(10))
        tree += parameters(b"}(" + ten + b"u") + b"q\x000"
    body = program(tree + b"h\x00")
    assert "not a tree of modules" in refusal(write(tmp_path / "model.pt", "zip", body))


def test_what_a_refused_file_tried_has_no_effect_on_the_next(tmp_path: Path) -> None:
    good = write(tmp_path / "good.pt", "zip", program(called(ORDERED_DICT)))
    for body, _ in SILENT.values():
        if len(body) < 1000:
            refusal(write(tmp_path / "bad.pt", "zip", body))
            assert open_torch_file(good).root == {}
