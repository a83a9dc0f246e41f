"""Runs one cell in its process: starts the engine, asks it, and compares it with the reference."""

import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.engines.option_matrix.cells import ADAPTER, Cell
from benchmarks.engines.option_matrix.models import directory, make
from tests.serving.agreement import PROMPTS, step_errors

# The last two prompts repeat themselves, so that n-grams draft for them.
ASKED = [*PROMPTS[:3], *([(7 * i + j % 9) % 4000 + 5 for j in range(71 + 8 * i)] for i in (1, 2))]
TOKENS = 12


def preload() -> None:
    """Before any fork, import what engines need and let vLLM inspect the model classes."""
    import vllm.v1.engine.llm_engine
    from torch._inductor.codecache import torch_key
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    import vllm_gac.serving.model.llama  # noqa: F401

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker
    else:
        import vllm.v1.worker.gpu_worker  # noqa: F401
    load_general_plugins()
    for name in ("GacLlamaForCausalLM", "LlamaForCausalLM"):
        registry._try_inspect_model_cls(name, registry.ModelRegistry.models[name])
    torch_key()  # hashes all of torch's sources, which takes seconds
    valid_vec_isa_list()  # compiles a program for each


def make_models(work: Path, kinds: Iterable[str]) -> None:
    """Run `models.make` as a job."""
    make(work, kinds)


def serve(cell: Cell, work: Path) -> dict[str, Any]:
    """Start the cell's engine and ask it.

    Returns:
        Either `refused`, the sentence, and `kind`, its type of error; or `asked`, the comparisons
        with the reference, each with a name, the error and the allowed error.
    """
    from vllm import LLM

    options = dict(cell.options)
    speculative = options.get("speculative_config", {})
    if "model" in speculative:
        draft = str(directory(work, speculative["model"]))
        options["speculative_config"] = speculative | {"model": draft}
    try:
        llm = LLM(str(directory(work, cell.model)), **options)
        return {"asked": ASK[cell.ask](llm, cell, work)}
    except AssertionError:
        raise
    except Exception as e:
        print_exception(e)
        return {"refused": sentence(e), "kind": type(root(e)).__name__}


def print_exception(error: BaseException) -> None:
    """To the log."""
    import traceback

    traceback.print_exception(error)


def root(error: BaseException) -> BaseException:
    """The first error of a chain of errors."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return error


def sentence(error: BaseException) -> str:
    """The message of an error without what pydantic adds around it."""
    said = re.search(r"Value error, (.*?)(?: \[type=value_error|$)", str(error), re.DOTALL)
    return said[1] if said else str(error)


# ---- what is asked ---------------------------------------------------------------------------


Asked = list[dict[str, Any]]


def generate(llm: Any, cell: Cell, work: Path) -> Asked:
    """Compare greedy answers twice, the second time from the prefix cache; then prompt logprobs."""
    from vllm import SamplingParams

    from tests.serving.engines import outputs

    request, prompts = (None, ASKED)
    if cell.adapter:  # slow: on a CPU, vLLM gathers an adapter's weights token by token
        request, prompts = adapter(cell, work), ASKED[3:]
    found = []
    for name in ("answers", "answers again"):
        answered = outputs(llm, prompts, TOKENS, request)
        found.append(answers_against_reference(name, answered, cell, work))
    cached = [output.num_cached_tokens or 0 for output in answered]
    block = llm.llm_engine.vllm_config.cache_config.block_size
    fills_a_block = max(map(len, prompts)) > block or not cell.adapter
    few_blocks = "num_gpu_blocks_override" in cell.options
    if cell.options.get("enable_prefix_caching") and fills_a_block and not few_blocks:
        assert max(cached) > 0, "nothing came from the prefix cache"
    if cell.adapter:
        return found  # vLLM on a CPU returns no prompt logprobs with an adapter
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": p} for p in ASKED[1:3]], sampling, use_tqdm=False)
    return [*found, prompts_against_reference(scored, cell, work)]


def answers_against_reference(name: str, outputs: Any, cell: Cell, work: Path) -> dict[str, Any]:
    gaps, errors, spreads = list[float](), list[float](), list[float]()
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        top = [{t: p.logprob for t, p in step.items()} for step in completion.logprobs]
        assert len(tokens) == TOKENS
        prompt = list(output.prompt_token_ids)
        expected = reference_logprobs(cell, work, prompt + tokens)[len(prompt) - 1 : -1]
        spreads += expected.std(-1).tolist()
        for gap, error in step_errors(expected, tokens, top):
            gaps.append(gap)
            errors.append(error)
    found = {"name": name, "gap": max(gaps), "error": max(errors), "allowed": cell.allowed}
    if cell.adapter and cell.mean_error is not None:  # its prompts are not scored, see above
        return {
            "name": f"{name} up to {max(errors):.2g}, mean error over spread",
            "error": statistics.fmean(errors) / statistics.fmean(spreads),
            "allowed": cell.mean_error,
        }
    if cell.mean_error is not None:
        found |= {"mean error": statistics.fmean(errors), "allowed": math.inf}
    return found


def prompts_against_reference(outputs: Any, cell: Cell, work: Path) -> dict[str, Any]:
    errors, logprobs = [], []
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        expected = reference_logprobs(cell, work, prompt)
        for position, token in enumerate(prompt[1:]):
            logprob = float(expected[position, token])
            logprobs.append(logprob)
            errors.append(abs(output.prompt_logprobs[position + 1][token].logprob - logprob))
    found = {"name": "prompts", "error": max(errors), "allowed": cell.allowed}
    if cell.mean_error is not None:
        spread = statistics.pstdev(logprobs)
        found = {
            "name": "prompts, mean error over spread",
            "error": statistics.fmean(errors) / spread,
            "allowed": cell.mean_error,
        }
    return found


def structured(llm: Any, cell: Cell, work: Path) -> Asked:
    """Check answers that must have a form; then compare free ones."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from tests.serving.engines import outputs

    pattern = r"[a-c]{3}-\d{2}"
    common = {"max_tokens": 24, "temperature": 0}
    forms: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"regex": pattern}, lambda text: re.fullmatch(pattern, text)),
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in ASKED[: len(forms)]]
    sampling = [
        SamplingParams(structured_outputs=StructuredOutputsParams(**form), **common)
        for form, _ in forms
    ]
    for output, (form, matches) in zip(
        llm.generate(prompts, sampling, use_tqdm=False), forms, strict=True
    ):
        assert matches(output.outputs[0].text), f"{form}: {output.outputs[0].text!r}"
    return [answers_against_reference("answers", outputs(llm, ASKED, TOKENS), cell, work)]


def embed(llm: Any, cell: Cell, work: Path) -> Asked:
    """Compare the normalized hidden state of the last token."""
    import torch

    found = []
    for prompt, output in zip(
        ASKED, llm.embed([{"prompt_token_ids": p} for p in ASKED], use_tqdm=False), strict=True
    ):
        expected = torch.nn.functional.normalize(last_hidden(cell, work, prompt), dim=-1)
        found.append(float((torch.tensor(output.outputs.embedding) - expected).norm()))
    return [{"name": "embeddings", "error": max(found), "allowed": cell.allowed}]


def prompt_embeds(llm: Any, cell: Cell, work: Path) -> Asked:
    """Compare answers to prompts that are given as rows of the embedding."""
    from vllm import SamplingParams

    checkpoint = opened(cell, work)
    with checkpoint.reader() as read:
        rows = read("model.embed_tokens.weight")
        prompts = [{"prompt_embeds": rows[prompt].clone()} for prompt in ASKED]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    answered = llm.generate(prompts, sampling, use_tqdm=False)
    for output, prompt in zip(answered, ASKED, strict=True):
        output.prompt_token_ids = prompt
    return [answers_against_reference("answers", answered, cell, work)]


def slept(llm: Any, cell: Cell, work: Path) -> Asked:
    """Compare answers before and after sleeping at both levels."""
    from benchmarks.common.engine_questions import sleep, wake
    from tests.serving.engines import outputs

    found = []
    for level in (0, 1, 2):
        if level:
            sleep(llm, level)
            wake(llm, level)
        name = f"after sleep of level {level}" if level else "answers"
        found.append(answers_against_reference(name, outputs(llm, ASKED, TOKENS), cell, work))
    return found


def starts(llm: Any, cell: Cell, work: Path) -> Asked:
    """Check that logprobs are finite; nothing more is known of random weights."""
    from tests.serving.engines import outputs

    for output in outputs(llm, ASKED, TOKENS):
        for step in output.outputs[0].logprobs:
            assert all(math.isfinite(candidate.logprob) for candidate in step.values())
    return [{"name": "finite logprobs", "error": 0.0, "allowed": cell.allowed}]


ASK: dict[str, Callable[[Any, Cell, Path], Asked]] = {
    function.__name__: function
    for function in (generate, structured, embed, prompt_embeds, slept, starts)
}


# ---- the reference ---------------------------------------------------------------------------


def opened(cell: Cell, work: Path) -> Any:
    from vllm_gac.importers.open_any import open_any_format

    return open_any_format(directory(work, cell.reference))[1]


def reference_logprobs(cell: Cell, work: Path, tokens: list[int]) -> Any:
    """The reference's logprobs in fp32: [tokens, vocab]."""
    import torch

    from vllm_gac.compression.reference_model import logits, reference

    checkpoint = opened(cell, work)
    with torch.inference_mode(), checkpoint.reader() as read:
        return logits(reference(checkpoint), read, torch.tensor([tokens]))[0].log_softmax(-1)


def last_hidden(cell: Cell, work: Path, tokens: list[int]) -> Any:
    """The normalized hidden state of the last token, before the unembedding: [hidden size]."""
    import torch

    from vllm_gac.compression.reference_model import embed as embedded
    from vllm_gac.compression.reference_model import (
        head_weights,
        layer_forward,
        layer_weights,
        reference,
        unembed,
    )

    checkpoint = opened(cell, work)
    model = reference(checkpoint)
    with torch.inference_mode(), checkpoint.reader() as read:
        hidden = embedded(model, read, torch.tensor([tokens]))
        for index, layer in enumerate(model.layout.layers):
            hidden = layer_forward(model, layer, layer_weights(model, read, index), hidden)
        norm, _ = head_weights(model, read)
        return unembed(model, (norm, torch.eye(norm.shape[0])), hidden)[0, -1]


def adapter(cell: Cell, work: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(directory(work, f"{cell.model} {ADAPTER}")))
