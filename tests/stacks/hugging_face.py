"""A tiny Llama in the training tools of Hugging Face: what each of them gives in one mode.

Each function takes a config value of `sac.apply` and returns an `Outcome`. A step is the tool's own: it computes the
loss, scales it and runs backward.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.support.model_zoo import VOCAB, tiny

LAYERS = 4


def trainer(mode: Any) -> Outcome:
    """`Trainer.training_step`."""
    transformers = pytest.importorskip("transformers")
    model, inputs = _llama()
    sac.apply(model, mode)
    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], save_strategy="no")
        return _steps_of(transformers.Trainer(model=model, args=given), model, inputs)


def accelerate(mode: Any) -> Outcome:
    """`Accelerator.prepare` and `Accelerator.backward`."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, inputs = _llama()
    sac.apply(model, mode)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.0))

    def step() -> Tensor:
        loss: Tensor = prepared(**inputs).loss
        accelerator.backward(loss)
        optimizer.step()
        return loss

    return _measured(step, model)


def peft_lora(mode: Any) -> Outcome:
    """LoRA adapters on a frozen model."""
    peft = pytest.importorskip("peft")
    model, inputs = _llama()
    torch.manual_seed(3)
    # The second matrix of an adapter begins at zero, and then the first has no gradient to compare.
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, adapters)
    sac.apply(model, mode)

    def step() -> Tensor:
        loss: Tensor = model(**inputs).loss
        loss.backward()
        return loss

    return _measured(step, model)


def trl_sft(mode: Any) -> Outcome:
    """`SFTTrainer.training_step`, on tokens."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model, inputs = _llama()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    sac.apply(model, mode)
    rows = datasets.Dataset.from_dict({"input_ids": inputs["input_ids"].tolist()})
    with tempfile.TemporaryDirectory() as folder:
        given = trl.SFTConfig(
            folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", gradient_checkpointing=False
        )
        made = trl.SFTTrainer(model=model, args=given, train_dataset=rows, processing_class=_tokenizer())
        return _steps_of(made, model, inputs)


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    return tiny("llama", num_hidden_layers=LAYERS, use_cache=False)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(3, VOCAB)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _steps_of(made: Any, model: nn.Module, inputs: dict[str, Any]) -> Outcome:
    """Steps of a `Trainer`, with its own call of backward."""
    made.current_gradient_accumulation_steps = 1  # what train() sets before its first step
    return _measured(lambda: made.training_step(made.model, dict(inputs)), model)


def _measured(step: Callable[[], Any], model: nn.Module) -> Outcome:
    with _forward_marked(model):
        return outcome(step, model)


@contextmanager
def _forward_marked(model: nn.Module) -> Iterator[None]:
    """The end of forward is said by the model itself, where the step is somebody else's."""
    handle = model.register_forward_hook(lambda *_: forward_done())
    try:
        yield
    finally:
        handle.remove()
