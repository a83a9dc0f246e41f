"""Parameters of functions, read from sources, and whether calls and overrides fit them."""

import ast
from dataclasses import dataclass

from tools.vllm_contract.sources import Function


@dataclass(frozen=True)
class Signature:
    """Parameters without `self` and `cls`.

    `positional` may be given by position, `named` by name; `required` must be given. `more` and
    `more_named` say whether there are *args and **kwargs.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    required: frozenset[str]
    more: bool
    more_named: bool

    @classmethod
    def none(cls) -> "Signature":
        """Of what does not exist: no call fits it."""
        return cls((), frozenset(), frozenset({"a definition"}), more=False, more_named=False)

    def cannot_take(self, call: ast.Call) -> str | None:
        """Why a call does not fit; None if it does, or if it passes on arguments of others."""
        given = [x for x in call.args if not isinstance(x, ast.Starred)]
        names = {x.arg for x in call.keywords if x.arg is not None}
        passes_on = len(given) < len(call.args) or any(x.arg is None for x in call.keywords)
        if len(given) > len(self.positional) and not self.more:
            return f"takes {len(self.positional)} arguments by position, not {len(given)}"
        unknown = sorted(names - self.named)
        if unknown and not self.more_named:
            return f"takes no argument {', '.join(unknown)}"
        missing = sorted(self.required - names - {*self.positional[: len(given)]})
        if missing and not passes_on:
            return f"requires {', '.join(missing)}"
        return None

    def cannot_stand_for(self, base: "Signature", takes_more: bool = False) -> str | None:
        """Why a function of this signature cannot override one of `base`; None if it can.

        With `takes_more` it may require arguments that `base` does not take.
        """
        for index, name in enumerate(base.positional):
            name_here = self.positional[index] if index < len(self.positional) else None
            if name_here != name and not self.more:
                return f"takes {name} as argument {index + 1}, our override does not"
        by_position = {*base.positional} if self.more else set()
        unknown = sorted(base.named - self.named - by_position)
        if unknown and not self.more_named:
            return f"takes {', '.join(unknown)}, our override does not"
        extra = sorted(self.required - base.named)
        if extra and not base.more_named and not takes_more:
            return f"is not given {', '.join(extra)}, which our override requires"
        return None


def signature_of(function: Function) -> Signature:
    """The signature of a function or method in a source."""
    arguments = function.args
    positional = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
    decorators = {ast.unparse(x) for x in function.decorator_list}
    optional = {*positional[len(positional) - len(arguments.defaults) :]}
    if positional[:1] in (["self"], ["cls"]) and "staticmethod" not in decorators:
        positional = positional[1:]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keywords = {x.arg: default for x, default in pairs}
    required = {x for x in positional if x not in optional}
    required |= {name for name, default in keywords.items() if default is None}
    only_positional = {x.arg for x in arguments.posonlyargs}
    return Signature(
        positional=tuple(positional),
        named=frozenset({*positional, *keywords} - only_positional),
        required=frozenset(required),
        more=arguments.vararg is not None,
        more_named=arguments.kwarg is not None,
    )
