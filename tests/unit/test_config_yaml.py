"""YAML files: inheritance, interpolation, overrides, and files that are none."""

import pytest

from nemo_ext.config import ConfigError
from nemo_ext.local.yaml_config import load_yaml


@pytest.fixture
def write(tmp_path):
    def _write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return _write


def test_a_file_overrides_its_defaults_key_by_key_and_paths_are_relative_to_the_file(write):
    write("base.yaml", "a: {x: 1, y: 2}\nl: [1, 2]\n")
    write("deep/middle.yaml", "defaults: ../base.yaml\na: {y: 3}\n")
    top = write("top.yaml", "defaults: deep/middle.yaml\nl: [9]\n")
    assert load_yaml(top) == {"a": {"x": 1, "y": 3}, "l": [9]}


def test_of_several_defaults_the_later_wins(write):
    write("one.yaml", "a: 1\nb: 1\n")
    write("two.yaml", "b: 2\n")
    assert load_yaml(write("top.yaml", "defaults: [one.yaml, two.yaml]\nc: 3\n")) == {"a": 1, "b": 2, "c": 3}


def test_a_section_marked_override_replaces_the_inherited_one(write):
    write("base.yaml", "a: {x: 1, y: 2}\n")
    assert load_yaml(write("top.yaml", "defaults: base.yaml\na: {_override_: true, z: 3}\n")) == {"a": {"z": 3}}


def test_interpolations_see_the_overrides(write):
    path = write("a.yaml", "n: 2\nm: ${n}\np: ${mul:${n},${m}}\n")
    assert load_yaml(path, ["n=3"]) == {"n": 3, "m": 3, "p": 9}


def test_override_values_are_yaml(write):
    path = write("a.yaml", "s: {a: 1}\nts: [{n: x, w: 1}]\n")
    loaded = load_yaml(path, ["s.a=null", "s.b=[1,2]", "s.c=1e-3", "s.d=true", "s.e=a=b", "ts[0].w=3"])
    assert loaded == {"s": {"a": None, "b": [1, 2], "c": 1e-3, "d": True, "e": "a=b"}, "ts": [{"n": "x", "w": 3}]}


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "+a=1", "~a=1", "a=[1", "l[5]=1", "l[x]=1"])
def test_a_malformed_override_is_one_line_that_shows_it(write, override):
    with pytest.raises(ConfigError) as caught:
        load_yaml(write("a.yaml", "a: 1\nl: [1]\n"), [override])
    (line,) = caught.value.lines
    assert line.startswith(f"override is {override}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1\n", "not YAML"),
        ("- 1\n", "it must hold sections"),
        ("a: ${b.c}\n", "a: Interpolation key 'b.c' not found"),
        ("a: ???\n", "Missing mandatory value: a"),
        ("defaults: nowhere.yaml\n", "nowhere.yaml: no such file"),
        ("defaults: a.yaml\n", "which inherits from it"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(write, text, says):
    path = write("a.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    (line,) = caught.value.lines
    assert says in line and str(path) in line


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="^CONFIG is .*none.yaml: no such file$"):
        load_yaml(tmp_path / "none.yaml")
