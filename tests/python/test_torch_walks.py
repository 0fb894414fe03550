"""Random walks through what users of torch do to a model while its layers come and go, beside a twin that is not attached: the
bytes of every tensor object, passes, state dicts and copies are the twin's, or a typed error says why not.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings

import effort
import pytest

import remap
from remap import InvalidArgument, InvalidState, advanced

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize as parametrizing  # noqa: E402
from torch.nn.utils import prune as pruning  # noqa: E402

from remap.internals import internals  # noqa: E402
from remap.model.hooks import OURS  # noqa: E402

LAYERS, WIDTH, PAGE = 6, 16, 4096


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        return x + self.scale * self.second(torch.relu(self.first(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Once(nn.Module):
    def forward(self, weight):
        return weight * 1.0


def linears(model):
    """(parent, name, Linear) of each plain one in a layer, by path."""
    return [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
        for path, module in model.layers.named_modules(prefix="layers")
        if type(module) is nn.Linear and "lora_" not in path
    ]


def tuners(model):
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "lora_A")]


def tensors_of(module):
    return [*module.parameters(), *module.buffers()]


# --- what users do: (model, a generator of their choices); each is done to the twin with equal choices ------------------


def wrap_layer(model, rng):
    index = rng.randrange(len(model.layers))
    model.layers[index] = Around(model.layers[index])


def wrap_linear(model, rng):
    plain = [each for each in linears(model) if each[1] != "base_layer"]  # peft looks there for the weight
    parent, name, module = rng.choice(plain or [(model, "out", model.out)])
    setattr(parent, name, Around(module))


def insert(model, rng):
    model.layers.insert(rng.randrange(len(model.layers) + 1), nn.Identity())


def move(model, rng):
    one, other = rng.randrange(len(model.layers)), rng.randrange(len(model.layers))
    model.layers[one], model.layers[other] = model.layers[other], model.layers[one]


def remove(model, rng):
    if len(model.layers) > 3:
        del model.layers[rng.randrange(len(model.layers))]


def prune(model, rng):
    fresh = [
        each[2] for each in linears(model) if "bias" in each[2]._parameters
    ]  # another mask would be made of the first one
    if fresh:
        pruning.identity(rng.choice(fresh), "bias")


def adapt(model, rng):
    if not tuners(model):
        names = {id(module): path for path, module in model.named_modules()}
        chosen = [names[id(module)] for _, _, module in linears(model)]
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=2, target_modules=rng.sample(chosen, max(1, len(chosen) // 2))), model
        )
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        for _, module in tuners(model):
            for each in (module.lora_A["default"], module.lora_B["default"]):
                each.weight.copy_(torch.randn(each.weight.shape, generator=generator) * 0.1)
        model.requires_grad_(False)


def merge(model, rng):
    for _, module in tuners(model):
        module.merge()


def unmerge(model, rng):
    for _, module in tuners(model):
        module.unmerge()


def unload(model, rng):
    for path, module in tuners(model):
        setattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module.get_base_layer())


def load(model, rng):
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    state = {name: torch.rand(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=rng.random() < 0.2)
    model.requires_grad_(False)


def parametrize(model, rng):
    parametrizing.register_parametrization(rng.choice(linears(model))[2], "weight", Once())


def train(model, rng):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()


def renew(model, rng):
    """The same memory in a new object."""
    module = rng.choice(linears(model))[2]
    if "bias" in module._parameters:
        module.bias = nn.Parameter(module.bias.data, requires_grad=False)


def exchange(model, rng):
    """Other memory in the same object, made from the old one."""
    module = rng.choice(linears(model))[2]
    module.weight.data = module.weight.data * 1.0


NAMES = [wrap_layer, wrap_linear, insert, move, prune, adapt, unload]
GUARDED = [merge, unmerge, load]  # refused while layers are away
WRITES = [parametrize, train, renew, exchange]  # found behind the fact


class Walk:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Stack().eval().requires_grad_(False)
        self.twin = copy.deepcopy(self.model)
        self.pairs = list(zip(tensors_of(self.model), tensors_of(self.twin), strict=True))
        self.x = torch.randn(3, WIDTH)
        self.session = None
        self.seen = []
        self.excused = False  # a layer that was removed is missed by passes while it is away
        self.remapped = 0

    def both(self, change):
        choices = self.rng.getstate()
        change(self.model, self.rng)
        self.rng.setstate(choices)
        change(self.twin, self.rng)

    @property
    def away(self):
        return bool(self.session and internals(self.tenant).away())

    # -- what the session does -----------------------------------------------------------------------------------------

    def attach(self):
        layers = [module for module in self.model.layers.modules() if isinstance(module, Layer)]
        shape = {"layers": len(layers), "kv_heads": 2, "head_dim": 8, "dtype": "float32", "block_tokens": 4}
        kv = remap.KVSpec(**shape, min_blocks=4, max_blocks=4000)
        registered = {
            id(tensor) for tensor in tensors_of(self.model)
        }  # attach does not move what the model has no more
        self.pairs = [pair for pair in self.pairs if id(pair[0]) in registered]
        self.session = remap.Session("4MiB", page_bytes=PAGE)
        self.tenant = self.session.attach(self.model, layers, kv=kv, name="m")

    def close(self):
        with warnings.catch_warnings():
            if self.excused:
                warnings.simplefilter("ignore")
            self.rng.choice([self.session.close, lambda: self.session.detach("m")])()
        self.session.close()
        self.session, self.excused = None, False

    def remap(self):
        with contextlib.suppress(InvalidArgument, InvalidState):  # too few are left, or no whole pass yet
            advanced.remap(self.session, "m", self.rng.randrange(LAYERS), self.rng.choice([1, 2]))
        advanced.check(self.session)
        self.remapped += bool(self.tenant.streamed)

    # -- what has to hold ----------------------------------------------------------------------------------------------

    def look(self):
        """From now on a hook of the user's reads a layer in each pass."""
        both = [[one for one in each.layers.modules() if isinstance(one, Layer)] for each in (self.model, self.twin)]
        layers = self.rng.choice(list(zip(*both)))  # a wrapper's own hooks are a parent's

        def hook(module, args, output):
            self.seen.append(all(map(torch.equal, *map(tensors_of, layers))))

        layers[0].register_forward_hook(hook, **self.rng.choice([{}, {"always_call": True}, {"prepend": True}]))

    def right(self):
        assert torch.equal(self.model(self.x), self.twin(self.x))
        assert all(self.seen)
        mine, theirs = self.model.state_dict(), self.twin.state_dict()
        assert list(mine) == list(theirs)
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
        if not self.session:
            assert all(torch.equal(mine, theirs) for mine, theirs in self.pairs)

    def copied(self):
        made = copy.deepcopy(self.model)
        assert not any(getattr(value, OURS, False) for module in made.modules() for value in vars(module).values())
        self.seen, kept = [], self.seen  # its hooks read the layers of the original
        assert torch.equal(made(self.x), self.twin(self.x))
        self.seen = kept

    def step(self):
        """One thing that a user does, and whether all is right behind it. Returns whether the walk goes on."""
        session = [self.remap, self.remap, self.remap, self.close] if self.session else [self.attach, self.attach]
        do = self.rng.choice([*session, *session, self.look, self.copied, remove, *NAMES, *GUARDED, *WRITES])
        away = self.away
        self.excused |= bool(self.session) and do is remove
        lost = (remap.Error,) if self.excused or (away and do in WRITES) else ()
        if do in GUARDED and away:
            with pytest.raises(InvalidState) if do is load or tuners(self.model) else contextlib.nullcontext():
                do(self.model, self.rng)
        elif hasattr(do, "__self__"):
            with contextlib.suppress(*lost):
                do()
        else:
            self.both(do)
        try:
            self.right()
        except lost:
            if do in WRITES:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.close()
                assert do in (train, exchange) or all(torch.equal(mine, theirs) for mine, theirs in self.pairs)
                return False
        return True


@pytest.mark.filterwarnings("ignore::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(effort.some(25, 400)))
def test_a_walk(seed):
    walk = Walk(seed)
    with torch.no_grad():
        for _ in range(40):
            if not walk.step():
                break
        if walk.session:
            walk.close()
            walk.right()
