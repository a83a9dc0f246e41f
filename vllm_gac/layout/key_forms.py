"""The forms of keys, and the one place that tells them apart."""

from typing import Literal, TypeAlias, assert_never, get_args

# rotary: cached after RoPE. latent: cached before up-projection to `head_dim` and RoPE (PaLU).
KeyForm: TypeAlias = Literal["rotary", "latent"]
KEY_FORMS: tuple[KeyForm, ...] = get_args(KeyForm)


def is_latent(form: KeyForm) -> bool:
    """Whether keys are rebuilt from what is cached; otherwise they are cached after RoPE.

    Who asks knows these two forms. Any other raises, so that nobody takes it for one of them.
    """
    match form:
        case "rotary":
            return False
        case "latent":
            return True
        case _:
            assert_never(form)
