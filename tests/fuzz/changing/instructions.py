r"""The instructions of a changing program, in the language of `writer.py`.

`= name` begins an instruction. Lines without a word in front are lines of `forward` that map `h` of (rows, 4) to
another one. The words are:

    attr NAME = VALUE, buffer NAME = VALUE       of the module; `$NAME` is the name that it gets
    let NAME = TEXT                              for `$NAME` below
    before, extra, between, last, after TEXT     of a training step, in which `me` is each module of the class in turn
    if EXPRESSION                                what a condition asks

`<<a || b>>` is one of both, `<<0.3 ? a || b>>` is a with that probability, `<<steps>>` three of the six steps
(`<<steps 2>>`: two), `<<block>>` the index of a block, `<<rows>>` a size for each step, `$state.load` a field of the
argument `state`, `\n` a line break.
"""

from __future__ import annotations

import re

_PLAIN = r"""
= linear
attr fc = nn.Linear(4, 4, bias=<<0.5 ? True || False>>)
    h = <<self.$fc(h) || h + self.$fc(h)>>

= perceptron
attr fc1 = nn.Linear(4, 8)
attr fc2 = nn.Linear(8, 4)
    h = h + self.$fc2(F.gelu(self.$fc1(h)))

= weight
attr weight = nn.Parameter(torch.randn(4, 4) / 2)
    h = <<h @ self.$weight || torch.tanh(h) @ self.$weight.sin() || h.sin() @ self.$weight>>

= attention
attr qkv = nn.Linear(4, 12)
    q, k, v = self.$qkv(h).chunk(3, 1)
    h = h + F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None]<< || , dropout_p=0.3>>)[0, 0]

= pure
    h = <<torch.tanh(h) || F.gelu(h) || h.softmax(-1) || h * torch.sigmoid(h) || h.sin() * h.cos() ||
    F.layer_norm(h, (4,)) || h / (1 + h.norm())>>

= shaped
    <<left, right = h.chunk(2, 1)\nh = torch.cat((right.sin(), left), 1) ||
    h = torch.stack([row.sin() for row in h.unbind(0)]) ||
    h = h.t().contiguous().t() || h = h.flip(0) || h = h.reshape(-1)[: h.numel()].view(-1, 4)>>

= in place
    <<h = (h * 1.5).relu_() || h = torch.tanh(h).add_(0.5) || h = h.clone()\nh[:, :2] += 0.5 ||
    h = (h + 1).mul_(0.5).clamp_(min=-1) || z = h.sin()\nz.t().mul_(0.5)\nh = h + z ||
    z = torch.zeros_like(h)\nz += h\nh = z.tanh_() || h = F.dropout(h * 1.5, 0.3, training=True, inplace=True)>>

= randomized
    h = <<F.dropout(h, 0.3, self.training) || h + torch.rand_like(h) || h[torch.randperm(len(h))] ||
    h * torch.bernoulli(torch.full_like(h, 0.6)) || F.alpha_dropout(h, 0.3, self.training)>>

= dropout layer
attr drop = nn.Dropout(0.3)
    h = self.$drop(h)

= tied weight
attr fc = nn.Linear(4, 4, bias=False)
    h = torch.tanh(self.$fc(h)) @ self.$fc.weight

= without gradient
attr fc = nn.Linear(4, 4)
    with torch.no_grad():
        z = torch.<<sigmoid || tanh || sin>>(self.$fc(h))
    h = h * z

= detached
    h = <<0.3 ? h.detach() || h + h.detach().sin() * h>>
"""

_CHANGING = r"""
= in place on input
    if not h.is_leaf:
        h.<<mul_(0.5) || add_(0.25) || relu_()>>

= rrelu
    h = F.rrelu(h, training=True)

= drawn by generator
attr generator = torch.Generator().manual_seed(3)
    h = <<h * torch.rand(h.shape, generator=self.$generator) || h[torch.randperm(len(h), generator=self.$generator)] ||
    h + torch.empty_like(h).normal_(generator=self.$generator)>>

= number of Python or NumPy
    h = <<h * random.random() || torch.roll(h, random.randint(0, 3), 1) || h * float(numpy.random.rand()) ||
    h + torch.from_numpy(numpy.random.rand(4)).to(h.dtype) || h[torch.as_tensor(numpy.random.permutation(len(h)))]>>

= value read
    h = <<h * (1 + math.tanh(h.mean().item())) || h + torch.tensor(h.detach().tolist()[0]) ||
    h + torch.full((4,), math.tanh(float(h.detach().sum()))) ||
    h[torch.tensor(sorted(range(len(h)), key=h.detach().sum(1).tolist().__getitem__))] ||
    h * (0.5 if h.detach().max() > 1 else 0.25) || h + h[h[:, 0] > 0].sum(0) || h + len(h[h > 0].nonzero()) * 0.1 ||
    h + torch.from_numpy(numpy.sin(h.detach().float().numpy()))>>

= loop by value
    <<while h.detach().abs().sum().item() > 4:\n    h = h * 0.5 ||
    for turn in range(int(h.detach().abs().max().item() * 2) % 3):\n    h = torch.tanh(h) + turn ||
    for turn in range(1 + int(torch.randint(3, ()))):\n    h = h.sin() + h>>

= repeated by attribute
attr depth = 1
attr fc = nn.Linear(4, 4)
before me.$depth = 1 + step % 3
    for turn in range(self.$depth):
        h = torch.tanh(self.$fc(h))

= chosen layer
attr layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
attr calls = 0
    self.$calls += 1
    h = self.$layers[<<self.$calls % 3 || random.randrange(3) || int(torch.randint(3, ())) ||
    int(h.detach().abs().sum() * 3) % 3>>](h)

= chosen scalar
attr factor = 1.0
<<self.$factor *= 0.9 || before me.$factor = 1.0 - 0.1 * step || between me.$factor = 1.0 - 0.1 * step ||
    self.$factor = 0.5 + math.tanh(h.detach().sum().item())>>
    h = torch.tanh(h) * self.$factor

= adapters
attr adapters = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
attr active = "a"
before me.$active = "ab"[step // 2 % 2]
<<0.5 ? between if step in <<steps>>:\n    me.$active = "ba"[step // 2 % 2] || pass>>
    h = h + self.$adapters[self.$active](h)

= routed
attr router = nn.Linear(4, 3)
attr experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    score, chosen = self.$router(h).softmax(-1).topk(<<1 || 2>>, dim=1)
    z = torch.zeros_like(h)
    for index, expert in enumerate(self.$experts):
        row, place = (chosen == index).nonzero(as_tuple=True)
        <<0.7 ? if len(row) == 0:\n    continue || pass>>
        z = z.index_add(0, row, (expert(h[row]) * score[row, place, None]).to(z.dtype))
    h = h + z

= normalized weight
attr weight = nn.Parameter(torch.randn(4, 4))
attr calls = 0
let write = <<self.$weight.copy_(self.$weight / self.$weight.norm(dim=1, keepdim=True)) ||
    self.$weight.div_(self.$weight.norm()) || self.$weight.mul_(0.9) || self.$weight.clamp_(-0.5, 0.5) ||
    self.$weight[0] += 0.25>>
    self.$calls += 1
    if <<True || self.training || self.$calls % 3 == 0>>:
        with torch.no_grad():
            $write
    h = F.linear(h, self.$weight)

= normalized weight by data
attr weight = nn.Parameter(torch.randn(4, 4))
    self.$weight.data.<<mul_(0.9) || clamp_(-0.5, 0.5) || add_(0.1)>>
    h = F.linear(h, self.$weight)

= written parameter after use
attr bias = nn.Parameter(torch.randn(4))
    h = h + self.$bias
    with torch.no_grad():
        self.$bias.<<mul_(0.9) || add_(h.detach().float().mean(0), alpha=0.1)>>

= embedding
attr emb = nn.Embedding(7, 4, <<max_norm=0.5 || max_norm=0.5 || scale_grad_by_freq=True>>)
    h = h + self.$emb((h.detach()[:, 0] * 5).long() % 7)

= lazy linear
attr fc = nn.LazyLinear(4)
    h = self.$fc(h)

= exchanged layer or parameter
attr fc = nn.Linear(4, 4)
before if step in <<steps>>:\n    me.$fc<< = nn.Linear(4, 4) || = nn.Sequential(nn.Linear(4, 4), nn.Tanh()) ||
    .weight = nn.Parameter(torch.randn(4, 4) / 2)>>
    h = self.$fc(h)

= computed weight
attr weight = nn.Parameter(torch.randn(4, 4) / 2)
attr made = None
before me.$made = None
    if self.$made is None:
        self.$made = torch.tanh(self.$weight)
    h = h @ self.$made.to(h.dtype)

= batch norm
attr norm = nn.BatchNorm1d(4<< || , momentum=None || , affine=False>>)
    h = self.$norm(h)

= own statistics
buffer mean = torch.zeros(4)
    with torch.no_grad():
        <<self.$mean.lerp_(h.float().mean(0), 0.1) || self.$mean.mul_(0.9).add_(h.float().mean(0), alpha=0.1) ||
    self.$mean.copy_(0.9 * self.$mean + h.float().mean(0)) ||
    self.$mean = 0.9 * self.$mean + 0.1 * h.float().mean(0) ||
    torch.add(self.$mean * 0.9, h.float().mean(0), alpha=0.1, out=self.$mean)>>
    <<h = h - self.$mean || h = torch.tanh(h - self.$mean) || pass>>

= power iteration
attr fc = <<0.3 ? torch.nn.utils.spectral_norm || nn.utils.parametrizations.spectral_norm>>(nn.Linear(4, 4))
    h = self.$fc(h)

= load
attr load = torch.zeros(4)
    <<self.$load += h.detach().float().mean(0) || with torch.no_grad():\n    self.$load += h.float().mean(0) ||
    self.$load.add_(h.detach().float().mean(0)) || self.$load[0] += 1>>
    <<h = h - torch.tanh(self.$load) || pass>>

= tensor rebound by loop
attr mask = torch.ones(4)
<<before || between>> me.$mask = torch.rand(4)
    h = <<h * self.$mask || h + self.$mask || torch.tanh(h + self.$mask)>>

= tensor written by loop
attr mask = torch.ones(4)
<<before || between>> me.$mask.copy_(torch.rand(4))
    h = <<h + self.$mask || torch.tanh(h + torch.sin(self.$mask))>>

= memory
attr memory = None
let value = <<h.detach().mean(0) || h.mean(0).detach() || h.detach().float().sum(0).tanh()>>
    <<0.5 ? old, self.$memory = self.$memory, $value\nif old is not None:\n    h = h * torch.sigmoid(old)\nold = None ||
    if self.$memory is not None:\n    h = h * torch.sigmoid(self.$memory)\nself.$memory = $value>>

= memory with graph
attr memory = None
before me.$memory = None
    if self.$memory is not None:
        h = h * torch.sigmoid(self.$memory)
    self.$memory = h.mean(0)

= cache
attr cache = None
    if self.$cache is None or len(self.$cache) < len(h):
        self.$cache = torch.outer(torch.arange(len(h)) + 1.0, torch.ones(4)).<<cos || sin>>()
    h = h * self.$cache[: len(h)]

= kept values
attr kept = []
    self.$kept.append(<<h.detach().mean(0) || h.detach().sum().item()>>)
    if len(self.$kept) > 1:
        h = h + torch.tanh(torch.as_tensor(self.$kept[-2]))
    <<0.5 ? del self.$kept[:-2] || pass>>

= counted
attr calls = 0
    self.$calls += 1
    <<h = h * (1 + 1 / self.$calls) || h = torch.tanh(h + self.$calls % 3) || pass>>

= state outside of the contract
attr held = {"a": [torch.zeros(4)]}
    <<type(self).calls = getattr(type(self), "calls", 0) + 1\nh = h * (1 + 1 / type(self).calls) ||
    CALLS.append(0)\nh = h * (1 + 1 / len(CALLS)) ||
    self.$held["a"][0].add_(h.detach().float().mean(0))\nh = h - torch.tanh(self.$held["a"][0])>>

= auxiliary loss
attr aux = None
    self.$aux = <<h.square().mean() || h.softmax(-1).mean(0).max() || h.exp().sum().log()>>
before me.$aux = None
extra if me.$aux is not None:\n    loss = loss + me.$aux

= field rebound
attr fc = nn.Linear(4, 4)
    <<$state.h = self.$fc(h + $state.h)\nh = h + $state.h || h = self.$fc(h + $state.h)\n$state.h = torch.tanh(h) ||
    $state.h = torch.tanh($state.h)\nh = h * self.$fc($state.h) || $state.h = h.detach()\nh = self.$fc($state.h) + h>>

= field written
    $state.load.add_(h.detach().float().mean(0))
    <<h = h - torch.tanh($state.load) || pass>>

= field appended
    $state.seen.append(<<h.detach().mean(0) || h.mean(0) || len(h)>>)
    h = h * (1 + 1 / len($state.seen))

= field counted
    $state.count += 1
    h = h * (1 + 1 / (1 + $state.count))

= gradient inside
attr fc = nn.Linear(4, 4)
    z = <<h if h.requires_grad else || >> h.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(self.$fc(z).sin().sum(), z, create_graph=<<True || z is h>>)
    h = h + slope

= lower precision inside
attr fc = nn.Linear(4, 4)
attr low = True
before me.$low = step in <<steps>>
    with torch.autocast("cpu", torch.bfloat16, enabled=self.$low):
        z = self.$fc(h)
    h = h + z.to(h.dtype)

= gradient hook
attr factor = 0.5
before me.$factor = 0.5 + 0.25 * step
    z = torch.sin(h)
    if z.requires_grad:
        z.register_hook(lambda gradient: gradient * self.$factor)
    h = h + z

= stopped
attr stop = False
before me.$stop = step in <<steps 2>>
    if self.$stop:
        raise Stop

= forward hook
attr fc = nn.Linear(4, 4)
attr _handle = None
let turns = <<steps 2>>
before if step == $turns[0]:\n    me.$_handle = me.$fc.register_forward_hook(lambda layer, given, out: out * 0.5)
before if step == $turns[1]:\n    me.$_handle.remove()
    h = torch.tanh(self.$fc(h))

= view of buffer
buffer table = torch.zeros(2, 4)
attr row = self.$table[0]
    self.$row.add_(h.detach().float().mean(0))
    h = h - torch.tanh(self.$table).sum(0)

= buffer made late
    if not hasattr(self, "late"):
        self.register_buffer("late", h.detach().float().mean(0))
    h = h - self.late

= attribute made and deleted
    self.inner = torch.sin(h)
    h = h + self.inner
    del self.inner

= inner gradient
attr inner = None
    h = torch.tanh(h)
    self.$inner = h
    if h.requires_grad:
        h.retain_grad()
last seen.append(None if me.$inner is None else me.$inner.grad)\nme.$inner = None

= kept output
attr features = {}
    self.$features["out"] = h
extra if "out" in me.$features:\n    loss = loss + me.$features.pop("out").sin().double().sum()

= dropout schedule
attr drop = nn.Dropout(0.1)
<<self.$drop.p = min(0.5, self.$drop.p + 0.1) || before me.$drop.p = 0.1 * (step % 4) ||
between me.$drop.p = 0.1 * (step % 4)>>
    h = self.$drop(h)

= flags set inside
attr fc = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3))
attr calls = 0
    self.$calls += 1
    self.$fc.<<train || requires_grad_>>(self.$calls % 2 == 0)
    h = h + self.$fc(h)

= seeded inside
    <<with torch.random.fork_rng():\n    torch.manual_seed(5)\n    h = h + torch.rand_like(h) ||
    torch.manual_seed(len(h))\nh = F.dropout(h, 0.3) ||
    numbers = torch.get_rng_state()\nh = F.dropout(h, 0.3)\ntorch.set_rng_state(numbers) ||
    random.seed(len(h))\nh = h * random.random()>>

= checkpoint inside
attr fc = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
    h = torch.utils.checkpoint.checkpoint(self.$fc, h, use_reentrant=False)

= transforms
    h = h + <<torch.func.vmap(lambda row: row.sin().sum())(h)[:, None] || torch.func.grad(lambda z: z.sin().sum())(h) ||
    torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1]>>

= dropped rows
    h = h[: <<1 + int(h.detach().abs().sum() * 3) % len(h) || random.randint(1, len(h))>>]

= full backward hook
attr fc = nn.Linear(4, 4)
attr calls = 0
attr _handle = self.$fc.register_full_backward_hook(lambda layer, given, out: setattr(self, "$calls", self.$calls + 1))
    h = torch.tanh(self.$fc(h))

= option
    h = <<torch.tanh(h) * (1 + 0.1 * option) || torch.tanh(h) if option % 2 else torch.sin(h)>>

= large tensors
attr load = torch.zeros(300)
attr held = {"sum": torch.zeros(4)}
attr mean = None
    with torch.no_grad():
        self.$load += h.mean()
        self.$held["sum"].add_(h.sum(0))
        self.$mean = h.mean(0) if self.$mean is None else self.$mean * 0.9 + h.mean(0)
    h = h * self.$held["sum"].sigmoid() * self.$load.mean().cos() * self.$mean.cos()

= state with a graph, given up before backward
attr state = None
attr fc = nn.Linear(4, 4)
between me.$state = None
    state, self.$state = self.$state, torch.tanh(self.$fc(h))
    h = self.$state if state is None else torch.tanh(self.$fc(state)) * self.$state
"""

_CONDITIONS = r"""
= if drawn
if <<torch.rand(()).item() < 0.5 || torch.randint(3, ()) == 0 || bool(torch.empty(1).bernoulli_(0.5)) ||
    random.random() < 0.5 || numpy.random.rand() < 0.5>>

= if input
if <<h.sum().item() > 0 || h[0, 0] > 0 || h.detach().tolist()[0][1] > 0 || len(h) > 3 || h.requires_grad>>

= if mode
if <<self.training || torch.is_grad_enabled() || torch.is_autocast_enabled("cpu")>>

= if counter
attr calls = 0
    self.$calls += 1
if self.$calls % <<2 || 3>> == 0

= if setting
attr flag = True
before me.$flag = step in <<steps>>
if self.$flag

= if setting between passes
attr flag = True
<<0.5 ? before me.$flag = True || pass>>
between if step in <<steps>>:\n    me.$flag = not me.$flag
if self.$flag

= if iterator
attr turns = <<itertools.cycle([True, False, False]) || map(round, iter(random.Random(3).random, None))>>
if next(self.$turns)

= if length of list
attr seen = []
    self.$seen.append(<<len(h) || None || h.detach().sum().item()>>)
<<0.3 ? after if step == 3:\n    me.$seen.clear() || pass>>
if len(self.$seen) % 2 == 0

= if entry of dict
attr book = <<{"count": 0} || collections.Counter(count=0)>>
    self.$book["count"] += 1
if self.$book["count"] % 2 == 0

= if entry of set
attr shapes = set()
    new = len(h) not in self.$shapes
    self.$shapes.add(len(h))
if new

= if field of object
attr config = SimpleNamespace(count=0)
    self.$config.count += 1
if self.$config.count % 2 == 0

= if field of argument
    $state.count += 1
if $state.count % 2 == 0

= if buffer's value
buffer steps = torch.zeros((), dtype=torch.long)
    <<self.$steps += 1 || self.$steps.add_(1) || self.$steps = self.$steps + 1>>
if self.$steps.item() % 2 == 0

= if parameter's value
attr scale = nn.Parameter(torch.randn(4) * 0.05)
    h = h + self.$scale
if self.$scale.sum().item() > 0

= if own generator
attr generator = torch.Generator().manual_seed(3)
if torch.rand((), generator=self.$generator).item() < 0.5
"""

_CHANGES = r"""
= rows
before x = torch.randn(<<<<rows>>[step] || 2 + step>>, 4)

= same input
before x = torch.linspace(-1, 1, 12).view(3, 4)

= layout
let other = <<x.t().contiguous().t() || x[:1].expand(3, 4) || x.repeat(2, 1)[::2]>>
before if step in <<steps>>:\n    x = $other

= input gradient
before x.requires_grad_(step in <<steps>>)

= evaluation mode
before model<< || .blocks[<<block>>]>>.train(step not in <<steps>>)

= evaluation mode between passes
before model.train()
between model.train(step not in <<steps>>)

= frozen
let where = <<before || before || between>>
let some = list(model.parameters())[<<0 || 1>> :: <<1 || 2 || 3>>]
# None is thawed between forward and a double backward: under hooks on saved tensors torch goes by the forward.
let thawed = "$where" == "before" or "double backward" not in KINDS or p.requires_grad
$where for p in $some:\n    p.requires_grad_(($thawed) and step not in <<steps>>)

= double precision
before if step >= <<2 || 4>>:\n    model.double()\n    x = x.double()

= order of blocks
before model.order = random.sample(model.order, len(model.order))

= draws between passes
between torch.rand(2), random.random(), numpy.random.rand()

= seeded by loop
<<before || between>> torch.manual_seed(step), random.seed(step), numpy.random.seed(step)

= weights loaded
let values = {name: x * 0.9 for name, x in model.state_dict().items()}
before if step in <<steps 2>>:\n    model.load_state_dict($values, strict=False)

= weights exchanged
before for p in model.parameters() if step in <<steps 2>> else ():\n    p.data = <<
    p.data.clone() || p.data * 0.9 || p.data.t().contiguous().t()>>

= gradients kept
before keep_gradients = step in <<steps>>

= copied block
let at = <<block>>
before if step in <<steps 2>>:\n    model.blocks[$at] = copy.deepcopy(model.blocks[$at])

= optimizer in backward
let some = filter(wants_gradient, model.parameters() if step == 0 else ())
before for p in $some:\n    p.register_post_accumulate_grad_hook(descend)

= weights written between passes
between for p in list(model.parameters())[<<0 || 1 || 2>> :: 4]:\n    p.detach().mul_(0.9)

= empty batch
before if step in <<steps 2>>:\n    x = torch.randn(0, 4)

= saved on CPU
around torch.autograd.graph.save_on_cpu() if step in <<steps>> else contextlib.nullcontext()

= flop counter
around FlopCounterMode(display=False) if step in <<steps>> else contextlib.nullcontext()

= second model
before if step == 0:\n    other = copy.deepcopy(model)
before if step in <<steps>>:\n    forward(other, copy.deepcopy(state), torch.randn(3, 4), step).backward()
"""


def _read(text: str) -> dict[str, list[str]]:
    """The lines of each instruction, by its name; a line in which `<<` is open goes on in the next."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^= ", text, flags=re.MULTILINE)[1:]:
        name, *lines = part.rstrip().split("\n")
        joined = found[name] = []
        for line in lines:
            if joined and joined[-1].count("<<") > joined[-1].count(">>"):
                joined[-1] += f" {line.strip()}"
            elif not line.startswith("#"):
                joined.append(line)
    return found


PLAIN, CHANGING, CONDITIONS, CHANGES = map(_read, (_PLAIN, _CHANGING, _CONDITIONS, _CHANGES))
INSTRUCTIONS = PLAIN | CHANGING
