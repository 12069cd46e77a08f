"""What every fusion promises: each method by its name, and each of them with every choice that its settings allow.

The choices come from the dictionaries of names and from the types of the sections, so a new one is tried by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from conftest import Tiny, make_tiny, update_of
from feddf.client import combine_halves
from feddf.config import ConfigError, DistillConfig, EnsembleConfig, FusionConfig, Settings, with_values
from feddf.config.names import AVERAGES, DROP_RULES, METHODS, PARTS, TARGETS, TEACHER_WEIGHTS
from feddf.config.sections import Section
from feddf.engines import in_process
from feddf.evaluate import logits
from feddf.fusion.distill import Student
from feddf.fusion.weights import CLASS_COUNTS
from feddf.rounds import run_round
from feddf.runs.methods import fit_prototypes, make_method
from feddf.runs.store import pack, unpack
from feddf.states import copy, digest, is_statistic
from feddf.types import Engine, Failure, Fused, Fusion, Job, Method, Refusal, ServerState, State, Update

WITHOUT_TEACHERS = {"fedavg", "fedma", "fd"}
"""The methods that never look at the sections [ensemble] and [distill], and whose next model is what they start from.
Any other method is tried with all that is in them."""


def nobody(accuracies: Mapping[str, float], n_classes: int, n_examples: int) -> set[str]:
    """A rule that drops no client."""
    return set()


def choices(name: str, section: type[Section]) -> Iterator[tuple[str, str]]:
    """Yield every key of a section that is one of a few words, with each of these words but the default."""
    for key, info in section.model_fields.items():
        if get_origin(info.annotation) is Literal:
            yield from ((f"{name}.{key}", word) for word in get_args(info.annotation) if word != info.default)


FUSING: list[tuple[str, Any]] = [
    *choices("fusion", FusionConfig),
    *(("fusion.aggregation", name) for name in AVERAGES if name != FusionConfig().aggregation),
    *(("fusion.drop_worst", name) for name in (*DROP_RULES, f"{__name__}:nobody")),
    ("fusion.momentum", 0.3),
    *(("fusion.parts", (name,)) for name in PARTS),
]
TEACHING: list[tuple[str, Any]] = [
    *choices("ensemble", EnsembleConfig),
    ("ensemble.cache", False),
    *choices("distill", DistillConfig),
    *(("ensemble.combine", name) for name in TARGETS if name != EnsembleConfig().combine),
    *(("ensemble.weights", name) for name in TEACHER_WEIGHTS if name != EnsembleConfig().weights),
    ("ensemble.swag_samples", 3),
    ("ensemble.groups", 2),
    ("distill.temperature", 2.0),
]
FURTHER = {"distill.optimizer": {"distill.swa_cycle": 2}, "distill.early_stopping": {"distill.held_out": 0.25}}
"""What goes with a choice, so that it does something in a run as short as these."""


def allowed(changes: Mapping[str, Any]) -> bool:
    tiny = make_tiny(norm="none")
    settings = with_values(tiny.settings, changes)
    try:
        settings.refuse(settings.mistakes(labeled=True, pooled=True))
        make_method(tiny.resources, settings, in_process)
    except ConfigError:
        return False
    return True


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    for method in METHODS:
        yield method, {"fusion.method": method}
        for key, value in [*FUSING, *([] if method in WITHOUT_TEACHERS else TEACHING)]:
            changes = {"fusion.method": method, key: value, **FURTHER.get(key, {})}
            if allowed(changes):
                yield f"{method}, {key} = {value}", changes
            answers = {**changes, "fusion.exchange": "answers"}
            if method == "feddf" and key.startswith("ensemble.") and allowed(answers):
                yield f"{method} of answers, {key} = {value}", answers


VARIANTS = dict(variants())


@pytest.fixture(params=VARIANTS)
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


def test_every_name_is_tried() -> None:
    tried = {(key, value) for changes in VARIANTS.values() for key, value in changes.items()}
    defaults = {("fusion.aggregation", "examples"), ("ensemble.combine", "logits"), ("ensemble.weights", "uniform")}
    assert {("fusion.parts", (name,)) for name in PARTS} <= tried
    for names in (METHODS, AVERAGES, DROP_RULES, TARGETS, TEACHER_WEIGHTS):
        assert {(names.key, name) for name in names} <= tried | defaults
    assert {("ensemble.cache", False), ("distill.init", "best"), ("fusion.batchnorm", "local")} <= tried


@pytest.fixture
def tiny(changes: dict[str, Any]) -> Tiny:
    """The tiny federation as the method wants it, put together as an experiment is."""
    method: Method | None = None
    for norm in ("batch", "none"):  # some methods cannot handle BatchNorm, and say so
        tiny = make_tiny(norm=norm)
        settings = with_values(tiny.settings, changes)
        try:
            method = make_method(tiny.resources, settings, in_process)
            break
        except ValueError:
            continue
    assert method is not None, "the method works with neither kind of models"
    prototypes = dict(fit_prototypes(tiny.resources, method.parts).prototypes)
    return replace(
        tiny,
        prototypes=prototypes,
        local=partial(tiny.local, prototypes=prototypes, half=combine_halves([part.half for part in method.parts])),
        parts=method.parts,
        federation=replace(tiny.federation, rounds_per_cohort=method.rounds_per_cohort),
        resources=replace(tiny.resources, prototypes=prototypes),
        settings=settings,
    )


@pytest.fixture
def fuse(tiny: Tiny) -> Fusion:
    return fusion(tiny, in_process)


def fusion(tiny: Tiny, engine: Engine) -> Fusion:
    return make_method(tiny.resources, tiny.settings, engine).fuse


@pytest.fixture
def updates(tiny: Tiny) -> list[Update]:
    return [update_of(tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7))) for c in tiny.federation.clients]


def averages_only(settings: Settings) -> bool:
    """Whether the next model is exactly what the fusion started from."""
    return settings.fusion.method in WITHOUT_TEACHERS and not settings.fusion.momentum


def sends_weights(tiny: Tiny) -> bool:
    """Whether clients send weights; if not, there is nothing to average."""
    return all(part.weights_up for part in tiny.parts)


def own_statistics(settings: Settings) -> bool:
    """Whether the average's BatchNorm statistics are others than the clients' average."""
    return settings.fusion.batchnorm in ("last", "recalibrate")


def used(fused: Fused, updates: Sequence[Update]) -> list[Update]:
    """Return the updates without those of dropped clients."""
    dropped = fused.notes.get("dropped_worst", {}).get("clients", {})
    return [update for update in updates if update.client_id not in dropped]


def whole(server: ServerState) -> str:
    """Return the digest of all that a checkpoint holds."""
    memory = {f"{whose} of {name}": state for whose, found in server.memory.items() for name, state in found.items()}
    own = {f"own of {client}": state for client, state in server.own.items()}
    return digest({**server.models, **memory, **own})


def test_its_inputs_are_not_changed(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    def picture() -> list[str]:
        return [digest(tiny.server.models), *(digest({"m": update.state}) for update in updates)]

    before = picture()
    fuse(tiny.server, updates, 1)
    assert picture() == before


def test_the_next_state_has_every_prototype_with_the_same_form(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    fused = fuse(tiny.server, updates, 1)
    assert fused.server.round == 1
    for models in (fused.server.models, fused.start):
        assert models.keys() == tiny.server.models.keys()
        for name, state in models.items():
            expected = tiny.server.models[name]
            assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
                k: (v.shape, v.dtype) for k, v in expected.items()
            }


def test_the_same_inputs_and_seed_give_the_same_bytes(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    one, two = (whole(fuse(tiny.server, updates, 5).server) for _ in range(2))
    assert one == two


def test_the_order_of_the_names_in_a_state_does_not_matter(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    """Some engines, spools and checkpoints sort them."""
    if not sends_weights(tiny):
        pytest.skip("clients send no weights")
    counts = [torch.tensor([update.n_examples - i, i, 0]) for i, update in enumerate(updates, 1)]
    told = [
        replace(one, payload={**one.payload, CLASS_COUNTS: {"counts": n}})
        for one, n in zip(updates, counts, strict=True)
    ]
    turned = [replace(update, state=dict(sorted(update.state.items()))) for update in told]
    models = {name: dict(sorted(state.items())) for name, state in tiny.server.models.items()}
    assert [list(update.state) for update in told] != [list(update.state) for update in turned]
    one, two = fuse(tiny.server, told, 5), fuse(replace(tiny.server, models=models), turned, 5)
    assert whole(one.server) == whole(two.server)


SHARES: dict[str, Callable[[Update], float]] = {"examples": lambda update: update.n_examples, "uniform": lambda _: 1}
"""How much an update counts in each average, written down independently of the code under test."""


def test_it_starts_from_the_average_of_each_prototype(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    weighted = [replace(update, n_examples=10 * (i + 1)) for i, update in enumerate(updates)]
    fused = fuse(tiny.server, weighted, 1)
    average = tiny.settings.fusion.aggregation
    if tiny.settings.fusion.defense == "robust":
        pytest.skip("it starts from the best of several averages: tests/fusion/test_defense.py")
    if not sends_weights(tiny):
        assert digest(fused.start) == digest(tiny.server.models)
        return
    for name in tiny.prototypes:
        mine = [update for update in used(fused, weighted) if update.prototype == name]
        if not mine:
            assert digest({"m": fused.start[name]}) == digest({"m": tiny.server.models[name]})
            continue
        if average not in SHARES:
            other: State = AVERAGES[average](tiny.server.models[name], mine)
        for key, tensor in fused.start[name].items():
            if own_statistics(tiny.settings) and is_statistic(key):
                continue
            if average not in SHARES:
                torch.testing.assert_close(tensor, other[key])
            elif tensor.is_floating_point():  # weights and BatchNorm's running statistics alike
                shares = [SHARES[average](update) for update in mine]
                total = sum(share * update.state[key].double() for share, update in zip(shares, mine, strict=True))
                torch.testing.assert_close(tensor.double(), total / sum(shares), atol=1e-6, rtol=1e-6)


def test_identical_updates_give_that_model_back(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    if not sends_weights(tiny):
        pytest.skip("clients send no weights")
    same = {name: next(u.state for u in updates if u.prototype == name) for name in tiny.prototypes}
    alike = [replace(u, state=same[u.prototype], n_examples=i + 1) for i, u in enumerate(updates)]
    fused = fuse(tiny.server, alike, 1)
    left = {update.prototype for update in used(fused, alike)}
    expected = {name: same[name] if name in left else tiny.server.models[name] for name in same}
    if tiny.settings.fusion.batchnorm != "recalibrate":
        assert digest(fused.start) == digest(expected)
        if averages_only(tiny.settings):
            assert digest(fused.server.models) == digest(expected)
    for name, state in fused.start.items():
        for key in state:
            assert is_statistic(key) or torch.equal(state[key], expected[name][key])


@dataclass
class Recording:
    """An engine that keeps the jobs of students."""

    students: list[Student] = field(default_factory=list)

    def __call__(self, function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any]:
        self.students += [job for job in jobs if isinstance(job, Student)]
        return in_process(function, jobs)


def test_one_client_alone_is_its_own_average_or_teacher(tiny: Tiny, updates: list[Update]) -> None:
    engine = Recording()
    alone = updates[1]  # an MLP
    fused = fusion(tiny, engine)(tiny.server, [alone], 1)
    if sends_weights(tiny):
        assert digest({"m": fused.start["mlp"]}) == digest({"m": alone.state})
        if averages_only(tiny.settings):
            assert digest({"m": fused.server.models["mlp"]}) == digest({"m": alone.state})
    if tiny.settings.distills:
        assert [student.id for student in engine.students] == sorted(tiny.prototypes)
    everything = torch.arange(len(tiny.pool))
    if tiny.settings.ensemble.combine == "entropy-reduced":
        return  # another target: tests/fusion/test_answers.py
    if "answers" in alone.payload:
        said = alone.payload["answers"]["outputs"].float()
    else:
        said = logits(tiny.prototypes["mlp"].load(alone.state or tiny.server.models["mlp"]), tiny.pool)
    expected = said / tiny.settings.distill.temperature
    for student in engine.students:
        answers = student.targets(everything, tiny.pool.batch(everything))
        torch.testing.assert_close(answers, expected.softmax(dim=1), atol=1e-5, rtol=1e-4)


def test_buffers_and_counters_survive(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    fused = fuse(tiny.server, updates, 1)
    for name, state in tiny.server.models.items():
        for key, tensor in state.items():
            assert fused.server.models[name][key].dtype == fused.start[name][key].dtype == tensor.dtype
            assert fused.server.models[name][key].isfinite().all()
    if counter := [key for key in tiny.server.models["cnn"] if key.endswith("num_batches_tracked")]:
        averaged = sends_weights(tiny) and any(update.prototype == "cnn" for update in used(fused, updates))
        assert int(fused.server.models["cnn"][counter[0]]) >= int(averaged)


@dataclass(frozen=True)
class Backwards:
    """An engine whose answers come in the opposite order."""

    def __call__(self, function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any | Failure]:
        return reversed(list(in_process(function, jobs)))


def test_the_order_of_arrival_does_not_matter(tiny: Tiny) -> None:
    def end(engine: Any) -> str:
        fuse = fusion(tiny, engine)
        return whole(
            run_round(tiny.server, tiny.federation, engine=engine, train=tiny.local, fuse=fuse, parts=tiny.parts).server
        )

    assert end(in_process) == end(Backwards())


def test_a_resumed_run_ends_as_an_uninterrupted_one(fuse: Fusion, tiny: Tiny) -> None:
    """Between two rounds the state goes through a checkpoint's bytes, which do not keep the order of its tensors."""

    def after(server: ServerState) -> ServerState:
        return run_round(
            server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse, parts=tiny.parts
        ).server

    first = after(tiny.server)
    kept = unpack(pack(first))
    backwards = {name: dict(sorted(state.items(), reverse=True)) for name, state in kept.models.items()}
    assert whole(after(replace(kept, models=backwards))) == whole(after(first))


def test_unfit_updates_are_refused_and_never_fused(tiny: Tiny, updates: list[Update]) -> None:
    """The gate would have refused these weights; here it is what the model says that is refused."""
    fuse = fusion(tiny, in_process)
    broken = replace(updates[1], state={**updates[1].state, "layers.5.bias": torch.full((3,), torch.inf)})
    if not sends_weights(tiny):
        if "answers" not in updates[1].payload:
            pytest.skip("clients send neither weights nor answers for a pool")
        said = torch.full_like(updates[1].payload["answers"]["outputs"], torch.inf)
        broken = replace(updates[1], payload={"answers": {"outputs": said}})
    given = [updates[0], broken, *updates[2:]]
    try:
        fused = fuse(tiny.server, given, 1)
    except Refusal as refusal:
        assert [failure.client_id for failure in refusal.failures] == ["c1"]  # noqa: PT017
    else:  # such a client guesses, so it was dropped before it was asked
        assert tiny.settings.fusion.drop_worst in DROP_RULES
        assert "c1" not in [update.client_id for update in used(fused, given)]


def test_a_prototype_without_clients_starts_from_its_previous_weights(
    fuse: Fusion, tiny: Tiny, updates: list[Update]
) -> None:
    only_mlp = [update for update in updates if update.prototype == "mlp"]
    fused = fuse(tiny.server, only_mlp, 1)
    assert digest({"m": fused.start["cnn"]}) == digest({"m": tiny.server.models["cnn"]})
    if tiny.settings.fusion.method in WITHOUT_TEACHERS:
        assert digest({"m": fused.server.models["cnn"]}) == digest({"m": tiny.server.models["cnn"]})


def test_clients_that_saw_nothing_do_not_divide_by_zero(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    idle = [replace(update, n_examples=0) for update in updates]
    assert digest(fuse(tiny.server, idle, 1).start) == digest(tiny.server.models)


def test_the_round_number_goes_on(fuse: Fusion, tiny: Tiny, updates: list[Update]) -> None:
    later = ServerState(41, {name: copy(state) for name, state in tiny.server.models.items()})
    assert fuse(later, updates, 1).server.round == 42
