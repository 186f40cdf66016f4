"""Model specs of the command line: what each form builds, and how each is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from sac.errors import ConfigError
from sac.tools.models import Scale, config_path, load_model, scale_config

LLAMA = Path(__file__).parents[2] / "examples" / "llama-3.2-1b.json"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
WORDS = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}


def tiny_llama(**changes: object) -> dict[str, object]:
    return {**json.loads(LLAMA.read_text()), **SIZES, "num_hidden_layers": 4, **WORDS, **changes}


@pytest.fixture
def config_file(tmp_path):
    def write(content: object) -> str:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return f"hf:{path}"

    return write


def refusal(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(spec, Scale())
    return str(caught.value)


def test_shipped_configs_have_names():
    assert Path(config_path("Llama-3.2-1B")) == LLAMA
    assert config_path("some/config.json") == "some/config.json"


def test_layers_seq_batch_vocab_and_dtype_scale_the_model(config_file):
    built = load_model(config_file(tiny_llama()), Scale(layers=2, seq=16, batch=3, vocab=50, dtype="bfloat16"))
    inputs = built.inputs_of_step(0)
    assert len(built.model.model.layers) == 2
    assert built.model.lm_head.weight.shape[0] == 50
    assert built.model.lm_head.weight.dtype == torch.bfloat16
    assert inputs["input_ids"].shape == (3, 16)
    assert inputs["input_ids"].max() < 50
    assert built.model(**inputs).loss.isfinite()


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}
FAMILIES = {
    "gpt2": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 4, "n_head": 4,
              "vocab_size": 99, "bos_token_id": 98, "eos_token_id": 98}, "GPT2LMHeadModel"),
    "bert": ({"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL}, "BertForMaskedLM"),
    "classifier": ({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SMALL},
                   "BertForSequenceClassification"),
    "t5": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8, "d_ff": 64,
            "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "vocab_size": 99, "pad_token_id": 0,
            "decoder_start_token_id": 0}, "T5ForConditionalGeneration"),
    "vit": ({"model_type": "vit", "architectures": ["ViTForImageClassification"], **SMALL, "image_size": 32,
             "patch_size": 8}, "ViTForImageClassification"),
    "no architectures": ({"model_type": "llama", **SMALL}, "LlamaForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_model_is_cut_to_its_layers_and_gives_a_loss(family, config_file):
    raw, expected_class = FAMILIES[family]
    built = load_model(config_file(raw), Scale(layers=2, seq=8, batch=2))
    lists = [module for module in built.model.modules() if isinstance(module, nn.ModuleList) and len(module) == 4]
    assert type(built.model).__name__ == expected_class
    assert not lists
    assert built.model(**built.inputs_of_step(0)).loss.isfinite()


def test_lists_with_one_entry_per_layer_and_sub_configs_are_cut_too():
    raw = {"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "vocab_size": 9, "pad_token_id": 8},
           "vision_config": {"num_hidden_layers": 5, "sizes": [1, 2]}, "torch_dtype": "bfloat16"}  # fmt: skip
    assert scale_config(raw, Scale(layers=2, vocab=4)) == {
        "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"], "vocab_size": 4, "pad_token_id": 3},
        "vision_config": {"num_hidden_layers": 2, "sizes": [1, 2]},
    }


MODULE = """
import torch
from torch import nn

def with_tuple(seq=4, batch=1):
    return nn.Linear(seq, 2), (torch.ones(batch, seq),)

def without_inputs():
    return nn.Linear(3, 2)
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_sac_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("user_module")
def test_function_gets_the_sizes_that_it_takes():
    built = load_model("my_sac_models:with_tuple", Scale(seq=7, batch=5))
    assert built.inputs_of_step(0)[0].shape == (5, 7)
    assert built.model(*built.inputs_of_step(0)).shape == (5, 2)


# What is given, and how the text goes on (` / ` begins a line of it).
@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            "llama.json",
            "'llama.json' is not a model spec / did you mean: hf:llama.json / legal: hf:CONFIG.json (a Hugg",
        ),
        ("T5-small", "'T5-small' is not a model spec / did you mean: hf:T5-small / legal: "),
        (
            "hf:smollm",
            'no shipped config is called "smollm" / did you mean: smollm2-135m / legal: llama-3.1-8b, llama-',
        ),
        (
            "my_sac_models:without_inputs",
            "my_sac_models:without_inputs returned Linear / legal: (model, inputs), where inputs is a tuple for model(",
        ),
    ],
)
def test_spec_that_names_nothing(spec, text):
    assert refusal(spec).replace("\n    ", " / ").startswith(f"--model: {text}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "it is not JSON: Expecting property name enclosed in double quotes"),
        ([1], "holds a list / legal: a config.json file, with a JSON object that has a model_type"),
        (
            tiny_llama(model_type="lama"),
            "model_type 'lama' is unknown to transformers VERSION / did you mean: llama / ",
        ),
        (
            tiny_llama(architectures=["LlamaForCausalLN"]),
            "transformers VERSION has no class 'LlamaForCausalLN' / did you mean: LlamaForCausalLM",
        ),
    ],
)
def test_config_file_that_names_no_model(content, text, config_file):
    told = refusal(config_file(content)).replace("\n    ", " / ").replace(transformers.__version__, "VERSION")
    assert told.partition("config.json")[2].lstrip(": ").startswith(text)
