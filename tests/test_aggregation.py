"""Aggregation: values by hand, and the promise that a window's gradient does not depend on how it was cut."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_dro.aggregation import LOSS_AGG_MODES, aggregate_loss


NAN, INF = float("nan"), float("inf")

every_mode = pytest.mark.parametrize("mode", LOSS_AGG_MODES)


# Row sums 3, 6 and nothing trained: 9 in 3 tokens of 2 sequences; row means 1.5 and 6.
LOSS = torch.tensor([[1.0, 2.0, NAN], [6.0, INF, -INF], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "local", "window"),
    [
        # window: N = 6, B = 4, two processes
        ("token-mean", 9 / 3, 9 / 6 * 2),
        ("token-sum", 9.0, 9.0 * 2),
        ("seq-mean-token-sum", 9 / 2, 9 / 4 * 2),
        ("seq-mean-token-mean", 7.5 / 2, 7.5 / 4 * 2),
        ("seq-mean-token-sum-norm", 9 / 2 / 8, 9 / 4 / 8 * 2),
    ],
)
@pytest.mark.parametrize("count", [int, float, torch.tensor])
def test_each_mode_by_hand_with_garbage_at_masked_positions(mode, local, window, count):
    assert aggregate_loss(LOSS, MASK, mode, scale_factor=8.0).item() == pytest.approx(local)
    counts = {"num_tokens": count(6), "num_sequences": count(4)}
    value = aggregate_loss(LOSS, MASK, mode, **counts, scale_factor=8, num_processes=2)
    assert value.item() == pytest.approx(window)
    assert value.dtype == torch.float32


@every_mode
def test_one_loss_per_sequence_counts_on_each_of_its_tokens(mode):
    per_row = torch.tensor([[1.5], [6.0], [NAN]])
    spread = aggregate_loss(per_row, MASK, mode, scale_factor=8.0)
    assert spread == aggregate_loss(per_row.expand(3, 3), MASK, mode, scale_factor=8.0)
    assert spread.item() > 0


@every_mode
def test_masked_garbage_gets_no_gradient(mode):
    loss = LOSS.clone().requires_grad_()
    aggregate_loss(loss, MASK, mode, scale_factor=8.0).backward()
    assert torch.equal(loss.grad != 0, MASK.bool())


@every_mode
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("counts", [{}, {"num_tokens": 0, "num_sequences": 0}])
def test_an_empty_window_gives_zero_with_a_graph(mode, shape, counts):
    leaf = torch.full(shape, NAN, requires_grad=True)
    counts_as_tensors = {name: torch.tensor(count) for name, count in counts.items()}
    for given_counts in (counts, counts_as_tensors):
        loss = aggregate_loss(leaf, torch.zeros(shape), mode, scale_factor=8.0, **given_counts)
        assert loss.item() == 0.0
        loss.backward()
        assert leaf.grad.abs().sum() == 0


def test_half_precision_losses_are_summed_in_float32():
    # 300 in bfloat16 has no odd neighbours: a running sum of ones in bfloat16 would stop at 256.
    loss = torch.ones(1, 301, dtype=torch.bfloat16)
    assert aggregate_loss(loss, torch.ones(1, 301), "token-sum").item() == 301.0


def test_an_unknown_mode_lists_the_known_ones_nearest_first():
    with pytest.raises(ValueError, match=r"loss_agg_mode='tokens-mean' is unknown.*nearest first: token-mean, "):
        aggregate_loss(LOSS, MASK, "tokens-mean")


@pytest.mark.parametrize(
    ("mode", "needed"),
    [
        ("token-mean", "num_tokens"),
        ("token-sum", None),
        ("seq-mean-token-sum", "num_sequences"),
        ("seq-mean-token-mean", "num_sequences"),
        ("seq-mean-token-sum-norm", "num_sequences"),
    ],
)
def test_several_processes_need_the_count_that_the_mode_divides_by(mode, needed):
    counts = {"num_tokens": 6, "num_sequences": 4}
    if needed is None:
        aggregate_loss(LOSS, MASK, mode, num_processes=2)
        return
    aggregate_loss(LOSS, MASK, mode, num_processes=2, scale_factor=8.0, **{needed: counts[needed]})
    del counts[needed]
    with pytest.raises(ValueError, match=f"{needed}=None counts this micro-batch only.*num_processes=2"):
        aggregate_loss(LOSS, MASK, mode, num_processes=2, scale_factor=8.0, **counts)


@pytest.mark.parametrize("scale_factor", [None, 0, -1.0, NAN, INF, "8", True])
def test_the_norm_needs_a_positive_scale_factor(scale_factor):
    message = re.escape(f"scale_factor={scale_factor!r} is not allowed") + ".*scale_factor=<max_completion_length>"
    with pytest.raises(ValueError, match=message):
        aggregate_loss(LOSS, MASK, "seq-mean-token-sum-norm", scale_factor=scale_factor)


@pytest.mark.parametrize(
    ("loss_shape", "mask_shape"), [((3,), (3,)), ((2, 1), (3, 4)), ((1, 4), (3, 4)), ((), (3, 4))]
)
def test_shapes_that_do_not_fit_are_refused(loss_shape, mask_shape):
    with pytest.raises(ValueError, match=re.escape(f"got {loss_shape} and {mask_shape}")):
        aggregate_loss(torch.zeros(loss_shape), torch.ones(mask_shape), "token-mean")


# Any cut of a window


@st.composite
def windows(draw):
    """A ragged mask with holes and empty rows, a seed for the losses, and a micro-batch and rank for each row."""
    num_rows, num_columns = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    bits = st.lists(st.booleans(), min_size=num_columns, max_size=num_columns)
    mask = torch.tensor(draw(st.lists(bits, min_size=num_rows, max_size=num_rows))).reshape(num_rows, num_columns)
    ranks, steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    places = draw(st.lists(st.integers(0, ranks * steps - 1), min_size=num_rows, max_size=num_rows))
    padding, masked_rows = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return mask, draw(st.integers(0, 2**16)), ranks, steps, torch.tensor(places), padding, masked_rows


def padded(values, columns, rows, fill):
    return torch.nn.functional.pad(values, (0, columns, 0, rows), value=fill)


@every_mode
@settings(max_examples=60, deadline=None)
@given(window=windows())
def test_the_summed_gradient_of_a_window_does_not_depend_on_how_it_is_cut(mode, window):
    mask, seed, ranks, steps, places, padding, masked_rows = window
    theta = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    whole = theta.clone().requires_grad_()
    value = aggregate_loss(whole.exp(), mask, mode, scale_factor=7.0)
    value.backward()

    cut = theta.clone().requires_grad_()
    counts = {"num_tokens": mask.sum().item(), "num_sequences": mask.any(dim=1).sum()}
    total = 0.0
    for place in range(ranks * steps):  # some hold no row at all
        rows = (places == place).nonzero().flatten()
        loss = padded(cut[rows].exp(), padding, masked_rows, NAN)
        loss = aggregate_loss(
            loss,
            padded(mask[rows].long(), padding, masked_rows, 0),
            mode,
            **counts,
            scale_factor=7.0,
            num_processes=ranks,
        )
        # A rank adds up its micro-batches, DDP averages over the ranks.
        (loss / ranks).backward()
        total += loss.item() / ranks

    torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-12, atol=1e-12)
    assert total == pytest.approx(value.item(), rel=1e-12, abs=1e-12)
    assert torch.equal(whole.grad != 0, mask)


@every_mode
@settings(max_examples=30, deadline=None)
@given(window=windows())
def test_gradients_scale_with_the_loss_and_ignore_the_order_of_rows(mode, window):
    mask, seed, *_ = window
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    order = torch.randperm(len(mask), generator=generator)

    plain, shuffled = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    aggregate_loss(plain.exp(), mask, mode, scale_factor=7.0).backward()
    aggregate_loss(3.0 * shuffled[order].exp(), mask[order], mode, scale_factor=7.0).backward()

    torch.testing.assert_close(shuffled.grad, 3.0 * plain.grad, rtol=1e-12, atol=1e-12)
