"""Loops with several optimizers, several losses, and gradients of gradients: as the plain loop."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fastaccum import FusedAccumulator  # noqa: E402
from tests.oracle import each_backend, each_take, stock  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


pytestmark = [pytest.mark.native, pytest.mark.quick]
SGD, Adam, AdamW, RMSprop = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
)  # fmt: skip
each_kind = pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
each_window = pytest.mark.parametrize("steps", [1, 3])


class Plain:
    """Accumulation written out by hand around a stock optimizer: clone, add, divide, step.

    A micro-batch in which none of its parameters took part weighs nothing. At one micro-batch per update
    it only steps and clears, so it is the stock loop itself.
    """

    def __init__(self, optimizer, steps):
        self.inner, self.steps, self.held = optimizer, steps, []
        self.params = [p for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self):
        self.inner.zero_grad()

    def step(self):
        if self.steps == 1:
            self.inner.step()
            return self.inner.zero_grad()
        self.held.append([None if p.grad is None else p.grad.detach().clone() for p in self.params])
        self.inner.zero_grad()
        if len(self.held) == self.steps:
            weight = sum(any(grad is not None for grad in grads) for grads in self.held)
            for p, grads in zip(self.params, zip(*self.held, strict=True), strict=True):
                grads = [grad for grad in grads if grad is not None]
                p.grad = torch.stack(grads).sum(0) / weight if grads else None
            self.inner.step()
            self.inner.zero_grad()
            self.held = []


def compare(build, loop, steps, kind, *, micro_batches=12, backend="auto", take="step"):
    """Runs ``loop(models, optimizers, i)`` on twins: by hand, and through the wrapper."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(3)
        models = build()
        optimizers = []
        for model in models:
            inner = stock(kind, model.parameters(), lr=0.05)
            options = {"backend": backend, "take": take}
            optimizers.append(FusedAccumulator(inner, steps, **options) if wrap else Plain(inner, steps))
        start = [p.detach().clone() for model in models for p in model.parameters()]
        for i in range(micro_batches):
            torch.manual_seed(100 + i)
            loop(models, optimizers, i)
        results.append([p.detach() for model in models for p in model.parameters()])
    assert any(not torch.equal(a, b) for a, b in zip(start, results[0], strict=True))
    for number, (expected, got) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=number: f"{n}: {m}")


def mlp(*sizes):
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(
        *itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers[:-1]), layers[-1]
    )


def data(n=4, width=3):
    return torch.randn(n, width, dtype=torch.float64)


# --------------------------------------------------------------------------------------------- GAN


def gan():
    return mlp(2, 4, 3), mlp(3, 4, 1)


def score(d, x, target):
    return F.binary_cross_entropy_with_logits(d(x), torch.full((len(x), 1), target, dtype=torch.float64))


@each_backend
@each_kind
@each_window
def test_a_gan_drops_what_the_other_loss_left(backend, kind, steps):
    """The generator's loss leaves gradients in the discriminator, which its zero_grad() drops."""

    def loop(models, optimizers, i):
        (g, d), (opt_g, opt_d) = models, optimizers
        fake = g(data(width=2))
        opt_d.zero_grad()
        score(d, data(), 1.0).backward()
        score(d, fake.detach(), 0.0).backward()
        opt_d.step()
        opt_g.zero_grad()
        score(d, fake, 1.0).backward()
        opt_g.step()

    compare(gan, loop, steps, kind, backend=backend)


@each_kind
@each_window
@each_take
def test_a_gan_that_freezes_the_discriminator(kind, steps, take):
    """The other widespread form, which needs no zero_grad(): it works while gradients are taken early."""

    def loop(models, optimizers, i):
        (g, d), (opt_g, opt_d) = models, optimizers
        fake = g(data(width=2))
        (score(d, data(), 1.0) + score(d, fake.detach(), 0.0)).backward()
        opt_d.step()
        d.requires_grad_(False)
        score(d, fake, 1.0).backward()
        opt_g.step()
        d.requires_grad_(True)

    compare(gan, loop, steps, kind, take=take)


def test_a_gan_whose_windows_have_different_lengths():
    """Two discriminator updates per generator update, each with its own number of micro-batches."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(3)
        g, d = gan()
        opt_g, opt_d = (
            (FusedAccumulator if wrap else Plain)(stock(Adam, m.parameters(), lr=0.05), n)
            for m, n in ((g, 4), (d, 2))
        )
        for i in range(16):
            torch.manual_seed(100 + i)
            fake = g(data(width=2))
            opt_d.zero_grad()
            (score(d, data(), 1.0) + score(d, fake.detach(), 0.0)).backward()
            opt_d.step()
            opt_g.zero_grad()
            score(d, fake, 1.0).backward()
            opt_g.step()
        results.append([p.detach() for m in (g, d) for p in m.parameters()])
        if wrap:
            assert {float(s["step"]) for s in opt_g.state.values()} == {4.0}
            assert {float(s["step"]) for s in opt_d.state.values()} == {8.0}
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_gradients_that_the_discriminator_did_not_drop_count_in_stock_and_here():
    """Without zero_grad() the leftovers are part of the next micro-batch, as they are in stock."""

    def loop(models, optimizers, i):
        (g, d), (opt_g, opt_d) = models, optimizers
        fake = g(data(width=2))
        (score(d, data(), 1.0) + score(d, fake.detach(), 0.0)).backward()
        opt_d.step()
        score(d, fake, 1.0).backward()
        opt_g.step()

    compare(gan, loop, 1, SGD)
    compare(gan, loop, 3, SGD)


# ------------------------------------------------------------------------------------ actor, critic


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.actor, self.critic = mlp(3, 5), mlp(5, 4, 2), mlp(5, 4, 1)


@each_backend
@each_kind
@each_window
def test_actor_and_critic_share_a_backbone_in_one_backward(backend, kind, steps):
    """One loss over three wrappers; on every third micro-batch the actor takes no part."""

    def build():
        model = ActorCritic()
        return model.backbone, model.actor, model.critic

    def loop(models, optimizers, i):
        backbone, actor, critic = models
        features = torch.tanh(backbone(data()))
        value = critic(features)
        loss = (value - 1.0).square().mean()
        if i % 3:
            advantage = (1.0 - value).detach()
            loss = loss - (actor(features).log_softmax(-1)[:, :1] * advantage).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    compare(build, loop, steps, kind, backend=backend)


@each_window
@each_take
def test_actor_and_critic_losses_go_backward_one_after_the_other(steps, take):
    """Two backward calls through one retained graph are one micro-batch of the shared backbone."""

    def build():
        model = ActorCritic()
        return nn.ModuleList([model.backbone, model.actor]), model.critic

    def loop(models, optimizers, i):
        (backbone, actor), critic = models
        features = torch.tanh(backbone(data()))
        value = critic(features)
        (value - 1.0).square().mean().backward(retain_graph=True)
        (-actor(features).log_softmax(-1)[:, :1] * value.detach()).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    compare(build, loop, steps, AdamW, take=take)


@each_window
def test_the_critics_gradients_are_taken_before_the_actors_backward(steps):
    """The critic steps first; the actor's loss then flows through it and is dropped (DDPG)."""

    def build():
        return mlp(3, 4, 2), mlp(5, 4, 1)

    def loop(models, optimizers, i):
        (actor, critic), (opt_actor, opt_critic) = models, optimizers
        state, action = data(), data(width=2)
        opt_critic.zero_grad()
        (critic(torch.cat([state, action], 1)) - 1.0).square().mean().backward()
        opt_critic.step()
        opt_actor.zero_grad()
        (-critic(torch.cat([state, actor(state)], 1))).mean().backward()
        opt_actor.step()

    compare(build, loop, steps, Adam)


# --------------------------------------------------------------------------- gradients of gradients


def penalty(d, real, fake):
    """WGAN-GP: the gradient by the input is itself differentiated."""
    at = torch.lerp(real, fake.detach(), torch.rand(len(real), 1, dtype=torch.float64)).requires_grad_()
    (grad,) = torch.autograd.grad(d(at).sum(), at, create_graph=True)
    return (grad.norm(2, 1) - 1.0).square().mean()


@each_backend
@each_kind
@each_window
def test_a_gradient_penalty(backend, kind, steps):
    def loop(models, optimizers, i):
        (g, d), (opt_g, opt_d) = models, optimizers
        real, fake = data(), g(data(width=2))
        opt_d.zero_grad()
        (d(fake.detach()).mean() - d(real).mean() + 10.0 * penalty(d, real, fake)).backward()
        opt_d.step()
        opt_g.zero_grad()
        (-d(fake).mean()).backward()
        opt_g.step()

    compare(gan, loop, steps, kind, backend=backend)


@each_window
@each_take
def test_a_penalty_on_the_gradients_by_the_parameters(steps, take):
    """``autograd.grad`` by the parameters with create_graph brings nothing; its backward does."""

    def loop(models, optimizers, i):
        (model,), (optimizer,) = models, optimizers
        loss = model(data()).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        assert all(p.grad is None for p in model.parameters())
        (loss + 0.1 * sum(grad.square().sum() for grad in grads)).backward()
        optimizer.step()

    compare(lambda: (mlp(3, 4, 1),), loop, steps, AdamW, take=take)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@each_window
def test_a_penalty_on_gradients_that_backward_left_in_grad(steps):
    """``backward(create_graph=True)``, then a loss of ``.grad`` itself, whose gradients come on top."""

    def loop(models, optimizers, i):
        (model,), (optimizer,) = models, optimizers
        model(data()).square().mean().backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        (0.1 * sum(grad.square().sum() for grad in grads)).backward()
        optimizer.step()

    compare(lambda: (mlp(3, 4, 1),), loop, steps, AdamW)


@each_window
def test_meta_learning_steps_inside_the_loss(steps):
    """MAML: the inner update is part of the graph, the outer loss goes through it."""

    def loop(models, optimizers, i):
        (model,), (optimizer,) = models, optimizers
        names = dict(model.named_parameters())
        loss = torch.func.functional_call(model, names, (data(),)).square().mean()
        grads = torch.autograd.grad(loss, list(names.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(names.items(), grads, strict=True)}
        torch.func.functional_call(model, fast, (data(),)).square().mean().backward()
        optimizer.step()

    compare(lambda: (mlp(3, 4, 1),), loop, steps, AdamW)


# ----------------------------------------------------------------------------------------- saliency


@each_backend
@each_window
@each_take
@pytest.mark.parametrize("by", ["input", "parameters", "both"])
def test_saliency_passes_between_micro_batches_bring_nothing(backend, steps, take, by):
    def loop(models, optimizers, i):
        (model,), (optimizer,) = models, optimizers

        def saliency():
            x = data().requires_grad_()
            wanted = [x] * (by != "parameters") + list(model.parameters()) * (by != "input")
            return torch.autograd.grad(model(x).sum(), wanted)

        saliency()
        model(data()).square().mean().backward()
        found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        saliency()
        for p, before in zip(model.parameters(), found, strict=True):
            assert (p.grad is None) == (before is None) and (before is None or torch.equal(p.grad, before))
        optimizer.step()
        saliency()
        assert all(p.grad is None for p in model.parameters())

    compare(lambda: (mlp(3, 4, 1),), loop, steps, AdamW, backend=backend, take=take)


@each_window
def test_a_saliency_pass_by_backward_is_dropped_by_zero_grad(steps):
    def loop(models, optimizers, i):
        (model,), (optimizer,) = models, optimizers
        x = data().requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()

    compare(lambda: (mlp(3, 4, 1),), loop, steps, AdamW)


@each_window
@each_take
def test_a_backward_by_inputs_alone_brings_nothing(steps, take):
    """``backward(inputs=[x])`` runs through the model without touching its gradients."""

    def loop(models, optimizers, i):
        (model,), (optimizer,) = models, optimizers
        x = data().requires_grad_()
        model(x).sum().backward(inputs=[x])
        assert all(p.grad is None for p in model.parameters())
        model(x.detach() + 0.1 * x.grad.sign()).square().mean().backward()  # an adversarial step
        optimizer.step()

    compare(lambda: (mlp(3, 4, 1),), loop, steps, AdamW, take=take)
