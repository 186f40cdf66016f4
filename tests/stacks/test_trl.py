"""TRL: supervised fine-tuning and preference training give the same losses and weights as without us.

TRL turns gradient checkpointing on by default: refused together with `sac.apply`, carried out by sac after `take_over`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.install import ours_on, regions_of
from sac.errors import ConfigError, ModelError
from tests.stacks.composition import Outcome, assert_recomputed
from tests.stacks.hf_training import Prepare, applied, arguments, llama, told, untouched
from tests.support.model_zoo import tiny

trl = pytest.importorskip("trl", reason="tests of TRL need trl")
peft = pytest.importorskip("peft", reason="tests of TRL need peft")

from sac.compat.huggingface import SacCallback, take_over  # noqa: E402  (needs transformers)

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "small", "cat", "sat", "on", "the", "mat", "and", "saw", "dog", "run"]
WORDS += ["far", "over", "hill"]
PAIRS = (("a small cat", "sat on the mat", "run far"), ("the dog", "saw a cat", "over the hill"))
TEXTS = (
    "a small cat sat on the mat",
    "the dog saw a cat run far",
    "over the hill a dog sat",
    "the cat and the dog run over the mat",
)
OFF = {"gradient_checkpointing": False}


def tokenizer() -> Any:
    """One token a word; TRL writes to it, so each trainer has its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def fine_tune(folder: Path, prepare: Prepare, **changes: Any) -> Outcome:
    from datasets import Dataset

    given = {name: changes.pop(name) for name in ("peft_config", "callbacks") if name in changes}
    args = arguments(folder, trl.SFTConfig, **({"bf16": False, "max_length": 16} | changes))
    texts = Dataset.from_list([{"text": text} for text in TEXTS * 2])
    torch.manual_seed(0)  # for adapters
    trainer = trl.SFTTrainer(llama(prepare), args=args, train_dataset=texts, processing_class=tokenizer(), **given)
    trainer.train()
    return told(trainer, tiny("llama")[1])


def lora() -> Any:
    return peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])


def sft(mode: Any) -> Outcome:
    """One row of the matrix of stacks."""
    with tempfile.TemporaryDirectory() as folder:
        return fine_tune(Path(folder), untouched if mode == "none" else applied(mode), **OFF)


def dpo(mode: Any, *, adapter: bool) -> Outcome:
    """Two forwards in each step, and two more of the reference: with an adapter the model without it."""
    from datasets import Dataset

    names = ("prompt", "chosen", "rejected")
    pairs = Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in PAIRS * 3])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.DPOTrainer(
            llama(untouched if mode == "none" else applied(mode)),
            None if adapter else tiny("llama")[0],
            args=arguments(Path(folder), trl.DPOConfig, bf16=False, max_length=16, **OFF),
            train_dataset=pairs,
            processing_class=tokenizer(),
            peft_config=lora() if adapter else None,
        )
        trainer.train()
        return told(trainer, tiny("llama")[1])


def test_fine_tuning_an_adapter_that_the_trainer_puts_on(tmp_path: Path) -> None:
    ways = {
        "none": lambda: fine_tune(tmp_path, untouched, peft_config=lora(), **OFF),
        "callback": lambda: fine_tune(
            tmp_path, untouched, peft_config=lora(), callbacks=[SacCallback("selective")], **OFF
        ),
        "take_over": lambda: fine_tune(tmp_path, take_over, peft_config=lora()),
    }
    found = assert_recomputed(lambda way: ways[way](), "callback", "take_over")
    assert all(any("lora_A" in name for name in one.state) for one in found)


def test_gradient_checkpointing_that_trl_turns_on_by_itself(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"activation_checkpointing_enable was called, and sac\.apply has been"):
        fine_tune(tmp_path, applied("selective"))
    with pytest.raises(ConfigError, match="activation_checkpointing is on in the arguments too"):
        fine_tune(tmp_path, untouched, callbacks=[SacCallback("selective")])


def test_gradient_checkpointing_that_is_taken_over(tmp_path: Path) -> None:
    kwargs = {"gradient_checkpointing_kwargs": {"mode": "full"}}
    assert_recomputed(lambda mode: sft(mode) if mode == "none" else fine_tune(tmp_path, take_over, **kwargs), "full")


def test_a_trained_model_can_be_given_back(tmp_path: Path) -> None:
    kept: list[nn.Module] = []

    def prepare(model: nn.Module) -> nn.Module:
        kept.append(sac.apply(model, "full"))
        return model

    fine_tune(tmp_path, prepare, peft_config=lora(), **OFF)
    assert len(list(regions_of(kept[0]))) == 2
    sac.remove(kept[0])
    assert not [one for one in kept[0].modules() if ours_on(one) is not None]  # TRL leaves a forward of its own
