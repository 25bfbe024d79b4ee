import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_dro.aggregation import LOSS_AGG_MODES, aggregate_loss
from trl_dro.windows import BatchPlan, block_and_slot, trained_counts


def plan(*, window: int, block: int, passes: int = 1, anchor: str = "old", world: int = 1) -> BatchPlan:
    return BatchPlan(
        world_size=world,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=window,
        steps_per_generation=block,
        num_iterations=passes,
        num_generations=4,
        anchor_policy=anchor,
    )


def staleness_by_simulation(window: int, block: int, passes: int) -> int:
    """Walk through micro-steps: a block is generated at the first micro-step of the window it begins in."""
    worst = 0
    for step in range(10 * window * block * passes):
        first_step = step // (block * passes) * (block * passes)
        worst = max(worst, step // window - first_step // window)
    return worst


@pytest.mark.parametrize(
    ("window", "block", "passes"),
    [(1, 1, 1), (2, 2, 1), (1, 4, 1), (2, 4, 1), (4, 2, 1), (4, 1, 1), (1, 1, 4), (2, 1, 3), (4, 2, 3), (2, 4, 4)],
)
def test_max_staleness_is_what_walking_through_the_steps_gives(window, block, passes):
    assert plan(window=window, block=block, passes=passes).max_staleness == staleness_by_simulation(
        window, block, passes
    )


def test_a_plan_counts_rows_over_processes_and_micro_batches():
    wide = plan(window=2, block=4, passes=3, world=2)
    assert wide.rows_per_window == 8 * 2 * 2
    assert wide.rows_per_generation == 8 * 2 * 4
    assert wide.prompts_per_generation == 16
    assert wide.windows_per_generation == 6.0
    assert plan(window=4, block=1).windows_per_generation == 0.25


@pytest.mark.parametrize(
    ("settings", "alive"),
    [
        ({"window": 1, "block": 1}, False),
        ({"window": 4, "block": 4}, False),
        ({"window": 4, "block": 2}, False),
        ({"window": 4, "block": 2, "passes": 2}, False),
        ({"window": 1, "block": 1, "passes": 2}, True),
        ({"window": 2, "block": 1, "passes": 3}, True),
        ({"window": 1, "block": 4}, True),
        ({"window": 1, "block": 1, "anchor": "reference"}, True),
        ({"window": 1, "block": 1, "anchor": "sampling"}, True),
    ],
)
def test_the_penalty_is_dead_exactly_when_every_block_is_used_up_in_its_own_window(settings, alive):
    assert plan(**settings).penalty_alive is alive


def test_micro_steps_walk_through_the_slots_of_each_block_once_for_each_pass():
    walked = [block_and_slot(step, 2, 2) for step in range(8)]
    assert walked == [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]


def test_counts_are_tokens_and_sequences_with_a_token():
    masks = [torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 0], [1, 1], [0, 1]])]
    assert trained_counts(masks).tolist() == [[2.0, 1.0], [4.0, 3.0]]


@st.composite
def runs(draw) -> dict:
    """An epoch: generated blocks of ragged masks, cut into windows that may span blocks, the last one short."""
    slots, passes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    window = draw(st.sampled_from([slots * k for k in (1, 2, 3)] + [d for d in (1, 2, 3) if slots % d == 0]))
    blocks = []
    for _ in range(draw(st.integers(1, 4))):
        width = draw(st.integers(1, 5))  # every block is padded to its own longest completion
        lengths = draw(
            st.lists(st.lists(st.integers(0, width), min_size=2, max_size=2), min_size=slots, max_size=slots)
        )
        blocks.append([torch.tensor([[t < n for t in range(width)] for n in rows]) for rows in lengths])
    return {"blocks": blocks, "slots": slots, "passes": passes, "window": window}


def loss_of(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Some loss of each token that depends on a parameter."""
    return torch.sin(weight[0] * torch.arange(1, mask.numel() + 1).view(mask.shape) + weight[1])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=40, deadline=None)
@given(run=runs())
def test_a_windows_gradient_is_that_of_all_its_rows_at_once(mode, run):
    """What the trainer does micro-batch by micro-batch, against one call on the concatenated rows of each window."""
    counts = [trained_counts(block) for block in run["blocks"]]
    steps = range(len(run["blocks"]) * run["slots"] * run["passes"])
    for start in range(0, len(steps), run["window"]):
        places = [block_and_slot(step, run["slots"], run["passes"]) for step in steps[start : start + run["window"]]]
        tokens, sequences = torch.stack([counts[block][slot] for block, slot in places]).sum(dim=0)
        masks = [run["blocks"][block][slot] for block, slot in places]

        weight = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
        for mask in masks:
            aggregate_loss(
                loss_of(weight, mask), mask, mode, num_tokens=tokens, num_sequences=sequences, scale_factor=7
            ).backward()

        whole = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
        width = max(mask.shape[1] for mask in masks)
        pad = [(0, width - mask.shape[1]) for mask in masks]
        losses = torch.cat([torch.nn.functional.pad(loss_of(whole, m), p) for m, p in zip(masks, pad, strict=True)])
        mask = torch.cat([torch.nn.functional.pad(m, p) for m, p in zip(masks, pad, strict=True)])
        aggregate_loss(losses, mask, mode, scale_factor=7).backward()
        torch.testing.assert_close(weight.grad, whole.grad, rtol=1e-10, atol=1e-12)
