"""Several ranks equal one process on the joined batch: value, terms and gradient of every objective, in float64.

Ranks are forked from a server that has imported torch once. Each rank takes its share of the images.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kontrast import distributed
from kontrast.objectives import OBJECTIVES, Objective, Sum, metrics, objective
from kontrast.objectives.inputs import values_unread

from support.objective_inputs import extra_inputs, possible_inputs, small_objective

N, WIDTH, D = 8, 6, 5
WORLDS = (2, 4)

ARGUMENTS = {"koleo": {"over_ranks": True}, "cross-entropy": {"classes": 8}}
"""Arguments without which an objective compares the images of each rank alone, or refuses the labels."""
# objective, its arguments, number of query views, arguments besides z
CASES: list[tuple[str, dict, int, tuple[str, ...]]] = [
    *((name, ARGUMENTS.get(name, {}), 2, ()) for name in OBJECTIVES),
    *((name, ARGUMENTS.get(name, {}), 2, ("keys",)) for name in OBJECTIVES if not OBJECTIVES[name].needs_labels),
    *((name, {}, 2, ("keys", "bank")) for name in OBJECTIVES if OBJECTIVES[name].takes_bank),
    *((name, ARGUMENTS.get(name, {}), 3, ("labels",)) for name in OBJECTIVES if OBJECTIVES[name].takes_labels),
    ("nt-xent", {"reduction": "sum"}, 3, ()),
    ("dclw", {"detach": False}, 3, ()),
    ("cacr", {"cost": "rbf"}, 3, ()),
    ("cacr", {"negatives": "same-view"}, 3, ()),
    ("cacr", {"cost": "rbf", "negatives": "same-view", "detach_negative_weights": True}, 2, ()),
    ("sim-affinity", {"symmetric": True, "normalize_by_n": True}, 3, ()),
    ("sim-whitening", {"variant": "mocov3"}, 3, ()),
    ("sim-whitening", {"variant": "mocov3"}, 2, ("keys",)),
    ("sim-whitening", {"symmetric": True}, 3, ()),
    ("sim-whitening", {"pooled": True}, 2, ("keys",)),
    ("sim-trace", {"scaling": "sum"}, 3, ()),
    ("sim-trace", {"variant": "paper"}, 2, ("keys",)),
    ("w-mse", {"pooled": True}, 3, ()),
    ("swd", {"prior": "normal"}, 3, ()),
    ("barlow-twins", {}, 3, ()),
    ("vicreg", {}, 3, ()),
    ("lejepa", {"directions": 6, "knots": 4}, 3, ("global_views",)),
    ("zero-cl", {"mode": "features"}, 3, ()),
    ("zero-cl", {"mode": "instances", "detach": False}, 2, ("keys",)),
    ("koleo", {"over_ranks": True}, 3, ("global_views",)),
    ("info-nce", {"symmetric": True}, 2, ()),
    ("info-nce", {"symmetric": True}, 2, ("labels",)),
    ("dcl", {"negatives": "cross-view"}, 2, ()),
    ("dcl", {"negatives": "cross-view"}, 2, ("labels",)),
    ("cacr", {"symmetric": True}, 2, ()),
    ("cacr", {"symmetric": True, "cost": "rbf"}, 2, ("labels",)),
    ("cacr", {"cost": "rbf"}, 2, ("keys",)),
    ("siglip", {"temperature": 0.2, "bias": -2.0}, 2, ("labels",)),
    ("cacr", {"variant": "mocov3", "cost": "rbf"}, 3, ("keys",)),
    ("cacr", {"variant": "mocov3"}, 3, ("keys",)),
    ("cacr", {"margin": 0.5}, 3, ()),
    ("info-nce", {"loss_scale": "2tau"}, 2, ("keys",)),
    ("nnclr", {}, 3, ("keys",)),
    ("sogclr", {"images": 24, "gamma": 0.4}, 3, ()),
    ("isogclr", {"images": 24, "gamma": 0.4, "beta": 0.3}, 3, ()),
    ("swav", {}, 3, ("keys", "bank")),
    ("dino", {"centering": "sinkhorn"}, 3, ("keys",)),
]
METRICS = ("conditional_entropy", "alignment", "uniformity")


def draw(V: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a linear layer [V,N,WIDTH] and its weights."""
    generator = torch.Generator().manual_seed(V)
    shapes = (V, N, WIDTH), (WIDTH, D)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)


def inputs(name: str, V: int, others: tuple[str, ...], images: slice) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the layer's inputs and weights, and the other arguments of the objective; of these images of a batch."""
    x, weights = draw(V)
    calls = possible_inputs(name, x[..., :D])
    given = calls[("keys" in others) + ("bank" in others)]
    if "labels" in others:
        given = given | {"labels": torch.tensor([4, 7, 7, 1, 4, 4, 0, 1])}
    if "global_views" in others:
        given = given | {"global_views": 2}
    share = {"keys": lambda keys: keys[:, images], "labels": lambda y: y[images], "indices": lambda i: i[images]}
    given = {k: share[k](value) if k in share else value for k, value in given.items()}
    if "prototypes" in given:
        given["prototypes"].requires_grad_()
    return x[:, images], weights.requires_grad_(), given


def with_parameters(name: str, arguments: dict, z: Tensor) -> Objective:
    """Return the objective with a parameter for every number that may be one."""
    chosen: dict = dict(arguments)
    for argument, parameter in OBJECTIVES.arguments(name).items():
        if argument in arguments or not isinstance(parameter.default, float):
            continue
        number = torch.nn.Parameter(torch.tensor(parameter.default, dtype=torch.float64))
        with contextlib.suppress(ValueError):  # a number that gets no gradient here
            chosen = objective(name, **chosen, **{argument: number}) and {**chosen, argument: number}
    return small_objective(name, z, **chosen).double()


def evaluate(images: slice) -> list[dict[str, Tensor]]:
    """Return for each case on these images the terms and the gradients of z, of the weights that made z, and of the
    objective's own numbers."""
    results = []
    for name, arguments, V, others in CASES:
        x, weights, given = inputs(name, V, others, images)
        z = x @ weights
        z.retain_grad()
        loss = with_parameters(name, arguments, z)
        if any(x.is_floating_point() for x in loss.buffers()):  # the step that is compared uses what another one stored
            first = z.detach().flip(-1).requires_grad_()
            torch.autograd.grad(loss(first, **given), first)
        terms = loss.terms(z, **given)
        terms.total.backward()
        results.append({**{k: x.detach() for k, x in terms.items()}, "of z": z.grad, "of weights": weights.grad})
        learned = [*loss.named_parameters(), *given.items()]
        results[-1] |= {f"of {k}": p.grad for k, p in learned if isinstance(p, Tensor) and p.grad is not None}
        results[-1] |= {f"buffer {k}": x for k, x in loss.named_buffers() if x.is_floating_point()}
    z = draw(2)[0][:, images]
    results.append({name: getattr(metrics, name)(z) for name in METRICS})
    return results


def ddp_step(images: slice) -> dict[str, Tensor]:
    """Return the weights after one step of SGD, with DistributedDataParallel if there are several ranks."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(WIDTH, D).double()
    if distributed.world() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    objective("cacr")(model(draw(3)[0][:, images])).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


def evaluate_sum(images: slice) -> dict[str, Tensor]:
    """Return the terms of a sum of objectives on these images, and their gradient."""
    z = draw(3)[0][:, images].requires_grad_()
    parts = [objective("nt-xent"), objective("koleo", over_ranks=True), objective("lejepa", directions=4)]
    terms = Sum(parts, weights=[1.0, 0.2, 0.5]).terms(z, global_views=2)
    terms.total.backward()
    return {name: term.detach() for name, term in terms.items()} | {"of z": z.grad}


# Of one case, the messages of the forward and of the backward pass, each as its name and the shape that a rank sends.
Messages = tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]]]


def messages(images: slice) -> list[Messages]:
    """Return what each case sends, without the check of equal shapes, which reads values."""
    sent: list[tuple[str, tuple[int, ...]]] = []

    def counted(name: str, send: Callable) -> Callable:
        return lambda *tensors, **options: sent.append((name, tuple(tensors[-1].shape))) or send(*tensors, **options)

    names, counts = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"), []
    originals = {name: getattr(dist, name) for name in names}
    for name, send in originals.items():
        setattr(dist, name, counted(name, send))
    for name, arguments, V, others in CASES:
        x, weights, given = inputs(name, V, others, images)
        z = (x @ weights).detach().requires_grad_()
        with values_unread():
            loss = small_objective(name, z, **arguments)(z, **given)
            forward = list(sent)
            sent.clear()
            loss.backward()
        counts.append((forward, list(sent)))
        sent.clear()
    for name, send in originals.items():
        setattr(dist, name, send)
    return counts


def uneven_errors(number: int) -> list[str]:
    """Return the error of each objective if one rank has one image more than the others."""
    errors = []
    for name in OBJECTIVES:
        z = draw(2)[0][:, : 2 + (number == 0)]
        try:
            errors.append(f"{name}: {small_objective(name, z)(z, **extra_inputs(name, z))}")
        except ValueError as error:
            errors.append(str(error))
    return errors


def run_rank(number: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(number), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "3"
    distributed.initialize(timeout_seconds=600)
    assert (distributed.rank(), distributed.world()) == (number, world)
    share = N // world
    images = slice(number * share, (number + 1) * share)
    half = torch.full((3,), 1.0 + number, dtype=torch.bfloat16, requires_grad=True)
    (distributed.gather(half) * (number + 1)).sum().backward()
    result = {
        "cases": evaluate(images),
        "ddp": ddp_step(images),
        "half": half.grad,
        "sum": evaluate_sum(images),
        "koleo": objective("koleo")(draw(2)[0][:, images]),
        "uneven": uneven_errors(number),
        "messages": messages(images),
    }
    torch.save(result, Path(folder) / f"{number}.pt")
    distributed.finalize()
    assert distributed.world() == 1


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    world, folder = request.param, tmp_path_factory.mktemp(f"world-{request.param}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "kontrast.objectives"])
    processes = [context.Process(target=run_rank, args=(r, world, port, str(folder))) for r in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)  # ranks take about 15 s on an idle machine; a longer wait means that one hangs
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * world
    return [torch.load(folder / f"{r}.pt", weights_only=True) for r in range(world)]


@pytest.fixture(scope="module")
def joined() -> list[dict[str, Tensor]]:
    return evaluate(slice(0, N))


def label(case: tuple) -> str:
    name, arguments, views, others = case
    return "-".join([name, str(views), *others, *(f"{k}={v}" for k, v in arguments.items())])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[label(case) for case in CASES])
def test_ranks_equal_one_process(number: int, ranks: list[dict], joined: list[dict[str, Tensor]]) -> None:
    """Every rank has the terms and buffers of the joined batch and R times its gradient of z; other gradients average
    to it."""
    world, expected = len(ranks), joined[number]
    ours = [rank["cases"][number] for rank in ranks]
    for name in expected:
        if name == "of z":
            found = torch.cat([rank[name] for rank in ours], dim=1) / world
            torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-9)
        elif name.startswith("buffer "):
            for rank in ours:
                torch.testing.assert_close(rank[name], expected[name])
                assert torch.equal(rank[name], ours[0][name])
        elif name.startswith("of "):
            average = torch.stack([rank[name] for rank in ours]).mean(0)
            torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-9)
        else:
            for rank in ours:
                torch.testing.assert_close(rank[name], expected[name], rtol=1e-9, atol=1e-9)


# Small messages besides the mean of the terms, forward and backward; distributed.py says what they are.
MORE_MESSAGES = {
    "align-uniform": (1, 1), "dclw": (1, 0), "swav": (3, 0), "dino": (1, 0), "sogclr": (1, 0), "lejepa": (1, 1),
    "isogclr": (1, 0),
}  # fmt: skip
FEATURE_STATISTICS = {"barlow-twins", "vicreg", "w-mse", "sim-trace"}
BOTH = {"sim-whitening", "zero-cl"}  # statistics of features, and a gather


@pytest.mark.parametrize("number", range(len(CASES)), ids=[label(case) for case in CASES])
def test_keys_are_sent_once_in_each_direction(number: int, ranks: list[dict]) -> None:
    name, arguments, views, others = CASES[number]
    forward, backward = ranks[0]["messages"][number]
    share = N // len(ranks)
    keys = [shape for operation, shape in forward if "gather" in operation and len(shape) == 3]
    gradients = [shape for _, shape in backward if len(shape) == 3 and shape[0] == N]
    assert len(keys) <= 1 and len(gradients) <= len(keys)
    assert all(shape[0] == share and shape[2] == D for shape in keys)
    if name in FEATURE_STATISTICS | BOTH:
        assert not keys or name in BOTH
        sums = [shape for _, shape in forward + backward if shape not in (*keys, *gradients)]
        assert all(len(shape) < 2 or shape[-2:] in ((1, D), (D, D)) for shape in sums)
        return
    more_forward, more_backward = MORE_MESSAGES.get(name, (0, 0))
    if name == "sim-affinity":
        more_forward = more_backward = views * (views - 1)  # pairs of views, in both directions with a teacher
    if arguments.get("detach") is False or arguments.get("cost") == "rbf":
        more_forward, more_backward = 1, 1
    if arguments.get("centering") == "sinkhorn":
        more_forward = 3
    assert len(forward) - len(keys) <= 1 + more_forward + ("labels" in others)
    assert len(backward) - len(gradients) <= more_backward


def test_only_the_keys_that_are_used_are_sent(ranks: list[dict]) -> None:
    """One direction between two views sends one of them; both directions send both in one message."""
    share = N // len(ranks)
    for name, arguments, views in (("info-nce", {}, 1), ("info-nce", {"symmetric": True}, 2), ("siglip", {}, 1)):
        forward, backward = ranks[0]["messages"][CASES.index((name, arguments, 2, ()))]
        assert [shape for _, shape in forward if len(shape) == 3] == [(share, views, D)]
        assert [shape for _, shape in backward] == [(N, views, D)]


def test_every_objective_is_compared() -> None:
    assert {name for name, *_ in CASES} == set(OBJECTIVES)


def test_metrics_of_the_joined_batch(ranks: list[dict], joined: list[dict[str, Tensor]]) -> None:
    for rank in ranks:
        for name in METRICS:
            torch.testing.assert_close(rank["cases"][-1][name], joined[-1][name])


def test_a_step_under_ddp_is_the_step_of_one_process(ranks: list[dict]) -> None:
    expected = ddp_step(slice(0, N))
    for rank in ranks:
        for name, parameter in expected.items():
            torch.testing.assert_close(rank["ddp"][name], parameter)


def test_gathered_gradients_are_summed_over_ranks(ranks: list[dict]) -> None:
    total = sum(range(1, len(ranks) + 1))
    for rank in ranks:
        assert rank["half"].dtype == torch.bfloat16
        assert rank["half"].tolist() == [total] * 3


def test_a_sum_of_objectives_on_ranks_equals_one_process(ranks: list[dict]) -> None:
    expected = evaluate_sum(slice(0, N))
    assert list(expected) == ["attraction", "repulsion", "koleo", "lejepa", "of z"]
    of_z = expected.pop("of z")
    torch.testing.assert_close(torch.cat([rank["sum"].pop("of z") for rank in ranks], dim=1) / len(ranks), of_z)
    for rank in ranks:
        torch.testing.assert_close(rank["sum"], expected)


def test_koleo_looks_for_neighbors_on_each_rank_alone(ranks: list[dict]) -> None:
    """As published; every rank has the mean of all ranks."""
    x, share = draw(2)[0], N // len(ranks)
    each = [objective("koleo")(x[:, start : start + share]) for start in range(0, N, share)]
    for rank in ranks:
        torch.testing.assert_close(rank["koleo"], torch.stack(each).mean())
    assert abs(rank["koleo"] - objective("koleo")(x)) > 1e-3


def test_uneven_batches_are_refused_on_all_ranks(ranks: list[dict]) -> None:
    """Sums over ranks would be divided by a wrong number of images."""
    for rank in ranks:
        assert len(rank["uneven"]) == len(OBJECTIVES)
        for error in rank["uneven"]:
            assert "[2, 2, 6]" in error and "[2, 3, 6]" in error


def test_one_process_communicates_nothing() -> None:
    x = torch.ones(2)
    for call in (distributed.gather, distributed.total, distributed.mean):
        assert call(x) is x
    assert distributed.world() == 1
    assert distributed.initialize().type in ("cpu", "cuda")
    assert not distributed.active()
    distributed.finalize()
