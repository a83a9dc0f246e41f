"""A gac model's config as transformers has it, with the layouts that it carries.

The served layout and the stored one differ if dims are padded at load time, or if heads are
repeated for many GPUs. Both travel with the config to every process, so that loading, reloading,
quantization and sleep mode use the same ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from transformers import CONFIG_MAPPING, PreTrainedConfig

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout, layout_in
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES
from vllm_gac.layout.schema import HfConfig, validate

if TYPE_CHECKING:
    from vllm.config import ModelConfig

T = TypeVar("T")

# Attributes for the "gac" object and the KV heads of the stored layout. They are set only if the
# served layout is padded or has repeated heads.
_STORED = "gac_stored"
_STORED_KV_HEADS = "gac_stored_kv_heads"
# config.json as it was read, and what was read of the attributes.
_ORIGINAL, _READ = "gac_original_config", "_gac_read"


class _Read(dict[str, Any]):
    """What was read of a config's attributes. A copy, or another process, reads them again."""

    def __deepcopy__(self, memo: object) -> "_Read":
        return _Read()

    def __reduce__(self) -> tuple[type["_Read"], tuple[()]]:
        return _Read, ()


class GacConfig(PreTrainedConfig):
    """The config of a gac model: that of its family in transformers, and the model's layouts.

    Its attributes may be changed, as vLLM's options do. The layouts are read of them when they are
    asked for, once.

    Examples:
        >>> import vllm_gac
        >>> _ = vllm_gac.import_model("svd-llm", "imported", progress=False)
        >>> config = vllm_gac.GacConfig.from_pretrained("imported")
        >>> config.model_type, config.served == config.stored, len(config.served.layers)
        ('llama', True, 2)
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """The config of a gac model in a directory or on the Hub; as transformers' of this name."""
        raw, unused = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls.from_dict(raw, **unused)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of a config.json, as an instance of its family's class, too.

        Args:
            config_dict: The parsed config.json.
            kwargs: Those of transformers' `from_dict`.

        Raises:
            CheckpointError: It has no "gac" object, or is of a family that is not known.
        """
        family = config_dict.get("model_type")
        if "gac" not in config_dict or family not in FAMILIES:
            raise CheckpointError('config.json: has no "gac" object, or an unknown model_type')
        read = CONFIG_MAPPING[family].from_dict(config_dict, **kwargs)
        if isinstance(read, tuple):  # with return_unused_kwargs
            return cls.adopt(read[0]), *read[1:]
        return cls.adopt(read)

    @classmethod
    def of(cls, hf_config: PreTrainedConfig) -> "GacConfig":
        """`hf_config` as a `GacConfig`: itself, or a copy if the model has no "gac" object.

        Raises CheckpointError if it is faulty, or of no known family.
        """
        if isinstance(hf_config, GacConfig):
            return hf_config
        raw = hf_config.to_dict()
        validate(HfConfig, raw, "config.json")
        if "gac" not in raw:
            hf_config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        return cls.adopt(hf_config)

    @staticmethod
    def adopt(config: PreTrainedConfig) -> "GacConfig":
        """`config`, which has just been read, as a `GacConfig`. Its class changes in place."""
        original = config.to_dict()
        config.__class__ = _CLASSES[config.model_type]
        setattr(config, _ORIGINAL, original)
        return cast("GacConfig", config)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and forget what was read before."""
        super().__setattr__(name, value)
        self.__dict__.pop(_READ, None)

    def to_dict(self) -> dict[str, Any]:
        """The attributes, without config.json as it was read."""
        attributes: dict[str, Any] = super().to_dict()
        return {key: value for key, value in attributes.items() if key not in (_ORIGINAL, _READ)}

    @property
    def original(self) -> dict[str, Any]:
        """The keys and values of config.json, before vLLM applied options to it."""
        return cast("dict[str, Any]", self.__dict__[_ORIGINAL])

    @property
    def checked(self) -> HfConfig:
        """The attributes that we read. Raises CheckpointError if they are faulty."""
        return self._once("checked", lambda: validate(HfConfig, self.to_dict(), self._where))

    @property
    def served(self) -> ModelLayout:
        """The layout to serve. Raises CheckpointError if the config is faulty."""
        return self._once("served", lambda: layout_in(self.checked, self._where))

    @property
    def stored(self) -> ModelLayout:
        """The layout of the files. Raises CheckpointError if the config is faulty."""
        return self._once("stored", self._stored)

    def check_overridden(self) -> None:
        """Check what options made of config.json.

        Raises:
            CheckpointError: The config is faulty. It names config.json, or the option if
                config.json alone is well-formed.
        """
        try:
            _ = self.served
        except CheckpointError:
            layout_in(validate(HfConfig, self.original, self._where), self._where)
            layout_in(validate(HfConfig, self.to_dict(), "--hf-overrides"), "--hf-overrides")
            raise

    def serve(self, served: ModelLayout) -> None:
        """Make `served` the layout to serve, and keep the stored one beside it."""
        stored = self.stored
        attributes = self.__dict__
        before = attributes.setdefault(_STORED, attributes["gac"])
        attributes.setdefault(_STORED_KV_HEADS, attributes["num_key_value_heads"])
        attributes["gac"] = served.section(before.get("source"))
        attributes["num_key_value_heads"] = served.num_key_value_heads
        attributes["head_dim"] = served.cache_head_dim
        self.__dict__[_READ] = _Read(served=served, stored=stored)

    def _stored(self) -> ModelLayout:
        raw = self.to_dict()
        if _STORED not in raw:
            return self.served
        raw |= {"gac": raw[_STORED], "num_key_value_heads": raw[_STORED_KV_HEADS]}
        return layout_in(validate(HfConfig, raw, self._where), self._where)

    def _once(self, name: str, read: Callable[[], T]) -> T:
        known = self.__dict__.setdefault(_READ, _Read())
        if name not in known:
            known[name] = read()
        return cast("T", known[name])

    @property
    def _where(self) -> str:
        return f"{self.name_or_path}/config.json" if self.name_or_path else "config.json"


# By family: so that what asks for transformers' class of the family gets it.
_CLASSES = {
    name: type(f"Gac{of.__name__}", (GacConfig, of), {"__module__": __name__})
    for name, of in ((name, CONFIG_MAPPING[name]) for name in FAMILIES)
}
globals().update({of.__name__: of for of in _CLASSES.values()})  # pickle finds them by name


def set_served_layout(model_config: "ModelConfig", served: ModelLayout) -> None:
    """Make `served` the layout that vLLM serves, and keep the stored one beside it."""
    GacConfig.of(model_config.hf_config).serve(served)
    # vLLM sizes scratch memory by the head size in it.
    model_config.model_arch_config = model_config.get_model_arch_config()


def serve_by_our_layers(model_config: "ModelConfig") -> None:
    """Make the config of a dense model that of a gac model of the same dims.

    Raises CheckpointError if it is faulty, or of no known family.
    """
    config = GacConfig.of(model_config.hf_config)
    config.update({"gac": config.served.section(), "architectures": [ARCHITECTURE]})
    model_config.hf_config = model_config.hf_text_config = config
    model_config.model_arch_config = model_config.get_model_arch_config()
