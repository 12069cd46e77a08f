from __future__ import annotations

import numpy as np
import torch

from feddf.fusion.swag import swag
from feddf.states import digest
from feddf.types import Update

POINTS = torch.tensor([[0.0, 0.0], [2.0, 0.2], [4.0, 1.0], [1.0, -1.0]])


def update(number: int, weight: torch.Tensor, n: int = 10, prototype: str = "p") -> Update:
    state = {
        "w": weight,
        "bn.running_mean": torch.full((2,), float(number)),
        "bn.running_var": torch.full((2,), 1.0 + number),
        "bn.num_batches_tracked": torch.tensor(7),
    }
    return Update(f"c{number}", prototype, 1, state, n)


def test_samples_have_the_mean_and_covariance_of_the_formula() -> None:
    """Half the diagonal and half the full covariance, both of the clients' models; 20,000 samples against NumPy's."""
    updates = [update(i, point) for i, point in enumerate(POINTS)]
    drawn = torch.stack([sample.state["w"] for sample in swag(updates, 0, samples=20_000, scale=0.5)]).numpy()
    points = POINTS.numpy()
    full = np.cov(points.T)
    diagonal = np.diag(points.var(axis=0))
    expected = 0.5 * (diagonal + full)  # in SWAG's own code the scale ½ is the half
    np.testing.assert_allclose(drawn.mean(axis=0), points.mean(axis=0), atol=0.02)
    np.testing.assert_allclose(np.cov(drawn.T), expected, atol=0.05)


def test_the_mean_is_weighed_by_the_number_of_examples() -> None:
    updates = [update(i, point, n) for i, (point, n) in enumerate(zip(POINTS, (1, 2, 3, 94), strict=True))]
    drawn = torch.stack([sample.state["w"] for sample in swag(updates, 0, samples=5000, scale=0.1)])
    expected = (POINTS * torch.tensor([[1.0], [2], [3], [94]])).sum(0) / 100
    torch.testing.assert_close(drawn.mean(0), expected, atol=0.02, rtol=0)


def test_statistics_and_counters_are_not_sampled() -> None:
    samples = swag([update(1, POINTS[0]), update(3, POINTS[1])], 0, samples=3)
    for sample in samples:
        assert sample.state["bn.running_var"].tolist() == [3.0, 3.0]
        assert sample.state["bn.num_batches_tracked"] == 7
        assert sample.state["bn.num_batches_tracked"].dtype == torch.int64


def test_each_prototype_has_its_own_and_one_client_alone_has_none() -> None:
    updates = [update(0, POINTS[0], prototype="a"), update(1, POINTS[1], prototype="a"), update(2, POINTS[2])]
    samples = swag(updates, 0, samples=4)
    assert [sample.prototype for sample in samples] == ["a"] * 4
    assert len({sample.client_id for sample in samples}) == 4


def test_clients_that_saw_nothing_are_no_part_of_it() -> None:
    updates = [update(0, POINTS[0]), update(1, POINTS[1]), update(2, POINTS[2] * 1e6, n=0)]
    assert max(float(sample.state["w"].abs().max()) for sample in swag(updates, 0, samples=50)) < 100


def test_the_seed_decides() -> None:
    updates = [update(i, point) for i, point in enumerate(POINTS)]
    one, same, other = (digest({s.client_id: s.state for s in swag(updates, seed)}) for seed in (1, 1, 2))
    assert one == same != other


def clients_with_two_weights() -> list[Update]:
    """The first weights lie on a line through the mean; the second do too, with deviations of their own."""
    first, second = POINTS[:, :1].expand(4, 50), POINTS[:, 1:].expand(4, 50)
    return [Update(f"c{i}", "p", 3, {"a": first[i].clone(), "b": second[i].clone()}, 10) for i in range(4)]


def test_noise_of_one_tensor_says_nothing_about_another() -> None:
    """All elements of a tensor deviate alike here, so what the low rank adds is constant in it and taken off."""
    samples = swag(clients_with_two_weights(), 0, samples=200)
    noise = {
        key: torch.stack([s.state[key] - s.state[key].mean() for s in samples]).flatten().numpy() for key in ("a", "b")
    }
    assert abs(np.corrcoef(noise["a"], noise["b"])[0, 1]) < 0.05


def test_the_seed_decides_both_parts() -> None:
    one, other = (swag(clients_with_two_weights(), seed, samples=1)[0].state["a"] for seed in (1, 2))
    assert not torch.allclose(one - one.mean(), other - other.mean())  # the diagonal
    assert abs(float(one.mean() - other.mean())) > 0.5  # the low rank: the diagonal's mean over 50 is small


def test_prototypes_are_sampled_apart_and_samples_count_like_a_mean_client() -> None:
    updates = [update(i, POINTS[i % 4], n=4 + i, prototype=name) for name in "ab" for i in range(4)]
    samples = swag(updates, 0, samples=1)
    assert not torch.equal(samples[0].state["w"], samples[1].state["w"])
    assert [(s.prototype, s.round, s.n_examples) for s in samples] == [("a", 1, 6), ("b", 1, 6)]  # 22 / 4
    assert {tensor.dtype for tensor in samples[0].state.values()} == {torch.float32, torch.int64}


def test_a_client_with_one_example_is_part_of_it_and_one_with_none_is_not() -> None:
    assert len(swag([update(0, POINTS[0], n=1), update(1, POINTS[1], n=1)], 0, samples=3)) == 3
    assert swag([update(0, POINTS[0], n=1), update(1, POINTS[1], n=0)], 0, samples=3) == []
