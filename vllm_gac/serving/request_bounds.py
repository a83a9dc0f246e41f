"""What one request may ask for at most: `vllm serve --middleware` with the class below.

vLLM bounds its queue and no request's share of it: a body of 1 KB with many prompts fills the
queue, and everybody else hears 503. A request is judged when vLLM reads its body, so after the
key, and refused as vLLM refuses: 400, in the form of OpenAI's errors.
"""

import json
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from pydantic import TypeAdapter, ValidationError

from vllm_gac.serving.repeats import costly

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Whose answers the engine computes. A prefix (`root_path`) may stand before each.
GUARDED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/inference/v1/generate",
    "/generative_scoring",
    "/invocations",
)
# Lists with one sequence for each text or list in them: of prompts, of conversations, of texts that
# are scored. Token ids and messages count nothing: a list of them is one prompt or conversation.
LISTS = {"prompt": (str, list), "prompt_embeds": (str,), "messages": (list,), "items": (str, list)}
PROMPTS = ("prompt", "prompt_embeds", "messages", "input", "token_ids", "query", "items")
# What grammars are compiled from.
SCHEMAS = ("response_format", "structured_outputs", "tools", "text", "output_config")
SCHEMA_BYTES = 64 << 10  # 0.1 to 1.6 CPU seconds; time grows faster than size (SECURITY.md)
# Grammars written out, whose rules may each name the next: 0.4 CPU seconds, and 3 for 32 KB.
GRAMMARS = ("grammar", "structural_tag")
GRAMMAR_BYTES = 16 << 10
BODY_BYTES = 16 << 20  # about two million tokens: more than any context

TOO_DEEP = "Schemas or tools of the request are nested too deeply: simplify them."
INTEGER = TypeAdapter(int)


class RequestBounds:
    """ASGI middleware: at most half of `--max-num-seqs` sequences, and 64 KB of schemas.

    Of these, 16 KB may be grammars, and repeats in them are bounded (`repeats.py`). Half of the
    batch, so that one request never holds all of it, and the queue, which is longer, takes several
    such requests. Where `--max-num-queued-tokens` bounds the queue, a request of several sequences
    gets at most half of that, too. One sequence alone, and all answers, are as long as
    `--max-model-len` lets them be. Routes that compute no answer pass as they are.

    Args:
        app: what answers: vLLM's application.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer, and judge the body when it is asked for."""
        guarded = scope["type"] == "http" and scope["path"].endswith(GUARDED)
        await self._app(scope, _judged(scope, receive) if guarded else receive, send)


def _judged(scope: "Scope", receive: "Receive") -> "Receive":
    """`receive`, whose first message is the whole body, or a refusal."""
    read = False

    async def judged() -> "Message":
        nonlocal read
        if read:
            return await receive()
        read, parts, size, more = True, [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message  # the client left
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > BODY_BYTES:
                raise HTTPException(413, f"The body is larger than {BODY_BYTES >> 20} MB.")
        body = b"".join(parts)
        scheduler = scope["app"].state.vllm_config.scheduler_config
        queued = scheduler.max_num_queued_tokens
        if refusal := refused(body, max(1, scheduler.max_num_seqs // 2), queued and queued // 2):
            raise HTTPException(400, refusal)  # FastAPI hands it to vLLM's handler of errors
        return {"type": "http.request", "body": body, "more_body": False}

    return judged


def refused(body: bytes, most: int, most_tokens: int | None = None) -> str | None:
    """Why a request asks for too much, in a sentence; None if it does not.

    Args:
        body: the request's. One that is no JSON object is left to vLLM, whose parser is the same.
        most: sequences, at most.
        most_tokens: tokens of the prompts of all sequences, at most, where there are several. A
            character counts as one, as in the worst case it is.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    sampling = asked.get("sampling_params")
    parts = [asked, sampling] if isinstance(sampling, dict) else [asked]
    prompts = max(1, sum(_listed(asked.get(name), kinds) for name, kinds in LISTS.items()))
    answers = max(_number(part.get("n")) for part in parts)
    if prompts * answers > most:
        return (
            f"The request asks for {prompts * answers} sequences (prompts: {prompts}, n: {answers})"
            f", and one request may have {most}: send several requests."
        )
    try:
        tokens = answers * sum(_size(asked.get(name)) for name in PROMPTS)
    except RecursionError:
        return "Prompts or messages of the request are nested too deeply: simplify them."
    if most_tokens is not None and prompts * answers > 1 and tokens > most_tokens:
        return (
            f"The prompts of the request's {prompts * answers} sequences have {tokens:,} "
            "characters or token ids, and one request of several sequences may have "
            f"{most_tokens:,}: send several requests."
        )
    schemas = [part[name] for part in parts for name in SCHEMAS if part.get(name) is not None]
    try:
        size = sum(map(_length, schemas))
        grammars = sum(map(_length, filter(None, map(_grammar, schemas))))
    except RecursionError:
        return TOO_DEEP
    if grammars > GRAMMAR_BYTES:
        return (
            f"Grammars and structural tags of the request have {grammars:,} characters, and one "
            f"request may have {GRAMMAR_BYTES:,}: simplify them."
        )
    if size > SCHEMA_BYTES:
        return (
            f"Schemas, grammars and tools of the request have {size:,} characters, and one request "
            f"may have {SCHEMA_BYTES:,}: simplify them, or send fewer."
        )
    try:
        return costly([part[name] for part in parts for name in _compiled(part)])
    except RecursionError:
        return TOO_DEEP


def _compiled(part: dict[str, Any]) -> list[str]:
    """Those of `SCHEMAS` that answers must follow: tools that are only offered are not compiled."""
    tools = part.get("tools")
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    strict = any(
        one.get("strict")
        for tool in listed
        for one in (tool, tool.get("function"))
        if isinstance(one, dict)
    )
    offered = not strict and part.get("tool_choice") in (None, "auto", "none")
    return [name for name in SCHEMAS if name in part and not (offered and name == "tools")]


def _length(schema: Any) -> int:
    return len(json.dumps(schema, ensure_ascii=False))


def _grammar(schema: Any) -> Any:
    """What of one of `SCHEMAS` is a grammar; None if nothing is."""
    if not isinstance(schema, dict):
        return None
    if schema.get("type") == "structural_tag":
        return schema
    return {name: schema[name] for name in GRAMMARS if schema.get(name) is not None} or None


def _listed(value: Any, kinds: tuple[type, ...]) -> int:
    """How many sequences a list starts."""
    return len([one for one in value if isinstance(one, kinds)]) if isinstance(value, list) else 0


def _size(prompt: Any) -> int:
    """Characters of its texts, and the number of its token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, dict):
        return sum(map(_size, prompt.values()))
    if isinstance(prompt, list):
        return sum(map(_size, prompt))
    return int(isinstance(prompt, int))


def _number(n: Any) -> int:
    """`n` as vLLM reads it, which takes "8" for 8; what it does not take, it refuses itself."""
    try:
        return max(1, INTEGER.validate_python(n))
    except ValidationError:
        return 1
