"""Repeats that cost a server too much are refused, and those of usual schemas are not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.serving.repeats import (
    MAX_COUNTED,
    MAX_IN_PATTERN,
    MAX_LENGTHS,
    MAX_OPTIONAL,
    MAX_TIMES,
    UNBOUNDED,
    costly,
)


def strings(**of_each: Any) -> dict[str, Any]:
    """A schema of an object with one string."""
    return {"type": "object", "properties": {"a": {"type": "string", **of_each}}}


def lengths(number: int, first: int = 128) -> dict[str, Any]:
    """A schema of strings that have different lengths."""
    return {"properties": {f"p{i}": {"maxLength": first + i} for i in range(number)}}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (strings(pattern="^[a-z]{1,16384}$"), "16,384 times, and may do so 128 times"),
        ({"patternProperties": {"^a{129}$": {}}}, "129 times, and may do so 128 times"),
        ({"json": '{"pattern": "a{200,}"}'}, "200 times, and may do so 128 times"),
        ({"regex": "(([ab]c?){1,10}){1,200}"}, "count as 2,000, and may as 24"),
        ({"regex": "(a|[^)]{2,40}\\)){1,40}"}, "count as 1,600, and may as 24"),
        ({"regex": "((a*)+)*"}, "count as 64, and may as 24"),
        ({"regex": "(" * 50 + "a" + "){1,2}" * 50}, "count as 1,000,000,000, and"),
        ({"regex": "([a-z]{1,30}|[b-z]{1,30}){1,30}"}, "count as 900, and may as 24"),
        ({"regex": r"(\w{1,20}\s?){1,50}"}, "count as 1,000, and may as 24"),
        ({"regex": "([a-z]?){1,500}"}, "count as 500, and may as 24"),
        # Nothing in a text says where a repeat ends, although each ends with one character.
        ({"regex": r"([a-y\x7a]{1,30}z){1,30}"}, "count as 900"),
        ({"regex": "([a-yà-ü]{1,30}é){1,30}"}, "count as 900"),
        ({"regex": "([^ab]{1,30};){1,30}"}, "count as 900"),
        ({"regex": "([a-y]{1,30}z|[a-y]{1,30}zz){1,30}"}, "count as 900"),
        ({"regex": "([a-y]{1,30}z?){1,30}"}, "count as 900"),
        ({"regex": "([a-y]{1,30}(z|;x)){1,30}"}, "count as 900"),
        ({"regex": "([a-y]{1,30}z|){1,30}"}, "count as 900"),
        ({"regex": "[a-z]?" * 300}, "300 optional parts follow one another, and 12 may"),
        ({"regex": "(a?(b*c{0,3})|de)(f?|g)" * 9}, "36 optional parts follow one another"),
        (
            {"grammar": 'root ::= (x | y){1,50}\nx ::= [a-z]{1,50}\ny ::= "(" [b-z]{2,9}'},
            "count as 2,500, and may as 1,024",
        ),
        ({"grammar": "start: x~1..50\nx: y~50 | start\ny: /a/"}, "count as 2,500"),
        ({"grammar": 'root ::= (x "; "){1,40}\nx ::= [a-z]{1,40}'}, "count as 1,600"),
        ({"grammar": "root ::= (x -> y){1,40}\nx ::= [a-z]{1,40}"}, "count as 1,600"),
        ({"grammar": "root ::= " + "(" * 400 + '"a"' + "){9}" * 400}, "count as 1,000,000,000"),
        (lengths(9), "9 different bounds of lengths from 128 on, and one request may have 8"),
        (
            {"properties": dict.fromkeys("abcdefghijklmnopqrstuvwxyzäöüßáéíó"), "maxProperties": 9},
            "34 properties beside minProperties or maxProperties, and 32 may be counted",
        ),
    ],
)
def test_what_costs_seconds_is_refused_wherever_it_stands(asked: Any, says: str) -> None:
    said = costly([{"type": "json_schema", "json_schema": {"schema": {"anyOf": [asked]}}}])
    assert said is not None
    assert says in said
    assert said.count(": ") == 1
    assert len(said) < 250


USUAL = [
    r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$",
    r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})$",
    r"^[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
    r"^((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)$",
    r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.){1,10}[a-z]{2,63}$",
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
    r"(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$",
    r"^https?://([\w-]+\.)+[\w-]+(:\d{1,5})?(/[\w./?%&=-]*)?$",
    r"^(/[\w-]+(\.[\w-]+)*)+$",
    r"^\+?\(?\d{1,4}\)?([ -]?\d{2,4}){2,5}$",
    r"^[A-Z]{2}\d{2}[A-Z0-9]{11,30}$",
    r"^#([0-9a-fA-F]{3}){1,2}$",
    r"^[\w .,'-]{1,128}$",
    r"^[A-Z][a-z]{1,20}( [A-Z][a-z]{1,20}){0,9}$",
    r"^(\w{1,20}\s){1,50}\w{1,20}$",
    r"^(\w+\s?)+$",
    r"^[a-z]{2,3}(-[a-z0-9]{1,8}){0,10}$",
    r"^(([0-9a-fA-F]{1,4}:){1,6}(:[0-9a-fA-F]{1,4}){1,6}|::)$",
    r'^\[("[^"]{1,20}",?){1,10}\]$',
    r"^([a-z]+(,[a-z]+)*\n)*$",
    r"^(red|green|blue)(,(red|green|blue)){0,9}$",
    r"^(GET|POST|PUT) (/[a-z0-9_-]{1,64}){1,8} HTTP/1\.[01]$",
    r"^-?\d{1,3}(,\d{3})*(\.\d{1,2})?$",
    r"^(\d{1,2}h ?)?(\d{1,2}m ?)?(\d{1,2}s)?$",
    r"^([0-9A-F]{2}:){5}[0-9A-F]{2}$",
    r"^(.|\n){1,128}$",
    r"\{[ ]?" + r',[ ]?"key"[ ]?:[ ]?"([^"\\]|\\["\\])*"' * 50 + r"[ ]?\}",
]


@pytest.mark.parametrize("regex", USUAL)
def test_usual_regexes_and_patterns_are_not_refused(regex: str) -> None:
    assert costly([strings(pattern=regex), {"regex": regex}]) is None


JSON_GRAMMAR = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}"
array ::= "[" ws (value ("," ws value)*)? "]"
string ::= "\"" ([^"\\] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})?
ws ::= [ \t\n]{0,20}
"""
LARK_GRAMMAR = """
start: sum
?sum: product (("+" | "-") product)*
?product: atom (("*" | "/") atom)*
atom: NUMBER | "-" atom | "(" sum ")"
NUMBER: /[0-9]+/
"""
# Of OpenAI's guide to structured outputs: steps of a proof, and a page whose parts hold parts.
STEP = {"properties": {"explanation": {"type": "string"}, "output": {"type": "string"}}}
PAGE = {
    "properties": {
        "type": {"type": "string", "enum": ["div", "button", "header", "section", "field", "form"]},
        "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "attributes": {"type": "array", "items": {"$ref": "#/$defs/attribute"}},
    },
    "$defs": {"attribute": {"properties": {"name": {"type": "string", "maxLength": 256}}}},
}
USUAL_SCHEMAS: list[Any] = [
    {"properties": {"steps": {"type": "array", "items": STEP}, "final_answer": {"minLength": 1}}},
    PAGE,
    {"properties": {"username": {"type": "string", "pattern": "^@[a-zA-Z0-9_]+$"}}},
    {"anyOf": [{"properties": {"number": {"pattern": r"^\d{1,5}[a-z]?$"}}}, {"type": "null"}]},
    {"enum": [f"country {number}" for number in range(250)]},
    {"grammar": JSON_GRAMMAR},
    {"grammar": LARK_GRAMMAR},
    {"grammar": 'root ::= "[" item{1,90} "]"\nitem ::= "\\"" [^"]{1,20} "\\"" ","?'},
    {"grammar": 'root ::= (line ";"){1,100}\nline ::= [a-z]{1,30} | [0-9]{1,30} "."'},
    {"grammar": 'root ::= [a-z]{1,1000000} " "{3} [0-9]{1,100}'},
    {"regex": "[a-z]{1,1000000}"},
    {"type": "regex", "pattern": "[a-z]{1,1000000}"},  # of a structural tag
    {"choice": ["{1,9999}", "a"]},
    {"json": "no JSON {1,9999}"},
    lengths(8),
    lengths(100, first=10),
    {"properties": {f"p{i}": {"type": "string", "maxLength": 255} for i in range(300)}},
    {"type": "array", "minItems": 1000000, "maxItems": 1000000, "items": {"maxLength": 100000}},
    {"properties": {f"p{i}": {"type": "integer"} for i in range(300)}},
    {"additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 500},
    {"properties": {"pattern": {"type": "string"}, "regex": {"enum": ["a"]}, "grammar": {}}},
    {"enum": [{"pattern": "a{1,9999}"}], "default": {"regex": "((((a*)*)*)*)*"}},
    {"pattern": None, "patternProperties": [1], "properties": 3, "maxLength": "many"},
]


@pytest.mark.parametrize("schema", USUAL_SCHEMAS, ids=range(len(USUAL_SCHEMAS)))
def test_usual_schemas_and_cheap_repeats_are_not_refused(schema: Any) -> None:
    assert costly([schema]) is None


def test_the_bounds_are_those_that_are_said() -> None:
    assert costly([strings(pattern=f"a{{{MAX_IN_PATTERN}}}")]) is None
    assert costly([{"regex": f"(a{{{MAX_TIMES // 8}}}){{8}}"}]) is None
    assert costly([{"regex": f"([ab]*){{{MAX_TIMES // UNBOUNDED}}}"}]) is None
    assert costly([{"regex": "(" + "a?" * MAX_OPTIONAL + "b+?)" * 9}]) is None
    assert costly([lengths(MAX_LENGTHS)]) is None
    properties = dict.fromkeys(map(str, range(MAX_COUNTED)))
    assert costly([{"properties": properties, "minProperties": 9}]) is None


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Regexes of smaller ones, each with how deep and how often it repeats."""
    most = st.integers(1, 40)

    def repeated(part: Any, number: int, least: int) -> Any:
        regex, depth, times = part
        quantifier = f"{{{min(least, number)},{number}}}"
        return f"({regex}){quantifier}", depth + 1, times * number

    def joined(parts: list[Any], between: str) -> Any:
        regex = between.join(part[0] for part in parts)
        return f"(?:{regex})", max(p[1] for p in parts), max(p[2] for p in parts)

    return st.one_of(
        st.builds(repeated, inner, most, st.integers(0, 40)),
        st.builds(lambda part: (f"({part[0]})*", part[1] + 1, part[2] * UNBOUNDED), inner),
        st.builds(lambda part: (f"({part[0]})?", max(part[1], 1), part[2]), inner),
        st.builds(joined, st.lists(inner, min_size=1, max_size=3), st.sampled_from(["", "|"])),
    )


# Each may be an a, so that none of them says where a repeat ends.
ATOMS = st.sampled_from(["a", ".", r"\w", "[^)]", "[]{2,3}*a]", r"[\]{4}a]", "[(?a]", "é", "[a|]"])
REGEXES = st.recursive(ATOMS.map(lambda atom: (atom, 0, 1)), _grown, max_leaves=12)


@given(REGEXES)
def test_a_regex_is_refused_exactly_where_it_repeats_too_often(found: Any) -> None:
    regex, depth, times = found
    refused = depth > 1 and times > MAX_TIMES
    assert (costly([{"regex": regex}]) is not None) == refused


@pytest.mark.parametrize("text", ["[", '"', "[a\\", '"\\', "{ " * 9 + "[", "(?<a[", "~ " * 9 + "["])
def test_reading_takes_time_in_proportion_to_the_text(text: str) -> None:
    """In time that grows with the square, each of these would be read for hours."""
    for kind in ("regex", "grammar"):
        costly([{kind: ("a ::= " + text * (1_000_000 // len(text)))}])


@given(st.text(alphabet='(){}[]*+?|\\"~:=,.0123456789ax \n', max_size=80))
def test_any_text_is_judged(text: str) -> None:
    for kind in ("regex", "pattern", "grammar", "json", "structural_tag"):
        assert costly([{kind: text}]) is None or len(costly([{kind: text}]) or "") < 250
