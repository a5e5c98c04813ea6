"""Config files are read strictly, and every fault has its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import field, frozen

from polyshard.config.fields import is_int, is_number, optional
from polyshard.config.files import parse_assignment, parse_assignments, read_config
from polyshard.exceptions import ConfigError


@frozen(kw_only=True)
class Inner:
    size: int = field(default=1, validator=is_int(1))


@frozen(kw_only=True)
class Outer:
    rate: float = field(default=0.0, validator=is_number())
    limit: int | None = field(default=3, validator=optional(is_int(1)))
    inner: Inner = field(factory=Inner)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


@pytest.mark.parametrize("none", ["none", "None", "NONE", "null", "~", ""])
def test_every_spelling_of_none_is_none(write: Write, none: str) -> None:
    assert read_config(write(f"limit: {none}\n")).values == {"limit": None}


def test_a_quoted_none_is_a_string(write: Write) -> None:
    assert read_config(write("name: 'none'\n")).values == {"name": "none"}


def test_numbers_are_numbers_and_words_are_words(write: Write) -> None:
    values = read_config(write("a: 1e-5\nb: 3\nc: yes\nd: '4'\ne: true\nf: -2E+3\n")).values
    assert values == {"a": 1e-5, "b": 3, "c": "yes", "d": "4", "e": True, "f": -2000.0}
    assert type(values["a"]) is float


def test_toml_and_json_are_read_as_well(write: Write) -> None:
    expected = {"rate": 0.5, "inner": {"size": 2}}
    toml = write("rate = 0.5\n[inner]\nsize = 2\n", "run.toml")
    json = write('{"rate": 0.5, "inner": {"size": 2}}', "run.json")
    assert read_config(toml).values == read_config(json).values == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "a: 1\nb: 2\na: 3\n", r'run\.yaml:3: found duplicate key "a"'),
        ("run.yaml", "a:\n  b: 1\n  b: 2\n", r'run\.yaml:3: found duplicate key "b"'),
        ("run.yaml", "- {a: 1, a: 2}\n", r'run\.yaml:1: found duplicate key "a"'),
        ("run.toml", "[a]\nb = 1\nb = 2\n", r"run\.toml:3: Cannot overwrite a value"),
        ("run.json", '{"a": [{"b": 1, "b": 2}]}', r"run\.json: found duplicate key 'b'"),
        ("run.toml", "a = 1\na = 2\n", r"run\.toml:2: Cannot overwrite a value"),
        ("run.json", '{"a": 1, "a": 2}', r"run\.json: found duplicate key 'a'"),
        ("run.yaml", "a: [1,\nb: 2\n", r"run\.yaml:3: expected ',' or '\]'"),
        ("run.json", '{"a": }', r"run\.json:1: Expecting value"),
        ("run.yaml", "", r"expected a mapping, found an empty file"),
        ("run.yaml", "- a\n", r"expected a mapping, found \['a'\] \(list\)"),
        ("run.txt", "a: 1\n", r"ends in \.yaml, \.yml, \.toml, \.json, found '\.txt'"),
    ],
)
def test_a_malformed_file_is_refused(write: Write, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(text, name))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read: No such file"):
        read_config(tmp_path / "gone.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match="expected text in UTF-8"):
        read_config(path)


def test_values_become_the_class(write: Write) -> None:
    outer = read_config(write("rate: 1e-3\ninner:\n  size: 4\n")).structure(Outer)
    assert outer == Outer(rate=1e-3, inner=Inner(size=4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate: 1\nlimitt: 2\n", r":2: limitt: Outer .* no field 'limitt' \(did you mean 'limit'"),
        ("inner:\n  size: 2\n  sice: 3\n", r":3: inner\.sice: Inner .*\(did you mean 'size'"),
        ("inner: {size: 2,\n  sice: 3}\n", r":2: inner\.sice: "),
        ("rate: 1\ninner:\n  size: '2'\n", r":3: inner\.size: .* found '2' \(str\)"),
        ("rate: 1\ninner: 5\n", r":2: inner: expected a mapping, found 5 \(int\)"),
    ],
)
def test_a_fault_is_reported_with_its_line(write: Write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml" + message):
        read_config(write(text)).structure(Outer)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("run.toml", "rate = 1\n[inner]\nsize = 2\nsice = 3\n", r"run\.toml:4: inner\.sice: "),
        ("run.toml", "rate = 1\n\ninner.sice = 3\n", r"run\.toml:3: inner\.sice: "),
        ("run.toml", "rate = 1\ninner = {sice = 3}\n", r"run\.toml:2: inner\.sice: "),
        ("run.json", '{"rate": 1,\n "inner":\n\t{"sice": 3}}', r"run\.json:3: inner\.sice: "),
    ],
)
def test_a_fault_in_toml_or_json_is_reported_with_its_line(
    write: Write, name: str, text: str, place: str
) -> None:
    with pytest.raises(ConfigError, match=place):
        read_config(write(text, name)).structure(Outer)


def test_an_assignment_replaces_one_value_and_leaves_its_neighbours(write: Write) -> None:
    source = read_config(write("rate: 1\ninner:\n  size: 4\n"))
    outer = source.assign(["inner.size=7", "limit=none"]).structure(Outer)
    assert outer == Outer(rate=1, limit=None, inner=Inner(size=7))


def test_a_fault_in_an_assignment_is_not_blamed_on_the_file(write: Write) -> None:
    source = read_config(write("inner:\n  size: 4\n")).assign(["inner.sice=1"])
    with pytest.raises(ConfigError, match=r"^command line: inner\.sice: "):
        source.structure(Outer)


def test_a_fault_beside_an_assignment_is_blamed_on_the_file(write: Write) -> None:
    source = read_config(write("inner:\n  sice: 4\n")).assign(["inner.size=1"])
    with pytest.raises(ConfigError, match=r"run\.yaml:2: inner\.sice: "):
        source.structure(Outer)


def test_assignments_are_read_as_yaml() -> None:
    assert parse_assignment("a.b=[1, none]") == (("a", "b"), [1, None])
    assert parse_assignments(["a.b=1e-3", "a.c=x=y", "d="]) == {
        "a": {"b": 1e-3, "c": "x=y"},
        "d": None,
    }


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", "a=[1"])
def test_a_malformed_assignment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_assignment(text)


def test_an_assignment_through_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\.b=2': a: expected a mapping, found 1"):
        parse_assignments(["a=1", "a.b=2"])


ELSEWHERE = {("rate",): ("inner", "size")}


def test_a_value_may_stand_elsewhere(write: Write) -> None:
    source = read_config(write("limit: 4\nrate: 2\n")).move(ELSEWHERE)
    assert source.structure(Outer) == Outer(limit=4, inner=Inner(size=2))
    assert source.locate(("inner", "size")).endswith("run.yaml:2")
    assert source.locate(("limit",)).endswith("run.yaml:1")
    assert not source.has(("rate",))


@pytest.mark.parametrize(
    ("text", "assignments"),
    [
        ("rate: 1\n", ["inner.size=2"]),
        ("inner: {size: 1}\n", ["rate=2"]),
        ("inner: null\n", ["rate=2"]),
    ],
)
def test_an_assignment_replaces_what_stands_elsewhere(
    write: Write, text: str, assignments: list[str]
) -> None:
    source = read_config(write(text)).assign(assignments).move(ELSEWHERE)
    assert source.structure(Outer) == Outer(inner=Inner(size=2))
    assert source.locate(("inner", "size")) == "command line"


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        ("rate: 1\ninner:\n  size: 1\n", [], r"run\.yaml:1: rate, and .*run\.yaml:3: inner\.size;"),
        ("limit: 1\n", ["inner.size=1", "rate=1"], "command line: rate, and command line: inner"),
        ("rate: '1'\n", [], r"run\.yaml:1: rate: Inner\.size .* found '1' \(str\)"),
        ("rate: 1\ninner: 5\n", [], r"run\.yaml:2: inner: expected a mapping, found 5 \(int\)"),
    ],
)
def test_a_fault_elsewhere_is_told_where_it_stands(
    write: Write, text: str, assignments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write(text)).assign(assignments).move(ELSEWHERE).structure(Outer)


def test_a_plain_string_may_stand_for_a_mapping(write: Write) -> None:
    source = read_config(write("inner: small\nlimit: 3\n"))
    assert source.expand("inner", "size").values == {"inner": {"size": "small"}, "limit": 3}
    assert source.expand("inner", "size").locate(("inner", "size")).endswith("run.yaml:1")
    assert source.expand("limit", "size") == source
