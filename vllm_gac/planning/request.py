"""The request for a plan: what it is to keep, and which methods and dims it may use.

Every field of `PlanRequest` is also an option of the command line (`vllm_gac.options`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeAlias, cast, get_args

from vllm_gac.alignment.rules import (
    GROUPS,
    LINEAR_MULTIPLES,
    STRATEGIES,
    allowed_dims,
    quantized_as,
)
from vllm_gac.compression.methods.registry import METHODS, usual_methods
from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.layer import BatchMix, Deployment, lacks_fused_times
from vllm_gac.gpu.profile import W4A16_GROUP, GpuProfile, Types, WeightsDtype
from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout
from vllm_gac.layout.key_forms import KEY_FORMS, KeyForm, is_latent
from vllm_gac.layout.rounding import evenly_spread
from vllm_gac.layout.schema import Role, Strategy
from vllm_gac.options import option, record_of, refuse_unexpected

# The objective of a plan within a loss.
Minimized: TypeAlias = Literal["time", "bytes"]

# By the budgets' names in plans.
BUDGET_FLAGS = {
    "parameters": "--param-ratio",
    "kv_elements": "--kv-ratio",
    "nanoseconds": "--latency",
}
# The options that describe the steps of a deployment. `BatchMix` has the same names.
_BATCH_MIX = ("decode_batch", "decode_context", "prefill_tokens")
# More than any engine takes, and few enough that nanoseconds and bytes are integers of 64 bits.
_MAX_SEQUENCES, _MAX_TOKENS, _MAX_MICROSECONDS = 10**5, 10**7, 10**12

# Of a number of a quantized linear, if not 1. MX formats have a scale of a byte for each 32, and
# W4A16 one of two bytes for each group.
_LINEAR_BYTES = {
    "mxfp8": 33 / 32,
    "mxfp4": 17 / 32,
    **{name: 1 / 2 + 2 / group for name, group in GROUPS.items()},
}
# Quantizations that profiles have times of.
PREDICTED: dict[str | None, WeightsDtype] = {
    "fp8_per_tensor": "fp8",
    "fp8_per_channel": "fp8",
    **dict.fromkeys(GROUPS, "w4a16"),
}
# Preferred steps between dims by role, and how often a step must fit into the dense dim. The first
# step that does is taken.
_STEPS: dict[Role, tuple[tuple[int, ...], int]] = {
    "head": ((16, 8, 2), 4),
    "width": ((64, 16, 8), 16),
    "rank": ((16, 8), 4),
}
# At most this many head sizes are tried. Without alignment there are more, and some are left out.
_MAX_SIZES = 24


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is to keep, and which methods and dims it may use.

    Ratios are shares of the dense model, above 0 and at most 1. The time is that of all decoder
    layers in a mean step, predicted from the profile of `gpu`. It is a budget only if `latency`
    (in microseconds) or `latency_ratio` is given. With `max_loss`, the plan is the fastest one that
    is expected to lose at most this share of the perplexity, and ratios are further budgets; if
    `minimize` is "bytes", it is the one with the fewest bytes of weights and cache. The
    deployment is known if `gpu`, one of these three or an option of the batch is given. In that
    case the plan has no dim that takes as long as a larger one, unless it is to have the fewest
    bytes; and with ratios alone it is the fastest one that is expected to lose at most 1.02 times
    the least.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.PlanRequest(param_ratio=0.85, kv_ratio=0.75)
        >>> request.methods, request.keeps_everything
        (('heads', 'prune'), False)
    """

    param_ratio: float = field(
        default=1.0,
        metadata=option(
            "--param-ratio", "share of the parameters to keep, 0 to 1", kind="ratio", group="first"
        ),
    )
    kv_ratio: float = field(
        default=1.0,
        metadata=option(
            "--kv-ratio", "share of the KV cache to keep, 0 to 1", kind="ratio", group="first"
        ),
    )
    max_loss: float | None = field(
        default=None,
        kw_only=True,
        metadata=option(
            "--max-loss",
            "the fastest model whose perplexity is this much higher at most, 1%% or 0.01; ratios "
            "that are given are kept to, too",
            kind="loss",
            group="first",
        ),
    )
    minimize: Minimized = field(
        default="time",
        kw_only=True,
        metadata=option(
            "--minimize",
            "the objective with --max-loss: predicted time, or bytes of the weights and of the KV "
            "cache of all sequences (--decode-batch, --decode-context); default: time",
            choices=get_args(Minimized),
        ),
    )
    methods: Sequence[str] = field(
        default=cast("Sequence[str]", None),  # set below
        metadata=option(
            "--method",
            ", ".join(f"{name} ({entry.help})" for name, entry in METHODS.items())
            + f"; default: {','.join(usual_methods())}, or all with --max-loss",
            kind="names",
            choices=METHODS,
        ),
    )
    align: Strategy = field(
        default="minimal",
        metadata=option("--align", "allowed dims; default: minimal", choices=STRATEGIES),
    )
    gpu: str | None = field(
        default=None,
        metadata=option(
            "--gpu",
            "profile to plan for: h100, h200, or a profile.json; it need not be this machine's; "
            "default: h200 with --max-loss, --align measured or an option of predicted times, "
            "else none",
        ),
    )
    key_form: str = field(
        default="auto",
        metadata=option(
            "--key-form",
            "how keys are cached; default: auto",
            choices=("auto", *KEY_FORMS),
        ),
    )
    key_group: int | None = field(
        default=None,
        metadata=option(
            "--key-group", "merge N key heads into one; default: whichever is best", choices=(1, 2)
        ),
    )
    value_group: int | None = field(
        default=None,
        metadata=option(
            "--value-group",
            "merge N value heads into one; default: whichever is best",
            choices=(1, 2),
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=option(
            "--tp --tensor-parallel-size -tp",
            "align widths, and predict times, for N tensor-parallel GPUs; default: 1",
            kind="count",
        ),
    )
    quantization: str | None = field(
        default=None,
        metadata=option(
            "--quantization",
            "allow only dims that linears quantized in this way take without padding, and dims "
            "that stay as they are, and predict times in FP8, or in W4A16 if the profile has them "
            "(h100 and h200 have none); default: any",
            choices=sorted(LINEAR_MULTIPLES),
            group="first",
        ),
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata=option(
            "--kv-cache-dtype",
            "allow only head sizes that such a cache takes without padding, and sizes that stay as "
            "they are, and predict times with it; default: auto, any",
            choices=("auto", "fp8"),
            group="first",
        ),
    )
    latency: float | None = field(
        default=None,
        metadata=option(
            "--latency",
            "at most so many microseconds a step",
            kind="microseconds",
            group="time limit",
        ),
    )
    latency_ratio: float | None = field(
        default=None,
        metadata=option(
            "--latency-ratio",
            "at most this share of the dense model's",
            kind="ratio",
            group="time limit",
        ),
    )
    decode_batch: int | None = field(
        default=None,
        metadata=option(
            "--decode-batch",
            "sequences in a decode step; default: 64",
            kind="count",
            maximum=_MAX_SEQUENCES,
            group="time",
        ),
    )
    decode_context: int | None = field(
        default=None,
        metadata=option(
            "--decode-context",
            "tokens of each; default: 2048",
            kind="count",
            maximum=_MAX_TOKENS,
            group="time",
        ),
    )
    prefill_tokens: int | None = field(
        default=None,
        metadata=option(
            "--prefill-tokens",
            "in a prefill step; default: 2048",
            kind="count",
            maximum=_MAX_TOKENS,
            group="time",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no plan can be asked for.

        Raises:
            PlanError: A value is not allowed.
        """
        refuse_unexpected(self, PlanError)
        if self.latency is not None and self.latency_ratio is not None:
            raise PlanError("--latency and --latency-ratio: give one of them")
        if (self.latency or 0) > _MAX_MICROSECONDS:
            raise PlanError(f"--latency {self.latency}: expected {_MAX_MICROSECONDS:,} at most")
        if self.max_loss is not None and self.limits_time:
            raise PlanError(
                "--max-loss finds the fastest model, so that a limit of time has no effect; leave "
                "out --latency and --latency-ratio, or --max-loss"
            )
        if self.max_loss is None and self.minimize != "time":
            raise PlanError(
                f"--minimize {self.minimize} has no effect without --max-loss; --param-ratio and "
                "--kv-ratio limit bytes"
            )
        if not self.methods:
            usual = usual_methods() if self.max_loss is None else tuple(METHODS)
            object.__setattr__(self, "methods", usual)
        latent = self.key_form != "auto" and is_latent(cast(KeyForm, self.key_form))
        for flag, value, is_of_heads in (
            ("--key-form", self.key_form, latent),
            ("--key-group", self.key_group, self.key_group == 2),
            ("--value-group", self.value_group, self.value_group == 2),
        ):
            if is_of_heads and "heads" not in self.methods:
                raise PlanError(
                    f"{flag} {value} has no effect with --method {','.join(self.methods)}, which "
                    "leaves heads as they are; add heads to --method, or leave it out"
                )

    @property
    def keeps_everything(self) -> bool:
        """Whether the request allows the whole dense model."""
        limits_nothing = self.max_loss is None and not self.limits_time
        return self.param_ratio == self.kv_ratio == 1 and limits_nothing

    @property
    def limits_time(self) -> bool:
        """Whether there is a budget of time."""
        return self.latency is not None or self.latency_ratio is not None

    @property
    def weighs_time(self) -> bool:
        """Whether time has a budget, or is to be the shortest."""
        return self.limits_time or (self.max_loss is not None and self.minimize == "time")

    def up_to(self, full: int, role: Role, heads: int = 1) -> tuple[int, ...]:
        """The dims of so many `heads` that alignment, number of GPUs and quantization allow."""
        parallel = self.tensor_parallel_size
        quantized = quantized_as(self.quantization, self.kv_cache_dtype == "fp8")
        multiple = quantized.multiple(role, heads, parallel)
        profile = read_profile(self.gpu or DEFAULT_GPU) if self.align == "measured" else None
        return _up_to(full, self.align, role, self.gpu, parallel, multiple, profile)

    def deployment(self) -> "Deployment | None":
        """The deployment that the plan is for, or None if the request names none.

        Raises:
            ProfileError: If there is no profile of the GPU.
        """
        mix = {name: size for name in _BATCH_MIX if (size := getattr(self, name)) is not None}
        if self.gpu is None and not mix and self.max_loss is None and not self.limits_time:
            return None
        profile = read_profile(self.gpu or DEFAULT_GPU)
        return Deployment(profile, BatchMix(**mix), self.types, self.tensor_parallel_size)

    @property
    def types(self) -> Types:
        """The types whose times are predicted."""
        return Types(
            PREDICTED.get(self.quantization, "bf16"),
            "fp8" if self.kv_cache_dtype == "fp8" else "bf16",
        )

    def check_groups(self, dense: ModelLayout) -> None:
        """Check the rows that a plan may leave as they are.

        Raises:
            PlanError: If the rows of a linear, on each GPU, are not whole groups with one scale.
        """
        group = GROUPS.get(self.quantization or "", 1)
        for name in LINEARS[: 4 if dense.experts else None]:
            columns = dense.linear_shape(dense.layers[0], name)[1]
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                columns //= self.tensor_parallel_size
            if columns % group:
                fitting = [other for other, size in GROUPS.items() if columns % size == 0]
                raise PlanError(
                    f"--quantization {self.quantization}: {name} has {columns} elements in a row "
                    f"on each GPU, which are no whole groups of {group}; take "
                    f"{' or '.join(fitting) or 'another quantization'}"
                )

    def held_bytes(self, mix: BatchMix, dense: ModelLayout, layers: Sequence[LayerLayout]) -> int:
        """Bytes of the weights of `dense` with these layers, and of the cache of all sequences.

        They are those of all GPUs together. Numbers that are in no linear have 16 bits.
        """
        model = replace(dense, layers=tuple(layers))
        linears = sum(
            math.prod(shape)
            for index in range(len(layers))
            for name, shape in model.layer_tensors(index)
            if len(shape) == 2 and not name.endswith(".rope_inv_freq")
        )
        linear = 2.0 if self.quantization is None else _LINEAR_BYTES.get(self.quantization, 1.0)
        cached = 1 if self.kv_cache_dtype == "fp8" else 2
        tokens = mix.decode_batch * mix.decode_context
        weights = 2 * model.parameters - (2 - linear) * linears
        return round(weights + cached * tokens * model.kv_elements)

    def about_times(self, profile: GpuProfile) -> list[str]:
        """What is to be known about times that `profile` predicts for this request."""
        notes = [] if (lacking := lacks_fused_times(profile, self.types)) is None else [lacking]
        if self.tensor_parallel_size > 1:
            notes.append("what GPUs take to add up their parts (all-reduce) is not predicted")
        if self.quantization is not None and self.types.weights == "bf16":
            notes.append(
                f"linears in {self.quantization} are predicted as 16-bit ones: profiles have times "
                f"of {', '.join(map(str, PREDICTED))} alone"
            )
        if (group := GROUPS.get(self.quantization or "", W4A16_GROUP)) != W4A16_GROUP:
            notes.append(f"groups of {group} are predicted as those of {W4A16_GROUP}")
        return notes

    def changed(self) -> dict[str, Any]:
        """The fields that have another value than the default, as JSON values."""
        default = record_of(PlanRequest())
        return {name: value for name, value in record_of(self).items() if value != default[name]}


@cache
def _up_to(
    full: int,
    strategy: Strategy,
    role: Role,
    gpu: str | None,
    parallel: int,
    multiple: int,
    _profile: GpuProfile | None,
) -> tuple[int, ...]:
    """The allowed dims up to the dense one, which always is, in rising order.

    `_profile` is what `gpu` names now: another one is another key of the cache.
    """
    more = {"tensor_parallel_size": parallel, "multiple": multiple}
    dims = {full, *allowed_dims(1, full, strategy, role, gpu, **more)}
    if strategy == "minimal":
        steps, fewest = _STEPS[role]
        parts = parallel if role == "width" else 1
        step = parts * next((s for s in steps if s * fewest * parts <= full), steps[-1])
        dims = {d for d in dims if d % step == 0 or d == full}
    rising = sorted(dims)
    return tuple(evenly_spread(rising, _MAX_SIZES) if role == "head" else rising)
