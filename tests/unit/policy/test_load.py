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
    return tmp_path / "work"


def error(source: object) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)  # type: ignore[arg-type]
    assert isinstance(caught.value, (SacError, ValueError))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_the_shipped_policies_are_files_that_load() -> None:
    assert shipped_policies() == tuple(sorted(shipped_policies()))
    for name in shipped_policies():
        assert load_policy(name).source == str(shipped.shipped_directory() / f"{name}.yaml")


def test_a_checkout_has_its_policies_beside_the_package() -> None:
    assert (shipped.shipped_directory() / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["deepseek_v3", "DeepSeek-V3", " deepseek-v3 "])
def test_a_shipped_name_is_case_and_hyphen_insensitive(here: Path, name: str) -> None:
    assert load_policy(name) == Policy("deepseek_v3")
    assert shipped_policies() == ("deepseek_v3", "llama")


@pytest.mark.parametrize("make", [str, Path, lambda path: os.path.join(".", path)])
def test_a_path_is_text_or_path_like(here: Path, make: type) -> None:
    (here / "mine.yml").write_text(EMPTY)
    assert load_policy(make("mine.yml")) == Policy("mine")


def test_a_path_like_needs_no_ending(here: Path) -> None:
    (here / "llama").write_text(f"{EMPTY}name: mine\n")
    assert load_policy(Path("llama")).name == "mine"
    assert load_policy("./llama").name == "mine"
    assert load_policy("llama").name == "llama"


def test_the_home_directory_may_be_a_tilde(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    (here / "mine.yaml").write_text(EMPTY)
    assert load_policy("~/mine.yaml") == Policy("mine")


def test_an_unknown_name(here: Path) -> None:
    assert error("lama") == (
        'policy: no shipped policy is called "lama"\n'
        "    did you mean: llama\n"
        "    legal: deepseek_v3, llama\n"
        '    fix: to name a file, give a path that ends in .yaml or has a "/" in it'
    )


def test_the_argument_is_called_as_its_caller_says(here: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy({"rules": 3}, where="activation_checkpointing.policy")
    assert str(caught.value) == (
        "activation_checkpointing.policy.rules: rules is 3\n    legal: a list of rules\n"
        '    fix: start each rule with "- "'
    )


def test_a_missing_file(here: Path) -> None:
    assert error("lama.yaml") == (
        'policy: there is no file "lama.yaml"\n'
        "    did you mean: llama\n"
        '    fix: the shipped policy is written "llama", without a path'
    )
    assert error("sub/other.yaml") == 'policy: there is no file "sub/other.yaml"\n    fix: check the path'


def test_a_path_that_cannot_be_one(here: Path) -> None:
    assert error("a\0b.yaml") == 'policy: there is no file "a\\x00b.yaml"\n    fix: check the path'
    assert error("x" * 5000 + ".yaml") == (
        f'policy: the file "{"x" * 57}..." cannot be reached: File name too long\n    fix: check the path'
    )
    os.symlink("loop.yaml", "loop.yaml")
    assert error("loop.yaml") == (
        'policy: the file "loop.yaml" cannot be reached: Too many levels of symbolic links\n    fix: check the path'
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (None, "a value of type NoneType"),
        (3, "a value of type int"),
        ([], "a value of type list"),
        (" ", "an empty name"),
    ],
)
def test_a_source_of_the_wrong_type(here: Path, source: object, found: str) -> None:
    assert error(source) == (
        f"policy: a policy is meant, this is {found}\n"
        "    legal: a path, a mapping, a Policy, or one of deepseek_v3, llama"
    )


def test_a_directory(here: Path) -> None:
    (here / "d.yaml").mkdir()
    assert error("d.yaml") == "d.yaml: this is a directory, not a policy file\n    fix: name a policy file"


def test_a_pipe_is_not_waited_for(here: Path) -> None:
    os.mkfifo("p.yaml")
    assert error("p.yaml") == "p.yaml: this is not a regular file\n    fix: name a policy file"


def test_a_file_that_must_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "p.yaml").write_text(EMPTY)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop root, who runs many a container
    assert error("p.yaml") == "p.yaml: the file cannot be read: Permission denied\n    fix: check its permissions"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x03\0\0", "the character 0x0003 is not allowed in YAML"),
        ("schema: sac/v1".encode("utf-16"), "the byte 0xff is not UTF-8"),
        (b"schema: sac/v1\nname: \xff", "p.yaml:2:1: the byte 0xff is not UTF-8"),
    ],
)
def test_what_is_no_text(here: Path, data: bytes, found: str) -> None:
    (here / "p.yaml").write_bytes(data)
    assert found in error("p.yaml")


def test_a_file_of_100_mb_is_not_read(here: Path) -> None:
    with open("p.yaml", "wb") as file:
        file.truncate(100 * 2**20)  # sparse: nothing is written either
    assert error("p.yaml") == "p.yaml: the file is longer than 1 MiB\n    fix: name a policy file; they have a few kB"


def test_a_file_of_just_1_mib_is_read(here: Path) -> None:
    (here / "p.yaml").write_text(EMPTY + "#" * (2**20 - len(EMPTY)))
    assert load_policy("p.yaml") == Policy("p")
    with open("p.yaml", "a") as file:
        file.write("#")
    assert error("p.yaml").startswith("p.yaml: the file is longer than 1 MiB")


def test_values_that_another_yaml_reader_has_changed_are_errors() -> None:
    rules = [{"ops": "a", "do": True}, {"ops": "a", "do": object(), "layers": 68, "call": {"index": None}}]
    text = error({True: "rules", "name": 1.1, "rules": rules})
    for found in ("a key of a policy is true", "name is 1.1", "do is true", "layers is 68"):
        assert found in text


def test_a_mapping_that_holds_itself() -> None:
    source: dict[str, object] = {}
    source["sets"] = source
    assert error(source) == (
        "policy" + ".sets" * 21 + ": this nests more than 20 deep\n    fix: a policy needs 5 levels"
    )


def test_a_mapping_that_is_too_large() -> None:
    assert "policy.rules[9998]: up to here the policy holds more than 10000" in error({"rules": [[]] * 10_000})


def test_a_number_too_long_to_print() -> None:
    assert error({"rules": [{"ops": "a", "do": "save", "layers": {"first": 10**5000}}]}) == (
        "policy.rules[0].layers.first: layers.first is a value of type int\n    legal: a whole number, 1 or more"
    )
