import pytest
import torch

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
