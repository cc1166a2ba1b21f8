"""The contract of every registered objective: inputs, terms, rows, precision, compilation and documentation."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import kontrast.objectives
from kontrast.cli.explain import equations, objective_index, objective_page, split_docstring
from kontrast.objectives import OBJECTIVES, Objective, objective
from kontrast.objectives.inputs import all_finite

from support.objective_inputs import DETACHED_KEYS, change_rows, extra_inputs, possible_inputs, small_objective

NAMES = sorted(OBJECTIVES)
TAKES_BANK = [name for name in NAMES if OBJECTIVES[name].takes_bank]
TEMPERED = [name for name in NAMES if "temperature" in OBJECTIVES.arguments(name)]
# Weights that are constant by default get a gradient here, so that the gradient is the derivative of the value.
ATTACHED = {
    "dclw": {"detach": False},
    "cacr": {"detach_positive_weights": False},
    "sim-trace": {"variant": "paper", "ridge": 0.05},
    "sogclr": {"gamma": 1.0},
    "isogclr": {"gamma": 1.0},
    "zero-cl": {"detach": False},
}
# Here the sign or order of features matters, so that a rotation changes the value.
NOT_ROTATION_INVARIANT = {"swd", "barlow-twins", "vicreg", "w-mse", "lejepa", "zero-cl", "cross-entropy"}
EXPECTED = """
    nt-xent info-nce dcl dclw decoupled-nt-xent swd align-uniform hard-negative multi-view-nce jcl cacr sim-affinity
    sim-whitening sim-trace alignment barlow-twins vicreg w-mse siglip swav dino nnclr sogclr co2 lejepa koleo
    zero-cl cross-entropy isogclr
"""
COMPILED_BY_DEFAULT = {"nt-xent", "cacr", "jcl", "swd", "sim-whitening", "lejepa"}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_registered_names() -> None:
    assert sorted(EXPECTED.split()) == NAMES


def code_lines(file: Path) -> int:
    """Count the lines of a file without the docstrings of its classes."""
    text = file.read_text()
    documents = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return len(text.splitlines()) - sum(len(document.splitlines()) for document in documents)


@pytest.mark.parametrize("name", NAMES)
def test_file_class_and_repr(name) -> None:
    family = OBJECTIVES[name]
    file = Path(inspect.getfile(family))
    assert file.stem == name.replace("-", "_")
    assert code_lines(file) < 75
    assert issubclass(family, Objective)
    assert family.__name__ in kontrast.objectives.__all__
    assert "Reference:" in family.__doc__
    assert " = " in family.__doc__
    assert family.paper
    built = objective(name)
    for argument, parameter in OBJECTIVES.arguments(name).items():
        assert f"{argument}={parameter.default!r}" in repr(built)


@pytest.mark.parametrize("name", NAMES)
def test_page_has_equations_and_says_when_to_use_it(name) -> None:
    lines = equations(OBJECTIVES[name].equation)
    assert lines and all(line.count("{") == line.count("}") for line in lines)
    assert all(len(re.findall(r"\\left(?![a-z])", line)) == line.count(r"\right") for line in lines)
    text, arguments = split_docstring(inspect.cleandoc(OBJECTIVES[name].__doc__))
    assert 2 <= text.use.count(". ") + 1 <= 4
    assert "Reference:" in text.details and "Shape:" in arguments


@pytest.mark.parametrize("name", [*NAMES, "index"])
def test_page_is_generated_from_the_docstring(name) -> None:
    page = Path(__file__).parents[2] / "docs" / "objectives" / f"{name}.md"
    made = objective_index() if name == "index" else objective_page(name)
    assert page.read_text(encoding="utf-8") == made, "run python -m kontrast.cli.explain docs/objectives"


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("name", [name for name in NAMES if "reduction" in OBJECTIVES.arguments(name)])
def test_reductions_scale_the_mean_of_the_anchors(name, views) -> None:
    z = draw(views, 4, 3)
    given = extra_inputs(name, z)
    mean, anchors = small_objective(name, z)(z, **given), len(small_objective(name, z).rows(z, **given))
    torch.testing.assert_close(small_objective(name, z, reduction="sum")(z, **given), 4 * anchors * mean)
    torch.testing.assert_close(small_objective(name, z, reduction="simclr_tf")(z, **given), anchors * mean)


def test_terms_of_the_whole_batch_have_no_sum() -> None:
    with pytest.raises(ValueError, match="use mean"):
        objective("cacr", cost="rbf", reduction="sum")(draw(2, 4, 3))


@pytest.mark.parametrize("name", [name for name in NAMES if "normalize" in OBJECTIVES.arguments(name)])
def test_without_normalize_the_length_counts(name) -> None:
    """Unit rows give the same loss with and without `normalize`."""
    rows, unit = draw(2, 4, 3), normalize(draw(2, 4, 3), dim=-1)
    unnormalized, given = small_objective(name, normalize=False), extra_inputs(name, rows)
    assert not torch.allclose(unnormalized(rows, **given), small_objective(name)(rows, **given))
    if name != "w-mse":  # it normalizes after whitening
        torch.testing.assert_close(unnormalized(unit, **given), small_objective(name)(unit, **given))


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name, views) -> None:
    z = draw(views, 4, 3, seed=views).requires_grad_()
    loss = small_objective(name, z, **ATTACHED.get(name, {}))
    for given in possible_inputs(name, z.detach())[name in DETACHED_KEYS :]:
        if name == "jcl" and not given:
            query, keys = z[:1].detach().requires_grad_(), z[1:].detach()
            assert torch.autograd.gradcheck(lambda q, k=keys: loss(torch.cat([q, k])), (query,))
        else:
            assert torch.autograd.gradcheck(lambda z, given=given: loss(z, **given), (z,))


@pytest.mark.parametrize("name", NAMES)
def test_torch_func(name) -> None:
    """Gradients, directional derivatives and batches of losses, without a change to the objective."""
    several = draw(3, 2, 6, 4)
    for given in possible_inputs(name, several):
        module = small_objective(name, several)
        state = copy.deepcopy(module.state_dict())
        loss, rows = functools.partial(module, **given), several.clone().requires_grad_()
        values = torch.stack([small_objective(name, z)(z, **given) for z in rows])
        (gradients,) = torch.autograd.grad(values.sum(), rows)
        torch.testing.assert_close(torch.func.vmap(loss)(several), values.detach())
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(several), gradients)
        slope = torch.func.jvp(loss, (several[0],), (several[1],))[1]
        torch.testing.assert_close(slope, (gradients[0] * several[1]).sum())
        assert all(torch.equal(x, state[k]) for k, x in module.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_loss_and_rows_average_to_it(name) -> None:
    loss = small_objective(name, draw(2, 6, 5))
    for views in (2, 3):
        z = draw(views, 6, 5)
        for given in possible_inputs(name, z):
            value, terms = loss(z, **given), loss.terms(z, **given)
            assert value.ndim == 0
            assert all(term.ndim == 0 for term in terms.values())
            torch.testing.assert_close(torch.stack(list(terms.values())).sum(), value)
            assert terms.attraction is terms["attraction"]
            try:
                rows = loss.rows(z, **given)
            except ValueError as refusal:
                assert "no loss per anchor" in str(refusal)
            else:
                assert rows.shape[1] == 6
                assert 1 <= rows.shape[0] <= views
                torch.testing.assert_close(rows.mean(), value)
    with pytest.raises(AttributeError, match="no term 'torque': the terms are attraction"):
        _ = terms.torque


@pytest.mark.parametrize("name", ["nt-xent", "dcl", "dclw", "decoupled-nt-xent", "hard-negative", "alignment", "cacr"])
def test_every_view_has_rows(name) -> None:
    assert small_objective(name).rows(draw(3, 6, 5)).shape == (3, 6)


@pytest.mark.parametrize("name", NAMES)
def test_two_tensors_are_two_views(name) -> None:
    z = draw(2, 6, 5)
    loss = small_objective(name, z)
    given = extra_inputs(name, z)
    torch.testing.assert_close(loss(z[0], z[1], **given), loss(z, **given))


@pytest.mark.parametrize("name", NAMES)
def test_order_of_images_does_not_matter(name) -> None:
    z, order = draw(2, 6, 5), torch.tensor([3, 1, 5, 0, 2, 4])
    loss, given = small_objective(name, z), extra_inputs(name, z)
    ordered = change_rows(given, lambda of_images: of_images[order], "indices", "labels")
    torch.testing.assert_close(loss(z[:, order], **ordered), loss(z, **given))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_ROTATION_INVARIANT])
def test_rotation_invariance(name) -> None:
    z, rotation = draw(2, 6, 5), torch.linalg.qr(draw(5, 5, seed=3)).Q
    given = extra_inputs(name, z)
    rotated = change_rows(given, lambda rows: rows @ rotation)
    torch.testing.assert_close(small_objective(name)(z @ rotation, **rotated), small_objective(name)(z, **given))


# These normalize after whitening; test_uniclr_identities.py tests their scale.
@pytest.mark.parametrize(
    "name", [name for name in NAMES if small_objective(name).normalize and name not in ("sim-whitening", "w-mse")]
)
def test_length_of_projections_does_not_matter_if_normalized(name) -> None:
    loss, z = small_objective(name), draw(2, 6, 5)
    for given in possible_inputs(name, z):
        longer = change_rows(given, lambda keys: 50 * keys, "keys")
        torch.testing.assert_close(loss(1e-4 * z, **longer), loss(z, **given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_bank_get_no_gradient(name) -> None:
    z = draw(2, 6, 5).requires_grad_()
    loss = small_objective(name, z)
    for given in possible_inputs(name, z.detach())[1:]:
        given = change_rows(given, Tensor.requires_grad_)
        loss(z, **given).backward()
        assert z.grad.abs().max() > 0
        for key, x in given.items():
            assert (x.grad is not None and x.grad.abs().max() > 0) if key == "prototypes" else x.grad is None


@pytest.mark.parametrize("name", TAKES_BANK)
def test_the_bank_is_not_normalized(name) -> None:
    """Unlike z and keys."""
    z = draw(2, 6, 5)
    given = possible_inputs(name, z)[-1]
    longer = {**given, "bank": 1.5 * given["bank"]}
    assert (small_objective(name)(z, **longer) - small_objective(name)(z, **given)).abs() > 1e-6
    as_given = {**given, "keys": normalize(given["keys"], dim=-1)}
    if "normalize" in OBJECTIVES.arguments(name):
        plain = small_objective(name, normalize=False)
        torch.testing.assert_close(
            small_objective(name)(z, **longer), plain(normalize(z, dim=-1), **as_given | {"bank": longer["bank"]})
        )


def test_info_nce_with_an_unnormalized_bank() -> None:
    q, k, bank = draw(1, 6, 5), draw(1, 6, 5, seed=1), 0.3 * draw(20, 5, seed=2)
    unit_q, unit_k = normalize(q[0], dim=-1), normalize(k[0], dim=-1)
    logits = torch.cat([(unit_q * unit_k).sum(-1, keepdim=True), unit_q @ bank.T], dim=1) / 0.2
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(6, dtype=torch.int64))
    torch.testing.assert_close(objective("info-nce", temperature=0.2)(q, keys=k, bank=bank), expected)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name) -> None:
    """bf16 and fp16 give a float32 loss near the float32 one, under autocast too; the gradient has z's type."""
    loss = small_objective(name, draw(2, 16, 8))
    for dtype in (torch.bfloat16, torch.float16):
        z = draw(2, 16, 8, dtype=dtype)
        for given in possible_inputs(name, z):
            exact = loss(z.double(), **change_rows(given, Tensor.double))
            half = z.clone().requires_grad_()
            value = loss(half, **given)
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), exact, rtol=2e-2, atol=2e-2)
            assert torch.autograd.grad(value, half)[0].dtype == dtype
    single = draw(2, 16, 8, dtype=torch.float32)
    given = extra_inputs(name, single)
    exact = loss(single.double(), **change_rows(given, Tensor.double))
    torch.testing.assert_close(loss(single, **given).double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = loss(single, **given)
    torch.testing.assert_close(under, loss(single, **given), rtol=0, atol=0)


def degenerate() -> dict[str, Tensor]:
    z = draw(2, 8, 6, dtype=torch.float32)
    zero = z.clone()
    zero[0, 0] = zero[1, 3] = 0
    line = z[:1, :1].expand(2, 8, 6)
    sign = torch.tensor([1.0, -1.0] * 4)[None, :, None]
    return {
        "zero rows": zero,
        "all zero": torch.zeros_like(z),
        "identical rows": line,
        "identical views": z[:1].expand(2, 8, 6),
        "antipodal rows": line * sign,
        "antipodal views": torch.stack([z[0], -z[0]]),
        "fewer images than width": draw(2, 2, 6, dtype=torch.float32),
        "width 1": z[..., :1],
    }


@pytest.mark.parametrize("name", NAMES)
def test_degenerate_rows_give_finite_values_and_gradients(name) -> None:
    settings = [{}, *([{"temperature": 0.01}] if name in TEMPERED else [])]
    settings += {"cacr": [{"t_plus": 100.0, "t_minus": 100.0}, {"cost": "rbf"}], "align-uniform": [{"alpha": 1.0}]}.get(
        name, []
    )
    for arguments in settings:
        for case, z in degenerate().items():
            loss = small_objective(name, z, **arguments)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for given in possible_inputs(name, z.to(dtype)):
                    half = z.to(dtype).clone().requires_grad_()
                    value = loss(half, **given)
                    grad = torch.autograd.grad(value, half)[0]
                    assert bool(torch.isfinite(value)), (case, dtype, arguments)
                    assert bool(torch.isfinite(grad).all()), (case, dtype, arguments)


GOOD = draw(2, 4, 3)
BAD_INPUT = {
    "one image": (GOOD[:, :1], {}, "at least 2 images"),
    "one view": (GOOD[:1], {}, "at least 2 views"),
    "one view without keys": (GOOD[0], {}, r"shape \[4, 3\]"),
    "four dimensions": (GOOD[None], {}, r"shape \[1, 2, 4, 3\]"),
    "no width": (GOOD[..., :0], {}, r"shape \[2, 4, 0\]"),
    "mismatched views": (GOOD[0], {"z2": GOOD[1, :3]}, "same shape"),
    "mixed types": (GOOD[0], {"z2": GOOD[1].float()}, "same shape"),
    "three views in two arguments": (GOOD, {"z2": GOOD}, "same shape"),
    "NaN": (GOOD * math.nan, {}, "NaN or infinity"),
    "infinity": (GOOD + math.inf, {}, "NaN or infinity"),
    "integers": (GOOD.long(), {}, "int64 of shape .*: give a floating point tensor"),
    "a list": (GOOD.tolist(), {}, "list: give a floating point tensor"),
    "integer z2": (GOOD[0], {"z2": GOOD[1].long()}, "z2 is torch.int64"),
    "keys of other images": (GOOD, {"keys": draw(2, 5, 3)}, r"give \[W,4,3\]"),
    "keys of other width": (GOOD, {"keys": draw(2, 4, 2)}, r"give \[W,4,3\]"),
    "one key view for two queries": (GOOD, {"keys": draw(1, 4, 3)}, "W at least 2"),
    "integer keys": (GOOD, {"keys": draw(2, 4, 3).long()}, "keys is torch.int64"),
    "NaN in keys": (GOOD, {"keys": draw(2, 4, 3) * math.nan}, "keys holds NaN"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_refused(name, case) -> None:
    z, given, message = BAD_INPUT[case]
    needed, loss = extra_inputs(name, GOOD), small_objective(name, GOOD)
    if "keys" in given and "labels" in needed:
        message = "labels don't go with keys"
    given = needed | given
    for call in (loss, loss.terms, loss.rows):
        with pytest.raises(ValueError, match=message):
            call(z, **given)


@pytest.mark.parametrize("name", NAMES)
def test_unsuitable_banks_and_labels_are_refused(name) -> None:
    loss, keys = functools.partial(small_objective(name, GOOD), **extra_inputs(name, GOOD)), draw(2, 4, 3)
    bank, labels = draw(6, 3), torch.tensor([0, 0, 1, 1])
    if OBJECTIVES[name].takes_bank:
        bank = possible_inputs(name, GOOD)[-1]["bank"]
        for bad in (draw(6, 2), draw(3), draw(0, 3)):
            with pytest.raises(ValueError, match=r"bank is .* give \[M,3\]"):
                loss(GOOD, keys=keys, bank=bad)
        with pytest.raises(ValueError, match=r"bank is .* give \[.*M,D\]"):
            loss(GOOD, keys=keys, bank=bank[0] if bank.ndim == 3 else bank[None])
        with pytest.raises(ValueError, match=r"bank is torch\.int64"):
            loss(GOOD, keys=keys, bank=bank.long())
        with pytest.raises(ValueError, match="bank holds NaN"):
            loss(GOOD, keys=keys, bank=bank.index_fill(0, torch.tensor([1]), math.nan))
    else:
        with pytest.raises(ValueError, match="takes no bank"):
            loss(GOOD, keys=keys, bank=bank)
    if OBJECTIVES[name].takes_labels:
        for bad in (labels[:3], labels.float(), labels[None], [0, 0, 1, 1], labels > 0):
            with pytest.raises(ValueError, match=r"labels is .*shape \[4\]"):
                loss(GOOD, labels=bad)
        torch.testing.assert_close(loss(GOOD, labels=labels.to(torch.uint8)), loss(GOOD, labels=labels))
        if not OBJECTIVES[name].needs_labels:  # one class is no less than another, and no anchor needs a negative
            with pytest.raises(ValueError, match="all 4 labels are 5"):
                loss(GOOD, labels=torch.full((4,), 5))
        with pytest.raises(ValueError, match=r"labels .* keys"):
            loss(GOOD, keys=keys, labels=labels)
    else:
        with pytest.raises(ValueError, match="takes no labels"):
            loss(GOOD, labels=labels)


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf, "0.1", None, True])
def test_temperature_is_a_positive_number(name, value) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*: give a finite number above 0"):
        small_objective(name, temperature=value)


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_checked(name) -> None:
    for argument, parameter in OBJECTIVES.arguments(name).items():
        for bad in (math.nan, "nonsense", [1]):
            with pytest.raises(ValueError, match=f"{argument} is "):
                small_objective(name, **{argument: bad})
        if isinstance(parameter.default, float):
            with pytest.raises(ValueError, match=f"{argument} is -1"):
                small_objective(name, **{argument: -1.0})
    with pytest.raises(ValueError, match="has no argument 'temprature'"):
        small_objective(name, temprature=0.1)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="unknown objective 'ntxent': did you mean 'nt-xent'"):
        objective("ntxent")
    with pytest.raises(ValueError, match="unknown objective 'SupCon': SupCon is nt-xent with labels="):
        objective("SupCon")


@pytest.mark.parametrize(
    "name", [name if name in COMPILED_BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_compiles_into_one_graph(name) -> None:
    z = draw(2, 6, 5).requires_grad_()
    loss, given = small_objective(name, z), extra_inputs(name, z.detach())
    before = copy.deepcopy(loss.state_dict())
    value = loss(z, **given)
    expected = torch.autograd.grad(value, z)[0]
    after = copy.deepcopy(loss.state_dict())
    loss.load_state_dict(before)
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(z, **given)
    torch.testing.assert_close(compiled, value)
    torch.testing.assert_close(torch.autograd.grad(compiled, z)[0], expected)
    torch.testing.assert_close(dict(loss.state_dict()), dict(after))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_capture_in_a_cuda_graph(name) -> None:
    """Replays use the new values of z, and buffers change with each of them: SWD's draws, DINO's center."""
    z = draw(2, 32, 16, dtype=torch.float32).cuda().requires_grad_()
    loss = small_objective(name, z).cuda()
    given = extra_inputs(name, z.detach())

    def step() -> tuple[Tensor, Tensor]:
        value = loss(z, **given)
        return value, torch.autograd.grad(value, z)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            z.copy_(draw(2, 32, 16, seed=seed, dtype=torch.float32))
        before = {k: x.clone() for k, x in loss.named_buffers()}
        graph.replay()
        ours = [x.clone() for x in captured]
        for k, x in loss.named_buffers():
            assert (k in loss.state_dict()) == (not torch.equal(x, before[k]))
            x.copy_(before[k])
        for replayed, expected in zip(ours, step()):
            torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-5)


def test_all_finite_if_the_sum_overflows():
    large = torch.full((4, 4), 3e38)
    assert all_finite(large) and math.isinf(float(large.sum()))
    large[0, 0], large[0, 1] = math.inf, -math.inf
    assert not all_finite(large)


def test_a_loss_with_a_bank_compiles_into_one_graph() -> None:
    loss, given = objective("nt-xent"), {"keys": draw(2, 6, 8), "bank": normalize(draw(9, 8), dim=-1)}
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(draw(2, 6, 8), **given), loss(draw(2, 6, 8), **given))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("nt-xent", "jcl") else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if "temperature" in OBJECTIVES.arguments(name)
    ],
)
def test_losses_of_many_temperatures_compile_in_one_process(name) -> None:
    """From the second temperature on, torch's compiler would treat it as a symbol."""
    torch._dynamo.reset()
    z, keys = draw(2, 6, 8), draw(2, 6, 8, seed=1)
    for temperature in (0.1, 0.2, 0.35, 0.5):
        loss = small_objective(name, temperature=temperature)
        compiled, given = torch.compile(loss, fullgraph=True, backend="eager"), extra_inputs(name, z)
        torch.testing.assert_close(compiled(z, keys=keys, **given), loss(z, keys=keys, **given))


def test_each_temperature_is_a_constant_of_its_own_trace() -> None:
    """Given a symbol, the operator would silently keep using the number of the first trace."""
    torch._dynamo.reset()
    scales: list = []

    def record(graph, inputs):
        scales.extend(node.args[4] for node in graph.graph.nodes if "row_statistics" in str(node.target))
        return graph

    for temperature in (0.1, 0.2, 0.5, 0.8):
        torch.compile(objective("nt-xent", temperature=temperature), fullgraph=True, backend=record)(draw(2, 6, 8))
    assert [list(found) for found in scales] == [[10.0], [5.0], [2.0], [1.25]]


def test_close_views_do_not_cancel() -> None:
    """In float32, 2 - 2 <z, z'> has no correct digits if two views are 1e-4 apart."""
    z = normalize(draw(8, 16), dim=-1)
    views = torch.stack([z, normalize(z + 1e-4 * draw(8, 16, seed=1), dim=-1)])
    for alpha in (1.0, 2.0):
        loss = objective("align-uniform", alpha=alpha, uniform_weight=0.0)
        torch.testing.assert_close(loss(views.float()).double(), loss(views), rtol=1e-3, atol=0)


def test_each_anchor_has_the_same_weight_with_more_queries_than_keys() -> None:
    """Local crops: each of three query views counts a third, whether it has one positive key or two."""
    z, keys = draw(3, 5, 4), draw(2, 5, 4, seed=1)
    wide = objective("dclw", temperature=0.3, sigma=1e9)(z, keys=keys)
    torch.testing.assert_close(wide, objective("dcl", temperature=0.3)(z, keys=keys))
    aligned = objective("align-uniform", uniform_weight=0.0)(z, keys=keys)
    torch.testing.assert_close(aligned, objective("alignment")(z, keys=keys))


def test_singular_features_without_ridge_give_nan() -> None:
    for name in ("sim-trace", "sim-whitening", "w-mse"):
        assert torch.isnan(small_objective(name, ridge=0.0)(draw(2, 8, 32)))
        assert torch.isfinite(small_objective(name)(draw(2, 8, 32)))


def test_numbers_from_numpy_and_torch_are_accepted() -> None:
    for value in (np.float32(0.25), np.int64(1), torch.tensor(0.25)):
        assert objective("dcl", temperature=value).temperature == float(value)
    for value in (np.float32("nan"), np.bool_(True), torch.ones(2), "0.1"):
        with pytest.raises(ValueError, match="temperature is"):
            objective("dcl", temperature=value)
