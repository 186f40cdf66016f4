"""The instructions of a changing program: each writes lines of `forward` that map `h` of (rows, 4) to another one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.fuzz.changing.writer import Writer

Instruction = Callable[[Writer, Random], None]


def steps(pick: Random) -> str:
    """Some of the first six steps, as source."""
    return str(tuple(sorted(pick.sample(range(6), 3))))


# -- layers and other ops that change nothing


def linear(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", f"nn.Linear(4, 4, bias={pick.random() < 0.5})")
    w.line(pick.choice([f"h = self.{layer}(h)", f"h = h + self.{layer}(h)"]))


def perceptron(w: Writer, pick: Random) -> None:
    up, down = w.attribute("fc", "nn.Linear(4, 8)"), w.attribute("fc", "nn.Linear(8, 4)")
    w.line(f"h = h + self.{down}(F.gelu(self.{up}(h)))")


def weight(w: Writer, pick: Random) -> None:
    name = w.attribute("weight", "nn.Parameter(torch.randn(4, 4) / 2)")
    w.line(
        pick.choice([f"h = h @ self.{name}", f"h = torch.tanh(h) @ self.{name}.sin()", f"h = h.sin() @ self.{name}"])
    )


def attention(w: Writer, pick: Random) -> None:
    layer = w.attribute("qkv", "nn.Linear(4, 12)")
    w.line(f"q, k, v = self.{layer}(h).chunk(3, 1)")
    dropout = pick.choice(["", ", dropout_p=0.3"])
    w.line(f"h = h + F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None]{dropout})[0, 0]")


def pure(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = torch.tanh(h)",
                "h = F.gelu(h)",
                "h = h.softmax(-1)",
                "h = h * torch.sigmoid(h)",
                "h = h.sin() * h.cos()",
                "h = F.layer_norm(h, (4,))",
                "h = h / (1 + h.norm())",
            ]
        )
    )


def shaped(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "left, right = h.chunk(2, 1)\nh = torch.cat((right.sin(), left), 1)",
                "h = torch.stack([row.sin() for row in h.unbind(0)])",
                "h = h.t().contiguous().t()",
                "h = h.flip(0)",
                "h = h.reshape(-1)[: h.numel()].view(-1, 4)",
            ]
        )
    )


def in_place(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = (h * 1.5).relu_()",
                "h = torch.tanh(h).add_(0.5)",
                "h = h.clone()\nh[:, :2] += 0.5",
                "h = (h + 1).mul_(0.5).clamp_(min=-1)",
                "z = h.sin()\nz.t().mul_(0.5)\nh = h + z",
                "z = torch.zeros_like(h)\nz += h\nh = z.tanh_()",
                "h = F.dropout(h * 1.5, 0.3, training=True, inplace=True)",
            ]
        )
    )


def in_place_on_input(w: Writer, pick: Random) -> None:
    """Of what the block is given, unless it is a leaf."""
    w.line(f"if not h.is_leaf:\n    h.{pick.choice(['mul_(0.5)', 'add_(0.25)', 'relu_()'])}")


def randomized(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = F.dropout(h, 0.3, self.training)",
                "h = h + torch.rand_like(h)",
                "h = h[torch.randperm(len(h))]",
                "h = h * torch.bernoulli(torch.full_like(h, 0.6))",
                "h = F.alpha_dropout(h, 0.3, self.training)",
            ]
        )
    )


def dropout_layer(w: Writer, pick: Random) -> None:
    w.line(f"h = self.{w.attribute('drop', 'nn.Dropout(0.3)')}(h)")


def rrelu(w: Writer, pick: Random) -> None:
    w.line("h = F.rrelu(h, training=True)")


def drawn_by_generator(w: Writer, pick: Random) -> None:
    name = w.attribute("generator", "torch.Generator().manual_seed(3)")
    w.line(
        pick.choice(
            [
                f"h = h * torch.rand(h.shape, generator=self.{name})",
                f"h = h[torch.randperm(len(h), generator=self.{name})]",
                f"h = h + torch.empty_like(h).normal_(generator=self.{name})",
            ]
        )
    )


def drawn_by_generator_in_list(w: Writer, pick: Random) -> None:
    name = w.attribute("generators", '{"a": [torch.Generator().manual_seed(3)]}')
    w.line(f'h = h * torch.rand(h.shape, generator=self.{name}["a"][0])')


def drawn_by_global_generator(w: Writer, pick: Random) -> None:
    name = w.name("GENERATOR")
    w.top(f"{name} = torch.Generator().manual_seed(3)\n")
    w.line(f"h = h * torch.rand(h.shape, generator={name})")


def python_number(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            ["h = h * random.random()", "h = h + random.gauss(0, 1)", "h = torch.roll(h, random.randint(0, 3), 1)"]
        )
    )


def numpy_numbers(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = h * float(numpy.random.rand())",
                "h = h + torch.from_numpy(numpy.random.rand(4)).to(h.dtype)",
                "h = h[torch.as_tensor(numpy.random.permutation(len(h)))]",
            ]
        )
    )


def own_python_number(w: Writer, pick: Random) -> None:
    made = pick.choice(["random.Random(3)", "numpy.random.default_rng(3)", "numpy.random.RandomState(3)"])
    draw = "rand" if "RandomState" in made else "random"
    w.line(f"h = h * (0.5 + self.{w.attribute('generator', made)}.{draw}())")


# -- values that are read


def value_read(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = h * (1 + math.tanh(h.mean().item()))",
                "h = h + torch.tensor(h.detach().tolist()[0])",
                "h = h + torch.full((4,), math.tanh(float(h.detach().sum())))",
                "h = h[torch.tensor(sorted(range(len(h)), key=h.detach().sum(1).tolist().__getitem__))]",
                "h = h * (0.5 if h.detach().max() > 1 else 0.25)",
                "h = h + h[h[:, 0] > 0].sum(0)",
                "h = h + len(h[h > 0].nonzero()) * 0.1",
            ]
        )
    )


def value_read_by_numpy(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = h + torch.from_numpy(numpy.sin(h.detach().float().numpy()))",
                "h = h * float(numpy.tanh(h.detach().float().numpy().sum()))",
                "z = torch.zeros(len(h), 4)\nz.numpy()[:] = numpy.cos(h.detach().float().numpy())\nh = h + z",
            ]
        )
    )


def loop_by_value(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "while h.detach().abs().sum().item() > 4:\n    h = h * 0.5",
                "for turn in range(int(h.detach().abs().max().item() * 2) % 3):\n    h = torch.tanh(h) + turn",
                "for turn in range(1 + int(torch.randint(3, ()))):\n    h = h.sin() + h",
            ]
        )
    )


def repeated_by_attribute(w: Writer, pick: Random) -> None:
    depth, layer = w.attribute("depth", "1"), w.attribute("fc", "nn.Linear(4, 4)")
    w.loop("before", f"me.{depth} = 1 + step % 3")
    w.line(f"for turn in range(self.{depth}):\n    h = torch.tanh(self.{layer}(h))")


# -- the same ops in the same order, on other things


def chosen_layer(w: Writer, pick: Random) -> None:
    layers = w.attribute("layers", "nn.ModuleList(nn.Linear(4, 4) for _ in range(3))")
    calls = w.attribute("calls", "0")
    w.line(f"self.{calls} += 1")
    index = pick.choice(
        [f"self.{calls} % 3", "random.randrange(3)", "int(torch.randint(3, ()))", "int(h.detach().abs().sum() * 3) % 3"]
    )
    w.line(f"h = self.{layers}[{index}](h)")


def ordered_layers(w: Writer, pick: Random) -> None:
    layers = w.attribute("layers", "nn.ModuleList(nn.Linear(4, 4) for _ in range(3))")
    order = pick.choice(
        ["random.sample(range(3), 2)", "torch.randperm(3).tolist()[:2]", "numpy.random.permutation(3)[:2]"]
    )
    w.line(f"for index in {order}:\n    h = torch.tanh(self.{layers}[index](h))")


def chosen_scalar(w: Writer, pick: Random) -> None:
    factor = w.attribute("factor", "1.0")
    change = pick.choice(
        [
            ("line", f"self.{factor} *= 0.9"),
            ("before", f"me.{factor} = 1.0 - 0.1 * step"),
            ("between", f"me.{factor} = 1.0 - 0.1 * step"),
            ("line", f"self.{factor} = 0.5 + math.tanh(h.detach().sum().item())"),
        ]
    )
    if change[0] == "line":
        w.line(change[1])
    else:
        w.loop(*change)
    w.line(f"h = torch.tanh(h) * self.{factor}")


def chosen_op(w: Writer, pick: Random) -> None:
    """An attribute holds the function."""
    act = w.attribute("act", "torch.sin")
    others = "(torch.sin, torch.cos, torch.tanh)"
    where = pick.choice(["line", "before", "between"])
    if where == "line":
        w.line(f"self.{act} = random.choice({others})")
    else:
        w.loop(where, f"me.{act} = {others}[step % 3]")
    w.line(f"h = self.{act}(h * 1.5)")


def chosen_order_of_operands(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    w.line(f"z = self.{layer}(h)\nh = h - z if random.random() < 0.5 else z - h")


def chosen_window(w: Writer, pick: Random) -> None:
    start = w.attribute("start", "0")
    w.line(f"self.{start} = (self.{start} + 1) % 3")
    w.line(f"h = h + h[:, self.{start} : self.{start} + 2].sum(1, keepdim=True)")


def adapters(w: Writer, pick: Random) -> None:
    """One of two adapters; the training loop says which, also between the passes."""
    both = w.attribute("adapters", 'nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})')
    active = w.attribute("active", '"a"')
    w.loop("before", f'me.{active} = "ab"[step // 2 % 2]')
    if pick.random() < 0.5:
        w.loop("between", f'if step in {steps(pick)}:\n    me.{active} = "ba"[step // 2 % 2]')
    w.line(f"h = h + self.{both}[self.{active}](h)")


def routed(w: Writer, pick: Random) -> None:
    router, experts = (
        w.attribute("router", "nn.Linear(4, 3)"),
        w.attribute("experts", "nn.ModuleList(nn.Linear(4, 4) for _ in range(3))"),
    )
    w.line(f"score, chosen = self.{router}(h).softmax(-1).topk({pick.choice([1, 2])}, dim=1)\nz = torch.zeros_like(h)")
    skip = pick.random() < 0.7
    with w.indented(f"for index, expert in enumerate(self.{experts}):"):
        w.line("row, place = (chosen == index).nonzero(as_tuple=True)")
        if skip:
            w.line("if len(row) == 0:\n    continue")
        w.line("z = z.index_add(0, row, (expert(h[row]) * score[row, place, None]).to(z.dtype))")
    w.line("h = h + z")


def routed_with_load(w: Writer, pick: Random) -> None:
    """As NeMo's gate does: a plain tensor counts what the experts got."""
    router, load = w.attribute("router", "nn.Linear(4, 3)"), w.attribute("load", "None")
    w.line(f"score, chosen = self.{router}(h).softmax(-1).topk(2, dim=1)")
    with w.without_grad():
        w.line("counts = torch.bincount(chosen.flatten(), minlength=3)")
        w.line(f"self.{load} = counts if self.{load} is None else self.{load}.add_(counts)")
    w.line("h = h * score.sum(1, keepdim=True)")


# -- parameters that are written


def normalized_weight(w: Writer, pick: Random) -> None:
    weight = w.attribute("weight", "nn.Parameter(torch.randn(4, 4))")
    write = pick.choice(
        [
            f"self.{weight}.copy_(self.{weight} / self.{weight}.norm(dim=1, keepdim=True))",
            f"self.{weight}.div_(self.{weight}.norm())",
            f"self.{weight}.mul_(0.9)",
            f"self.{weight}.clamp_(-0.5, 0.5)",
            f"self.{weight}[0] += 0.25",
        ]
    )
    guard = pick.choice(["", "if self.training:"])
    with w.indented(guard) if guard else w.indented("if True:"), w.without_grad():
        w.line(write)
    w.line(f"h = F.linear(h, self.{weight})")


def normalized_weight_by_data(w: Writer, pick: Random) -> None:
    """Which nothing sees: no version counts it, and no mode."""
    weight = w.attribute("weight", "nn.Parameter(torch.randn(4, 4))")
    w.hides("a write by .data")
    w.line(f"self.{weight}.data.{pick.choice(['mul_(0.9)', 'clamp_(-0.5, 0.5)', 'add_(0.1)'])}")
    w.line(f"h = F.linear(h, self.{weight})")


def written_bias(w: Writer, pick: Random) -> None:
    """Which autograd does not save, so that two forwards before a backward are allowed."""
    bias = w.attribute("bias", "nn.Parameter(torch.randn(4))")
    with w.without_grad():
        w.line(f"self.{bias}.{pick.choice(['mul_(0.9)', 'clamp_(-0.5, 0.5)', 'add_(0.1)'])}")
    w.line(f"h = h + self.{bias}")


def written_weight_of_layer(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    with w.without_grad():
        w.line(f"for p in self.{layer}.parameters():\n    p.{pick.choice(['mul_(0.95)', 'clamp_(-0.4, 0.4)'])}")
    w.line(f"h = self.{layer}(h)")


def written_parameter_after_use(w: Writer, pick: Random) -> None:
    bias = w.attribute("bias", "nn.Parameter(torch.randn(4))")
    w.line(f"h = h + self.{bias}")
    with w.without_grad():
        w.line(f"self.{bias}.{pick.choice(['mul_(0.9)', 'add_(h.detach().float().mean(0), alpha=0.1)'])}")


def embedding(w: Writer, pick: Random) -> None:
    options = pick.choice(["max_norm=0.5", "max_norm=0.5", "scale_grad_by_freq=True"])
    layer = w.attribute("emb", f"nn.Embedding(7, 4, {options})")
    w.line(f"h = h + self.{layer}((h.detach()[:, 0] * 5).long() % 7)")


def rebound_parameter(w: Writer, pick: Random) -> None:
    """The training loop puts another parameter in place before a step."""
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    w.loop("before", f"if step in {steps(pick)}:\n    me.{layer}.weight = nn.Parameter(torch.randn(4, 4) / 2)")
    w.line(f"h = self.{layer}(h)")


def parameter_made_by_forward(w: Writer, pick: Random) -> None:
    """At its first call, as lazy modules do."""
    weight = w.attribute("weight", "None")
    with w.indented(f"if self.{weight} is None:"):
        w.line(f"self.{weight} = torch.eye(4) * 0.5")
    w.line(f"h = h @ self.{weight}.to(h.dtype)")


def lazy_linear(w: Writer, pick: Random) -> None:
    w.line(f"h = self.{w.attribute('fc', 'nn.LazyLinear(4)')}(h)")


def exchanged_layer(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    other = pick.choice(["nn.Linear(4, 4)", "nn.Tanh()", "nn.Sequential(nn.Linear(4, 4), nn.Tanh())"])
    w.loop("before", f"if step in {steps(pick)}:\n    me.{layer} = {other}")
    w.line(f"h = self.{layer}(h)")


def grown_list_of_layers(w: Writer, pick: Random) -> None:
    layers = w.attribute("layers", "nn.ModuleList([nn.Linear(4, 4)])")
    w.loop("before", f"if step in {steps(pick)}:\n    me.{layers}.append(nn.Linear(4, 4))")
    w.line(f"for layer in self.{layers}:\n    h = torch.tanh(layer(h))")


def tied_weight(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4, bias=False)")
    w.line(f"h = torch.tanh(self.{layer}(h)) @ self.{layer}.weight")


def computed_weight(w: Writer, pick: Random) -> None:
    """Made once per step from a parameter, with its graph; the training loop drops it."""
    weight, made = w.attribute("weight", "nn.Parameter(torch.randn(4, 4) / 2)"), w.attribute("made", "None")
    w.loop("before", f"me.{made} = None")
    with w.indented(f"if self.{made} is None:"):
        w.line(f"self.{made} = torch.tanh(self.{weight})")
    w.line(f"h = h @ self.{made}.to(h.dtype)")


# -- buffers, and tensors that are none


def batch_norm(w: Writer, pick: Random) -> None:
    options = pick.choice(["", ", momentum=None", ", affine=False"])
    w.line(f"h = self.{w.attribute('norm', f'nn.BatchNorm1d(4{options})')}(h)")


def own_statistics(w: Writer, pick: Random) -> None:
    mean = w.buffer("mean", "torch.zeros(4)")
    with w.without_grad():
        w.line(
            pick.choice(
                [
                    f"self.{mean}.lerp_(h.float().mean(0), 0.1)",
                    f"self.{mean}.mul_(0.9).add_(h.float().mean(0), alpha=0.1)",
                    f"self.{mean}.copy_(0.9 * self.{mean} + h.float().mean(0))",
                    f"self.{mean} = 0.9 * self.{mean} + 0.1 * h.float().mean(0)",
                    f"torch.add(self.{mean} * 0.9, h.float().mean(0), alpha=0.1, out=self.{mean})",
                ]
            )
        )
    w.line(pick.choice([f"h = h - self.{mean}", f"h = torch.tanh(h - self.{mean})", ""]))


def statistics_after_use(w: Writer, pick: Random) -> None:
    mean = w.buffer("mean", "torch.zeros(4)")
    w.line(f"h = h - self.{mean}")
    with w.without_grad():
        w.line(f"self.{mean}.lerp_(h.float().mean(0), 0.1)")


def power_iteration(w: Writer, pick: Random) -> None:
    """Spectral normalisation, as torch does it: buffers that are written where the layer trains."""
    layer = "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))"
    if pick.random() < 0.3:
        layer = "torch.nn.utils.spectral_norm(nn.Linear(4, 4))"
    w.line(f"h = self.{w.attribute('fc', layer)}(h)")


def weight_norm(w: Writer, pick: Random) -> None:
    layer = pick.choice(
        ["nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))", "nn.utils.weight_norm(nn.Linear(4, 4))"]
    )
    w.line(f"h = self.{w.attribute('fc', layer)}(h)")


def cyclic_buffer(w: Writer, pick: Random) -> None:
    """A ring: written at a place that moves."""
    ring, place = w.buffer("ring", "torch.zeros(3, 4)"), w.attribute("place", "0")
    w.line(f"self.{ring}[self.{place}] = h.detach().float().mean(0)")
    w.line(f"self.{place} = (self.{place} + 1) % 3")
    w.line(f"h = h + self.{ring}.mean(0)")


def load(w: Writer, pick: Random) -> None:
    name = w.attribute("load", "torch.zeros(4)")
    w.line(
        pick.choice(
            [
                f"self.{name} += h.detach().float().mean(0)",
                f"with torch.no_grad():\n    self.{name} += h.float().mean(0)",
                f"self.{name}.add_(h.detach().float().mean(0))",
                f"self.{name}[0] += 1",
            ]
        )
    )
    w.line(pick.choice([f"h = h - torch.tanh(self.{name})", ""]))


def load_written_by_numpy(w: Writer, pick: Random) -> None:
    name = w.attribute("load", "torch.zeros(4)")
    w.hides("a write by numpy")
    w.line(f"self.{name}.numpy()[0] += 1")
    w.line(f"h = h - torch.tanh(self.{name})")


def load_in_container(w: Writer, pick: Random) -> None:
    name = w.attribute("loads", '{"a": [torch.zeros(4)]}')
    w.line(
        pick.choice(
            [
                f'self.{name}["a"][0].add_(h.detach().float().mean(0))',
                f'self.{name}["a"][0] += h.detach().float().mean(0)',
                f'self.{name}["a"][0] = self.{name}["a"][0] * 0.5 + h.detach().float().mean(0)',
                f'self.{name}["a"].append(h.detach().float().mean(0))',
            ]
        )
    )
    w.line(f'h = h - torch.tanh(self.{name}["a"][-1])')


def load_of_global(w: Writer, pick: Random) -> None:
    name = w.name("LOAD")
    w.top(f"{name} = torch.zeros(4)\n")
    w.line(f"{name}.add_(h.detach().float().mean(0))")
    w.line(pick.choice([f"h = h - torch.tanh({name})", ""]))


def global_tensor(w: Writer, pick: Random) -> None:
    """Read by the block, written by the training loop."""
    name = w.name("TABLE")
    w.top(f"{name} = torch.linspace(-1, 1, 4)\n")
    where = pick.choice(["before", "between"])
    w.loop(where, f"if step in {steps(pick)}:\n    {name}.mul_(-0.5)")
    w.line(f"h = h + torch.sin({name})")


def tensor_rebound_by_loop(w: Writer, pick: Random) -> None:
    name = w.attribute("mask", "torch.ones(4)")
    where = pick.choice(["before", "between"])
    w.loop(where, f"me.{name} = torch.rand(4)")
    w.line(pick.choice([f"h = h * self.{name}", f"h = h + self.{name}", f"h = torch.tanh(h + self.{name})"]))


def tensor_written_by_loop(w: Writer, pick: Random) -> None:
    name = w.attribute("mask", "torch.ones(4)")
    w.loop(pick.choice(["before", "between"]), f"me.{name}.copy_(torch.rand(4))")
    w.line(pick.choice([f"h = h + self.{name}", f"h = torch.tanh(h + torch.sin(self.{name}))"]))


def memory(w: Writer, pick: Random) -> None:
    """Recurrent memory by assignment; what was there before dies in the forward."""
    name = w.attribute("memory", "None")
    value = pick.choice(["h.detach().mean(0)", "h.mean(0).detach()", "h.detach().float().sum(0).tanh()"])
    early = pick.random() < 0.5
    if early:
        w.line(f"old, self.{name} = self.{name}, {value}")
        w.line("if old is not None:\n    h = h * torch.sigmoid(old)")
        w.line("old = None")
    else:
        w.line(f"if self.{name} is not None:\n    h = h * torch.sigmoid(self.{name})")
        w.line(f"self.{name} = {value}")


def memory_of_rows(w: Writer, pick: Random) -> None:
    """A whole activation, read where its shape fits."""
    name = w.attribute("memory", "None")
    w.line(f"if self.{name} is not None and self.{name}.shape == h.shape:\n    h = h + torch.tanh(self.{name})")
    w.line(f"self.{name} = h.detach(){pick.choice(['', '.clone()'])}")


def memory_with_graph(w: Writer, pick: Random) -> None:
    """Within a step an earlier call's value is read with its graph; the training loop drops it."""
    name = w.attribute("memory", "None")
    w.loop("before", f"me.{name} = None")
    w.line(f"if self.{name} is not None:\n    h = h * torch.sigmoid(self.{name})")
    w.line(f"self.{name} = h.mean(0)")


def cache(w: Writer, pick: Random) -> None:
    """Made at the first call and when the shape changes, as rotary tables are."""
    name = w.attribute("cache", "None")
    with w.indented(f"if self.{name} is None or len(self.{name}) < len(h):"):
        w.line(f"self.{name} = torch.outer(torch.arange(len(h)) + 1.0, torch.ones(4)).{pick.choice(['cos', 'sin'])}()")
    w.line(f"h = h * self.{name}[: len(h)]")


def cache_by_shape(w: Writer, pick: Random) -> None:
    name = w.attribute("cache", "{}")
    made = pick.choice(["torch.rand(len(h), 4)", "torch.linspace(0, 1, len(h))[:, None].cos()"])
    w.line(f"if len(h) not in self.{name}:\n    self.{name}[len(h)] = {made}")
    w.line(f"h = h * self.{name}[len(h)]")


def kept_values(w: Writer, pick: Random) -> None:
    """A list that grows; a later call reads what an earlier one has put there."""
    name = w.attribute("kept", "[]")
    value = pick.choice(["h.detach().mean(0)", "h.detach().sum().item()"])
    w.line(f"self.{name}.append({value})")
    read = f"torch.tanh(torch.as_tensor(self.{name}[-2]))"
    w.line(f"if len(self.{name}) > 1:\n    h = h + {read}")
    if pick.random() < 0.5:
        w.line(f"del self.{name}[:-2]")


def kept_in_deque(w: Writer, pick: Random) -> None:
    name = w.attribute("kept", "collections.deque(maxlen=2)")
    w.line(f"self.{name}.append(h.detach().float().mean(0))")
    w.line(f"h = h + torch.tanh(self.{name}[0])")


def counted(w: Writer, pick: Random) -> None:
    """A counter that the numbers depend on."""
    calls = w.attribute("calls", "0")
    w.line(f"self.{calls} += 1")
    w.line(pick.choice([f"h = h * (1 + 1 / self.{calls})", f"h = torch.tanh(h + self.{calls} % 3)", ""]))


def running_average(w: Writer, pick: Random) -> None:
    name = w.attribute("average", "0.0")
    w.line(f"self.{name} = 0.9 * self.{name} + 0.1 * h.detach().float().mean().item()")
    w.line(f"h = h - self.{name}")


# -- what leaves a block, and comes into it, elsewhere than by its result


def auxiliary_loss(w: Writer, pick: Random) -> None:
    name = w.attribute("aux", "None")
    w.line(f"self.{name} = {pick.choice(['h.square().mean()', 'h.softmax(-1).mean(0).max()', 'h.exp().sum().log()'])}")
    w.loop("before", f"me.{name} = None")
    w.loop("extra", f"if me.{name} is not None:\n    loss = loss + me.{name}")


def auxiliary_losses(w: Writer, pick: Random) -> None:
    name = w.attribute("aux", "[]")
    w.line(f"self.{name}.append(h.square().mean())")
    w.loop("before", f"me.{name}.clear()")
    w.loop("extra", f"if me.{name}:\n    loss = loss + me.{name}[-1]")


def field_rebound(w: Writer, pick: Random) -> None:
    layer, field = w.attribute("fc", "nn.Linear(4, 4)"), w.state("h")
    w.line(
        pick.choice(
            [
                f"{field} = self.{layer}(h + {field})\nh = h + {field}",
                f"h = self.{layer}(h + {field})\n{field} = torch.tanh(h)",
                f"{field} = torch.tanh({field})\nh = h * self.{layer}({field})",
                f"{field} = h.detach()\nh = self.{layer}({field}) + h",
            ]
        )
    )


def field_written(w: Writer, pick: Random) -> None:
    field = w.state("load")
    w.line(f"{field}.add_(h.detach().float().mean(0))")
    w.line(pick.choice([f"h = h - torch.tanh({field})", ""]))


def field_appended(w: Writer, pick: Random) -> None:
    field = w.state("seen")
    w.line(f"{field}.append({pick.choice(['h.detach().mean(0)', 'h.mean(0)', 'len(h)'])})")
    w.line(f"h = h * (1 + 1 / len({field}))")


def field_counted(w: Writer, pick: Random) -> None:
    field = w.state("count")
    w.line(f"{field} += 1")
    w.line(f"h = h * (1 + 1 / (1 + {field}))")


# -- gradients, precision and errors inside


def gradient_inside(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    graph = pick.choice(["", ", create_graph=True"])
    if graph and pick.random() < 0.5:
        w.line("z = h if h.requires_grad else h.detach().requires_grad_()")
    else:
        w.line("z = h.detach().requires_grad_()")
    with w.indented("with torch.enable_grad():"):
        w.line(f"(slope,) = torch.autograd.grad(self.{layer}(z).sin().sum(), z{graph})")
    w.line("h = h + slope")


def lower_precision_inside(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    on = w.attribute("low", "True")
    w.loop("before", f"me.{on} = step in {steps(pick)}")
    with w.indented(f'with torch.autocast("cpu", torch.bfloat16, enabled=self.{on}):'):
        w.line(f"z = self.{layer}(h)")
    w.line("h = h + z.to(h.dtype)")


def without_gradient(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Linear(4, 4)")
    with w.without_grad():
        w.line(f"z = {pick.choice(['torch.sigmoid', 'torch.tanh', 'torch.sin'])}(self.{layer}(h))")
    w.line("h = h * z")


def detached(w: Writer, pick: Random) -> None:
    w.line("h = h.detach()" if pick.random() < 0.3 else "h = h + h.detach().sin() * h")


def gradient_hook(w: Writer, pick: Random) -> None:
    factor = w.attribute("factor", "0.5")
    w.loop("before", f"me.{factor} = 0.5 + 0.25 * step")
    w.line("z = torch.sin(h)")
    w.line(f"if z.requires_grad:\n    z.register_hook(lambda gradient: gradient * self.{factor})")
    w.line("h = h + z")


def gradient_statistics(w: Writer, pick: Random) -> None:
    """A hook that counts, as loss scaling by gradients does."""
    calls = w.attribute("calls", "0")
    w.line("z = torch.sin(h)")
    w.line(f"if z.requires_grad:\n    z.register_hook(lambda gradient: setattr(self, '{calls}', self.{calls} + 1))")
    w.line("h = h + z")


def stopped(w: Writer, pick: Random) -> None:
    """Raises in some steps; the training loop goes on with the next."""
    stop = w.attribute("stop", "False")
    w.loop("before", f"me.{stop} = step in {pick.sample(range(6), 2)}")
    w.line(f"if self.{stop}:\n    raise Stop")


def caught_inside(w: Writer, pick: Random) -> None:
    calls = w.attribute("calls", "0")
    w.line(
        f"self.{calls} += 1\ntry:\n    if self.{calls} % 2:\n        raise Stop\n    h = torch.sin(h)\n"
        "except Stop:\n    h = torch.cos(h)"
    )


def function_with_state(w: Writer, pick: Random) -> None:
    """An autograd function that keeps a Python number for its backward."""
    name, factor = w.name("Scaled"), w.attribute("factor", "1.0")
    w.top(
        f"class {name}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, factor):\n"
        "        ctx.factor = factor\n        ctx.save_for_backward(x.sin())\n        return x * factor\n\n"
        "    @staticmethod\n    def backward(ctx, gradient):\n        (sine,) = ctx.saved_tensors\n"
        "        return gradient * ctx.factor + 0.1 * sine, None\n"
    )
    w.line(f"self.{factor} *= 0.9\nh = {name}.apply(h, self.{factor})")


def forward_hook(w: Writer, pick: Random) -> None:
    """Put on one of the block's layers in some step, and taken off in another."""
    layer, handle = w.attribute("fc", "nn.Linear(4, 4)"), w.attribute("_handle", "None")
    on, off = sorted(pick.sample(range(6), 2))
    w.loop(
        "before",
        f"if step == {on}:\n    me.{handle} = me.{layer}.register_forward_hook(lambda layer, given, out: out * 0.5)\n"
        f"if step == {off}:\n    me.{handle}.remove()",
    )
    w.line(f"h = torch.tanh(self.{layer}(h))")


# -- state that is further away


def number_in_depths(w: Writer, pick: Random) -> None:
    """A counter somewhere below an attribute."""
    made, read = pick.choice(
        [
            ("SimpleNamespace(inner=[SimpleNamespace(count=0)])", "inner[0].count"),
            ('{"a": [{"b": 0}]}', '["a"][0]["b"]'),
            ("collections.defaultdict(int)", '["a"]'),
            ("[0, [0]]", "[1][0]"),
            ("Slotted()", "count"),
            ("Plain(inner=Plain(count=0))", "inner.count"),
            ("numpy.zeros(3)", "[1]"),
            ("bytearray(3)", "[1]"),
            ('array.array("d", [0, 0])', "[1]"),
        ]
    )
    name = w.attribute("below", made)
    place = f"self.{name}{'' if read.startswith('[') else '.'}{read}"
    w.line(f"{place} += 1\nh = h * (1 + 1 / (1 + float({place})))")


def tensor_in_depths(w: Writer, pick: Random) -> None:
    made, read = pick.choice(
        [
            ("SimpleNamespace(inner=[torch.zeros(4)])", ".inner[0]"),
            ("Plain(inner=Plain(load=torch.zeros(4)))", ".inner.load"),
            ("collections.OrderedDict(a=torch.zeros(4))", '["a"]'),
            ("collections.deque([torch.zeros(4)])", "[0]"),
        ]
    )
    place = f"self.{w.attribute('below', made)}{read}"
    write = pick.choice(
        [f"{place}.add_(h.detach().float().mean(0))", f"{place} = {place} * 0.5 + h.detach().float().mean(0)"]
    )
    w.line(f"{write}\nh = h - torch.tanh({place})")


def layer_outside_of_modules(w: Writer, pick: Random) -> None:
    """A module in a list, which is no child: its buffers are in no state dict."""
    name = w.attribute("others", "[nn.BatchNorm1d(4, affine=False)]")
    w.line(f"h = self.{name}[0](h)")


def view_of_buffer(w: Writer, pick: Random) -> None:
    table = w.buffer("table", "torch.zeros(2, 4)")
    row = w.attribute("row", f"self.{table}[0]")
    w.line(f"self.{row}.add_(h.detach().float().mean(0))\nh = h - torch.tanh(self.{table}).sum(0)")


def buffer_made_late(w: Writer, pick: Random) -> None:
    name = w.name("late")
    w.line(f'if not hasattr(self, "{name}"):\n    self.register_buffer("{name}", h.detach().float().mean(0))')
    w.line(f"h = h - self.{name}")


def attribute_made_and_deleted(w: Writer, pick: Random) -> None:
    name = w.name("inner")
    w.line(f"self.{name} = torch.sin(h)\nh = h + self.{name}\ndel self.{name}")


def attribute_by_name(w: Writer, pick: Random) -> None:
    """A new attribute in each call."""
    calls = w.attribute("calls", "0")
    w.line(f'self.{calls} += 1\nsetattr(self, f"{calls}_{{self.{calls}}}", h.detach().float().mean().item())')


def text(w: Writer, pick: Random) -> None:
    name = w.attribute("text", '"a"')
    w.line(f'self.{name} = {{"a": "b", "b": "c", "c": "a"}}[self.{name}]')
    w.line(f'h = torch.tanh(h) if self.{name} == "b" else torch.sin(h)')


def mutable_default(w: Writer, pick: Random) -> None:
    name = w.name("counted")
    w.top(f"def {name}(h, calls=[]):\n    calls.append(0)\n    return h * (1 + 1 / len(calls))\n")
    w.line(f"h = {name}(h)")


def inner_gradient(w: Writer, pick: Random) -> None:
    """A value inside whose gradient is read after backward."""
    name = w.attribute("inner", "None")
    w.line(f"h = torch.tanh(h)\nself.{name} = h\nif h.requires_grad:\n    h.retain_grad()")
    w.loop("last", f"seen.append(None if me.{name} is None else me.{name}.grad)\nme.{name} = None")


def kept_output(w: Writer, pick: Random) -> None:
    """What features are read by: the loss has a part of a value inside."""
    name = w.attribute("features", "{}")
    w.line(f'self.{name}["out"] = h')
    w.loop("extra", f'if "out" in me.{name}:\n    loss = loss + me.{name}.pop("out").sin().double().sum()')


# -- settings that forward changes


def dropout_schedule(w: Writer, pick: Random) -> None:
    layer = w.attribute("drop", "nn.Dropout(0.1)")
    change = pick.choice(["line", "before", "between"])
    if change == "line":
        w.line(f"self.{layer}.p = min(0.5, self.{layer}.p + 0.1)")
    else:
        w.loop(change, f"me.{layer}.p = 0.1 * (step % 4)")
    w.line(f"h = self.{layer}(h)")


def flags_set_inside(w: Writer, pick: Random) -> None:
    """Layers that forward freezes or puts into evaluation mode in every other call."""
    layer, calls = w.attribute("fc", "nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))"), w.attribute("calls", "0")
    w.line(f"self.{calls} += 1")
    w.line(f"self.{layer}.{pick.choice(['train', 'requires_grad_'])}(self.{calls} % 2 == 0)")
    w.line(f"h = h + self.{layer}(h)")


def seeded_inside(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "with torch.random.fork_rng():\n    torch.manual_seed(5)\n    h = h + torch.rand_like(h)",
                "torch.manual_seed(len(h))\nh = F.dropout(h, 0.3)",
                "numbers = torch.get_rng_state()\nh = F.dropout(h, 0.3)\ntorch.set_rng_state(numbers)",
                "random.seed(len(h))\nh = h * random.random()",
            ]
        )
    )


def checkpoint_inside(w: Writer, pick: Random) -> None:
    layer = w.attribute("fc", "nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))")
    w.line(f"h = torch.utils.checkpoint.checkpoint(self.{layer}, h, use_reentrant=False)")


def transforms(w: Writer, pick: Random) -> None:
    w.line(
        pick.choice(
            [
                "h = h + torch.func.vmap(lambda row: row.sin().sum())(h)[:, None]",
                "h = h + torch.func.grad(lambda z: z.sin().sum())(h)",
                "h = h + torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1]",
            ]
        )
    )


def dropped_rows(w: Writer, pick: Random) -> None:
    """As many as a value says."""
    w.line(pick.choice(["h = h[: 1 + int(h.detach().abs().sum() * 3) % len(h)]", "h = h[: random.randint(1, len(h))]"]))


def full_backward_hook(w: Writer, pick: Random) -> None:
    layer, calls = w.attribute("fc", "nn.Linear(4, 4)"), w.attribute("calls", "0")
    w.init(
        f"self.{layer}.register_full_backward_hook(\n"
        f"    lambda layer, given, out: setattr(self, '{calls}', self.{calls} + 1)\n)"
    )
    w.line(f"h = torch.tanh(self.{layer}(h))")


def option(w: Writer, pick: Random) -> None:
    """An argument that is a number, another one in each step."""
    w.whole.uses_option = True
    w.line(pick.choice(["h = torch.tanh(h) * (1 + 0.1 * option)", "h = torch.tanh(h) if option % 2 else torch.sin(h)"]))


def mask(w: Writer, pick: Random) -> None:
    """An argument that is a tensor or None."""
    w.whole.uses_option = True
    w.line("if option % 3:\n    h = h * torch.full((4,), 0.5 + 0.1 * option)")


PLAIN: dict[str, Instruction] = {
    "linear": linear,
    "perceptron": perceptron,
    "weight": weight,
    "attention": attention,
    "pure": pure,
    "shaped": shaped,
    "in place": in_place,
    "randomized": randomized,
    "dropout layer": dropout_layer,
    "tied weight": tied_weight,
    "without gradient": without_gradient,
    "detached": detached,
}
CHANGING: dict[str, Instruction] = {
    "in place on input": in_place_on_input,
    "rrelu": rrelu,
    "drawn by generator": drawn_by_generator,
    "drawn by generator in list": drawn_by_generator_in_list,
    "drawn by global generator": drawn_by_global_generator,
    "python number": python_number,
    "numpy numbers": numpy_numbers,
    "own python number": own_python_number,
    "value read": value_read,
    "value read by numpy": value_read_by_numpy,
    "loop by value": loop_by_value,
    "repeated by attribute": repeated_by_attribute,
    "chosen layer": chosen_layer,
    "ordered layers": ordered_layers,
    "chosen scalar": chosen_scalar,
    "chosen op": chosen_op,
    "chosen order of operands": chosen_order_of_operands,
    "chosen window": chosen_window,
    "adapters": adapters,
    "routed": routed,
    "routed with load": routed_with_load,
    "normalized weight": normalized_weight,
    "normalized weight by data": normalized_weight_by_data,
    "written bias": written_bias,
    "written weight of layer": written_weight_of_layer,
    "written parameter after use": written_parameter_after_use,
    "embedding": embedding,
    "rebound parameter": rebound_parameter,
    "parameter made by forward": parameter_made_by_forward,
    "lazy linear": lazy_linear,
    "exchanged layer": exchanged_layer,
    "grown list of layers": grown_list_of_layers,
    "computed weight": computed_weight,
    "batch norm": batch_norm,
    "own statistics": own_statistics,
    "statistics after use": statistics_after_use,
    "power iteration": power_iteration,
    "weight norm": weight_norm,
    "cyclic buffer": cyclic_buffer,
    "load": load,
    "load written by numpy": load_written_by_numpy,
    "load in container": load_in_container,
    "load of global": load_of_global,
    "global tensor": global_tensor,
    "tensor rebound by loop": tensor_rebound_by_loop,
    "tensor written by loop": tensor_written_by_loop,
    "memory": memory,
    "memory of rows": memory_of_rows,
    "memory with graph": memory_with_graph,
    "cache": cache,
    "cache by shape": cache_by_shape,
    "kept values": kept_values,
    "kept in deque": kept_in_deque,
    "counted": counted,
    "running average": running_average,
    "auxiliary loss": auxiliary_loss,
    "auxiliary losses": auxiliary_losses,
    "field rebound": field_rebound,
    "field written": field_written,
    "field appended": field_appended,
    "field counted": field_counted,
    "gradient inside": gradient_inside,
    "lower precision inside": lower_precision_inside,
    "gradient hook": gradient_hook,
    "gradient statistics": gradient_statistics,
    "stopped": stopped,
    "caught inside": caught_inside,
    "function with state": function_with_state,
    "forward hook": forward_hook,
    "number in depths": number_in_depths,
    "tensor in depths": tensor_in_depths,
    "layer outside of modules": layer_outside_of_modules,
    "view of buffer": view_of_buffer,
    "buffer made late": buffer_made_late,
    "attribute made and deleted": attribute_made_and_deleted,
    "attribute by name": attribute_by_name,
    "text": text,
    "mutable default": mutable_default,
    "inner gradient": inner_gradient,
    "kept output": kept_output,
    "dropout schedule": dropout_schedule,
    "flags set inside": flags_set_inside,
    "seeded inside": seeded_inside,
    "checkpoint inside": checkpoint_inside,
    "transforms": transforms,
    "dropped rows": dropped_rows,
    "full backward hook": full_backward_hook,
    "option": option,
    "mask": mask,
}
INSTRUCTIONS: dict[str, Instruction] = {**PLAIN, **CHANGING}
