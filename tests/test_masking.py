import pytest
import torch

from trl_dro.masking import masked_mean, masked_sum, safe_exp, upcast, zero_masked


NAN, INF = float("nan"), float("inf")


def test_a_masked_mean_counts_only_what_the_mask_keeps():
    values = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 60.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])

    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values, mask, dim=1, keepdim=True).tolist() == [[1.5], [4.0]]
    assert masked_sum(values, mask).item() == 7.0
    assert masked_sum(values, mask, dim=1).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_garbage_at_masked_positions_reaches_neither_value_nor_gradient(garbage):
    values = torch.tensor([[1.0, garbage], [3.0, garbage]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])

    mean = masked_mean(values, mask)
    mean.backward()

    assert mean.item() == 2.0
    assert values.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


def test_a_mean_over_nothing_is_zero_and_can_be_differentiated():
    values = torch.tensor([[1.0, NAN]], requires_grad=True)
    mask = torch.zeros(1, 2)

    mean = masked_mean(values, mask)
    mean.backward()

    assert mean.item() == 0.0
    assert values.grad.tolist() == [[0.0, 0.0]]


def test_a_mean_of_booleans_is_a_share():
    clipped = torch.tensor([[True, False, True]])
    assert masked_mean(clipped, torch.tensor([[1, 1, 0]])).item() == 0.5


def test_one_value_per_row_is_spread_over_the_rows_trained_tokens():
    values = torch.tensor([[2.0], [NAN]])
    mask = torch.tensor([[1, 0], [0, 0]])
    assert zero_masked(values, mask).tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_only_half_precision_is_raised_to_float32():
    raised = {dtype: upcast(torch.zeros(1, dtype=dtype)).dtype for dtype in (torch.bfloat16, torch.float16)}
    kept = {dtype: upcast(torch.zeros(1, dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}

    assert set(raised.values()) == {torch.float32}
    assert all(before == after for before, after in kept.items())


def test_exp_is_exact_up_to_20_and_flat_beyond():
    log_ratio = torch.tensor([0.5, 20.0, 21.0, -1000.0], dtype=torch.float64, requires_grad=True)

    ratio = safe_exp(log_ratio)
    ratio.sum().backward()

    e20, e_half = 485165195.4097903, 1.6487212707001282
    assert ratio.tolist() == pytest.approx([e_half, e20, e20, 1 / e20])
    assert log_ratio.grad.tolist() == pytest.approx([e_half, e20, 0.0, 0.0])
