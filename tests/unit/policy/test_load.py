"""Where a policy comes from: names, paths, mappings, and files that are no policies."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from sac.errors import PolicyError, SacError
from sac.policy import load as shipped
from sac.policy.load import load_policy, shipped_policies
from sac.policy.model import Policy

EMPTY = "schema: sac/v1\nrules: []\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and two shipped policies of its own."""
    directory = tmp_path / "shipped"
    directory.mkdir()
    for name in ("llama", "deepseek_v3"):
        (directory / f"{name}.yaml").write_text(f"{EMPTY}name: {name}\n")
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(shipped, "shipped_directory", lambda: directory)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "work"))
    return tmp_path / "work"


def error(source: object) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)  # type: ignore[arg-type]
    assert isinstance(caught.value, (SacError, ValueError))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v3", "DeepSeek-V3", " deepseek-v3 "])
def test_a_shipped_name_is_case_and_hyphen_insensitive(here: Path, name: str) -> None:
    assert load_policy(name) == Policy("deepseek_v3")
    assert shipped_policies() == ("deepseek_v3", "llama")


@pytest.mark.parametrize("source", ["mine.yml", Path("mine.yml"), "./mine.yml", "~/mine.yml"])
def test_a_path_is_text_or_path_like(here: Path, source: str | Path) -> None:
    (here / "mine.yml").write_text(EMPTY)
    assert load_policy(source) == Policy("mine")


def test_a_path_like_needs_no_ending(here: Path) -> None:
    (here / "llama").write_text(f"{EMPTY}name: mine\n")
    assert [load_policy(one).name for one in (Path("llama"), "./llama", "llama")] == ["mine", "mine", "llama"]


def test_an_unknown_name(here: Path) -> None:
    assert error("lama") == (
        'policy: no shipped policy is called "lama"\n'
        "    did you mean: llama\n"
        "    legal: deepseek_v3, llama\n"
        '    fix: to name a file, give a path that ends in .yaml or has a "/" in it'
    )


# What is given, and how the error begins (` / ` begins a line of it).
SOURCES = [
    (None, "policy: a policy is meant, this is a value of type NoneType / legal: a path, a mapping, a Policy, or one"),
    ([], "policy: a policy is meant, this is a value of type list / legal: "),
    (" ", "policy: a policy is meant, this is an empty name / legal: "),
    (
        "lama.yaml",
        'policy: there is no file "lama.yaml" / did you mean: llama / fix: the shipped policy is written "ll',
    ),
    ("sub/other.yaml", 'policy: there is no file "sub/other.yaml" / fix: check the path'),
    ("a\0b.yaml", 'policy: there is no file "a\\x00b.yaml" / fix: check the path'),
    ("x" * 5000 + ".yaml", f'policy: the file "{"x" * 57}..." cannot be reached: File name too long / fix: check'),
    ("loop.yaml", 'policy: the file "loop.yaml" cannot be reached: Too many levels of symbolic links / fix: check'),
    ("folder.yaml", "folder.yaml: this is a directory, not a policy file / fix: name a policy file"),
    ("pipe.yaml", "pipe.yaml: this is not a regular file / fix: name a policy file"),
    ("long.yaml", "long.yaml: the file is longer than 1 MiB / fix: name a policy file"),
    ("binary.yaml", "binary.yaml:1:1: the character 0x0003 is not allowed in YAML"),
    ("latin.yaml", "latin.yaml:2:1: the byte 0xff is not UTF-8"),
]


@pytest.mark.parametrize(("source", "text"), SOURCES)
def test_what_is_no_policy(here: Path, source: object, text: str) -> None:
    os.symlink("loop.yaml", "loop.yaml")
    os.mkdir("folder.yaml")
    os.mkfifo("pipe.yaml")
    Path("long.yaml").write_text(EMPTY + "#" * (2**20 - len(EMPTY) + 1))
    Path("binary.yaml").write_bytes(b"\x03\0\0")
    Path("latin.yaml").write_bytes(b"schema: sac/v1\nname: \xff")
    assert error(source).startswith(text.replace(" / ", "\n    "))


def test_a_file_that_must_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "p.yaml").write_text(EMPTY)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop root, who runs many a container
    assert error("p.yaml") == "p.yaml: the file cannot be read: Permission denied\n    fix: check its permissions"


def test_values_that_another_yaml_reader_has_changed_are_errors() -> None:
    rules = [{"ops": "a", "do": True}, {"ops": "a", "do": object(), "layers": 68, "call": {"index": None}}]
    text = error({True: "rules", "name": 1.1, "rules": rules})
    for found in ("a key of a policy is true", "name is 1.1", "do is true", "layers is 68"):
        assert found in text


def test_mappings_that_would_take_all_memory_are_refused() -> None:
    endless: dict[str, object] = {}
    endless["sets"] = endless
    assert "sets: this nests more than 20 deep" in error(endless)
    assert "policy.rules[9998]: up to here the policy holds more than 10000" in error({"rules": [[]] * 10_000})
    number = [{"ops": "a", "do": "save", "layers": {"first": 10**5000}}]
    assert "layers.first is a value of type int" in error({"rules": number})
