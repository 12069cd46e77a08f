from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import stripes
from feddf.config import DataConfig, parse
from feddf.config.keys import nested
from feddf.data.datasets import Dataset
from feddf.runs.build import Parts, build
from reproduction.__main__ import app
from reproduction.theorem import _domain, estimate
from test_cli import CONFIG, feddf


def bands(data: DataConfig) -> Dataset:
    return Dataset("bands", stripes(900, 1), stripes(60, 2))


BASE = {
    "data": {"name": f"{__name__}:bands"}, "prototypes": [{"model": "cnn", "width": 8}], "clients": {"total": 3},
    "local": {"epochs": 12, "batch_size": 16, "lr": 0.05}, "fusion": {"method": "fedavg"}, "rounds": 1,
    "run": {"engine": "in-process"}, "partition": {"min_size": 150},
}  # fmt: skip


def parts_with(changes: dict[str, object]) -> Parts:
    return build(parse(nested(BASE, changes)))


def test_clients_that_are_alike_cannot_be_told_apart_and_clients_of_one_class_can() -> None:
    alike = estimate(parts_with({"partition.scheme": "iid"}))
    apart = estimate(parts_with({"partition.alpha": 0.001}))
    assert alike.terms()["discrepancy"] < 0.25
    assert apart.terms()["discrepancy"] > alike.terms()["discrepancy"] + 0.2


def test_a_client_with_most_of_the_data_is_not_far_from_them() -> None:
    parts = parts_with({"partition.scheme": "iid", "clients.total": 2, "local.epochs": 5})
    most = torch.arange(700)
    clients = [
        replace(parts.federation.clients[0], indices=most),
        replace(parts.federation.clients[1], indices=torch.arange(700, 810)),
    ]
    found = estimate(replace(parts, federation=replace(parts.federation, clients=clients)))
    assert max(found.discrepancies.values()) < 0.5  # always saying "its own" would be right six times of seven


def test_the_terms_are_what_they_say() -> None:
    found = estimate(parts_with({"partition.scheme": "iid"}), delta=0.1, ensemble=0.9)
    terms = found.terms()
    assert terms["pooled risk"] < 0.05  # bands are easy
    assert 0 <= terms["lambda"] < 0.2
    assert terms["complexity"] == pytest.approx(4 * 3 / (0.1 * (2 * 270) ** 0.5))
    assert found.ensemble_risk == pytest.approx(0.1)
    assert found.lambdas.keys() == found.discrepancies.keys() == {"client-0", "client-1", "client-2"}


def test_the_command_explains_each_term_and_keeps_every_clients(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    assert feddf("run", "small.toml", "--out", "out", cwd=tmp_path).returncode == 0
    done = feddf("bound", "out", "--epochs", "2", "--most", "50", cwd=tmp_path, app=app)
    assert done.returncode == 0, done.stderr
    for word in ("pooled risk", "discrepancy", "lambda", "complexity", "measured", "vacuous"):
        assert word in done.stdout
    kept = json.loads((tmp_path / "out" / "bound.json").read_text())
    assert len(kept["discrepancies"]) == 4
    assert feddf("bound", "nowhere", cwd=tmp_path, app=app).returncode == 1


def test_the_others_hold_nothing_of_a_clients_shard_even_where_only_a_part_of_it_is_looked_at() -> None:
    shard = torch.arange(100)
    domain = _domain("client", shard, 300, most=20, seed=0)
    assert len(domain.own) == len(domain.others) == 20
    assert not set(domain.others.tolist()) & set(shard.tolist())
