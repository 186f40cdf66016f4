"""Models that the command line can build, from a config file or a function, and inputs for them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.kv_cache import turn_off_cache
from sac.errors import ConfigError, Problem, SacError, listing, nearest
from sac.extras import import_extra
from sac.planner.fakes import Build, Inputs
from sac.tools.cli import FORMS

# -- A model, its batches, and the sizes that both are built with

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OWN_MODEL = "write a function that returns (model, inputs) and name it as package.module:function"
_TOP = "--model"


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the model and its batch; None keeps the value of the config file.

    ``layers`` counts per stack, ``seq`` in tokens, ``batch`` in rows, ``vocab`` in tokens.
    """

    layers: int | None = None
    seq: int = 128
    batch: int = 1
    vocab: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse sizes and dtypes that no model can be built with; raises ``ConfigError`` with all of them."""
        sizes = {name: size for name, size in asdict(self).items() if isinstance(size, int) and size < 1}
        problems = [Problem(f"--{name}", f"{size} is not a size", "1, 2, 3, …") for name, size in sizes.items()]
        if self.dtype not in DTYPES:
            found = f"unknown dtype '{self.dtype}'"
            problems.append(Problem("--dtype", found, listing(list(DTYPES)), nearest(self.dtype, DTYPES)))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model in training mode, and the inputs of each step: ``model(*inputs)`` or ``model(**inputs)``."""

    model: nn.Module
    inputs_of_step: Callable[[int], Inputs]
    name: str


# -- The inputs of each training step for a Hugging Face model: seeded random numbers


def batches_of(model_class: Any, config: Any, scale: Scale) -> Callable[[int], dict[str, Any]]:
    """Return a function from step to the keyword inputs of such a model, including labels if it takes any.

    Raises ``ConfigError`` if no batches can be generated for models of this class and config.
    """
    class_name, accepted = model_class.__name__, inspect.signature(model_class.forward).parameters
    name = str(getattr(model_class, "main_input_name", "input_ids"))
    compares = {"input_ids", "return_loss", "pixel_values"} <= accepted.keys()  # texts with pictures, in two towers
    name = "input_ids" if compares else name
    if name not in ("input_ids", "pixel_values"):
        found = f"no batch can be generated for {class_name}, which reads '{name}'"
        raise ConfigError(Problem(_TOP, found, "models that read input_ids or pixel_values", fix=OWN_MODEL))
    vocab = _checked_vocab(class_name, config, scale) if name == "input_ids" else 0

    def inputs_of_step(step: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(step)
        if name == "pixel_values":
            main = _pixels(config, scale, random)
        else:
            main = torch.randint(0, vocab, (scale.batch, scale.seq), generator=random)
        inputs: dict[str, Any] = {name: main}
        if "labels" in accepted and "Classification" in class_name:
            shape = tuple(main.shape[:2]) if "Token" in class_name else (len(main),)
            inputs["labels"] = torch.randint(0, config.num_labels, shape, generator=random)
        elif "labels" in accepted and name == "input_ids":
            inputs["labels"] = main
        if compares:
            inputs |= {"pixel_values": _pixels(config, scale, random), "return_loss": True}
        return inputs

    return inputs_of_step


def _checked_vocab(class_name: str, config: Any, scale: Scale) -> int:
    text_config = config.get_text_config()
    vocab, most = (getattr(text_config, name, None) for name in ("vocab_size", "max_position_embeddings"))
    if not isinstance(vocab, int):
        found = f"no batch can be generated for {class_name}: its config does not give the number of tokens"
        raise ConfigError(Problem(_TOP, found, "a config with vocab_size", fix=OWN_MODEL))
    is_rotary = any(hasattr(text_config, name) for name in ("rope_theta", "rope_parameters", "rope_scaling"))
    if isinstance(most, int) and scale.seq > most and not is_rotary:
        found = f"{class_name} has {most} positions, fewer than a row of {scale.seq} tokens"
        raise ConfigError(Problem("--seq", found, f"1 to {most}", fix=f"--seq {most}"))
    return vocab


def _pixels(config: Any, scale: Scale, random: torch.Generator) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 224  # for models that take pictures of any size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    frames = (config.num_frames,) if isinstance(getattr(config, "num_frames", None), int) else ()  # of a video
    return torch.randn((scale.batch, *frames, channels, height, width), generator=random).to(DTYPES[scale.dtype])


# -- Models from a Hugging Face config file, scaled to the available hardware, with random weights

# All names under which a transformers config counts the layers of a stack.
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers",
               "decoder_layers")  # fmt: skip
_SUB_CONFIGS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")


def _from_config(path: str, scale: Scale, build: Build) -> BuiltModel:
    """Build the model that a config.json describes: its ``architectures`` entry, or a causal language model."""
    model_class, config = _class_and_config(path, scale)
    inputs_of_step = batches_of(model_class, config, scale)
    try:
        model = build(partial(model_class, config), DTYPES[scale.dtype]).train()
    except SacError:
        raise
    except Exception as error:
        found = f"{path}: {model_class.__name__} cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(Problem(_TOP, found, fix=OWN_MODEL)) from error
    turn_off_cache(model)  # training does not read it: no mode should pay for it
    return BuiltModel(model, inputs_of_step, f"{model_class.__name__} ({Path(path).name})")


def _class_and_config(path: str, scale: Scale) -> tuple[Any, Any]:
    """Return the model's class and its config at this scale; raises ``ConfigError`` if the file describes none."""
    raw = scale_config(_read_config(path), scale)
    transformers = import_extra("transformers", "hf")
    model_type = raw.pop("model_type", None)
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        found = f"{path}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
        raise ConfigError(Problem(_TOP, found, "a model_type of transformers", nearest(str(model_type), known.keys())))
    try:
        config = transformers.AutoConfig.for_model(model_type, **raw)
    except Exception as error:  # from checks that each config makes in its own way
        found = f"{path}: transformers cannot make a config from it: {type(error).__name__}: {error}"
        fix = "leave --layers out, or write the sizes into the file" if scale.layers is not None else ""
        raise ConfigError(Problem(_TOP, found, fix=fix)) from error
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # shifted into the labels
    return _model_class(transformers, raw.get("architectures") or [], config, path), config


def scale_config(raw: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Return ``raw`` with fewer layers and tokens, also in sub-configs; lists with one entry per layer are cut.

    A list of two may as well be a range: it is cut if its name says that it is about layers.
    """
    scaled = {key: value for key, value in raw.items() if key not in ("torch_dtype", "dtype")}
    if scale.layers is not None and isinstance(raw.get("depths"), list):  # one stack per stage
        scaled["depths"] = [scale.layers] * len(raw["depths"])
    elif scale.layers is not None:
        counts = {key: scaled[key] for key in _LAYER_KEYS if isinstance(scaled.get(key), int)}
        for key, value in scaled.items():
            if key in counts:
                scaled[key] = scale.layers
            elif isinstance(value, list) and len(value) in counts.values() and (len(value) > 2 or "layer" in key):
                scaled[key] = value[: scale.layers]
    if scale.vocab is not None and "vocab_size" in scaled:
        scaled["vocab_size"] = scale.vocab
        ids = {key: value for key, value in scaled.items() if key.endswith("_token_id") and isinstance(value, int)}
        scaled |= {key: min(value, scale.vocab - 1) for key, value in ids.items()}
    for key in _SUB_CONFIGS:
        if isinstance(scaled.get(key), Mapping):
            scaled[key] = scale_config(scaled[key], scale)
    return scaled


def _read_config(path: str) -> dict[str, Any]:
    legal = "a config.json file, with a JSON object that has a model_type"
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it is not JSON: {error}"
        raise ConfigError(Problem(_TOP, f"cannot read {path}: {reason}", legal)) from error
    if isinstance(raw, dict):
        return raw
    raise ConfigError(Problem(_TOP, f"{path} holds a {type(raw).__name__}", legal))


def _model_class(transformers: Any, architectures: list[str], config: Any, path: str) -> Any:
    if architectures:
        found = getattr(transformers, architectures[0], None)
        if found is not None:
            return found
        problem = f"{path}: transformers {transformers.__version__} has no class {architectures[0]!r}"
        legal = [name for name in dir(transformers) if name.startswith(type(config).__name__.removesuffix("Config"))]
        raise ConfigError(Problem(_TOP, problem, listing(legal), nearest(architectures[0], legal)))
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if found := mapping.get(type(config), None):
            return found[0] if isinstance(found, tuple) else found
    problem = f"{path} names no architecture, and transformers has no default one for {type(config).__name__}"
    raise ConfigError(Problem(_TOP, problem, fix='add "architectures": ["…"] to the file'))


# -- A model named on the command line: ``hf:CONFIG.json`` or ``package.module:function``


def load_model(spec: str, scale: Scale, build: Build | None = None) -> BuiltModel:
    """Build the model that ``spec`` names, with random weights.

    ``build`` makes the model of a config file, given a function that calls the model's class, and a dtype; it may leave
    out the data. Raises ``ConfigError`` if the spec, the file or the function that it names cannot be used.
    """
    torch.manual_seed(0)
    form, _, rest = spec.partition(":")
    if form == "hf" and rest:
        return _from_config(config_path(rest), scale, build or (lambda make, dtype: make().to(dtype)))
    if not form or not rest or "/" in spec:
        hint = f"hf:{spec}" if spec.endswith(".json") or spec.lower() in _shipped_configs() else ""
        raise ConfigError(Problem(_TOP, f"'{spec}' is not a model spec", FORMS, hint))
    function = _function(spec, form, rest)
    built = function(**_arguments(spec, function, scale))
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not isinstance(inputs, (tuple, dict)):
        legal = "(model, inputs), where inputs is a tuple for model(*inputs) or a dict for model(**inputs)"
        raise ConfigError(Problem(_TOP, f"{spec} returned {type(built).__name__}", legal))
    return BuiltModel(model.train(), lambda step: inputs, spec)


def _arguments(spec: str, function: Callable[..., Any], scale: Scale) -> dict[str, Any]:
    """Return what of ``scale`` a function takes; raises ``ConfigError`` if it needs more, or ignores what was said."""
    signature, usual = inspect.signature(function), asdict(Scale())
    given = {name: value for name, value in asdict(scale).items() if value is not None}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in [name for name in given if name not in signature.parameters and not takes_any]:
        if given.pop(name) != usual[name]:
            found = f"{spec} takes no argument `{name}`, so this has no effect"
            raise ConfigError(Problem(f"--{name}", found, fix=f"leave it out, or give the function a parameter {name}"))
    try:
        signature.bind(**given)
    except TypeError as error:
        problem = Problem(_TOP, f"{spec} cannot be called: {error}", fix="give its arguments defaults")
        raise ConfigError(problem) from error
    return given


def config_path(text: str) -> str:
    """Return the path of a config file; ``text`` is a path, or the name of a shipped file."""
    path = Path(text).expanduser()
    if text.endswith(".json") or len(path.parts) > 1 or path.exists():
        return str(path)
    shipped = _shipped_configs()
    if text.lower() in shipped:
        return shipped[text.lower()]
    found, fix = f'no shipped config is called "{text}"', "to name a file, give a path that ends in .json"
    raise ConfigError(Problem(_TOP, found, listing(list(shipped)), nearest(text.lower(), shipped), fix))


def _shipped_configs() -> dict[str, str]:
    """Return the paths of the shipped config files by name."""
    try:
        folder = Path(str(resources.files("sac.examples")))
    except ModuleNotFoundError:  # a checkout that is run in place
        folder = Path(__file__).resolve().parents[2] / "examples"
    return {path.stem: str(path) for path in sorted(folder.glob("*.json"))}


def _function(spec: str, module_name: str, function_name: str) -> Callable[..., Any]:
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        fix = "run where the module can be imported, or put its folder on PYTHONPATH"
        raise ConfigError(Problem(_TOP, f"'{spec}': no module named '{error.name}'", fix=fix)) from error
    function = getattr(module, function_name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    found = f"'{spec}': module '{module_name}' has no function '{function_name}'"
    public = [name for name, _ in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_")]
    raise ConfigError(Problem(_TOP, found, listing(public), nearest(function_name, public)))
