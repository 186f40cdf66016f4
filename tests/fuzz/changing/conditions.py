"""What a branch of a changing program asks; each writes what it needs and returns an expression."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random

from tests.fuzz.changing.writer import Writer

Condition = Callable[[Writer, Random], str]


def counter(w: Writer, pick: Random) -> str:
    calls = w.attribute("calls", "0")
    w.line(f"self.{calls} += 1")
    return f"self.{calls} % {pick.choice([2, 3])} == 0"


def switch(w: Writer, pick: Random) -> str:
    """Turned by the block itself."""
    flag = w.attribute("flag", str(pick.random() < 0.5))
    w.line(f"self.{flag} = not self.{flag}")
    return f"self.{flag}"


def setting(w: Writer, pick: Random) -> str:
    """Set by the training loop before a step."""
    flag = w.attribute("flag", "True")
    w.loop("before", f"me.{flag} = step in {tuple(sorted(pick.sample(range(6), 3)))}")
    return f"self.{flag}"


def setting_between_passes(w: Writer, pick: Random) -> str:
    flag = w.attribute("flag", "True")
    if pick.random() < 0.5:
        w.loop("before", f"me.{flag} = True")
    w.loop("between", f"if step in {tuple(sorted(pick.sample(range(6), 3)))}:\n    me.{flag} = not me.{flag}")
    return f"self.{flag}"


def global_setting(w: Writer, pick: Random) -> str:
    name = w.name("FLAG")
    w.top(f"{name} = [True]\n")
    w.loop("before", f"{name}[0] = step in {tuple(sorted(pick.sample(range(6), 3)))}")
    return f"{name}[0]"


def global_setting_between_passes(w: Writer, pick: Random) -> str:
    name = w.name("FLAG")
    w.top(f"{name} = [True]\n")
    w.loop("between", f"if step in {tuple(sorted(pick.sample(range(6), 3)))}:\n    {name}[0] = not {name}[0]")
    return f"{name}[0]"


def global_counter(w: Writer, pick: Random) -> str:
    name = w.name("CALLS")
    w.top(f"{name} = [0]\n")
    w.line(f"{name}[0] += 1")
    return f"{name}[0] % 2 == 0"


def closure_counter(w: Writer, pick: Random) -> str:
    made, attribute = w.name("counter"), w.name("count")
    w.top(
        f"def {made}():\n    calls = 0\n\n    def count():\n        nonlocal calls\n        calls += 1\n"
        "        return calls\n\n    return count\n"
    )
    w.init(f"self.{attribute} = {made}()")
    return f"self.{attribute}() % 2 == 0"


def class_counter(w: Writer, pick: Random) -> str:
    name = w.name("calls")
    w.line(f'type(self).{name} = getattr(type(self), "{name}", 0) + 1')
    return f"type(self).{name} % 2 == 0"


def iterator(w: Writer, pick: Random) -> str:
    name = w.attribute("turns", "itertools.cycle([True, False, False])")
    if sys.version_info >= (3, 14):
        w.hides("an iterator of itertools")
    return f"next(self.{name})"


def length_of_list(w: Writer, pick: Random) -> str:
    seen = w.attribute("seen", "[]")
    w.line(f"self.{seen}.append({pick.choice(['len(h)', 'None', 'h.detach().sum().item()'])})")
    if pick.random() < 0.3:
        w.loop("after", f"if step == 3:\n    me.{seen}.clear()")
    return f"len(self.{seen}) % 2 == 0"


def entry_of_dict(w: Writer, pick: Random) -> str:
    book = w.attribute("book", pick.choice(['{"count": 0}', "collections.Counter(count=0)"]))
    w.line(f'self.{book}["count"] += 1')
    return f'self.{book}["count"] % 2 == 0'


def entry_of_set(w: Writer, pick: Random) -> str:
    shapes = w.attribute("shapes", "set()")
    expression = w.name("new")
    w.line(f"{expression} = len(h) not in self.{shapes}")
    w.line(f"self.{shapes}.add(len(h))")
    return expression


def field_of_object(w: Writer, pick: Random) -> str:
    value = w.attribute("config", "SimpleNamespace(count=0)")
    w.line(f"self.{value}.count += 1")
    return f"self.{value}.count % 2 == 0"


def field_of_argument(w: Writer, pick: Random) -> str:
    field = w.state("count")
    w.line(f"{field} += 1")
    return f"{field} % 2 == 0"


def buffer_value(w: Writer, pick: Random) -> str:
    steps = w.buffer("steps", "torch.zeros((), dtype=torch.long)")
    w.line(pick.choice([f"self.{steps} += 1", f"self.{steps}.add_(1)", f"self.{steps} = self.{steps} + 1"]))
    return f"self.{steps}.item() % 2 == 0"


def parameter_value(w: Writer, pick: Random) -> str:
    weight = w.attribute("scale", "nn.Parameter(torch.randn(4) * 0.05)")
    w.line(f"h = h + self.{weight}")
    return f"self.{weight}.sum().item() > 0"


def tensor_attribute(w: Writer, pick: Random) -> str:
    load = w.attribute("load", "torch.zeros(4)")
    w.line(f"self.{load} += h.detach().float().mean(0)")
    return f"self.{load}.sum().item() > 0"


def own_generator(w: Writer, pick: Random) -> str:
    generator = w.attribute("generator", "torch.Generator().manual_seed(3)")
    return f"torch.rand((), generator=self.{generator}).item() < 0.5"


def own_python_generator(w: Writer, pick: Random) -> str:
    generator = w.attribute("generator", "random.Random(3)")
    return f"self.{generator}.random() < 0.5"


def own_numpy_generator(w: Writer, pick: Random) -> str:
    generator = w.attribute("generator", "numpy.random.default_rng(3)")
    return f"self.{generator}.random() < 0.5"


CONDITIONS: dict[str, Condition] = {
    "if torch.rand": lambda w, pick: f"torch.rand(()).item() < {pick.choice([0.3, 0.5, 0.7])}",
    "if torch.randint": lambda w, pick: "torch.randint(3, ()) == 0",
    "if bernoulli": lambda w, pick: "bool(torch.empty(1).bernoulli_(0.5))",
    "if random.random": lambda w, pick: f"random.random() < {pick.choice([0.3, 0.5, 0.7])}",
    "if numpy.random": lambda w, pick: "numpy.random.rand() < 0.5",
    "if input's value": lambda w, pick: pick.choice(
        ["h.sum().item() > 0", "h[0, 0] > 0", "bool((h.detach().mean() > 0))", "h.detach().tolist()[0][1] > 0"]
    ),
    "if input's shape": lambda w, pick: "len(h) > 3",
    "if input needs grad": lambda w, pick: "h.requires_grad",
    "if training": lambda w, pick: "self.training",
    "if autocast": lambda w, pick: 'torch.is_autocast_enabled("cpu")',
    "if grad mode": lambda w, pick: "torch.is_grad_enabled()",
    "if counter": counter,
    "if own switch": switch,
    "if setting": setting,
    "if setting between passes": setting_between_passes,
    "if global setting": global_setting,
    "if global setting between passes": global_setting_between_passes,
    "if global counter": global_counter,
    "if closure counter": closure_counter,
    "if class counter": class_counter,
    "if iterator": iterator,
    "if length of list": length_of_list,
    "if entry of dict": entry_of_dict,
    "if entry of set": entry_of_set,
    "if field of object": field_of_object,
    "if field of argument": field_of_argument,
    "if buffer's value": buffer_value,
    "if parameter's value": parameter_value,
    "if tensor attribute's value": tensor_attribute,
    "if own generator": own_generator,
    "if own random.Random": own_python_generator,
    "if own numpy generator": own_numpy_generator,
}
