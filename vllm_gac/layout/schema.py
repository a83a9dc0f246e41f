"""What a config.json says, as pydantic models, and the types that all our file formats use.

`HfConfig` is the part of a Hugging Face `config.json` this project reads, `GacSection` its
nested `"gac"` object. Plans (planning/plan_file.py) and GPU profiles (gpu/profile.py) use these
types, too. Our own formats forbid unknown keys, so that a typo is an error, not a silent default.
"""

import math
import reprlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.config_keys import canonical_keys
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES
from vllm_gac.layout.key_forms import KeyForm


def _known_version(version: int) -> int:
    if version != 1:
        raise ValueError("this release reads format version 1; install one that reads it")
    return version


Version = Annotated[int, AfterValidator(_known_version)]


def between(minimum: float, maximum: float) -> AfterValidator:
    """Bounds of a float. The message of Field(ge=, le=) would print hundreds of digits."""

    def check(value: float) -> float:
        if not minimum <= value <= maximum:
            raise ValueError(f"must be between {minimum:g} and {maximum:g}")
        return value

    return AfterValidator(check)


# Far above any existing model, and far below what would exhaust memory before a tensor is read.
Dim = Annotated[int, Field(ge=1, le=1 << 20)]
HeadSize = Annotated[int, Field(ge=1, le=1024)]
Heads = Annotated[int, Field(ge=1, le=1024)]
Layers = Annotated[int, Field(ge=1, le=1024)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Ratio = Annotated[float, Field(gt=0, le=1)]
# Times and rates of GPUs, in microseconds, seconds, or 10^12 a second: far from any that was
# measured, and near enough to one another that their products and ratios are numbers.
Positive = Annotated[float, between(1e-6, 1e9)]

# The roles of dims, and the alignment strategies (alignment/rules.py).
Role = Literal["head", "rank", "width"]
Strategy = Literal["none", "minimal", "measured"]

# Every linear of a decoder layer; any of them may be factorized.
LinearName = Literal[
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


class StrictModel(BaseModel):
    """Forbids unknown keys, and does not accept "1", 1.0 or true for 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ForeignModel(BaseModel):
    """What is read of a file of another tool: ignores unknown keys, and is as strict otherwise."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class KeySection(StrictModel):
    """Keys of one layer: `heads` cached key heads of `size` elements each per token."""

    form: KeyForm
    heads: Heads
    size: HeadSize


class ValueSection(StrictModel):
    """Values of one layer: `heads` cached value heads of `size` elements each per token."""

    heads: Heads
    size: HeadSize


class LayerSection(StrictModel):
    """One decoder layer of a compressed model."""

    key: KeySection
    value: ValueSection
    intermediate_size: Dim
    ranks: dict[LinearName, Dim] = Field(default_factory=dict)
    # Fewer query heads than the model's config says; None keeps them all.
    query_heads: Heads | None = None
    # Whether `self_attn.rope_inv_freq` is stored. None: it is stored exactly if the number or size
    # of the key heads differs from the model's own.
    rope_table: bool | None = None


class GacSection(StrictModel):
    """The `"gac"` object of config.json, version 1."""

    version: Version
    softmax_scale: Annotated[float, Field(ge=1e-3, le=1e3, allow_inf_nan=False)]
    # Head size before compression. None: the one that the softmax scale belongs to.
    head_dim: HeadSize | None = None
    layers: Annotated[list[LayerSection], Field(min_length=1, max_length=1024)]
    source: dict[str, Any] = Field(default_factory=dict)


if TYPE_CHECKING:  # type checkers want literals, not what gives them
    ModelType: TypeAlias = str
    Architecture: TypeAlias = str
else:
    ModelType = Literal[*FAMILIES]
    Architecture = Literal[*(family.architecture for family in FAMILIES.values()), ARCHITECTURE]


class RopeParameters(ForeignModel):
    """RoPE as transformers 5 writes it: the types default, linear, llama3 and yarn.

    The bounds are far from any existing model, and they keep every frequency finite in fp32.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: Annotated[float, between(1, 1e30)] = 10000.0
    factor: Annotated[float, between(1, 1e6)] = 1.0
    low_freq_factor: Annotated[float, between(1e-6, 1e6)] = 1.0
    high_freq_factor: Annotated[float, between(1e-6, 1e6)] = 4.0
    original_max_position_embeddings: Dim = 8192
    beta_fast: Annotated[float, between(1e-6, 1e6)] = 32.0
    beta_slow: Annotated[float, between(1e-6, 1e6)] = 1.0
    truncate: bool = True
    mscale: Annotated[float, between(0, 1e3)] = 0.0
    mscale_all_dim: Annotated[float, between(0, 1e3)] = 0.0
    attention_factor: Annotated[float, between(1e-3, 1e3)] | None = None
    # How fast the scale of queries grows with the contexts of the original length before them.
    llama_4_scaling_beta: Annotated[float, between(0, 1e3)] = 0.0
    # Which layers have RoPE; None: all.
    layers: list[bool] | None = None
    # Only whole heads are rotated in the models we read.
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] = 1.0

    @model_validator(mode="after")
    def _nothing_guessed(self) -> Self:
        needed = {
            "default": set(),
            "linear": {"factor"},
            "llama3": {
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            },
            "yarn": {"factor", "original_max_position_embeddings"},
        }[self.rope_type]
        if self.llama_4_scaling_beta:
            needed.add("original_max_position_embeddings")
        if missing := sorted(needed - self.model_fields_set):
            raise ValueError(f"{self.rope_type} RoPE needs {', '.join(missing)}")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be less than "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.rope_type == "yarn" and self.rope_theta == 1:
            raise ValueError("rope_theta: must be above 1 for yarn RoPE")
        return self

    def turns(self, index: int) -> bool:
        """Whether layer `index` has RoPE."""
        return self.layers is None or self.layers[index]

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by; 1 unless the type is yarn."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


class Experts(ForeignModel):
    """A mixture of experts in place of each layer's MLP, by the names of config.json."""

    num_experts: Annotated[int, Field(ge=1, le=1024)]
    # How many of them a token goes to.
    num_experts_per_tok: Annotated[int, Field(ge=1, le=1024)]
    # Channels of each.
    moe_intermediate_size: Dim
    # Whether the weights of a token's experts add up to 1.
    norm_topk_prob: bool = False

    @model_validator(mode="after")
    def _there_are_as_many(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: is {self.num_experts_per_tok}, and there are "
                f"{self.num_experts} experts"
            )
        return self


# vLLM computes a cosine and sine table for all positions before it serves a model.
_MAX_POSITIONS = 1 << 24


class HfConfig(ForeignModel):
    """What this project reads of a config.json; other keys are copied unread.

    Other keys that vLLM would honour are refused (config_keys.py).
    """

    model_type: ModelType
    architectures: list[Architecture] = Field(default_factory=list)
    hidden_size: Dim
    intermediate_size: Dim
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads
    head_dim: HeadSize
    vocab_size: Annotated[int, Field(ge=1, le=1 << 22)]
    max_position_embeddings: Annotated[int, Field(ge=1, le=_MAX_POSITIONS)] = 2048
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    # Engines look it up in torch, and end with an error of Python for another name.
    dtype: Literal["bfloat16", "float16", "float32", "float64", "half", "float"] | None = None
    # These two are not used here; transformers refuses values of other types.
    eos_token_id: int | list[int] | None = None
    use_cache: bool = True
    rope: RopeParameters = RopeParameters()
    experts: Experts | None = None
    gac: GacSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, raw: Any) -> Any:
        return canonical_keys(raw) if isinstance(raw, dict) else raw

    @property
    def width(self) -> int:
        """Channels of the MLP of a dense layer, or of each expert in its place."""
        return self.experts.moe_intermediate_size if self.experts else self.intermediate_size

    @field_validator("num_key_value_heads")
    @classmethod
    def _kv_heads_divide(cls, value: int, info: Any) -> int:
        heads = info.data.get("num_attention_heads")
        if heads is not None and heads % value:
            raise ValueError(f"{value} does not divide num_attention_heads = {heads}")
        return value

    @model_validator(mode="after")
    def _positions_are_bounded(self) -> Self:
        """With linear RoPE, vLLM computes a table for `factor` times as many positions."""
        if self.rope.rope_type != "linear":
            return self
        positions = self.max_position_embeddings * self.rope.factor
        if positions > _MAX_POSITIONS:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} times RoPE's factor "
                f"{self.rope.factor:g} is {positions:.0f} positions, at most {_MAX_POSITIONS}"
            )
        return self

    @model_validator(mode="after")
    def _gac_is_served_as_gac(self) -> Self:
        """Under another architecture's name, vLLM would build the dense model."""
        if self.gac is not None and self.architectures != [ARCHITECTURE]:
            raise ValueError(
                f'architectures are {self.architectures}, but there is a "gac" object: '
                f"expected {[ARCHITECTURE]}"
            )
        if self.gac is None and ARCHITECTURE in self.architectures:
            raise ValueError(
                f'architectures are {self.architectures}, but there is no "gac" object'
            )
        return self


_Model = TypeVar("_Model", bound=BaseModel)
_FAULT_BYTES = 800
_MAX_KEYS = 9  # that a message lists
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def validate(
    model: type[_Model], raw: Any, where: str, error: type[GacError] = CheckpointError
) -> _Model:
    """`raw` as a `model`.

    Args:
        model: the pydantic model.
        raw: parsed JSON.
        where: what error messages call the file.
        error: class of the error to raise.

    Raises:
        error: one sentence that names `where` and the first wrong key.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        message = sanitize(first["msg"].removeprefix("Value error, "), _FAULT_BYTES)
        if first["type"] == "extra_forbidden":
            message = "unknown key"
            if len(first["loc"]) == 1 and len(model.model_fields) <= _MAX_KEYS:
                message += f"; known are {', '.join(model.model_fields)}"
        if first["loc"]:
            key = ".".join(sanitize(part) for part in first["loc"])
            message = f"{key}: {message}, got {sanitize(_short.repr(first['input']))}"
        more = f" (and {e.error_count() - 1} more faults)" if e.error_count() > 1 else ""
        raise error(f"{where}: {message}{more}") from e
